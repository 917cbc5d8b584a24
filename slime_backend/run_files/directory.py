"""Where everything of a run lies. Each file name of a run stands here and nowhere else; docs/runs.md explains them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

SegmentKind = Literal["jsonl", "parquet"]
_SEALED: Mapping[SegmentKind, tuple[str, str]] = {"jsonl": ("_", ".jsonl"), "parquet": ("", ".parquet")}


@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run. Nothing here changes anything on disk."""

    path: Path

    # ---- rollouts ---------------------------------------------------------------------------------------------------

    @property
    def submitted(self) -> Path:
        """One line for each request that is about to be sent: its receipt."""
        return self.path / "submitted.jsonl"

    @property
    def rollouts(self) -> Path:
        """One line for each answer, with its provenance; the active segment of the ledger."""
        return self.path / "rollouts.jsonl"

    @property
    def unusable(self) -> Path:
        """One line for each answer that is no rollout, with the reason."""
        return self.path / "unusable.jsonl"

    @property
    def ledger(self) -> Path:
        """A directory: older segments of the ledger, its index and its locks.

        Whatever in it is no complete Parquet file begins with `_` or `.`, which readers of Parquet directories skip.
        """
        return self.path / "rollouts"

    def sealed_rollouts(self, number: int, kind: SegmentKind) -> Path:
        """A sealed segment of the ledger: its lines until it has become Parquet, then that."""
        before, after = _SEALED[kind]
        return self.ledger / f"{before}{number:06d}{after}"

    def list_sealed_rollouts(self, kind: SegmentKind) -> Iterator[tuple[int, Path]]:
        """(number, path) of every sealed segment that is there in this format, in no order."""
        before, after = _SEALED[kind]
        for path in self.ledger.glob(f"{before}[0-9]*{after}"):
            number = path.name[len(before) : -len(after)]
            if number.isdigit():
                yield int(number), path

    @property
    def next_rollouts(self) -> Path:
        """The segment that a rotation opens before it renames the active one."""
        return self.ledger / "_next.jsonl"

    @property
    def ledger_index(self) -> Path:
        """SQLite: where the rollouts of a receipt, a session, a version or a class lie. Disposable."""
        return self.ledger / "_index.sqlite"

    @property
    def ledger_lock(self) -> Path:
        """Locked by the process that writes the ledger."""
        return self.ledger / "_lock"

    @property
    def ledger_lock_holder(self) -> Path:
        """That process, where the file system has no locks."""
        return self.ledger / "_lock_holder.json"

    @property
    def run_lock(self) -> Path:
        """Locked by the process that runs the run."""
        return self.ledger / "_run_lock"

    @property
    def run_lock_holder(self) -> Path:
        """That process, where the file system has no locks."""
        return self.ledger / "_run_lock_holder.json"

    # ---- training and publications ----------------------------------------------------------------------------------

    @property
    def steps(self) -> Path:
        """One line for each training step: reward, loss, lag, the receipts it was trained on."""
        return self.path / "steps.jsonl"

    @property
    def superseded_steps(self) -> Path:
        """The lines of steps that were trained again, because a kill came before their weights were saved."""
        return self.path / "steps.superseded.jsonl"

    @property
    def staleness(self) -> Path:
        """One line for each rollout that was dropped, masked or corrected for its lag."""
        return self.path / "staleness.jsonl"

    @property
    def publications(self) -> Path:
        """One line for each publication: its policy, and each engine's times and evidence."""
        return self.path / "publications.jsonl"

    @property
    def weight_digests(self) -> Path:
        """One line for each version: a digest of each tensor, as it was sent and as each engine had it."""
        return self.path / "weight_digests.jsonl"

    @property
    def all_weights(self) -> Path:
        """A directory: one checkpoint for each published version, which the audit recomputes rollouts from."""
        return self.path / "weights"

    def weights(self, version: str) -> Path:
        """The checkpoint that a version was published from."""
        return self.all_weights / version

    @property
    def trainer_state(self) -> Path:
        """What the trainer needs besides the weights to go on: step and optimizer."""
        return self.path / "trainer.pt"

    @property
    def deepspeed_states(self) -> Path:
        """A directory: DeepSpeed's own checkpoint of the last step."""
        return self.path / "deepspeed"

    # ---- results ----------------------------------------------------------------------------------------------------

    @property
    def audit(self) -> Path:
        """The audit's result: verdict, differences, each violation."""
        return self.path / "audit.json"

    @property
    def summary(self) -> Path:
        """The figures of the run, counted from its other files."""
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        """A page to look at the run in a browser."""
        return self.path / "report.html"

    # ---- logs and trackers ------------------------------------------------------------------------------------------

    def engine_log(self, number: int) -> Path:
        """What an engine printed."""
        return self.path / f"engine{number}.log"

    def trainer_log(self, rank: int) -> Path:
        """What a rank of the trainer printed; rank 0 is the run's own process."""
        return self.path / f"trainer{rank}.log"

    @property
    def audit_log(self) -> Path:
        """What the audit that runs during the training printed."""
        return self.path / "audit.log"

    @property
    def wandb_id(self) -> Path:
        """The W&B run that a resumed run goes on in."""
        return self.path / "wandb_id"

    @property
    def wandb_rows(self) -> Path:
        """What an offline W&B run got, row by row, while it is under way."""
        return self.path / ".wandb-rows.jsonl"

    @property
    def tensorboard(self) -> Path:
        """A directory: TensorBoard's files."""
        return self.path / "tensorboard"

    # ---- a gateway --------------------------------------------------------------------------------------------------

    @property
    def gateway_store(self) -> Path:
        """SQLite: sessions, turns, feedback and leases of a gateway."""
        return self.path / "gateway.sqlite"


def remove_weights(directory: Path) -> None:
    """Remove a version's checkpoint, its config first: without it the directory is no version for a reader, also after
    a kill half-way."""
    (directory / "config.json").unlink(missing_ok=True)
    shutil.rmtree(directory)
