"""One decision fixes the pause mode, the radix cache and what follows a pause, so that they can't contradict.

    layout      prefix sharing   pause      radix cache   after the pause
    colocated   any              retract    on            flush every engine, verify
    disjoint    off (default)    in_place   off           nothing to flush
    disjoint    retract          retract    on            flush every engine, verify
    disjoint    scoped           in_place   on            new epoch, sweep what is unlocked, verify

Why these four and no other: an in-place pause keeps every request's KV, so after a publication the radix cache would
hand out prefixes that the old weights computed. Either nothing is shared (`off`), or nothing is kept (`retract`), or
each entry says which weights built it (`scoped`). Pure: no I/O, no clients, imports nothing of ours but `wire`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from slime_backend.errors import UsageError

Layout = Literal["colocated", "disjoint"]
PauseMode = Literal["abort", "retract", "in_place"]
PrefixSharing = Literal["off", "retract", "scoped", "unsafe"]
AfterPause = Literal["nothing", "flush", "sweep"]


class PolicyError(UsageError, ValueError):
    """The asked combination can't be run safely; the message says why and names the ways out."""


@dataclass(frozen=True, slots=True)
class Policy:
    """One row of the table above."""

    layout: Layout
    prefix_sharing: PrefixSharing
    pause_mode: PauseMode
    radix_cache: bool
    after_pause: AfterPause

    @property
    def keeps_unscoped_kv(self) -> bool:
        """KV of older weights survives a publication and nothing tells it from new KV."""
        return self.pause_mode == "in_place" and self.after_pause != "sweep"

    @property
    def needed_hooks(self) -> tuple[str, ...]:
        """Engine-plugin hooks without which this policy can't be verified."""
        return {
            "flush": ("kv_evidence",),
            "sweep": ("kv_evidence", "kv_spans", "scope"),
            "nothing": ("kv_evidence",),
        }[self.after_pause]

    @property
    def safe(self) -> bool:
        """False only for the negative control, which shares what it can't scope."""
        return not (self.radix_cache and self.keeps_unscoped_kv)

    def __str__(self) -> str:
        radix = "on" if self.radix_cache else "off"
        return (
            f"{self.layout}, prefix sharing {self.prefix_sharing}: pause {self.pause_mode}, radix cache {radix}, "
            f"then {self.after_pause}"
        )


_ROWS: dict[tuple[Layout, PrefixSharing], tuple[PauseMode, bool, AfterPause]] = {
    ("disjoint", "off"): ("in_place", False, "nothing"),
    ("disjoint", "retract"): ("retract", True, "flush"),
    ("disjoint", "scoped"): ("in_place", True, "sweep"),
    # Negative control: what a deployment gets that sets the pause mode and the radix cache independently.
    ("disjoint", "unsafe"): ("in_place", True, "nothing"),
}


def decide(layout: Layout, prefix_sharing: PrefixSharing) -> Policy:
    """The policy of a deployment.

    Colocated engines give their GPU memory back to the trainer between rollouts, so their KV can't be kept: they
    always retract and flush, whatever `prefix_sharing` says.

    Raises PolicyError for words that the table doesn't know.
    """
    if layout not in get_args(Layout):
        raise PolicyError(f"layout {layout!r} is unknown; use one of {', '.join(get_args(Layout))}")
    if prefix_sharing not in get_args(PrefixSharing):
        known = [s for s in get_args(PrefixSharing) if s != "unsafe"]
        raise PolicyError(f"disjoint-prefix-sharing {prefix_sharing!r} is unknown; use one of {', '.join(known)}")
    if layout == "colocated":
        if prefix_sharing == "unsafe":
            raise PolicyError("disjoint-prefix-sharing=unsafe is a negative control of the disjoint layout only")
        return Policy("colocated", prefix_sharing, "retract", True, "flush")
    return Policy(layout, prefix_sharing, *_ROWS[(layout, prefix_sharing)])


def check_radix_setting(policy: Policy, radix_cache_on: bool, where: str) -> None:
    """Refuse a radix-cache setting, found at `where`, that the policy can't make safe.

    Only one case is dangerous: the cache on where in-flight KV is kept unscoped. A cache that is off where the policy
    would share costs speed, not correctness, and passes.
    """
    if radix_cache_on and policy.keeps_unscoped_kv and policy.prefix_sharing != "unsafe":
        raise PolicyError(
            f"{where} turns the radix cache on, but disjoint-prefix-sharing=off keeps the KV of in-flight requests "
            "across a publication, so later requests would match prefixes of older weights. Ways out: "
            f"remove {where}; or --disjoint-prefix-sharing (retract and flush at each publication); "
            "or --disjoint-prefix-sharing=scoped (entries carry the weight epoch)"
        )
