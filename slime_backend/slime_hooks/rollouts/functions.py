"""Functions for slime's `--*-path` flags. `python -m slime_backend.slime_hooks.train` sets them by itself.

    --rollout-function-path            ...rollouts.generate_rollout   the run's own rollout function, then ledger and
                                                                      staleness; whatever function that is
    --rollout-sample-hook-path         ...rollouts.note_rollout       which rollout a sample was finished in
    --rollout-sample-filter-path       ...rollouts.filter_stale       staleness without generate_rollout
    --custom-rollout-log-function-path ...rollouts.log_rollouts       reef/ metrics next to slime's own
    --custom-tis-function-path         ...importance.correct          the trainer's side of --staleness correct

All but the last run in slime's rollout manager, one process per run. The spans come into `Sample` by PATCHES, in every
process, so nothing is imported here that imports slime or torch: these come after the process is prepared for them.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_backend.import_hooks import ModuleFunction
from slime_backend.provenance.errors import StalenessError
from slime_backend.provenance.staleness import Decision
from slime_backend.slime_hooks.rollouts.generate_calls import METADATA_KEY, note_call, notes
from slime_backend.slime_hooks.rollouts.ledger import RolloutLedger, leaves
from slime_backend.slime_hooks.rollouts.stale_samples import apply_staleness, trainer_version


@dataclass(slots=True)
class _Run:
    """What this process knows of the run, kept between rollouts."""

    ledger: RolloutLedger | None = None
    first_rollout: int | None = None
    decided: dict[int, list[Decision]] = field(default_factory=dict)  # of the rollout at work
    lock: threading.Lock = field(default_factory=threading.Lock)


_run = _Run()


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The rollout function that the run was started with (`args.reef_rollout_function_path`), then our part: what
    isn't in the ledger yet is written, and the staleness policy is applied. Evaluation passes through."""
    from slime.utils.misc import load_function

    inner = load_function(args.reef_rollout_function_path)
    output = inner(args, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        samples = getattr(output, "samples", output)  # slime still takes a bare list
        _record(args, samples)
        if rollout_id not in _run.decided:
            _judge(args, rollout_id, samples)
    return output


def note_rollout(args: Any, sample: Any, *, rollout_id: int | None = None, evaluation: bool = False) -> None:
    """Note the rollout that a sample was finished in: a fully asynchronous one may be trained on in a later one."""
    if not evaluation:
        notes(sample)["rollout_id"] = rollout_id


def filter_stale(args: Any, data: Any) -> None:
    """The staleness policy, in slime's own rollout function (a fully asynchronous one calls no filter).

    Raises StalenessError without `note_rollout`, which says where the trainer stands.
    """
    noted = [((s.metadata or {}).get(METADATA_KEY) or {}).get("rollout_id") for s in leaves(data)]
    known = [rollout_id for rollout_id in noted if rollout_id is not None]
    if not known:
        raise StalenessError(
            "filter_stale doesn't know the rollout; add --rollout-sample-hook-path "
            "slime_backend.slime_hooks.rollouts.note_rollout"
        )
    _judge(args, max(known), data)


def log_rollouts(
    rollout_id: int, args: Any, samples: Sequence[Any], rollout_extra_metrics: Any, rollout_time: float
) -> bool:
    """Log the `reef/` metrics of a rollout into slime's own run, and its line of steps.jsonl.

    Returns what the run's own log function says (`args.reef_rollout_log_function_path`), and False without one, so that
    slime's own metrics are logged too.
    """
    decisions = _run.decided.pop(rollout_id, None)
    if decisions is not None:  # None: replayed from saved rollout data
        from slime_backend.slime_hooks.rollouts.figures import figures, step_row

        row, records = step_row(rollout_id, samples, decisions, args.reward_key)
        _ledger(args).add_step(row)
        _log(args, rollout_id, figures(row, records, samples))
    if args.reef_rollout_log_function_path is None:
        return False
    from slime.utils.misc import load_function

    own = load_function(args.reef_rollout_log_function_path)
    return bool(own(rollout_id, args, samples, rollout_extra_metrics, rollout_time))


def _judge(args: Any, rollout_id: int, samples: Any) -> None:
    if _run.first_rollout is None:
        _run.first_rollout = rollout_id
    decisions = apply_staleness(
        samples,
        policy=args.staleness,
        bound=args.max_version_lag,
        trainer_at=trainer_version(args, rollout_id, _run.first_rollout),
        args=args,
    )
    _run.decided = {rollout_id: decisions}
    rows = [{"step": rollout_id + 1, **d.to_json()} for d in decisions if d.action != "train"]
    _ledger(args).add_decisions(rows)


def _record(args: Any, samples: Any) -> None:
    _ledger(args).record(
        samples,
        temperature=float(args.rollout_temperature),
        engine=f"router {args.sglang_router_ip}:{args.sglang_router_port}",
        reward_key=args.reward_key,
    )


def _ledger(args: Any) -> RolloutLedger:
    with _run.lock:
        if _run.ledger is None:
            _run.ledger = RolloutLedger(Path(args.reef_run_dir))
        return _run.ledger


def _log(args: Any, rollout_id: int, values: dict[str, float | int]) -> None:
    try:
        from slime.observability import logging_utils
        from slime.observability.metric_utils import compute_rollout_step
    except ModuleNotFoundError:  # before slime 624b824a
        from slime.utils import logging_utils
        from slime.utils.metric_utils import compute_rollout_step

    row = {**values, "rollout/step": compute_rollout_step(args, rollout_id)}
    logging_utils.log(args, row, step_key="rollout/step")


def keep_spans(module: Any) -> None:
    """slime.utils.types: `Sample` keeps what SGLang says of a call's tokens, which slime throws away."""
    original = module.Sample._apply_meta_info
    _must_take(original, "slime/utils/types.py: Sample._apply_meta_info", "meta_info", "new_token_count")

    @functools.wraps(original)
    def _apply_meta_info(
        self: Any,
        args: Any,
        meta_info: dict[str, Any],
        *,
        new_token_count: int = 0,
        update_terminal_info: bool = True,
        **others: Any,
    ) -> None:
        original(
            self,
            args,
            meta_info,
            new_token_count=new_token_count,
            update_terminal_info=update_terminal_info,
            **others,
        )
        if update_terminal_info and meta_info.get("finish_reason"):  # not for the chunks of a stream
            note_call(self, meta_info, new_token_count)

    module.Sample._apply_meta_info = _apply_meta_info


def record_groups(module: Any) -> None:
    """slime.rollout.sglang_rollout: each group is written when it has its rewards, so that those which a dynamic filter
    throws away are in the ledger too, and a kill loses no finished group."""
    original = module.generate_and_rm_group
    where = "slime/rollout/sglang_rollout.py: generate_and_rm_group"
    _must_take(original, where, "args", "group", "sampling_params", "evaluation")

    @functools.wraps(original)
    async def generate_and_rm_group(
        args: Any, group: list[Any], sampling_params: dict[str, Any], evaluation: bool = False
    ) -> Any:
        finished = await original(args, group, sampling_params, evaluation=evaluation)
        if not evaluation:
            # In a thread: the ledger now and then seals a segment, and requests of others are in flight meanwhile.
            await asyncio.to_thread(_record, args, finished)
        return finished

    module.generate_and_rm_group = generate_and_rm_group


def _must_take(function: Any, where: str, *names: str) -> None:
    found = inspect.signature(function).parameters
    missing = [name for name in names if name not in found]
    if missing:
        raise ImportError(
            f"{where} takes {', '.join(found)} and no longer {', '.join(missing)}: this slime is not one that "
            "reef-slime knows; see docs/slime/compatibility.md"
        )


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.utils.types", keep_spans),
    ("slime.rollout.sglang_rollout", record_groups),
)
