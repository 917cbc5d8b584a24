"""Counts the updates of weights that this rank carried out or failed, and makes each answer speak for all ranks.

Needed in every release from 0.5.15.post1 to 0.5.23 (0.5.23, scheduler_components/weight_updater.py:121-289): there an
update, or the joining of its process group, answers with rank 0's outcome. Here the rank that
answers waits for the others', and an update that failed on any of them is answered as failed, with the rank and its
message. The counts stand in each rank's own report, so an answer need not be believed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_plugin import registry
from slime_backend.engine_plugin.epoch import UPDATER, UPDATES
from slime_backend.engine_plugin.tensor_ranks import ABSENT, RANKS

GROUPS = tuple(f"{UPDATER}.{name}_weights_update_group" for name in ("init", "destroy"))
WAIT_S = 600.0  # a rank that reads a large checkpoint may take long; the controller's own deadline is shorter or equal


@dataclass(slots=True)
class LoadCounts:
    """Updates of this process since its start."""

    done: int = 0
    failed: int = 0
    last_failure: str | None = None
    last_failed: bool = False

    def note(self, failures: Sequence[str]) -> None:
        self.last_failed = bool(failures)
        if failures:
            self.failed += 1
            self.last_failure = "; ".join(failures)
        else:
            self.done += 1


LOADS = LoadCounts()


def functions() -> list[registry.HookFunction]:
    around: list[registry.HookFunction] = [(target, "around", _around(LOADS.note)) for target in UPDATES]
    return around + [(target, "around", _around(lambda failures: None)) for target in GROUPS]


def _around(note: Callable[[Sequence[str]], None]) -> Callable[..., Any]:
    def around(original: Any, updater: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            result = original(updater, *args, **kwargs)
        except BaseException as error:  # SGLang ends the process for it; the rank that answers learns why
            note(_failures_of_all(False, f"{type(error).__name__}: {error}"))
            raise
        failures = _failures_of_all(bool(getattr(result, "success", True)), str(getattr(result, "message", "")))
        note(failures)
        if failures:
            result.success, result.message = False, "; ".join(failures)
        return result

    return around


def _failures_of_all(success: bool, message: str) -> list[str]:
    """This rank's failure in words; on the rank that answers, those of all that it answers for."""
    failures = [] if success else [message]
    for rank, other in RANKS.share("load", {"success": success, "message": message}, WAIT_S).items():
        if other == ABSENT:
            continue  # its outcome is nobody's to tell; the report names it, and such an engine isn't admitted
        if isinstance(other, str):
            failures.append(f"tensor rank {rank}: {other}")
        elif not other["success"]:
            failures.append(f"tensor rank {rank}: {other['message']}")
    return failures
