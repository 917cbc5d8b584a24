"""What somebody should learn at once, in one line each. Pure; the tracker delivers them.

Flush not verified   an engine's own counts don't show that it is paused and its cache was emptied
Pause not verified   an engine's own counts don't show that it is paused, where its cache is kept
Weights not verified an engine's own digests of its weights aren't those of what was sent
Engine retired       an engine isn't confirmed at the new version: the fleet goes on with fewer
Engine not updated   no engine is, and this one's weights weren't touched: it goes on at the old version
Publication failed   no engine reached the new version
KV contradiction     the stamps of a rollout's KV slots aren't of the weights that its record claims
Audit violation      a rollout is not what its record claims
Log-probs differ     the trainer's log-probs of tokens that its own weights sampled aren't the engine's
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from slime_backend.publication import PublicationReport

Level = Literal["WARN", "ERROR"]
# The step behind the pause is one of two, by the policy: a flush is made, or nothing but a pause.
UNVERIFIED = {"flush": "Flush not verified", "verify": "Pause not verified", "weights": "Weights not verified"}
NAMED_RECEIPTS = 3
# Of the mean |trainer - engine| over tokens of lag 0, at temperature 1, by the engine's dtype. In float32 both compute
# the same to some 1e-6, to 1e-4 where one of them uses TF32. bfloat16 has 8 bits of mantissa: an honest engine differs
# by 6e-3 (a model of 2 layers) to a few 1e-2; float16 has three bits more. A forgotten temperature of 0.8 makes 0.17.
GAP_AT_LAG_0 = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 5e-2}


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
        seen = f"{engine.engine} at {report.version}: {reason}"
        if engine.failed_step in UNVERIFIED:
            alerts.append(Alert(UNVERIFIED[engine.failed_step], seen, "ERROR"))
        if engine.stayed:
            alerts.append(Alert("Engine not updated", f"{seen}; it stays as it was", "WARN"))
        else:
            rest = f"{confirmed} of {len(report.engines)} engines go on"
            alerts.append(Alert("Engine retired", f"{seen}; {rest}", "WARN"))
    if report.state == "failed":
        alerts.append(Alert("Publication failed", f"no engine reached {report.version}", "ERROR"))
    return alerts


def audit_alerts(receipts: Sequence[str]) -> list[Alert]:
    """`receipts`: of the rollouts that were found not to hold."""
    if not receipts:
        return []
    text = f"{len(receipts)} audited rollouts don't hold: {_named(receipts)}; audit.json says why"
    return [Alert("Audit violation", text, "ERROR")]


def contradiction_alerts(step: int, receipts: Sequence[str]) -> list[Alert]:
    """`receipts`: of the step's rollouts whose measured KV isn't what their records claim."""
    if not receipts:
        return []
    text = (
        f"step {step}: {len(receipts)} rollouts were sampled from KV of other weights than their records claim: "
        f"{_named(receipts)}; measured_context in the ledger has what was found"
    )
    return [Alert("KV contradiction", text, "ERROR")]


def _named(receipts: Sequence[str]) -> str:
    return ", ".join(receipts[:NAMED_RECEIPTS]) + (", ..." if len(receipts) > NAMED_RECEIPTS else "")


def gap_threshold(dtype: str, temperature: float) -> float:
    """Dividing the logits by a temperature under 1 multiplies their differences."""
    return GAP_AT_LAG_0[dtype] * max(1.0, 1.0 / temperature)


def gap_alerts(step: int, gap: float | None, tokens: int, dtype: str, temperature: float) -> list[Alert]:
    """`gap`: logprob_gap_at_lag_0 of the step, over `tokens` tokens; None where it trained on none of lag 0."""
    threshold = gap_threshold(dtype, temperature)
    if gap is None or gap <= threshold:  # it is a mean of finite log-probs
        return []
    text = (
        f"step {step}: {gap:.2g} nats on average over {tokens} tokens of lag 0, over {threshold:.2g} for {dtype}: the "
        "engine serves other weights than it says, or samples from another distribution than the trainer computes"
    )
    return [Alert("Log-probs differ", text, "ERROR")]


def _line(text: str) -> str:
    return " ".join(text.split())
