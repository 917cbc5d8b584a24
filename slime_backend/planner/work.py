"""What each mode prefills between two publications. Pure arithmetic.

    off                nothing is shared, nothing is computed again
    scoped             who is in flight keeps its KV; who begins next finds an empty tree
    retract, requeue   all in flight are prefilled again, prompt and answer so far; they find each other's prompts
    drop               as many new requests as were in flight begin at once, in an empty tree

Requests that one prefill step admits don't find each other's tokens: a step matches before it computes. So of requests
with one prompt that wait together, as many compute it as fit a step.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from slime_backend.planner.traffic import Traffic

Mode = Literal["drop", "requeue", "retract", "off", "scoped"]
MODES: tuple[Mode, ...] = get_args(Mode)
POLICIES: tuple[Mode, ...] = ("off", "retract", "scoped")  # ours; the other two are slime's abort and what follows it
TINY = 1e-9  # of a request: rounding
FOUND = 1.0  # tokens that a request computes whose whole prompt is in the cache: the last one is never taken from it


@dataclass(frozen=True, slots=True)
class Waiting:
    """Requests with one prompt, one behind the other, that are there with this probability."""

    requests: float
    chance: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """`again` tokens of `again_requests` requests in `again_steps` prefill steps at once, at a publication; then, as
    requests begin: the first `cold` of them find an empty tree, so that `computing` of these compute `whole`; the
    others compute `fresh`.
    """

    whole: float
    fresh: float
    steps: float  # per request
    again: float = 0.0
    again_requests: float = 0.0
    again_steps: float = 0.0
    cold: float = 0.0
    computing: float = 0.0

    def tokens(self, requests: float) -> float:
        """Prefilled in a period in which so many requests begin."""
        cold = min(requests, self.cold)
        computing = min(cold, self.computing)
        return self.again + computing * self.whole + (cold - computing) * FOUND + (requests - cold) * self.fresh

    def step_count(self, requests: float) -> float:
        return self.again_steps + requests * self.steps


def work(mode: Mode, t: Traffic) -> Work:
    # Of a group at once: who computes, then who finds. One by one: those whose places became free together.
    steps = min(1.0, 2 / t.group) if t.together else -math.expm1(-beside(t)) / beside(t) if beside(t) else 1.0
    if mode == "off":
        return Work(t.prompt, t.prompt, steps)
    fresh = fresh_tokens(t)
    if mode == "scoped" or (mode != "drop" and t.in_flight < 1):
        # One by one it is whoever reaches the first step, whatever its prompt: the rest of its group finds it.
        cold = t.group if t.together else min(1 + beside(t), _fit(t, t.prompt))
        return Work(t.prompt, fresh, steps, cold=cold, computing=min(cold, _fit(t, t.prompt)))
    again, again_steps = at_once(replace(t, period_s=0.0), mode == "drop")
    return Work(t.prompt, fresh, steps, again, t.in_flight, again_steps)


@functools.lru_cache(maxsize=1024)
def at_once(t: Traffic, new: bool) -> tuple[float, float]:
    """(tokens, prefill steps) of as many requests as there are in flight: new ones, or those in flight."""
    queues, progress = (new_queues(t), 0.0) if new else (queues_in_flight(t), t.progress)
    tokens, steps = zip(*(together(t, queue, progress) for queue in queues), strict=True)
    return statistics.fmean(tokens), statistics.fmean(steps)


def fresh_tokens(t: Traffic) -> float:
    """Prefilled per request, with the beginning of all prompts and its siblings in the cache."""
    own = max(FOUND, t.prompt - t.shared)
    computing = min(t.group, _fit(t, own), t.group if t.together else 1 + beside(t) / 2)  # half of them come before it
    return (computing * own + (t.group - computing) * FOUND) / t.group


def beside(t: Traffic) -> float:
    """Of requests that are sent as places become free, how many reach a prefill step with a given one: those whose
    places became free in the same decode step, which ends one in `answer` requests."""
    return max(0.0, t.in_flight - 1) / t.answer


def together(t: Traffic, queue: Sequence[Waiting], progress: float) -> tuple[float, float]:
    """(tokens, prefill steps) of those in the queue, that find an empty tree, each with `progress` tokens of an answer.

    A step takes them in their order as long as they fit. Those whose prompt an earlier step has computed find it, all
    others compute all they have, but for the beginning that all prompts share, once a step has computed it. What is
    left of a group at the end of a step is found in the next; the last request of a step is computed to its end there,
    half of it on average.
    """
    tokens, steps, room = 0.0, 1, t.chunk
    computed, known = 0.0, False  # requests, in all; whether the beginning that all share is in the tree
    for waiting in queue:
        left = waiting.chance * waiting.requests
        whole = left - min(1.0, left)  # of these one is computed to its end
        while left > 0:
            own = max(FOUND, t.prompt - (t.shared if known else 0)) + progress
            computing = min(left, room / own)
            left -= computing
            computed += computing
            cost = computing * own
            if room - cost < TINY:
                known = computed >= 1
                halved = min(0.5, left)
                cost += halved * own
                found, left = left <= whole, left - halved
                if found:
                    cost += left * (progress + FOUND)
                    left = 0.0
            tokens += cost
            room -= cost
            while room < TINY:
                room += t.chunk
                steps += 1
    return tokens, steps - (room >= t.chunk)


def new_queues(t: Traffic) -> list[list[Waiting]]:
    """As many new requests as there are in flight, one queue for each place in a group that the first may have."""
    group = max(1, round(t.group))
    queues = []
    for first in range(1, group + 1):
        queue = [Waiting(min(first, t.in_flight))]
        while (left := t.in_flight - sum(w.requests for w in queue)) > 0:
            queue.append(Waiting(min(group, left)))
        queues.append(queue)
    return queues


def queues_in_flight(t: Traffic) -> list[list[Waiting]]:
    """Those in flight by their prompts, oldest first, one queue for each place in a group that the newest may have.

    The request that began x requests ago is still there if its answer is longer than x / in_flight of a mean one; each
    began at some time between two beginnings.
    """
    unit = t.answer / t.in_flight
    begun = range(math.ceil(max(t.answers) / unit) + 1)
    alive = [sum(a > (x + 0.5) * unit for a in t.answers) / len(t.answers) for x in begun]
    group = max(1, round(t.group))
    queues = []
    for newest in range(group):
        queue = []
        for first in range(newest + 1 - group, len(alive), group):
            if t.together:  # all of a group began at once
                members = [alive[first]] * group if first >= 0 else []
            else:
                members = alive[max(0, first) : first + group]
            if here := sum(members):
                chance = 1 - math.prod(1 - p for p in members)
                queue.append(Waiting(here / chance, chance))
        queues.append(queue[::-1])
    return queues


def groups_in_flight(t: Traffic) -> float:
    """Prompts among the requests in flight."""
    expected = statistics.fmean(sum(waiting.chance for waiting in queue) for queue in queues_in_flight(t))
    return min(t.in_flight, max(t.in_flight / t.group, expected))


def _fit(t: Traffic, tokens: float) -> float:
    """Requests of so many tokens each that fit a prefill step; the last one of a step may go on in the next."""
    return max(1.0, t.chunk / tokens)
