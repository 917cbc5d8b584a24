"""`Traffic` describes the load of one engine."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from slime_backend.errors import UsageError

LENGTHS = 32  # that represent a distribution of answers
CHUNK = 8192  # SGLang's usual chunked_prefill_size on a GPU


class PlanError(UsageError, ValueError):
    """A plan can't be made of what was given; the message is one line."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """This is the traffic on one engine: lengths in tokens, in_flight and group in requests.

    Raises PlanError for impossible values.
    """

    prompt: float
    shared: float  # tokens that all prompts of the run begin with
    group: float  # requests with the same prompt
    answers: tuple[float, ...]  # lengths, equally likely
    in_flight: float
    period_s: float  # from the beginning of a publication to that of the next
    chunk: float = CHUNK  # tokens of one prefill step
    together: bool = True  # a group's requests reach the engine at once; False: one by one, as places become free

    def __post_init__(self) -> None:
        self._check("prompt", self.prompt, 1)
        self._check("shared", self.shared, 0)
        self._check("group", self.group, 1)
        self._check("in_flight", self.in_flight, 0)
        self._check("period_s", self.period_s, 0)
        self._check("chunk", self.chunk, 1)
        if self.shared > self.prompt:
            raise PlanError(f"{self.shared:g} shared tokens are more than the prompt's {self.prompt:g}")
        if not self.answers or min(self.answers) < 1:
            raise PlanError("an answer must have at least 1 token")

    def _check(self, name: str, value: float, least: float) -> None:
        if not math.isfinite(value) or value < least:
            raise PlanError(f"{name} is {value:g}; it must be at least {least:g}")

    @property
    def answer(self) -> float:
        """Return the mean length."""
        return statistics.fmean(self.answers)

    @property
    def progress(self) -> float:
        """Return how many tokens a request in flight has on average; longer answers are in flight more often."""
        return statistics.fmean(a * a for a in self.answers) / (2 * self.answer)


def answers_around(mean: float, spread: float) -> tuple[float, ...]:
    """Return log-normal lengths with this mean; `spread` is the standard deviation over the mean.

    Raises PlanError for a mean under 1 or a negative spread.
    """
    if not math.isfinite(mean) or mean < 1:
        raise PlanError(f"answers of {mean:g} tokens; give at least 1")
    if not math.isfinite(spread) or spread < 0:
        raise PlanError(f"a spread of {spread:g}; give 0 for answers of one length, about 0.5 for usual ones")
    if spread == 0:
        return (mean,)
    sigma = math.sqrt(math.log1p(spread * spread))
    middle = statistics.NormalDist()
    raw = [math.exp(sigma * middle.inv_cdf((i + 0.5) / LENGTHS)) for i in range(LENGTHS)]
    scale = mean / statistics.fmean(raw)
    return tuple(max(1.0, scale * length) for length in raw)


def quantiles(lengths: Sequence[float]) -> tuple[float, ...]:
    """Return at most LENGTHS lengths that represent these: each the mean of an equal share of the sorted ones."""
    ordered = sorted(lengths)
    count = min(LENGTHS, len(ordered))
    cuts = [round(i * len(ordered) / count) for i in range(count + 1)]
    return tuple(statistics.fmean(ordered[a:b]) for a, b in itertools.pairwise(cuts))
