"""What somebody should be told of at once, in one line each. Pure; the tracker delivers them.

Flush not verified   an engine's own counts don't show that its cache was emptied
Engine retired       an engine isn't confirmed at the new version: the fleet goes on with fewer
Publication failed   no engine reached the new version
Audit violation      a rollout is not what its record claims
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime_backend.publication import PublicationReport

Level = Literal["WARN", "ERROR"]
NAMED_RECEIPTS = 3


@dataclass(frozen=True, slots=True)
class Alert:
    title: str
    text: str  # one line
    level: Level


def publication_alerts(report: PublicationReport) -> list[Alert]:
    """One per engine that isn't confirmed, and one where none is."""
    alerts = []
    confirmed = sum(e.confirmed for e in report.engines)
    for engine in report.engines:
        if engine.confirmed:
            continue
        reason = _line(f"{engine.failed_step}: {engine.reason}")
        if engine.failed_step == "flush":
            text = f"{engine.engine} at {report.version}: {reason}"
            alerts.append(Alert("Flush not verified", text, "ERROR"))
        rest = f"{confirmed} of {len(report.engines)} engines go on"
        alerts.append(Alert("Engine retired", f"{engine.engine} at {report.version}: {reason}; {rest}", "WARN"))
    if report.state == "failed":
        alerts.append(Alert("Publication failed", f"no engine reached {report.version}", "ERROR"))
    return alerts


def audit_alerts(receipts: Sequence[str]) -> list[Alert]:
    """`receipts`: of the rollouts that were found not to hold."""
    if not receipts:
        return []
    names = ", ".join(receipts[:NAMED_RECEIPTS]) + (", ..." if len(receipts) > NAMED_RECEIPTS else "")
    text = f"{len(receipts)} audited rollouts don't hold: {names}; audit.json says why"
    return [Alert("Audit violation", text, "ERROR")]


def _line(text: str) -> str:
    return " ".join(text.split())
