"""Keeps one sliding window of KV at each anchor of a prompt, so that prompts which diverge there share what is before.

Needed from SGLang 0.5.18 on, on models with sliding-window and full-attention layers, and works from 0.5.22 on, where
the tree has a checkpoint of its own (the lines below are 0.5.23's). A prefill hands its KV to the radix tree once per
chunk, and frees all sliding-window KV but the last window first (unified_radix_cache.py:1211, mem_cache/common.py:75).
A match may end only where one window lies behind it (unified_cache/components/swa.py:357), so a prompt that diverges
inside an earlier one finds no legal end and computes everything: 0 of 8272 tokens.

At each anchor (anchor_plan.py) this hook lets SGLang's own checkpoint run up to there first, then as asked:

    chunk           |------------------------------------------|      frees all but the last window, inserts
    with anchors    |-----------a|----------------b|-----------|      the same call, three times

Every call is an ordinary one, so slots, locks and counts stay SGLang's: the request's lock moves on, and leaves behind
each anchor one window that is unlocked and evicted like any other entry. It works above the tree core, so for the
Rust and the Python one, for every page size (anchors are floored to whole pages), for chunked prefill (a chunk takes
the anchors inside it), and for scoped keys; what the hook `scope` withholds never gets here.

SGLang learns a branch by missing it: it ends the next such request's checkpoint at that point (swa.py:1017) and frees
what is behind, the anchors there too. Where a chunk has anchors, the branch becomes one of them instead. A request that
ends in its prefill (one token of output) hands over all its windows at once, and is kept from ending at a branch.

In the HTTP process a malformed hint is refused (400), and a sound one cut down to what the plan can use. The Rust
server (SGLANG_RUST_SERVER) passes hints on as they come: there a malformed one is ignored, with a line in the log.
"""

from __future__ import annotations

import logging
import weakref
from typing import Any

from slime_backend import wire
from slime_backend.engine_plugin import registry
from slime_backend.engine_plugin.anchor_plan import AnchorError, Planner, clip, grid_limit, hint
from slime_backend.engine_plugin.generation import CONTEXT, PREFIX_CACHE, RECORD, REQ
from slime_backend.engine_plugin.message_marks import load_marks
from slime_backend.engine_plugin.names import IMPORTED, Need, Sglang
from slime_backend.engine_plugin.registry import Plan

log = logging.getLogger(__name__)

HOOK = wire.ANCHORS_HOOK
CHECKPOINT = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree"
TREE = "sglang.srt.mem_cache.registry.create_tree_cache"
TREE_CLASS = "UnifiedRadixCache"
TOKENIZE = "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object"
FREES_EARLY = "SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS"  # on from 0.5.18
SWITCH = f"sglang.srt.environ.Envs.{FREES_EARLY}"
UNIFIED = f"sglang.srt.mem_cache.unified_radix_cache.{TREE_CLASS}"
USES: tuple[Need, ...] = (
    *(f"{UNIFIED}.{name}" for name in ("components", "linker", "cache_controller", "sliding_window_size", "page_size")),
    f"{UNIFIED}.token_to_kv_pool_allocator",
    *(f"{PREFIX_CACHE}.supports_{name}" for name in ("swa", "mamba")),
    "sglang.srt.mem_cache.unified_cache.component_type.ComponentType.SWA",
    *(f"{REQ}.{name}" for name in ("swa_branching_seqlen", "origin_input_ids", "sampling_params", "rid", "finished")),
    f"{RECORD}.cache_protected_len",
    *(f"{CONTEXT}.get_{name}" for name in ("disagg", "model", "serving")),
    "sglang.srt.utils.hf_transformers_utils.get_tokenizer",
    "sglang.srt.mem_cache.allocator.swa.SWATokenToKVPoolAllocator.size_swa",
)

# None where this process's tree is left alone.
_planner: Planner | None = None
# Weak: SGLang may drop a request without finishing it.
_plans: weakref.WeakKeyDictionary[Any, tuple[int, ...]] = weakref.WeakKeyDictionary()


def install() -> str:
    """Attach where SGLang frees a prompt's windows early; active once the scheduler has built a hybrid tree."""
    status = registry.install(HOOK, _plan_where(frees_early()))
    return status if status != wire.ACTIVE else "this process has built no radix cache"


def plan(sglang: Sglang) -> Plan:
    return _plan_where(sglang.switch(SWITCH))


def _plan_where(frees: bool | None) -> Plan:
    if frees is None:
        return Plan(instead=f"this SGLang has no {FREES_EARLY}; whether it keeps windows inside a prompt is not known")
    if not frees:
        return Plan(instead=wire.NOT_NEEDED)  # a prompt's windows all reach the tree
    functions: tuple[registry.HookFunction, ...] = (
        (TREE, "after", _after_tree),
        (CHECKPOINT, "around", _around_checkpoint),
        (TOKENIZE, "before", _before_tokenize),
    )
    return Plan(functions, USES)


def frees_early() -> bool | None:
    """Whether SGLang frees sliding-window KV before the tree sees it; None where it has no such switch."""
    return IMPORTED.switch(SWITCH)


def status_for(tree: Any) -> str:
    """`wire.ACTIVE`, `wire.NOT_NEEDED`, or why windows inside a prompt can't be kept in this process's tree."""
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.runtime_context import get_disagg

    if not tree.supports_swa() or getattr(tree, "disable", False):
        return wire.NOT_NEEDED  # no sliding windows, or nothing is shared at all
    if type(tree).__name__ != TREE_CLASS:
        return f"the cache is a {type(tree).__name__}, not a {TREE_CLASS}"
    if not tree.components[ComponentType.SWA].gates_prefix_match:
        return wire.NOT_NEEDED  # a match doesn't look at windows
    if tree.supports_mamba():
        return "a recurrent state can't be kept at every anchor"
    if tree.cache_controller is not None or tree.linker is not None:
        return "not verified with copies of the cache elsewhere (HiCache, an external linker)"
    if get_disagg().disaggregation_mode != "null":
        return "not verified with disaggregated prefill and decode"
    return wire.ACTIVE


def make_planner(tree: Any, marks: tuple[tuple[int, ...], ...] = ()) -> Planner:
    """The planner for one tree: its page size, and a grid that fits its pool."""
    limit = grid_limit(int(tree.token_to_kv_pool_allocator.size_swa), int(tree.sliding_window_size))
    return Planner(marks, limit, int(tree.page_size))


def checkpoint_at_anchors(original: Any, tree: Any, req: Any, planner: Planner, up_to: int, **kwargs: Any) -> None:
    """`original(tree, req, up_to=...)` for every due anchor, then for `up_to`."""
    anchors = _plans.get(req)
    if anchors is None:
        anchors = _plans[req] = _plan(planner, req)
    start = req.kv.cache_protected_len  # the tree has everything before: from a match, or an earlier chunk
    due = [anchor for anchor in anchors if start < anchor < up_to]
    if due:
        branch = req.swa_branching_seqlen
        if branch is not None and branch < up_to:
            req.swa_branching_seqlen = None
            if branch > start:
                due = sorted({*due, branch})
        for anchor in due:
            original(tree, req, up_to=anchor, **kwargs)
    original(tree, req, up_to=up_to, **kwargs)


def _plan(planner: Planner, req: Any) -> tuple[int, ...]:
    try:
        return planner.plan(req.origin_input_ids, req.sampling_params.custom_params)
    except AnchorError:  # the Rust server passes on what the HTTP process refuses
        log.exception("reef-slime: no anchors for request %s", req.rid)
    except Exception as error:  # ids of a form that we don't know: such a prompt goes without anchors
        registry.report_fault((HOOK,), CHECKPOINT, error)
    return ()


def _after_tree(tree: Any, *args: Any, **kwargs: Any) -> Any:
    global _planner
    status = status_for(tree)
    _planner = None
    if status == wire.ACTIVE:
        _planner = make_planner(tree, load_marks(_tokenizer))
        log.info("reef-slime: %d message marks, grid of up to %d anchors", len(_planner.marks), _planner.grid_limit)
    registry.set_status(HOOK, status)
    return tree


def _tokenizer() -> Any:
    """As the scheduler loads it (managers/scheduler.py:910), which with --skip-tokenizer-init it doesn't."""
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    return get_tokenizer(
        get_serving().tokenizer_path,
        tokenizer_mode=get_serving().tokenizer_mode,
        trust_remote_code=get_model().trust_remote_code,
        revision=get_model().revision,
    )


def _around_checkpoint(original: Any, tree: Any, req: Any, *, up_to: int, **kwargs: Any) -> None:
    if _planner is None:
        original(tree, req, up_to=up_to, **kwargs)
    elif req.finished():
        # SGLang frees no window of a finished request first. One that ended in its prefill must not stop at a branch.
        req.swa_branching_seqlen = None
        original(tree, req, up_to=up_to, **kwargs)
    else:
        checkpoint_at_anchors(original, tree, req, _planner, up_to, **kwargs)


def _before_tokenize(manager: Any, obj: Any, input_text: Any, input_ids: Any = None, *args: Any, **kwargs: Any) -> None:
    params = obj.sampling_params
    custom = params.get("custom_params") if isinstance(params, dict) else None
    if not isinstance(custom, dict) or wire.ANCHORS_KEY not in custom:
        return
    asked = hint(custom)
    # What goes on to the scheduler is short and fits 64 bits, whatever came.
    kept = clip(asked, len(input_ids)) if input_ids is not None else []
    obj.sampling_params = {**params, "custom_params": {**custom, wire.ANCHORS_KEY: kept}}
