"""An engine as the planner sees one, step by step instead of by formula: a queue, a tree of prompts, and a clock.

It prefills whenever somebody waits, and decodes otherwise; a step matches before it computes. Requests come one by one,
as places become free.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from slime_backend.planner.predict import standstill_s
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import Mode


@dataclass
class Request:
    group: int
    answer: int
    done: int = 0
    left: float = 0  # tokens to prefill before it can decode, once it is admitted
    admitted: bool = False
    sampled: list[int] = field(default_factory=list)  # the publications before each token


@dataclass
class Found:
    tokens_per_s: float
    prefilled_per_token: float
    lag: float
    mixed_share: float


def simulate(mode: Mode, t: Traffic, speeds: Speeds, periods: int, seed: int = 0) -> Found:
    """Between two publications, `periods` apart; some more to warm up."""
    chance = random.Random(seed)
    warm = max(10, round(2 * max(t.answers) * t.in_flight / speeds.decode / t.period_s))
    begun = 0

    def new() -> Request:
        nonlocal begun
        begun += 1
        return Request((begun - 1) // round(t.group), round(chance.choice(t.answers)))

    waiting = [new() for _ in range(round(t.in_flight))]
    running: list[Request] = []
    tree: set[int] = set()
    now, version, prefilled, kept, finished = 0.0, 0, 0.0, 0, []
    while version < warm + periods:
        if now >= (version + 1) * t.period_s:
            now += standstill_s(mode, speeds)
            version += 1
            tree.clear()
            if version == warm:
                begin, prefilled, kept, finished = now, 0.0, 0, []
            if mode == "drop":
                kept -= sum(len(r.sampled) for r in running + waiting if version > warm)
                waiting, running = [new() for _ in range(len(running) + len(waiting))], []
            elif mode in ("retract", "requeue"):
                waiting, running = running + waiting, []
                for request in waiting:
                    request.admitted = False
        elif waiting:
            room, batch = t.chunk, []
            known = frozenset(tree)
            for request in waiting:
                if room <= 0:
                    break
                if not request.admitted:
                    own = t.prompt + request.done
                    found = t.prompt if request.group in known else t.shared if known else 0
                    request.left = own if mode == "off" else max(1, own - found)
                    request.admitted = True
                taken = min(room, request.left)
                request.left -= taken
                room -= taken
                batch.append(request)
            prefilled += t.chunk - room
            now += (t.chunk - room) / speeds.prefill + speeds.admission_s
            ready = [r for r in batch if r.left <= 0]
            tree.update(r.group for r in ready)
            waiting = waiting[len(ready) :]
            running += ready
            _sample(ready, version)
            kept += len(ready)
        else:
            now += len(running) / speeds.decode
            _sample(running, version)
            kept += len(running)
        over = [r for r in running if r.done >= r.answer]
        finished += over
        running = [r for r in running if r.done < r.answer]
        waiting += [new() for _ in over]
    lags = [r.sampled[-1] - v for r in finished for v in r.sampled]
    mixed = [r.sampled[-1] != r.sampled[0] for r in finished]
    return Found(
        kept / (now - begin), prefilled / max(1, kept), sum(lags) / max(1, len(lags)), sum(mixed) / max(1, len(mixed))
    )


def _sample(requests: list[Request], version: int) -> None:
    for request in requests:
        request.done += 1
        request.sampled.append(version)
