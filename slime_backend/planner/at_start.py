"""`--disjoint-prefix-sharing=auto`: one of the policy's words, and why, from what is known before an engine runs.

Safety first and by itself: what else may keep KV, or an SGLang that can't scope, rules modes out whatever they would
save. Of those left the planner takes the one whose rollouts for one publication are done first. The policy decides on
the word as if a user had given it, and every engine's own report is checked against it as ever.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from slime_backend.fleet.kv_holders import unhandled
from slime_backend.planner.predict import seconds_for
from slime_backend.planner.recommend import ALIKE, PREFERRED
from slime_backend.planner.speeds import PREFILL_TO_DECODE, Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import POLICIES, Mode
from slime_backend.policy import Layout, PrefixSharing

AUTO = "auto"
SCOPING_SGLANG = (0, 5, 23)  # the first one that the hook `scope` is active in (docs/compatibility.md)
FLUSHED = frozenset({"hicache"})  # kv_holders that a flush empties too, where a user has allowed them


@dataclass(frozen=True, slots=True)
class StartFacts:
    """What is known at start."""

    layout: Layout
    traffic: Traffic | None  # None: unknown
    requests: float  # that one publication is made from, on one engine
    sglang: str | None  # its version; None: unknown
    engine_info: Mapping[str, Any]  # engine settings by SGLang's names, as kv_holders reads them
    radix_cache_off: bool = False  # by an override
    engines_elsewhere: str = ""  # why the settings of some engine are not among these; empty: they are
    assumed: str = ""  # what was put in for what isn't known; for the reason


@dataclass(frozen=True, slots=True)
class Choice:
    sharing: PrefixSharing
    why: str  # one line


def choose(facts: StartFacts) -> Choice:
    if facts.layout == "colocated":
        return Choice("retract", "colocated engines always retract and flush")
    if facts.radix_cache_off:
        return Choice("off", "the radix cache is turned off, so there is nothing to share")
    safe, why_not = safe_modes(facts)
    if len(safe) == 1 or facts.traffic is None:
        mode = next(m for m in PREFERRED if m in safe)
        return Choice(cast(PrefixSharing, mode), why_not or "nothing is known of the traffic")
    # Only the ratio of the speeds matters here: all the modes stand still for the same bytes.
    speeds = Speeds(PREFILL_TO_DECODE, 1.0, 0.0)
    costs = {mode: seconds_for(mode, facts.traffic, speeds, facts.requests) for mode in safe}
    fastest = min(costs.values())
    mode = next(m for m in PREFERRED if m in costs and (1 - ALIKE) * costs[m] <= fastest)
    beside = " and ".join(f"{m} to take {costs[m] / costs[mode]:.2f} times as long" for m in costs if m != mode)
    notes = [facts.assumed, why_not]
    return Choice(cast(PrefixSharing, mode), "; ".join(filter(None, [f"the planner expects {beside}", *notes])))


def safe_modes(facts: StartFacts) -> tuple[tuple[Mode, ...], str]:
    """(the policies that may be taken, why others may not). Never empty."""
    holders = {holder.name for holder in unhandled(facts.engine_info)}
    if holders - FLUSHED:
        return ("off",), f"engines that may keep KV elsewhere ({', '.join(sorted(holders))}) must share nothing"
    if holders:
        return ("off", "retract"), f"{', '.join(sorted(holders))} is emptied by a flush, and not by a sweep"
    if facts.engines_elsewhere:
        return ("off", "retract"), f"scoped is left out: {facts.engines_elsewhere}"
    if facts.sglang is None or _numbers(facts.sglang) < SCOPING_SGLANG:
        needed = ".".join(map(str, SCOPING_SGLANG))
        return ("off", "retract"), f"scoped needs SGLang {needed}, there is {facts.sglang or 'no known version'}"
    return POLICIES, ""


def installed_sglang() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def info_of_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Engine settings by SGLang's names, of flags of its server: ["--a-b", "1", "--c"] -> {"a_b": "1", "c": True}."""
    found: dict[str, Any] = {}
    for flag, following in zip(flags, [*flags, ""][1:], strict=True):
        if not flag.startswith("--"):
            continue
        name, equals, value = flag[2:].partition("=")
        if not equals:
            value = following if following and not following.startswith("--") else ""
        found[name.replace("-", "_")] = value or True
    return found


def _numbers(version: str) -> tuple[int, ...]:
    """(0, 5, 15) of "0.5.15.post1"."""
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        parts.append(int(digits))
    return tuple(parts)
