"""`predict` computes throughput, prefilled tokens and lag of each mode, from the work and the speeds.

An engine does one thing at a time: it is paused, prefills, or decodes. So in a period of T seconds with a pause of S,
with n requests begun and ended, answers of A tokens on average, and the tokens that work.py counts,

    T = S + tokens(n) / prefill + (n * (A - 1) - initial) / decode     (+ the prefill steps' own time)

which gives n, and n * A / T finished tokens per second. The first token of a request comes with its prefill, and each
of the `initial` requests, which a publication has prefilled again, gets one more.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import MODES, Mode, Work, prefill_work

# An abort pause checks once a second whether its requests are gone (SGLang 0.5.23, tokenizer_manager.py).
ABORT_POLL_S = 1.0
ABORTING: tuple[Mode, ...] = ("drop", "requeue")
LONGEST_UNITS = 256  # the resolution of `renewal`
BISECTIONS = 60
LONG = 16  # budgets over this many of the longest answer count as a stationary process


@dataclass(frozen=True, slots=True)
class Prediction:
    """A prediction has the figures of one engine under one mode."""

    mode: Mode
    tokens_per_s: float  # in finished answers
    prefilled_per_s: float  # tokens
    prefilled_per_token: float  # for each finished one; infinite where none is finished
    lag: float  # publications between a token's sampling and its answer's end, mean over tokens
    mixed_share: float  # share of answers sampled by several versions
    standstill_share: float  # share of the time
    answer: float  # mean length of a finished answer


def predict(mode: Mode, traffic: Traffic, speeds: Speeds) -> Prediction:
    return _predict_drop(traffic, speeds) if mode == "drop" else _predict_continuing(mode, traffic, speeds)


def predict_all(traffic: Traffic, speeds: Speeds) -> dict[Mode, Prediction]:
    return {mode: predict(mode, traffic, speeds) for mode in MODES}


def standstill_s(mode: Mode, speeds: Speeds) -> float:
    return speeds.standstill_s + (ABORT_POLL_S if mode in ABORTING else 0.0)


def prefill_s(speeds: Speeds, work: Work, requests: float) -> float:
    """Return the prefill time of a period in which `requests` requests begin."""
    return work.tokens(requests) / speeds.prefill + work.step_count(requests) * speeds.admission_s


def decode_s(speeds: Speeds, work: Work, traffic: Traffic, requests: float) -> float:
    """Return the decode time of such a period; tokens that come with a prefill aren't decoded."""
    return max(0.0, requests * (traffic.answer - 1) - work.initial_requests) / speeds.decode


def seconds_for(mode: Mode, traffic: Traffic, speeds: Speeds, requests: float) -> float:
    """Return how long `requests` requests and one publication take, where the trainer waits for its rollouts."""
    work = prefill_work(mode, traffic)
    return standstill_s(mode, speeds) + prefill_s(speeds, work, requests) + decode_s(speeds, work, traffic, requests)


def _predict_continuing(mode: Mode, t: Traffic, speeds: Speeds) -> Prediction:
    """Predict a mode in which an answer outlives a publication."""
    stop = min(t.period_s, standstill_s(mode, speeds))
    work = prefill_work(mode, t)

    def time_left(requests: float) -> float:
        return t.period_s - stop - prefill_s(speeds, work, requests) - decode_s(speeds, work, t, requests)

    requests = _largest(time_left, t.period_s * speeds.prefill)  # each request computes at least a token
    rate = requests * t.answer / t.period_s
    prefilled = work.tokens(requests) / t.period_s
    if time_left(0) < 0:  # the initial prefill outlasts the period: each request that it prefills gets a token
        share = (t.period_s - stop) / prefill_s(speeds, work, 0)
        rate, prefilled = share * work.initial_requests / t.period_s, share * work.initial_tokens / t.period_s
    token_s = t.in_flight / rate if rate else math.inf  # seconds per token of one request
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


def _predict_drop(t: Traffic, speeds: Speeds) -> Prediction:
    """Predict `drop`: all requests begin again after each publication; what isn't finished by the next one is lost."""
    stop = min(t.period_s, standstill_s("drop", speeds))
    work = prefill_work("drop", t)

    def time_left(tokens: float) -> float:
        """Return the time left of the period when each place has sampled this many tokens."""
        requests = t.in_flight * renewal(t.answers, tokens)[1]
        decoded = t.in_flight * (tokens - 1) - requests  # later requests have a first token from their prefill as well
        return t.period_s - stop - prefill_s(speeds, work, requests) - max(0.0, decoded) / speeds.decode

    budget = _largest(time_left, t.period_s * speeds.decode)
    finished, ended = (t.in_flight * each for each in renewal(t.answers, budget))
    rate = finished / t.period_s
    prefilled = work.tokens(ended) / t.period_s
    per_token = prefilled / rate if rate else math.inf
    return Prediction(
        "drop", rate, prefilled, per_token, 0.0, 0.0, stop / t.period_s, finished / ended if ended else 0.0
    )


def _largest(time_left: Callable[[float], float], high: float) -> float:
    """Return by bisection the largest number that leaves time; 0 where none does."""
    low = 0.0
    if time_left(low) <= 0:
        return 0.0
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if time_left(middle) >= 0 else (low, middle)
    return low


def renewal(answers: tuple[float, ...], budget: float) -> tuple[float, float]:
    """Return (tokens of finished answers, finished answers) of one place that samples `budget` tokens.

    It samples one answer after the other and leaves the last one unfinished. The resolution is a 256th of the longest
    answer; beyond 16 of these, the unfinished part is that of a stationary process.
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
