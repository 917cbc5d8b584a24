"""`--disjoint-prefix-sharing=auto` becomes one of the policy's modes here, from what is known before an engine runs.

Safety comes first: other holders of KV, or an SGLang that can't scope, rule modes out whatever they would save. So does
what would be refused later: a mode that SGLang can't start with, or that an engine's own report would
contradict at admission, is left out where another mode passes. Of the rest the planner takes the one whose rollouts for
one publication are done first. The mode is then checked as if a user had given it, and so is every engine's own report.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_backend.fleet.kv_holders import unhandled
from slime_backend.planner.predict import seconds_for
from slime_backend.planner.recommend import ALIKE, PREFERRED, Ours
from slime_backend.planner.speeds import PREFILL_TO_DECODE, Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.policy import Layout, PrefixSharing

AUTO = "auto"
SCOPING_SGLANG = (0, 5, 22)  # the first one that the hook `scope` is active in (docs/sglang-releases.md)
FLUSHED = frozenset({"hicache"})  # kv_holders that a flush empties too, where a user has allowed them
# Settings that SGLang refuses to start with where the radix cache is off, or that turn it on whatever its flag is
# (arg_groups/kv_cache_hook.py, hicache_hook.py and pd_disaggregation_hook.py of 0.5.23).
KEEPS_RADIX_CACHE = (
    "enable_hierarchical_cache",
    "enable_lmcache",
    "enable_unified_cache_external_linker",
    "disaggregation_decode_enable_radix_cache",
)


@dataclass(frozen=True, slots=True)
class StartFacts:
    """These facts are known before an engine runs."""

    layout: Layout
    traffic: Traffic | None  # None: unknown
    requests: float  # per publication, on one engine
    sglang: str | None  # its version; None: unknown
    engine_info: Mapping[str, Any]  # engine settings by SGLang's names, as kv_holders reads them
    disable_radix_cache: bool | None = None  # a user's override; None: the policy's own
    engines_elsewhere: str = ""  # why some engine's settings aren't known; empty: they are
    assumed: str = ""  # the assumptions made for unknown facts, for the reason

    @property
    def radix_cache_off(self) -> bool:
        return bool(self.disable_radix_cache or self.engine_info.get("disable_radix_cache"))

    @property
    def why_radix_cache_stays_on(self) -> str:
        """Return why `off` would be refused; empty: it wouldn't be."""
        if self.disable_radix_cache is False:
            return "an override keeps the radix cache on"
        flags = [f"--{name.replace('_', '-')}" for name in KEEPS_RADIX_CACHE if self.engine_info.get(name)]
        return f"SGLang needs the radix cache for {' and '.join(flags)}" if flags else ""


@dataclass(frozen=True, slots=True)
class Choice:
    sharing: PrefixSharing
    why: str  # one line


def resolve_sharing(asked: Any, facts: Callable[[], StartFacts]) -> tuple[Any, str]:
    """Return (the policy's mode, why it was taken); a mode other than `auto` is returned as it is, without a reason."""
    if asked != AUTO:
        return asked, ""
    choice = choose(facts())
    return choice.sharing, choice.why


def choose(facts: StartFacts) -> Choice:
    if facts.layout == "colocated":
        return Choice("retract", "colocated engines always retract and flush")
    if facts.radix_cache_off:
        return Choice("off", "the radix cache is turned off, so there is nothing to share")
    left, why_not = modes_left(facts)
    if len(left) == 1 or facts.traffic is None:
        return Choice(next(m for m in PREFERRED if m in left), why_not or "nothing is known of the traffic")
    # Only the ratio of the speeds matters here: all modes pause for the same bytes.
    speeds = Speeds(PREFILL_TO_DECODE, 1.0, 0.0)
    costs = {mode: seconds_for(mode, facts.traffic, speeds, facts.requests) for mode in left}
    fastest = min(costs.values())
    mode = next(m for m in PREFERRED if m in costs and (1 - ALIKE) * costs[m] <= fastest)
    slower = " and ".join(f"{m} to take {costs[m] / costs[mode]:.2f} times as long" for m in costs if m != mode)
    notes = [facts.assumed, why_not]
    return Choice(mode, "; ".join(filter(None, [f"the planner expects {slower}", *notes])))


def modes_left(facts: StartFacts) -> tuple[tuple[Ours, ...], str]:
    """Return (the policies that may be taken, why others may not).

    There is always one, and none that would be refused where another wouldn't be. `retract` passes wherever another
    mode does: it holds with or without the radix cache.
    """
    holders = {holder.name for holder in unhandled(facts.engine_info)}
    stays_on = facts.why_radix_cache_stays_on
    left: tuple[Ours, ...] = ("off", "retract", "scoped")
    why_not = ""
    if facts.engines_elsewhere:
        return ("retract",), f"off and scoped are left out: {facts.engines_elsewhere}"
    if holders - FLUSHED:
        left = ("off",)
        why_not = f"engines that may keep KV elsewhere ({', '.join(sorted(holders))}) must share nothing"
    elif holders:
        left, why_not = ("off", "retract"), f"{', '.join(sorted(holders))} is emptied by a flush, and not by a sweep"
    elif no_scope := why_not_scoped(facts.sglang):
        left, why_not = ("off", "retract"), no_scope
    if stays_on:
        left = tuple(mode for mode in left if mode != "off") or ("retract",)
        why_not = "; ".join(filter(None, [why_not, f"off is left out: {stays_on}"]))
    return left, why_not


def why_not_scoped(sglang: str | None) -> str | None:
    """Why engines of this release can't scope their cache entries, or None."""
    if sglang is not None and _numbers(sglang) >= SCOPING_SGLANG:
        return None
    return f"scoped needs SGLang {'.'.join(map(str, SCOPING_SGLANG))}, there is {sglang or 'no known version'}"


def installed_sglang() -> str | None:
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def info_of_flags(flags: Sequence[str]) -> dict[str, Any]:
    """Read engine settings from flags of SGLang's server: ["--a-b", "1", "--c"] -> {"a_b": "1", "c": True}."""
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
    """Return (0, 5, 15) for "0.5.15.post1"."""
    parts = []
    for part in version.split(".")[:3]:
        digits = "".join(c for c in part if c.isdigit())
        if not part[:1].isdigit():
            break
        parts.append(int(digits))
    return tuple(parts)
