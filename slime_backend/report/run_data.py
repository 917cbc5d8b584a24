"""What the report reads: the files of one run, each of which may be missing, cut off, or of an older version."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from slime_backend.command_line import command
from slime_backend.ledger.files import read_rollouts
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import LedgerReader, open_reader
from slime_backend.provenance.classes import CLASSES
from slime_backend.provenance.errors import LedgerError, RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.report.bounded import Thinned
from slime_backend.report.hit_rate import HitRate
from slime_backend.report.summary import summarise
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.wire import WireError

# What is drawn of a long run: these many steps and publications, evenly spaced, so that page and memory stay bounded.
DRAWN_STEPS, DRAWN_PUBLICATIONS = 2000, 1000
KEPT_UNCONFIRMED = 200  # publications with an unconfirmed engine, the first ones, that are shown whatever the spacing
SLOWEST = 16
LOOKED_AT = 60  # rollouts of each class, for the one with the most segments
VIOLATED_SAMPLES = 4
NAMED_VERSIONS = 5

UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, WireError, RecordError, LedgerError)


@dataclass(slots=True)
class RunFiles:
    """A run as its files tell it. `missing`: what could not be read, one sentence each; empty for a whole run."""

    run_dir: Path
    summary: dict[str, Any] = field(default_factory=dict)
    audit: dict[str, Any] | None = None  # with each violation
    steps: list[dict[str, Any]] = field(default_factory=list)  # at most DRAWN_STEPS + 1
    step_count: int = 0
    publications: list[dict[str, Any]] = field(default_factory=list)  # some of a long run's, in order
    publication_count: int = 0
    published: Counter[str] = field(default_factory=Counter)  # versions, in order, previous ones included
    hit_rate: HitRate = field(default_factory=HitRate)
    samples: list[RolloutRecord] = field(default_factory=list)  # violated ones first, then by class
    missing: list[str] = field(default_factory=list)

    @property
    def versions(self) -> list[str]:
        """Every version in the order of publication, then those that only rollouts name."""
        return list(dict.fromkeys([*self.published, *self.hit_rate.versions]))

    @property
    def drawn_versions(self) -> list[str]:
        """All, or of a long run those that have points of hit rate."""
        few = len(self.hit_rate.drawn) < len(self.hit_rate.versions)
        return list(self.hit_rate.drawn) if few else self.versions

    @property
    def sampled(self) -> str:
        """One sentence where the page draws a part of a long run; "" where it draws all."""
        parts = [
            f"{len(kept):,} of {count:,} {name}"
            for name, kept, count in (
                ("steps", self.steps, self.step_count),
                ("publications", self.publications, self.publication_count),
            )
            if len(kept) < count
        ]
        return f"A long run: drawn are {' and '.join(parts)}, evenly spaced; the figures count all." if parts else ""

    @property
    def violations(self) -> list[dict[str, Any]]:
        found = (self.audit or {}).get("violations")
        return found if isinstance(found, list) else []


def read_run(run_dir: Path) -> RunFiles:
    """Read all there is. Raises nothing for what is missing or damaged inside the directory."""
    run = RunFiles(run_dir)
    _read_steps(run)
    _read_publications(run)
    files = RunDir(run_dir)
    run.audit = _object(run, files.audit)
    if run.audit is None:
        run.missing.append(
            f"There is no {files.audit.name}: the run did not reach its audit, or makes none; "
            f"`{command('audit', run_dir)}` does."
        )
    rollouts = _read_ledger(run)
    summary = _object(run, files.summary)
    if summary is None:
        run.missing.append(
            f"There is no {files.summary.name}: the run is still going or was killed. The figures below are counted "
            "from its other files."
        )
        summary = _counted(run)
    else:
        _compare(run, summary, rollouts)
    run.summary = summary
    _check_versions(run)
    return run


def _read_steps(run: RunFiles) -> None:
    kept: Thinned[dict[str, Any]] = Thinned(DRAWN_STEPS)
    for row in _rows(run, RunDir(run.run_dir).steps, "step", "reward and lag are not shown"):
        kept.add({key: value for key, value in row.items() if key != "receipts"})
    run.steps, run.step_count = kept.all(), kept.seen


def _read_publications(run: RunFiles) -> None:
    """Evenly spaced ones, those with an unconfirmed engine, and the slowest."""
    spaced: Thinned[tuple[int, dict[str, Any]]] = Thinned(DRAWN_PUBLICATIONS)
    unconfirmed: list[tuple[int, dict[str, Any]]] = []
    slowest: list[tuple[float, int, dict[str, Any]]] = []
    rows = _rows(run, RunDir(run.run_dir).publications, "engines", "publications are not shown")
    for number, row in enumerate(rows):
        run.published.update(name for name in (row.get("previous_version"), row.get("version")) if name)
        spaced.add((number, row))
        if len(unconfirmed) < KEPT_UNCONFIRMED and not all(e.get("confirmed") for e in row["engines"] or []):
            unconfirmed.append((number, row))
        took = row.get("wall_ms")
        heapq.heappush(slowest, (took if isinstance(took, int | float) else 0.0, number, row))
        if len(slowest) > SLOWEST:
            heapq.heappop(slowest)
    kept = dict([*spaced.all(), *unconfirmed, *((number, row) for _, number, row in slowest)])
    run.publications, run.publication_count = [kept[number] for number in sorted(kept)], spaced.seen


def _check_versions(run: RunFiles) -> None:
    """A version that served but was never published: lines were lost, or somebody else publishes to the engines."""
    unknown = [v for v in run.hit_rate.versions if v not in run.published]
    if run.publications and unknown:
        names = ", ".join(unknown[:NAMED_VERSIONS]) + (", ..." if len(unknown) > NAMED_VERSIONS else "")
        run.missing.append(f"Rollouts name versions that {RunDir(run.run_dir).publications.name} doesn't: {names}.")


def _compare(run: RunFiles, summary: dict[str, Any], rollouts: int) -> None:
    """The summary was counted from the other files: where they differ now, something was lost or went on."""
    ended: list[Any] = [summary.get(key) for key in ("publications", "publications_failed")]
    counted = {
        "steps": (summary.get("steps"), run.step_count),
        "publications": (
            None if None in ended else sum(ended) + summary.get("publications_unknown", 0),
            run.publication_count,
        ),
        "rollouts": (summary.get("rollouts_completed"), rollouts),
    }
    for name, (recorded, there) in counted.items():
        if recorded is None:
            run.missing.append(f"{RunDir(run.run_dir).summary.name} doesn't say how many {name} there were.")
        elif recorded != there:
            run.missing.append(f"{RunDir(run.run_dir).summary.name} counts {recorded} {name}, the files have {there}.")


def _object(run: RunFiles, path: Path) -> dict[str, Any] | None:
    """A JSON file's object; None where there is none, and a note where it can't be read."""
    if not path.is_file():
        return None
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        run.missing.append(f"{path.name} can't be read: {error}.")
        return None
    return data if isinstance(data, dict) else None


def _rows(run: RunFiles, path: Path, key: str, consequence: str) -> Iterator[dict[str, Any]]:
    """The readable rows of a JSON lines file; a damaged one, and one without `key`, is none."""
    name = path.name
    if not path.is_file():
        run.missing.append(f"There is no {name}: {consequence}.")
        return
    count, damage = 0, Damage()
    try:
        for row in read_jsonl(path, damage):
            if key in row:
                count += 1
                yield row
    except (OSError, ValueError) as error:
        run.missing.append(f"{name} can't be read beyond its first {count} rows: {error}.")
        return
    if damage:
        run.missing.append(f"{damage}.")
    if not count:
        run.missing.append(f"{name} has no rows: {consequence}.")


def _read_ledger(run: RunFiles) -> int:
    """Hit rates of every rollout, in one pass; a few rollouts to draw, through the index. The number of rollouts."""
    count, damage = 0, Damage()
    try:
        for row in read_rollouts(run.run_dir, damage):
            run.hit_rate.add(row)
            count += 1
        with open_reader(run.run_dir) as reader:
            run.samples = _choose(reader, [str(v.get("receipt")) for v in run.violations], run.versions)
        if damage:
            run.missing.append(f"{damage}.")
    except UNREADABLE as error:
        run.missing.append(f"The ledger of rollouts can't be read: {_words(error)}.")
    return count


def _choose(reader: LedgerReader, violated: list[str], versions: list[str]) -> list[RolloutRecord]:
    """What the audit names comes first; then of each class, strongest first, those with the most segments: one from
    the middle of the run, where there is one, and another of other versions."""
    chosen: dict[str, RolloutRecord] = {}
    for receipt in violated[:VIOLATED_SAMPLES]:
        for record in reader.find(Query(receipt=receipt), 1):
            chosen[record.receipt] = record
    middle = versions[len(versions) // 2] if versions else None
    for name in reversed(CLASSES):
        seen: set[tuple[str, ...]] = set()
        for version in (middle, None):
            found = reader.find(Query(version=version, rollout_class=name), LOOKED_AT)
            for record in sorted(found, key=lambda r: -len(r.segments)):  # stable: of equals the oldest
                if record.versions not in seen:
                    seen.add(record.versions)
                    chosen.setdefault(record.receipt, record)
                    break
    return list(chosen.values())


def _counted(run: RunFiles) -> dict[str, Any]:
    try:
        return summarise(run.run_dir)
    except UNREADABLE as error:
        run.missing.append(f"The figures can't be counted from the other files either: {_words(error)}.")
        return {}


def _words(error: BaseException) -> str:
    """One line. A KeyError alone is only a name."""
    text = f"{error} is missing" if isinstance(error, KeyError) else str(error)
    return " ".join(text.split()).rstrip(".") or type(error).__name__
