"""Throughput, prefilled tokens and lag of each mode, from the work and the speeds. Pure arithmetic.

An engine does one thing at a time: it stands still, prefills, or decodes. So in a period of T seconds with a standstill
of S, with n requests begun and ended, answers of A tokens on average, and the tokens that work.py counts,

    T = S + tokens(n) / prefill + (n * (A - 1) - again) / decode     (+ the prefill steps' own time)

which gives n, and n * A / T finished tokens per second. The first token of a request comes with its prefill, and one
more with each time that it is prefilled again.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import MODES, Mode, Work, work

# An abort pause looks once a second whether its requests are gone (SGLang 0.5.23, tokenizer_manager.py).
ABORT_POLL_S = 1.0
ABORTING: tuple[Mode, ...] = ("drop", "requeue")
LONGEST_UNITS = 256  # the resolution of `renewal`
BISECTIONS = 60
LONG = 16  # budgets over so many of the longest answer: where what was begun is as if it had always been going on


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one engine."""

    mode: Mode
    tokens_per_s: float  # of finished answers
    prefilled_per_s: float  # tokens
    prefilled_per_token: float  # for each finished one; infinite where none is finished
    lag: float  # publications between a token's sampling and its answer's end, mean over tokens
    mixed_share: float  # of the answers: sampled by several versions
    standstill_share: float  # of the time
    answer: float  # mean length of what is finished


def predict(mode: Mode, traffic: Traffic, speeds: Speeds) -> Prediction:
    return _dropping(traffic, speeds) if mode == "drop" else _going_on(mode, traffic, speeds)


def predict_all(traffic: Traffic, speeds: Speeds) -> dict[Mode, Prediction]:
    return {mode: predict(mode, traffic, speeds) for mode in MODES}


def standstill_s(mode: Mode, speeds: Speeds) -> float:
    return speeds.standstill_s + (ABORT_POLL_S if mode in ABORTING else 0.0)


def prefill_s(speeds: Speeds, done: Work, requests: float) -> float:
    """Of a period in which so many requests begin."""
    return done.tokens(requests) / speeds.prefill + done.step_count(requests) * speeds.admission_s


def decode_s(speeds: Speeds, done: Work, traffic: Traffic, requests: float) -> float:
    """The same. Tokens that came with a prefill aren't decoded."""
    return max(0.0, requests * (traffic.answer - 1) - done.again_requests) / speeds.decode


def seconds_for(mode: Mode, traffic: Traffic, speeds: Speeds, requests: float) -> float:
    """How long so many requests take with one publication among them: where the trainer waits for its rollouts."""
    done = work(mode, traffic)
    return standstill_s(mode, speeds) + prefill_s(speeds, done, requests) + decode_s(speeds, done, traffic, requests)


def _going_on(mode: Mode, t: Traffic, speeds: Speeds) -> Prediction:
    """Every mode in which an answer outlives a publication."""
    stop = min(t.period_s, standstill_s(mode, speeds))
    done = work(mode, t)

    def left(requests: float) -> float:
        return t.period_s - stop - prefill_s(speeds, done, requests) - decode_s(speeds, done, t, requests)

    requests = _largest(left, t.period_s * speeds.prefill)  # each computes at least a token
    rate = requests * t.answer / t.period_s
    prefilled = done.tokens(requests) / t.period_s
    if left(0) < 0:  # not even the prefilling again is done by the next publication: a token each for as many as are
        share = (t.period_s - stop) / prefill_s(speeds, done, 0)
        rate, prefilled = share * done.again_requests / t.period_s, share * done.again / t.period_s
    token_s = t.in_flight / rate if rate else math.inf  # of one request
    squares = sum(a * (a - 1) for a in t.answers) / (2 * len(t.answers) * t.answer)
    mixed = statistics.fmean(min(1.0, (a - 1) * token_s / t.period_s if a > 1 else 0.0) for a in t.answers)
    return Prediction(
        mode,
        rate,
        prefilled,
        prefilled / rate if rate else math.inf,
        squares * token_s / t.period_s if squares else 0.0,
        mixed,
        stop / t.period_s,
        t.answer,
    )


def _dropping(t: Traffic, speeds: Speeds) -> Prediction:
    """All begin anew after each publication: what isn't finished by the next one is lost."""
    stop = min(t.period_s, standstill_s("drop", speeds))
    done = work("drop", t)

    def left(tokens: float) -> float:
        """Of the period, when each place has sampled so many tokens."""
        requests = t.in_flight * renewal(t.answers, tokens)[1]
        decoded = t.in_flight * (tokens - 1) - requests  # those that begin later have a first token as well
        return t.period_s - stop - prefill_s(speeds, done, requests) - max(0.0, decoded) / speeds.decode

    budget = _largest(left, t.period_s * speeds.decode)
    finished, ended = (t.in_flight * each for each in renewal(t.answers, budget))
    rate = finished / t.period_s
    prefilled = done.tokens(ended) / t.period_s
    per_token = prefilled / rate if rate else math.inf
    return Prediction(
        "drop", rate, prefilled, per_token, 0.0, 0.0, stop / t.period_s, finished / ended if ended else 0.0
    )


def _largest(left: Callable[[float], float], high: float) -> float:
    """The largest number that leaves no less than nothing, by bisection; 0 where none does."""
    low = 0.0
    if left(low) <= 0:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if left(middle) >= 0 else (low, middle)
    return low


def renewal(answers: tuple[float, ...], budget: float) -> tuple[float, float]:
    """(tokens of finished answers, finished answers) that one place gets out of `budget` tokens, one answer after the
    other, the last one left unfinished.

    In units of a 256th of the longest answer; beyond 16 of those, what is left unfinished is that of a process which
    has always been going on.
    """
    longest = max(answers)
    mean = statistics.fmean(answers)
    if budget > LONG * longest:
        unfinished = statistics.fmean(a * a for a in answers) / (2 * mean)
        return budget - unfinished, (budget - unfinished) / mean
    tokens, counts = _renewal_table(answers)
    place = min(len(tokens) - 1, int(budget * LONGEST_UNITS / longest))
    return tokens[place], counts[place]


@functools.lru_cache(maxsize=64)
def _renewal_table(answers: tuple[float, ...]) -> tuple[list[float], list[float]]:
    unit = max(answers) / LONGEST_UNITS
    lengths = [(max(1, round(a / unit)), a) for a in answers]
    tokens, counts = [0.0], [0.0]
    for budget in range(1, LONG * LONGEST_UNITS + 1):
        fitting = [(a + tokens[budget - units], 1 + counts[budget - units]) for units, a in lengths if units <= budget]
        tokens.append(sum(f for f, _ in fitting) / len(answers))
        counts.append(sum(c for _, c in fitting) / len(answers))
    return tokens, counts
