"""The verdict of an audit, in one word and one line. Pure.

clean                enough was checked to find what the plan asks for, and all of it holds
contaminated         a rollout isn't what its record claims
not enough samples   what was checked holds, but a contamination of the asked size could have been missed
not decidable        the same, because versions differ by less than the noise of 16 bits over the tokens at hand
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from slime_backend.audit.sampling import Plan

Outcome = Literal["clean", "contaminated", "not enough samples", "not decidable"]
ONE_IN = 20  # the contamination that an audit must find unless it is asked for another


@dataclass(frozen=True, slots=True)
class Conclusion:
    outcome: Outcome
    text: str
    finds_one_in: int  # the rarest contamination that this sample finds, as one in so many; 0: none

    def __str__(self) -> str:
        return f"{self.outcome}: {self.text}"


def conclude(
    plan: Plan,
    checked: int,
    faults: Sequence[str],
    one_in: int = ONE_IN,
    gone: int = 0,
    not_auditable: Mapping[str, int] | None = None,
    undecided: Sequence[tuple[str, int]] = (),
) -> Conclusion:
    """`checked`: rollouts of the sample that were checked, of `plan.recorded`; `faults`: one name per violation;
    `one_in`: the contamination that must be found; `gone`: rollouts that weren't, for want of their weights;
    `not_auditable`: sampling parameters -> rollouts that can't be audited for them, not among `plan.recorded`;
    `undecided`: of each audited rollout that 16 bits leave undecided, the claim that can't be excluded, and how many
    more tokens would do. These are not among `checked`."""
    finds = plan.finds_one_in(checked)
    found = f"would have been found with {plan.probability:.3g} probability"
    if faults:
        named = ", ".join(f"{count} {fault}" for fault, count in Counter(faults).most_common())
        return Conclusion("contaminated", f"{len(faults)} of the audited rollouts don't hold: {named}", finds)
    without = f"; the weights of {gone:,} more were no longer there" if gone else ""
    if not_auditable:
        named = ", ".join(f"{count:,} {names}" for names, count in not_auditable.items())
        without += f"; {sum(not_auditable.values()):,} more are not auditable: {named}"
    if undecided:
        claim, tokens = max(undecided, key=lambda pair: pair[1])
        without += (
            f"; {len(undecided):,} more differ from another claim by less than the noise ({claim}: {tokens:,} more "
            "tokens would do)"
        )
    scale = f"{checked:,} of {plan.recorded:,} rollouts audited"
    if checked and checked == plan.recorded:
        return Conclusion("clean", f"all {checked:,} rollouts audited{without}", finds)
    if finds >= min(one_in, plan.recorded) > 0:
        return Conclusion("clean", f"{scale}: one contaminated in {finds:,} {found}{without}", finds)
    enough = f"; {plan.rollouts(one_in):,} are enough for one in {one_in:,}" if plan.recorded else ""
    what = f"one in {finds:,} {found}" if finds else "no contamination is sure to be found"
    return Conclusion(
        "not decidable" if undecided else "not enough samples", f"{scale}: {what}{enough}{without}", finds
    )
