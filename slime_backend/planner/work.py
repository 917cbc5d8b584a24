"""`prefill_work` computes what each mode prefills between two publications. Pure arithmetic.

    off                nothing is shared, nothing is computed again
    scoped             requests in flight keep their KV; the next ones find an empty tree
    retract, requeue   all in flight are prefilled again, prompt and answer so far; they find each other's prompts
    drop               as many new requests as were in flight begin at once, with an empty tree

Requests that one prefill step admits don't find each other's tokens: a step matches before it computes. So of waiting
requests with one prompt, as many compute it as fit a step.
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
POLICIES: tuple[Mode, ...] = ("off", "retract", "scoped")  # ours; the other two are what slime does, with an abort
ROUNDING = 1e-9  # of a request
LEAST_COMPUTED = 1.0  # tokens that a fully cached request computes: the last one is never taken from the cache


@dataclass(frozen=True, slots=True)
class QueuedGroup:
    """A queued group is consecutive requests with one prompt that are there with this probability."""

    requests: float
    probability: float = 1.0


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a mode is what its requests prefill at a publication and until the next one.

    At the publication, `initial_tokens` of `initial_requests` requests are prefilled at once, in `initial_steps` steps.
    Then requests begin: the first `cold` of them find an empty tree, so that `cold_computing` of these compute
    `full_prefill` tokens; the others compute `cached_prefill`.
    """

    full_prefill: float
    cached_prefill: float
    steps: float  # per request
    initial_tokens: float = 0.0
    initial_requests: float = 0.0
    initial_steps: float = 0.0
    cold: float = 0.0
    cold_computing: float = 0.0

    def tokens(self, requests: float) -> float:
        """Return the tokens prefilled in a period in which `requests` requests begin."""
        cold = min(requests, self.cold)
        computing = min(cold, self.cold_computing)
        return (
            self.initial_tokens
            + computing * self.full_prefill
            + (cold - computing) * LEAST_COMPUTED
            + (requests - cold) * self.cached_prefill
        )

    def step_count(self, requests: float) -> float:
        return self.initial_steps + requests * self.steps


def prefill_work(mode: Mode, traffic: Traffic) -> Work:
    steps = _steps_per_request(traffic)
    if mode == "off":
        return Work(traffic.prompt, traffic.prompt, steps)
    cached = cached_prefill(traffic)
    per_step = _requests_per_step(traffic, traffic.prompt)
    if mode == "scoped" or (mode != "drop" and traffic.in_flight < 1):
        # One by one it is whoever reaches the first step, whatever its prompt: the rest of its group finds it.
        cold = traffic.group if traffic.together else min(1 + arrivals_per_step(traffic), per_step)
        return Work(traffic.prompt, cached, steps, cold=cold, cold_computing=min(cold, per_step))
    tokens, initial_steps = initial_prefill(replace(traffic, period_s=0.0), mode == "drop")
    return Work(traffic.prompt, cached, steps, tokens, traffic.in_flight, initial_steps)


def _steps_per_request(traffic: Traffic) -> float:
    """Return the steps per request: a group at once takes two, one to compute and one to find the prompt.

    One by one, the requests that arrive in one step share it.
    """
    if traffic.together:
        return min(1.0, 2 / traffic.group)
    others = arrivals_per_step(traffic)
    return -math.expm1(-others) / others if others else 1.0


@functools.lru_cache(maxsize=1024)
def initial_prefill(traffic: Traffic, new: bool) -> tuple[float, float]:
    """Return (tokens, prefill steps) of as many requests as there are in flight: new ones, or those in flight."""
    queues, progress = (new_queues(traffic), 0.0) if new else (queues_in_flight(traffic), traffic.progress)
    tokens, steps = zip(*(prefill_in_steps(traffic, queue, progress) for queue in queues), strict=True)
    return statistics.fmean(tokens), statistics.fmean(steps)


def cached_prefill(traffic: Traffic) -> float:
    """Return the tokens prefilled per request, with the beginning of all prompts and its siblings in the cache."""
    own = max(LEAST_COMPUTED, traffic.prompt - traffic.shared)
    # One by one, half of the others in a step come before a request.
    computing = min(
        traffic.group,
        _requests_per_step(traffic, own),
        traffic.group if traffic.together else 1 + arrivals_per_step(traffic) / 2,
    )
    return (computing * own + (traffic.group - computing) * LEAST_COMPUTED) / traffic.group


def arrivals_per_step(traffic: Traffic) -> float:
    """Return how many other requests reach a prefill step with a given one, where they are sent as places become free.

    They are those whose places became free in the same decode step, which ends one in `answer` requests.
    """
    return max(0.0, traffic.in_flight - 1) / traffic.answer


def prefill_in_steps(traffic: Traffic, queue: Sequence[QueuedGroup], progress: float) -> tuple[float, float]:
    """Return (tokens, prefill steps) of a queue with an empty tree, each request with `progress` tokens of an answer.

    A step takes requests in their order as long as they fit. Those whose prompt an earlier step has computed find it,
    all others compute all they have, except the beginning that all prompts share once a step has computed it. The rest
    of a group at the end of a step is found in the next; the last request of a step is computed to its end there, half
    of it on average.
    """
    tokens, steps, room = 0.0, 1, traffic.chunk
    computed, known = 0.0, False  # requests, in all; whether the beginning that all share is in the tree
    for group in queue:
        left = group.probability * group.requests
        before_last = left - min(1.0, left)  # the last of these is computed to its end
        while left > 0:
            own = max(LEAST_COMPUTED, traffic.prompt - (traffic.shared if known else 0)) + progress
            computing = min(left, room / own)
            left -= computing
            computed += computing
            cost = computing * own
            if room - cost < ROUNDING:
                known = computed >= 1
                halved = min(0.5, left)
                cost += halved * own
                found, left = left <= before_last, left - halved
                if found:
                    cost += left * (progress + LEAST_COMPUTED)
                    left = 0.0
            tokens += cost
            room -= cost
            while room < ROUNDING:
                room += traffic.chunk
                steps += 1
    return tokens, steps - (room >= traffic.chunk)


def new_queues(traffic: Traffic) -> list[list[QueuedGroup]]:
    """Return queues of as many new requests as there are in flight, one for each position of the first in its group."""
    size = max(1, round(traffic.group))
    queues = []
    for first in range(1, size + 1):
        queue = [QueuedGroup(min(first, traffic.in_flight))]
        while (left := traffic.in_flight - sum(group.requests for group in queue)) > 0:
            queue.append(QueuedGroup(min(size, left)))
        queues.append(queue)
    return queues


def queues_in_flight(traffic: Traffic) -> list[list[QueuedGroup]]:
    """Return queues of the requests in flight, oldest first, one for each position of the newest in its group.

    The request that began x requests ago is still there if its answer is longer than x / in_flight of a mean one; each
    began at some time between two beginnings.
    """
    unit = traffic.answer / traffic.in_flight
    begun = range(math.ceil(max(traffic.answers) / unit) + 1)
    alive = [sum(a > (x + 0.5) * unit for a in traffic.answers) / len(traffic.answers) for x in begun]
    size = max(1, round(traffic.group))
    queues = []
    for newest in range(size):
        queue = []
        for first in range(newest + 1 - size, len(alive), size):
            if traffic.together:  # all of a group began at once
                members = [alive[first]] * size if first >= 0 else []
            else:
                members = alive[max(0, first) : first + size]
            if expected := sum(members):
                probability = 1 - math.prod(1 - p for p in members)
                queue.append(QueuedGroup(expected / probability, probability))
        queues.append(queue[::-1])
    return queues


def groups_in_flight(traffic: Traffic) -> float:
    """Return how many prompts the requests in flight have."""
    expected = statistics.fmean(sum(group.probability for group in queue) for queue in queues_in_flight(traffic))
    return min(traffic.in_flight, max(traffic.in_flight / traffic.group, expected))


def _requests_per_step(traffic: Traffic, tokens: float) -> float:
    """Return how many requests of so many tokens fit a prefill step; the last one may go on in the next."""
    return max(1.0, traffic.chunk / tokens)
