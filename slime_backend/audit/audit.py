"""Recompute rollouts' log-probs under the versions that they claim, and name every one that doesn't hold.

In fp32 an honest engine differs by about 1e-6; by how much a fault does depends on the step between two versions:
docs/audit.md. `audit_run` audits a run that is there, audit_follow.py one that goes on.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from slime_backend.audit.conclusion import ONE_IN, Conclusion, conclude
from slime_backend.audit.diagnosis import Diagnostician, claims
from slime_backend.audit.differences import SPAN_KINDS, Differences, span_kind
from slime_backend.audit.likelihood import Alternative, Finding, Judgement, Observed, judge
from slime_backend.audit.sampling import Plan, Sample
from slime_backend.audit.scorer import LoadModel, Scorer, WeightsGoneError
from slime_backend.ledger.files import read_records
from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import not_auditable
from slime_backend.run_files import RunDir
from slime_backend.run_files.damage import Damage
from slime_backend.run_files.jsonl import read_jsonl

TOLERANCE = 1e-4  # |difference of log-prob|, fp32
NEAR = 2  # versions that are tried in the place of a claimed one, by likelihood: each costs a forward pass
HALF_DTYPES = frozenset(("bfloat16", "float16", "half"))  # SGLang's names
SAME = 1e-6  # nats: a claim that differs by less can't be told from the recorded one, nor need it be
EXPLAINED_VIOLATIONS = 20  # for these the audit also looks for what would explain them


@dataclass(frozen=True, slots=True)
class Violation:
    receipt: str
    engine: str
    claimed: str  # the version that the record claims for the worst token
    kind: str  # "log-prob", "spans", "version"
    max_abs_diff: float
    worst_token: int  # output index
    detail: str
    fault: str  # a `diagnosis.Fault`, "inconsistent record", "unknown version", or "not examined"

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
    gone: int = 0  # rollouts that weren't audited, because the weights that they name were removed
    not_auditable: dict[str, int] = field(default_factory=dict)  # sampling parameters -> rollouts sampled with them
    waiting: int = 0  # rollouts that `audit_follow` has taken in, or seen, and not checked yet
    damaged_places: list[str] = field(default_factory=list)  # the first of these
    damaged: int = 0  # lines and segments of the ledger that can't be read: their rollouts are in no other figure
    finished: bool = True  # False in what `audit_follow` writes while the run goes on
    noise: float | None = None  # of a token's log-prob, nats, where rollouts are judged by likelihood (16 bits)
    decided: int = 0  # rollouts whose claim holds against every other, by likelihood
    undecided: int = 0  # rollouts whose tokens are too few for that
    slopes: list[dict[str, Any]] = field(default_factory=list)  # of the residual along each fault: 0 the claim, 1 it
    verdict: Conclusion | None = None
    differences: dict[str, dict[str, Any]] = field(default_factory=dict)  # kind of span -> Differences.to_json
    violations: list[Violation] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Something was checked, and all of it holds."""
        return self.rollouts > 0 and not self.violations

    @property
    def clean(self) -> bool:
        """As `passed`, and enough was checked."""
        return self.verdict is not None and self.verdict.outcome == "clean"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> AuditResult:
        known = {f.name: data[f.name] for f in fields(cls) if f.name in data}
        verdict = data.get("verdict")
        known["violations"] = [Violation(**v) for v in data["violations"]]
        return cls(**{**known, "verdict": Conclusion(**verdict) if verdict else None})

    def summary(self) -> dict[str, Any]:
        """For `summary.json`: violations counted, with their receipts, and no histograms."""
        data = {key: value for key, value in self.to_json().items() if key != "differences"}
        return {**data, "violations": len(self.violations), "violated": [v.receipt for v in self.violations]}


class Audit:
    """An audit under way: it is offered every rollout of the run, and checks those that it asked for.

    `rollouts`: the size of the sample (None: all); `one_in`: the contamination that it must be able to find.
    """

    def __init__(
        self,
        run_dir: Path,
        load_model: LoadModel,
        *,
        rollouts: int | None = None,
        tolerance: float | None = None,
        one_in: int = ONE_IN,
        seed: int = 0,
    ) -> None:
        """`tolerance` None: TOLERANCE for weights of 32 bits, likelihoods for those of 16 (likelihood.py)."""
        self.run_dir, self.one_in = run_dir, one_in
        self._chooses, self.tolerance = tolerance is None, TOLERANCE if tolerance is None else tolerance
        self._observed: dict[str, Observed] = {}
        self._worst: dict[str, tuple[str, int, float]] = {}  # receipt -> (version, token, |difference|)
        self.scorer = Scorer(RunDir(run_dir).all_weights, load_model)
        self.sample = Sample(rollouts, seed)
        self._diagnostician = Diagnostician(self.scorer, self.tolerance)
        self._differences = {kind: Differences() for kind in SPAN_KINDS}
        self._not_auditable: Counter[str] = Counter()
        self._left_out = 0
        self._published_names: set[str] = set()
        self._published_size = 0
        self._dtypes: set[str] = set()  # of the engines, as publications.jsonl has them
        self._checked: set[str] = set()
        self.damage = Damage()  # of the ledger, while it was read
        self._recorded = self._recorded_crossing = self._crossing = self._gone = 0
        self._violations: list[Violation] = []

    def offer(self, record: RolloutRecord) -> bool:
        """Count a rollout; whether it is to be checked. One that was sampled from another distribution than the
        weights' own (penalties, grammars: sampling_params.py) can't be, and stands for itself in the result."""
        reason = not_auditable(record.sampling)
        if reason:
            self._not_auditable[reason] += 1
            return False
        self._recorded += 1
        self._recorded_crossing += record.crossing
        return self.sample.offer(record.receipt, record.crossing, record.contradicted)

    def check(self, record: RolloutRecord) -> None:
        """Check a rollout that was asked for; one whose weights were removed since is counted and left alone."""
        try:
            by_likelihood = self._chooses and self._is_half(record)
            found, residual = examine(record, self.scorer)
            if found is None:
                found = over_bound(record, residual, math.inf if by_likelihood else self.tolerance)
            if found is None and by_likelihood:
                self._observe(record, residual)
        except WeightsGoneError:
            self._gone += 1
            return
        diffs = [abs(r) for r in residual]
        if found is not None and found.kind == "version" and self._were_published(record):
            self._gone += 1
            return
        self._checked.add(record.receipt)
        self._crossing += record.crossing
        self._diagnostician.note(record)
        for number, segment in enumerate(record.segments if diffs else ()):
            kind = span_kind(number, record.segments, record.prefills)
            self._differences[kind].add(diffs[segment.start : segment.end])
        if found is not None:
            if found.kind == "log-prob" and len(self._violations) < EXPLAINED_VIOLATIONS:
                diagnosis = self._diagnostician.explain(record)
                found = replace(found, fault=diagnosis.fault, detail=f"{found.detail}; {diagnosis.text}")
            self._violations.append(found)

    def _is_half(self, record: RolloutRecord) -> bool:
        """Whether the engines computed in 16 bits: by what they were started with, else by the weights on disk."""
        self._published()
        known = self._dtypes - {"", "auto"}
        if known:
            return bool(known & HALF_DTYPES)
        return any(self.scorer.is_half(version) for version in sorted(_named(record)) if self.scorer.knows(version))

    def _observe(self, record: RolloutRecord, residual: list[float]) -> None:
        """Score every other claim for the same tokens; the verdict is on all rollouts together, in `result`."""
        claimed = np.array([b - r for b, r in zip(record.logprobs, residual, strict=True)])
        alternatives = []
        for other in claims(record, self.scorer, near=NEAR):
            try:
                direction = np.array(self.scorer.score_all(record, other.segments, other.mix)) - claimed
            except WeightsGoneError:
                continue
            if np.abs(direction).max(initial=0.0) > SAME:
                alternatives.append(Alternative((other.fault, other.text), other.fault, other.text, direction))
        self._observed[record.receipt] = Observed(
            record.receipt, record.engine, np.array(residual), tuple(alternatives)
        )
        worst = int(np.abs(residual).argmax()) if residual else 0
        version = next((s.version for s in record.spans if s.start <= worst < s.end), "?")
        self._worst[record.receipt] = (version, worst, abs(residual[worst]) if residual else 0.0)

    def _found(self, finding: Finding) -> Violation:
        one, other = finding.observed, finding.alternative
        version, token, diff = self._worst[one.receipt]
        fault = "unexplained" if other is None else other.fault
        return Violation(one.receipt, one.engine, version, "log-prob", diff, token, str(finding), fault)

    def result(self, *, finished: bool = True, waiting: int = 0) -> AuditResult:
        differences = {kind: d for kind, d in self._differences.items() if d.tokens}
        tokens = sum(d.tokens for d in differences.values())
        judged = judge(list(self._observed.values())) if self._observed else Judgement(0.0)
        violations = [*self._violations, *map(self._found, judged.findings)]
        sure = (self._checked - self._observed.keys()) | judged.decided
        in_sample = len(sure if self.sample.count is None else sure & self.sample.holds())
        plan = Plan(self._recorded, self._recorded_crossing)
        return AuditResult(
            rollouts=len(self._checked),
            recorded=self._recorded + self._left_out + self._not_auditable.total(),
            tokens=tokens,
            crossing=self._crossing,
            max_abs_logprob_diff=max((d.largest for d in differences.values()), default=0.0),
            mean_abs_logprob_diff=sum(d.total for d in differences.values()) / max(1, tokens),
            tolerance=self.tolerance,
            noise=judged.noise if self._observed else None,
            decided=len(judged.decided),
            undecided=len(judged.undecided),
            slopes=judged.slopes,
            gone=self._gone,
            not_auditable=dict(self._not_auditable),
            waiting=waiting,
            damaged=self.damage.lines + self.damage.segments,
            damaged_places=list(self.damage.places),
            finished=finished,
            verdict=conclude(
                plan,
                in_sample,
                [v.fault for v in violations],
                self.one_in,
                self._gone,
                self._not_auditable,
                list(judged.undecided.values()),
            ),
            differences={kind: d.to_json() for kind, d in differences.items()},
            violations=violations,
        )

    def is_gone(self, record: RolloutRecord) -> bool:
        """Whether weights that the record names were this run's once and are removed: it can't be checked."""
        missing = {v for v in _named(record) if not self.scorer.knows(v)}
        return bool(missing) and missing <= self._published()

    def leave_out(self) -> None:
        """Count a rollout whose weights are gone before the sample is drawn: no other stands for it."""
        self._gone += 1
        self._left_out += 1

    def _were_published(self, record: RolloutRecord) -> bool:
        """Whether every version that the record names was this run's, so that its weights were there once."""
        return _named(record) <= self._published()

    def _published(self) -> set[str]:
        """Read again where the file has grown."""
        path = RunDir(self.run_dir).publications
        size = path.stat().st_size if path.is_file() else 0
        if size != self._published_size:
            rows = list(read_jsonl(path))
            self._published_names = {str(p.get(key)) for p in rows for key in ("previous_version", "version")}
            self._dtypes = {str(e.get("dtype", "")) for p in rows for e in p.get("engines") or ()}
            self._published_size = size
        return self._published_names


def audit_run(
    run_dir: Path,
    load_model: LoadModel,
    *,
    rollouts: int | None = None,
    tolerance: float | None = None,
    one_in: int = ONE_IN,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> AuditResult:
    """Audit a run directory: its ledger against `weights/<version>`.

    `rollouts`: how many to check; those that lived through a publication first, then a random sample (None: all).
    Reads the ledger twice, and holds no more of it than the sample, or one rollout where all are checked. Raises
    AuditError where nothing was recorded.
    """
    audit = Audit(run_dir, load_model, rollouts=rollouts, tolerance=tolerance, one_in=one_in, seed=seed)
    versions: dict[str, int] = {}
    offered = wanted = 0
    for record in read_records(run_dir, audit.damage):
        offered += 1
        if not not_auditable(record.sampling) and audit.is_gone(record):
            audit.leave_out()
            continue
        wanted += audit.offer(record)
        for version in record.versions:
            versions.setdefault(version, len(versions))
    if not offered and audit.damage:
        raise AuditError(f"{RunDir(run_dir).rollouts} has no rollout that can be read: {audit.damage}")
    if not offered:
        raise AuditError(f"{RunDir(run_dir).rollouts} has no rollouts; was the run started with another directory?")
    chosen: Iterable[RolloutRecord]
    if rollouts is None:  # in the order of the ledger, where versions follow each other
        chosen = (r for r in read_records(run_dir) if not not_auditable(r.sampling) and not audit.is_gone(r))
    else:
        held = audit.sample.holds()
        chosen = [record for record in read_records(run_dir) if record.receipt in held]
        chosen.sort(key=lambda r: [versions[v] for v in r.versions])  # so that each model is loaded once
        wanted = len(chosen)
    for done, record in enumerate(chosen, 1):
        audit.check(record)
        if progress is not None:
            progress(done, wanted)
    return audit.result()


def check(record: RolloutRecord, scorer: Scorer, tolerance: float) -> tuple[Violation | None, list[float]]:
    """One rollout: its first fault, and |difference of log-prob| of every token that could be recomputed."""
    found, residual = examine(record, scorer)
    return found or over_bound(record, residual, tolerance), [abs(r) for r in residual]


def examine(record: RolloutRecord, scorer: Scorer) -> tuple[Violation | None, list[float]]:
    """What is wrong with the record itself, and else the log-prob of each token as recorded less that as recomputed."""
    inconsistent = why_inconsistent(record)
    if inconsistent:
        return _fault(record, "spans", "inconsistent record", inconsistent), []
    unknown = sorted(v for v in _named(record) if not scorer.knows(v))
    if unknown:
        detail = f"it names {', '.join(unknown)}, of which no weights were saved"
        return _fault(record, "version", "unknown version", detail), []
    scored = scorer.score_all(record, record.segments)
    return None, [recorded - again for recorded, again in zip(record.logprobs, scored, strict=True)]


def over_bound(record: RolloutRecord, residual: Sequence[float], tolerance: float) -> Violation | None:
    """The violation where a token differs by more than `tolerance`; NaN does too."""
    diffs = [abs(r) for r in residual]
    wrong = [number for number, diff in enumerate(diffs) if not diff <= tolerance]
    if not wrong:
        return None
    worst = max(wrong, key=lambda number: (math.isnan(diffs[number]), diffs[number]))
    return _fault(
        record, "log-prob", "not examined", f"token {worst} differs by {diffs[worst]:.3g}", worst, diffs[worst]
    )


def _fault(record: RolloutRecord, kind: str, name: str, detail: str, worst: int = 0, diff: float = 0.0) -> Violation:
    claimed = next((s.version for s in record.spans if s.start <= worst < s.end), "?")
    return Violation(record.receipt, record.engine, claimed, kind, diff, worst, detail, name)


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


def _named(record: RolloutRecord) -> set[str]:
    """Every version that the record names."""
    return {c.version for s in record.segments for c in s.context} | {s.version for s in record.segments}
