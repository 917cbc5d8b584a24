"""The sentence at the top of the report: what a reader must know before looking at anything else. Pure.

bad       something is wrong with the data: an audit violation, a publication that failed, a rollout lost
warning   nothing is known to be wrong, but something was not shown: no audit, an interrupted run, a retired engine
good      every publication was confirmed on every engine and the audit found nothing
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Level = Literal["good", "warning", "bad"]
TITLES: dict[Level, str] = {
    "good": "Everything checked holds",
    "warning": "Nothing wrong was found, but not everything was checked",
    "bad": "Something is wrong with this run",
}


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    text: str


@dataclass(frozen=True, slots=True)
class Verdict:
    level: Level
    findings: tuple[Finding, ...]  # worst first

    @property
    def title(self) -> str:
        return TITLES[self.level]


def judge(
    summary: Mapping[str, Any],
    audit: Mapping[str, Any] | None,
    publications: Sequence[Mapping[str, Any]],
    missing: Sequence[str],
    publication_count: int | None = None,
) -> Verdict:
    """From the summary's figures, the audit with its violations, and each publication's outcome; `publication_count`
    where `publications` are a part of a long run's, every one with an unconfirmed engine among the first of them.
    """
    count = len(publications) if publication_count is None else publication_count
    findings = [*_audit(audit), *_publications(summary, publications, count), *_rollouts(summary)]
    if summary.get("completed") is False:
        findings.append(Finding("warning", "The run was interrupted before its last step or its audit."))
    findings += [Finding("warning", text) for text in missing]
    order: tuple[Level, ...] = ("bad", "warning", "good")
    findings.sort(key=lambda f: order.index(f.level))
    return Verdict(findings[0].level if findings else "warning", tuple(findings))


def _audit(audit: Mapping[str, Any] | None) -> list[Finding]:
    if audit is None:
        return []  # stands among what is missing
    violations = audit.get("violations")
    count = len(violations) if isinstance(violations, list) else int(violations or 0)
    scale = f"{_times(_int(audit, 'rollouts'), 'rollout')}, {_times(_int(audit, 'tokens'), 'token')}"
    if count:
        return [Finding("bad", f"The audit found {_times(count, 'violation')} in {scale}{_concluded(audit)}.")]
    if not _int(audit, "rollouts"):
        return [Finding("warning", "The audit checked no rollout.")]
    largest = f"{audit['max_abs_logprob_diff']:.2g}" if "max_abs_logprob_diff" in audit else "?"
    enough = (audit.get("verdict") or {}).get("outcome") not in ("not enough samples", "not decidable")
    text = f"Audit: 0 violations in {scale}; the largest difference of log-prob is {largest}{_concluded(audit)}."
    found = [Finding("good" if enough and audit.get("finished", True) else "warning", text)]
    if gone := _int(audit, "gone"):
        found.append(Finding("warning", f"{_times(gone, 'rollout')} can't be audited: their weights were removed."))
    return found


def _concluded(audit: Mapping[str, Any]) -> str:
    """The audit's own verdict; none in the file of an older version."""
    verdict = audit.get("verdict")
    going_on = "; it was still going on" if not audit.get("finished", True) else ""
    return (f"; {verdict['outcome']}: {verdict['text']}" if verdict else "") + going_on


def _publications(summary: Mapping[str, Any], publications: Sequence[Mapping[str, Any]], count: int) -> list[Finding]:
    if not publications:
        return []
    findings = []
    failed = [str(p.get("version")) for p in publications if p.get("state") == "failed"]
    if failed:
        findings.append(Finding("bad", f"No engine reached {_some(failed)}: the publication failed."))
    unknown = [str(p.get("version")) for p in publications if p.get("state") == "unknown"]
    if unknown:
        text = f"The run ended while {_some(unknown)} was being published: its record of that is lost."
        findings.append(Finding("warning", text))
    for publication in publications:
        for engine in publication.get("engines", []):
            if not engine.get("confirmed"):
                step = str(engine.get("failed_step") or "unknown step")
                fate = "was not updated to" if engine.get("stayed") else "was retired at"
                text = (
                    f"{engine.get('engine')} {fate} {publication.get('version')}: {step}: "
                    f"{engine.get('reason') or 'no reason recorded'}"
                )
                findings.append(Finding("warning", text))
    if not findings:
        done = _verified(summary)
        findings.append(Finding("good", f"{_times(count, 'publication')}, each confirmed on every engine{done}."))
    stale = summary.get("cached_tokens_first_after_publication_max")
    if stale:
        findings.append(Finding("bad", f"{stale:,} tokens came from the cache right after a publication: stale KV."))
    return findings


def _verified(summary: Mapping[str, Any]) -> str:
    parts = [
        f"{_int(summary, key):,} {name} verified"
        for key, name in (("flushes_verified", "flushes"), ("sweeps_verified", "sweeps"))
        if _int(summary, key)
    ]
    return "; " + " and ".join(parts) if parts else ""


def _rollouts(summary: Mapping[str, Any]) -> list[Finding]:
    completed = summary.get("rollouts_completed")
    if completed is None:
        return []
    lost, doubled, aborted = (_int(summary, f"rollouts_{name}") for name in ("lost", "doubled", "aborted"))
    findings = []
    if contradicted := _int(summary, "kv_contradictions"):
        text = f"{_times(contradicted, 'rollout')} sampled from KV of other weights than the record claims."
        findings.append(Finding("bad", text))
    if doubled:
        findings.append(Finding("bad", f"{_times(doubled, 'rollout')} recorded twice."))
    if lost:
        # Requests in flight when a run is interrupted never come back; that is no fault of the engines.
        level: Level = "bad" if summary.get("completed") else "warning"
        findings.append(Finding(level, f"{_times(lost, 'rollout')} submitted that never came back."))
    if aborted:
        findings.append(Finding("warning", f"{_times(aborted, 'rollout')} aborted."))
    if not findings:
        findings.append(Finding("good", f"{_times(completed, 'rollout')} came back, none lost, doubled or aborted."))
    return findings


def _int(data: Mapping[str, Any], key: str) -> int:
    value = data.get(key)
    return int(value) if isinstance(value, int | float) else 0


def _times(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def _some(names: Sequence[str], shown: int = 5) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
