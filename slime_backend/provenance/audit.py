"""Recompute rollouts' log-probs under the versions that they claim, and name every one that doesn't hold.

A token sampled by version v over KV that versions u, v, ... computed can be recomputed exactly: build the KV position
by position with the version that the record names, then score. In fp32 an honest engine differs by about 1e-6, one
stale prefix by 1e-2 and more, so the tolerance of 1e-4 lies far from both.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.segments import read_rollouts
from slime_backend.wire import KvSegment

TOLERANCE = 1e-4  # |difference of log-prob|, fp32
MODELS_IN_MEMORY = 4
EXPLAINED_VIOLATIONS = 20  # for these the audit also looks for the version that would explain them

LoadModel = Callable[[Path], Any]  # directory -> a Hugging Face causal LM in eval mode


@dataclass(frozen=True, slots=True)
class Violation:
    receipt: str
    engine: str
    claimed: str  # the version that the record claims for the worst token
    kind: str  # "log-prob", "spans", "version"
    max_abs_diff: float
    worst_token: int  # output index
    detail: str

    def __str__(self) -> str:
        return f"{self.receipt} ({self.engine}, claims {self.claimed}): {self.detail}"


@dataclass(slots=True)
class AuditResult:
    rollouts: int = 0
    recorded: int = 0
    tokens: int = 0
    crossing: int = 0  # audited rollouts that lived through a publication
    max_abs_logprob_diff: float = 0.0
    mean_abs_logprob_diff: float = 0.0
    tolerance: float = TOLERANCE
    violations: list[Violation] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return self.rollouts > 0 and not self.violations

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    def summary(self) -> dict[str, Any]:
        """As `to_json`, with violations counted; the receipts that they concern are listed beside."""
        return {**self.to_json(), "violations": len(self.violations), "violated": [v.receipt for v in self.violations]}


def audit_run(
    run_dir: Path,
    load_model: LoadModel,
    *,
    rollouts: int | None = None,
    tolerance: float = TOLERANCE,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Audit a run directory: its ledger against `weights/<version>`.

    `rollouts`: how many to check; those that lived through a publication first, then a random sample (None: all).
    Raises AuditError where nothing was recorded.
    """
    records = [RolloutRecord.from_json(r) for r in read_rollouts(run_dir)]
    if not records:
        raise AuditError(f"{run_dir / 'rollouts.jsonl'} has no rollouts; was the run started with another directory?")
    result = AuditResult(recorded=len(records), tolerance=tolerance)
    scorer = Scorer(run_dir / "weights", load_model)
    total_diff = 0.0
    chosen = choose(records, rollouts, seed)
    for done, record in enumerate(chosen, 1):
        found, diffs = check(record, scorer, tolerance)
        if found is not None:
            if len(result.violations) < EXPLAINED_VIOLATIONS:
                found = explain(found, record, scorer, tolerance)
            result.violations.append(found)
        result.rollouts += 1
        result.tokens += len(diffs)
        result.crossing += record.crossing
        result.max_abs_logprob_diff = max([result.max_abs_logprob_diff, *diffs])
        total_diff += sum(diffs)
        if progress is not None:
            progress(done, len(chosen))
    result.mean_abs_logprob_diff = total_diff / max(1, result.tokens)
    return result


def choose(records: Sequence[RolloutRecord], count: int | None, seed: int) -> list[RolloutRecord]:
    """Half of the places go to rollouts that lived through a publication, where a fault would show; the rest are a
    random sample. Ordered by version, so that each model is loaded once."""
    if count is None or count >= len(records):
        chosen = list(records)
    else:
        rng = random.Random(seed)
        crossing = [r for r in records if r.crossing]
        first = rng.sample(crossing, min(len(crossing), count // 2))
        taken = {r.receipt for r in first}
        rest = [r for r in records if r.receipt not in taken]
        chosen = first + rng.sample(rest, count - len(first))
    order = {version: i for i, version in enumerate(dict.fromkeys(v for r in records for v in r.versions))}
    return sorted(chosen, key=lambda r: [order[v] for v in r.versions])


def check(record: RolloutRecord, scorer: Scorer, tolerance: float) -> tuple[Violation | None, list[float]]:
    """One rollout: its first fault, and |difference of log-prob| of every token that could be recomputed."""

    def fault(kind: str, detail: str, worst: int = 0, diff: float = 0.0) -> Violation:
        claimed = next((s.version for s in record.spans if s.start <= worst < s.end), "?")
        return Violation(record.receipt, record.engine, claimed, kind, diff, worst, detail)

    inconsistent = why_inconsistent(record)
    if inconsistent:
        return fault("spans", inconsistent), []
    named = {span.version for segment in record.segments for span in segment.context}
    named |= {segment.version for segment in record.segments}
    unknown = sorted(v for v in named if not scorer.knows(v))
    if unknown:
        return fault("version", f"it names {', '.join(unknown)}, of which no weights were saved"), []
    diffs: list[float] = []
    for segment in record.segments:
        scored = scorer.score(record, segment)
        claimed = record.logprobs[segment.start : segment.end]
        diffs += [abs(a - b) for a, b in zip(scored, claimed, strict=True)]
    worst = max(range(len(diffs)), key=diffs.__getitem__, default=0)
    if diffs and not diffs[worst] <= tolerance:  # NaN is a violation too
        return fault("log-prob", f"token {worst} differs by {diffs[worst]:.3g}", worst, diffs[worst]), diffs
    return None, diffs


def why_inconsistent(record: RolloutRecord) -> str:
    """Why the record contradicts itself, or "" where it doesn't."""
    if len(record.output_ids) != len(record.logprobs):
        return f"{len(record.logprobs)} log-probs for {len(record.output_ids)} tokens"
    for name, spans in (("sampled spans", record.spans), ("KV segments", record.segments)):
        position = 0
        for span in spans:
            if span.start != position or span.end <= span.start:
                return f"{name} leave a gap or overlap at token {position}"
            position = span.end
        if position != len(record.output_ids):
            return f"{name} cover {position} of {len(record.output_ids)} tokens"
    for segment in record.segments:
        position = 0
        for context in segment.context:
            if context.start != position:
                return f"the context of tokens {segment.start}..{segment.end} has a gap at position {position}"
            position = context.end
        if position != len(record.prompt_ids) + segment.end - 1:
            return f"the context of tokens {segment.start}..{segment.end} covers {position} positions"
        sampled = {s.version for s in record.spans if s.start < segment.end and segment.start < s.end}
        if sampled != {segment.version}:
            return f"tokens {segment.start}..{segment.end}: sampled by {sorted(sampled)}, KV says {segment.version}"
    return ""


def explain(violation: Violation, record: RolloutRecord, scorer: Scorer, tolerance: float) -> Violation:
    """Say which saved version, if any, would explain the tokens from the first wrong one on, computed throughout."""
    if violation.kind != "log-prob":
        return violation
    for version in scorer.versions():
        length = len(record.prompt_ids) + len(record.output_ids) - 1
        whole = KvSegment.from_json(
            {
                "start": 0,
                "end": len(record.output_ids),
                "version": version,
                "context": [{"version": version, "start": 0, "end": length}],
            }
        )
        scored = scorer.score(record, whole)
        worst = violation.worst_token
        if abs(scored[worst] - record.logprobs[worst]) <= tolerance:
            return Violation(
                **{**asdict(violation), "detail": f"{violation.detail}; version {version} would explain that token"}
            )
    return Violation(**{**asdict(violation), "detail": f"{violation.detail}; no single saved version explains it"})


class Scorer:
    """Scores output tokens over KV that is built version by version. Keeps a few models in memory."""

    def __init__(self, weights: Path, load_model: LoadModel) -> None:
        self.weights = weights
        self._load = load_model
        self._models: OrderedDict[str, Any] = OrderedDict()

    def knows(self, version: str) -> bool:
        return (self.weights / version / "config.json").is_file()

    def versions(self) -> list[str]:
        return sorted((p.name for p in self.weights.iterdir() if self.knows(p.name)), key=lambda n: (len(n), n))

    def model(self, version: str) -> Any:
        if version in self._models:
            self._models.move_to_end(version)
        else:
            self._models[version] = self._load(self.weights / version)
            if len(self._models) > MODELS_IN_MEMORY:
                self._models.popitem(last=False)
        return self._models[version]

    @torch.no_grad()
    def score(self, record: RolloutRecord, segment: KvSegment) -> list[float]:
        """Log-probs (natural, at the record's temperature) of output tokens segment.start..segment.end.

        The logits at position p, which the next token is sampled from, belong to the version that computed p's KV.
        """
        tokens = torch.tensor([(*record.prompt_ids, *record.output_ids[: segment.end])])
        first = len(record.prompt_ids) + segment.start - 1  # the position whose logits sampled the first token
        past: Any = None
        rows: list[torch.Tensor] = []
        for span in segment.context:
            keep = max(0, span.end - max(first, span.start))
            output = self.model(span.version)(
                input_ids=tokens[:, span.start : span.end],
                past_key_values=past,
                use_cache=True,
                logits_to_keep=max(1, keep),  # 0 would mean all of them
            )
            past = output.past_key_values
            if keep:
                rows.append(output.logits[0, -keep:])
        temperature = record.temperature or 1.0
        logprobs = (torch.cat(rows).float() / temperature).log_softmax(-1)
        sampled = tokens[0, first + 1 : first + 1 + len(logprobs)]
        return [float(x) for x in logprobs.gather(1, sampled[:, None])[:, 0]]
