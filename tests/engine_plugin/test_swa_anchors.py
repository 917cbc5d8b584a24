"""Anchors on SGLang's own radix tree and allocator, on the CPU and without a server: both tree cores, pages 1 and 16.

`Cache(planner=None)` is SGLang as it is: the negative control of each claim.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_backend.engine_plugin import swa_anchors
from slime_backend.engine_plugin.anchor_plan import AnchorError, Planner
from slime_backend.wire import ACTIVE, NOT_NEEDED
from tests.engine_plugin.tree_only import Cache

WINDOW = 128
MARK = 3  # a token that begins a message, in the tests of boundaries
chance = random.Random(11)
unlike = itertools.count(500)  # a prompt's first token, so that no two share a prefix by chance
KINDS = [(core, page) for core in ("rust", "python") for page in (1, 16)]


def prompt(length: int) -> list[int]:
    return [next(unlike), *(chance.randrange(5, 500) for _ in range(length - 1))][:length]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-page{kind[1]}")
def make(request: pytest.FixtureRequest) -> Any:
    """make(patched, **Cache fields) -> a cache of one core and page size."""
    core, page = request.param

    def build(patched: bool = True, grid: int = 0, **options: Any) -> Cache:
        planner = Planner(marks=((MARK,),), grid_limit=grid, page=page) if patched else None
        cache = Cache(core=core, page=page, window=WINDOW, planner=planner, **options)
        assert ("Rust" in type(cache.tree.tree_core).__name__) == (core == "rust")
        return cache

    return build


def floor(length: int, cache: Cache) -> int:
    return length // cache.page * cache.page


def test_no_gpu_is_visible() -> None:
    assert not torch.cuda.is_available()


# --- reuse -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["hint", "boundary", "grid"])
def test_first_fan_out_finds_the_head(make: Any, source: str) -> None:
    head = prompt(4096 if source == "grid" else 4000)
    if source == "boundary":
        head[-1] = MARK
    hint = {"anchors": [len(head)]} if source == "hint" else {}
    plain, patched = make(False), make(grid=4 if source == "grid" else 0)
    found = {}
    for cache in (plain, patched):
        found[cache] = [cache.prompt(head + prompt(n), **hint) for n in (300, 80, 400)]
    assert found[plain][:2] == [0, 0]  # SGLang learns the branch by missing it once
    assert found[patched] == [0, floor(len(head), patched), floor(len(head), patched)]


def test_no_tail_length_makes_a_cliff(make: Any) -> None:
    """The first prompt's tail decides what stays in the tree, the second's what is looked for."""
    lengths = range(1, 401, 1 if os.environ.get("REEF_ALL_TAILS") else 19)
    patched, plain = make(), make(False)
    lost = 0
    for n in lengths:
        head = prompt(701)
        for cache in (patched, plain):
            cache.prompt(head + prompt(n), anchors=[701])
        assert patched.prompt(head + prompt(n)) == floor(701, patched), n
        lost += plain.prompt(head + prompt(n)) < 600
    assert lost > len(lengths) / 2


@pytest.mark.parametrize("chunk", [16, 256, 2048])
def test_chunked_prefill_takes_the_anchors_inside_each_chunk(make: Any, chunk: int) -> None:
    ids = prompt(3000)
    anchors = [100, 256, 257, 700, 2047, 2048, 2500]
    cache = make(chunk=chunk)
    cache.prompt(ids, anchors=anchors)
    for anchor in anchors:
        assert cache.prompt(ids[:anchor] + prompt(50)) == floor(anchor, cache), anchor


@pytest.mark.parametrize("extra", [-1, 0, 1])
@pytest.mark.parametrize("windows", [1, 2])
def test_prompts_around_one_and_two_windows(make: Any, windows: int, extra: int) -> None:
    head = prompt(windows * WINDOW + extra)
    cache = make()
    for tail in ([], [1], prompt(WINDOW - 1), prompt(WINDOW), prompt(WINDOW + 1)):
        cache.prompt(head + tail, anchors=[len(head)])
    assert cache.prompt(head + prompt(9)) == floor(len(head), cache)


def test_a_low_branch_does_not_hide_the_anchors_above_it(make: Any) -> None:
    """Two system prompts share their first words. SGLang ends the second one's checkpoint there, to learn it."""
    found = {}
    for cache in (plain := make(False), patched := make()):
        first, second = (prefix := prompt(320)) + prompt(1280), prefix + prompt(1600)
        cache.prompt(first + prompt(200), anchors=[len(first)])
        cache.prompt(second + prompt(200), anchors=[len(second)])
        found[cache] = cache.prompt(second + prompt(200), anchors=[len(second)])
        assert cache.prompt(prefix + prompt(50)) == 320  # the branch was learnt all the same
    assert found == {plain: 320, patched: 1920}


def test_a_request_that_ends_in_its_prefill_is_not_cut_at_a_branch(make: Any) -> None:
    found = {}
    for cache in (plain := make(False), patched := make()):
        words = prompt(320)
        cache.prompt(words + prompt(1280))
        cache.prompt(head := words + prompt(1600), output=(), anchors=[1600], ends=True)
        found[cache] = cache.prompt(head[:1600] + prompt(50))
    assert found == {plain: 320, patched: 1600}


def test_append_and_dropped_reasoning_find_no_less_than_without(make: Any) -> None:
    found = {}
    for cache in (make(False), make()):
        head, question, reply, turn = (list(range(10 + i, 10 + i + n)) for i, n in enumerate((2000, 300, 64, 90)))
        cache.prompt(head + question, output=reply, anchors=[len(head)])
        append = cache.prompt(head + question + reply + turn, anchors=[len(head)])
        dropped = cache.prompt(head + question + turn[::-1], anchors=[len(head)])
        found[cache.planner is not None] = (append, dropped)
    assert found[True][0] >= found[False][0] > 2300
    assert found[True][1] >= found[False][1] > 2200


# --- keys --------------------------------------------------------------------------------------------------------


def test_scoped_keys_keep_apart_what_they_kept_apart(make: Any) -> None:
    cache, head = make(), prompt(1600)
    cache.prompt(head + prompt(40), anchors=[1600], key="0:")
    assert cache.prompt(head + prompt(40), anchors=[1600], key="1:") == 0
    assert cache.prompt(head + prompt(40), key="1:") == cache.prompt(head + prompt(40), key="0:") == 1600


def test_a_withheld_request_leaves_no_anchor(make: Any) -> None:
    cache, head = make(chunk=512), prompt(1600)
    from sglang.srt.managers import schedule_batch

    class Withheld(schedule_batch.Req):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.skip_radix_cache_insert = True

    from tests.engine_plugin import tree_only

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_only, "Req", Withheld)
        cache.prompt(head + prompt(40), anchors=[1600])
    assert cache.tree.full_evictable_size() == cache.used_swa() == 0


# --- cost --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 3, 16])
def test_an_anchor_costs_one_window_unlocked(make: Any, count: int) -> None:
    ids = prompt(7300)
    anchors = [400 * (i + 1) + 5 for i in range(count)]
    used, locked = {}, {}
    for patched in (False, True):
        cache = make(patched, chunk=2048)
        req = cache.start(ids, anchors=anchors)
        locked[patched] = cache.tree.swa_protected_size()
        cache.finish(req, [1, 2])
        used[patched] = cache.used_swa()
        assert cache.tree.swa_evictable_size() == used[patched]
    assert locked[True] == locked[False]
    assert used[True] <= used[False] + count * -(-(WINDOW + 1) // cache.page) * cache.page


def test_a_request_without_anchors_goes_through_one_checkpoint() -> None:
    calls: list[int] = []
    req = SimpleNamespace(
        origin_input_ids=list(range(100)),
        sampling_params=SimpleNamespace(custom_params=None),
        kv=SimpleNamespace(cache_protected_len=0),
    )

    class Weak(SimpleNamespace):
        def __hash__(self) -> int:  # type: ignore[override]  # SimpleNamespace has none
            return id(self)

    request = Weak(**vars(req), finished=lambda: False)
    for _ in range(2):
        swa_anchors.checkpoint_at_anchors(
            lambda tree, req, *, up_to: calls.append(up_to), None, request, Planner(), 100
        )
    assert calls == [100, 100]


def test_ids_that_cannot_be_read_end_no_scheduler(make: Any, monkeypatch: Any) -> None:
    cache = make()
    monkeypatch.setattr(Planner, "plan", lambda *args: 1 / 0)
    cache.prompt(head := prompt(500), anchors=[400])
    monkeypatch.undo()
    assert cache.prompt(head[:400] + prompt(9)) == 0


# --- pressure ----------------------------------------------------------------------------------------------------


def test_a_parked_head_outlives_five_others(make: Any) -> None:
    """6000 slots: room for a few windows of each head, not for one slot per token."""
    cache = make(swa_slots=6000, chunk=2048, full_slots=80000)
    parked = prompt(7300)
    cache.prompt(parked + prompt(60), anchors=[7300])
    for _ in range(5):
        cache.prompt((other := prompt(7300)) + prompt(60), anchors=[7300])
        assert cache.prompt(other + prompt(70), anchors=[7300]) == floor(7300, cache)
    assert cache.prompt(parked + prompt(70)) == floor(7300, cache)


def test_a_pool_too_small_for_the_anchors_gives_them_up(make: Any) -> None:
    """Every prompt asks for 16 windows; ten such prompts don't fit. Nothing fails, and the last one is still served."""
    cache = make(swa_slots=3008, chunk=1024, full_slots=80000)
    for _ in range(10):
        head = prompt(3500)
        anchors = [200 * (i + 1) for i in range(15)] + [3500]
        cache.prompt(head + prompt(60), anchors=anchors)
        assert cache.used_swa() <= 3008
    assert cache.prompt(head + prompt(60)) == floor(3500, cache)
    running = [cache.start(prompt(40) + prompt(900), anchors=[40, 300, 600]) for _ in range(8)]
    for req in running:
        cache.finish(req, [1, 2, 3])


def test_many_rounds_of_everything_leak_nothing(make: Any) -> None:
    """The invariants are checked after every chunk and request; a slot freed twice raises."""
    rounds = int(os.environ.get("REEF_TREE_ROUNDS", "60"))
    cache = make(swa_slots=4000, full_slots=12000, chunk=640, grid=2)
    heads = [prompt(n) for n in (40, 127, 128, 129, 300, 1500, 2200)]
    running: list[Any] = []
    hits = 0
    for _ in range(rounds):
        head = chance.choice(heads)[: chance.choice((None, None, 100, 700))]
        ids = head + prompt(chance.choice((1, 5, 127, 128, 200)))
        anchors = chance.choice(
            (None, [len(head)], [len(head), 7, 7, -3, 10**9], [chance.randrange(3000) for _ in range(20)], ["x"], 5)
        )
        req = cache.start(ids, anchors=anchors)
        hits += req.found > 0
        running.append(req)
        while len(running) > chance.randrange(4):
            cache.finish(running.pop(chance.randrange(len(running))), prompt(chance.choice((0, 1, 30))))
    for req in running:
        cache.finish(req)
    assert hits > rounds / 4
    cache.check()


# --- the hook itself ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("frees", "status"), [(False, NOT_NEEDED), (None, "this SGLang has no SGLANG_OPT")])
def test_where_sglang_keeps_the_windows_the_hook_stays_out(monkeypatch: Any, frees: Any, status: str) -> None:
    monkeypatch.setattr(swa_anchors, "frees_early", lambda: frees)
    monkeypatch.setattr(swa_anchors.registry, "_register", lambda *a: pytest.fail("it attached"))
    assert swa_anchors.install().startswith(status)


def test_the_switch_of_this_sglang_is_read() -> None:
    from sglang.srt.environ import envs

    assert swa_anchors.frees_early() is True
    with envs.SGLANG_OPT_UNIFIED_CACHE_FREE_OUT_OF_WINDOW_SLOTS.override(False):
        assert swa_anchors.install() == NOT_NEEDED


def test_status_by_kind_of_tree(make: Any, monkeypatch: Any) -> None:
    from sglang.srt import runtime_context

    tree = make().tree
    monkeypatch.setattr(runtime_context, "get_disagg", lambda: SimpleNamespace(disaggregation_mode="null"))
    assert swa_anchors.status_for(tree) == ACTIVE
    monkeypatch.setattr(tree, "cache_controller", object())
    assert "HiCache" in swa_anchors.status_for(tree)
    monkeypatch.setattr(tree, "disable", True)
    assert swa_anchors.status_for(tree) == NOT_NEEDED
    assert swa_anchors.status_for(SimpleNamespace(supports_swa=lambda: False)) == NOT_NEEDED
    other = SimpleNamespace(supports_swa=lambda: True)
    assert swa_anchors.status_for(other) == "the cache is a SimpleNamespace, not a UnifiedRadixCache"


def test_the_planner_fits_the_tree(make: Any) -> None:
    small, large = make(swa_slots=6000), make(swa_slots=80000)
    assert swa_anchors.make_planner(small.tree) == Planner((), 0, small.page)
    assert swa_anchors.make_planner(large.tree) == Planner((), 4, large.page)


def request_with(custom_params: Any) -> Any:
    return SimpleNamespace(sampling_params={"temperature": 1.0, "custom_params": custom_params})


def test_the_http_process_refuses_or_cuts_hints() -> None:
    with pytest.raises(AnchorError):
        swa_anchors._before_tokenize(None, request_with({"kv_anchors": [1, 2.5]}), None, [1] * 50)
    shared = {"kv_anchors": [70, 40, 40, -1, 10**30], "mine": 1}
    obj = request_with(shared)
    swa_anchors._before_tokenize(None, obj, None, [1] * 50)
    assert obj.sampling_params == {"temperature": 1.0, "custom_params": {"kv_anchors": [40], "mine": 1}}
    assert shared["kv_anchors"] == [70, 40, 40, -1, 10**30]  # other items of a batch may share the caller's dict
    for custom_params in (None, {"mine": [1]}, "text"):
        obj = request_with(custom_params)
        before = obj.sampling_params
        swa_anchors._before_tokenize(None, obj, None, [1] * 50)
        assert obj.sampling_params is before
