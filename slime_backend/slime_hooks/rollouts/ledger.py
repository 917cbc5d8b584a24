"""Writes the generate calls of slime's samples to the run's ledger. Duck-typed: no slime, no torch.

A call is written once, when its sample is finished and has its reward: an aborted sample waits in slime's buffer until
a later rollout goes on with it. The sample's metadata says which of its calls were written.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.jsonl import JsonlWriter
from slime_backend.slime_hooks.rollouts.generate_calls import METADATA_KEY, calls_of, notes, record_of

log = logging.getLogger(__name__)

UNFINISHED = ("pending", "aborted")  # values of slime's Sample.Status


@dataclass(slots=True)
class LedgerCounts:
    """Of one process since its start."""

    written: int = 0
    without_record: int = 0  # calls whose context can't be placed, or that came without KV segments


class RolloutLedger:
    """The ledger and the step file of a slime run. One process writes them: slime's rollout manager."""

    def __init__(self, run_dir: Path) -> None:
        """Raises LedgerError where another process writes to the same run."""
        self.run_dir = run_dir
        self.counts = LedgerCounts()
        run_dir.mkdir(parents=True, exist_ok=True)
        self._lock = threading.Lock()  # slime generates in one thread, or several, and collects in another
        self._ledger = Ledger(run_dir)
        self._steps = JsonlWriter(run_dir / "steps.jsonl")
        self._staleness = JsonlWriter(run_dir / "staleness.jsonl")

    def record(self, samples: Any, *, temperature: float, engine: str, reward_key: str | None = None) -> None:
        """Write the calls of finished samples that aren't written yet. `samples`: a sample, or lists of them."""
        with self._lock:
            seen: set[str] = set()
            for sample in leaves(samples):
                if status(sample) in UNFINISHED:
                    continue
                # By name, since the copies of a sample that a rollout function splits have copies of its calls too.
                written = notes(sample).setdefault("written", [])
                for call in calls_of(sample):
                    if call.receipt in written:
                        continue
                    written.append(call.receipt)
                    if call.receipt in seen:
                        continue
                    seen.add(call.receipt)
                    record = record_of(
                        sample,
                        call,
                        group=group_name(sample),
                        engine=engine,
                        temperature=temperature,
                        reward=reward_of(sample, reward_key),
                    )
                    if record is None:
                        self.counts.without_record += 1
                    else:
                        self._ledger.append(record)
                        self.counts.written += 1

    def add_step(self, row: dict[str, Any]) -> None:
        """One line of steps.jsonl."""
        with self._lock:
            self._steps.append(row)

    def add_decisions(self, rows: Iterable[dict[str, Any]]) -> None:
        """Lines of staleness.jsonl."""
        with self._lock:
            for row in rows:
                self._staleness.append(row)

    def close(self) -> None:
        with self._lock:
            self._ledger.close()
            self._steps.close()
            self._staleness.close()


def leaves(samples: Any) -> Iterator[Any]:
    """Every sample of a sample, a group, a batch of groups, or groups whose rollouts were split into several."""
    if isinstance(samples, list | tuple):
        for item in samples:
            yield from leaves(item)
    elif samples is not None:
        yield samples


def status(sample: Any) -> str:
    """slime's Sample.Status by its value."""
    return str(getattr(sample.status, "value", sample.status))


def group_name(sample: Any) -> str:
    """Samples of one prompt share it."""
    return f"g{sample.group_index:05d}" if sample.group_index is not None else f"s{sample.index}"


def reward_of(sample: Any, reward_key: str | None) -> float:
    """The reward that slime trains with; 0 where there is none (yet): slime may compute it from the whole batch."""
    reward = sample.reward
    if isinstance(reward, dict):
        reward = reward.get(reward_key) if reward_key else None
    return float(reward) if isinstance(reward, int | float) else 0.0


def has_calls(sample: Any) -> bool:
    return bool(((sample.metadata or {}).get(METADATA_KEY) or {}).get("calls"))
