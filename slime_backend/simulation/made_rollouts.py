"""`made` makes records of a real rollout's shape without an engine, to test and measure the ledger."""

from __future__ import annotations

import hashlib
import random

from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Prefill, Span

GROUP_SIZE = 8
PER_VERSION = 500  # records


def receipt(number: int) -> str:
    """Return 32 hexadecimal digits, as random as a run's, and the same for the same number."""
    return hashlib.blake2b(str(number).encode(), digest_size=16).hexdigest()


def made(number: int, tokens: int = 0) -> RolloutRecord:
    """Make record `number`, always the same: one in three lived through a retracting publication.

    It has `tokens` output tokens and ten times as many prompt tokens; its spans always describe 480 + 48.
    """
    version = number // PER_VERSION
    prompt, output, old, new = 480, 48, f"v{version}", f"v{version + 1}"
    rng = random.Random(number)
    at = rng.randrange(1, output)
    end = prompt + output - 1
    unbroken = (KvSegment(0, output, old, (Span(old, 0, end),)),)
    first = KvSegment(0, at, old, (Span(old, 0, prompt + at - 1),))
    crossing = (first, KvSegment(at, output, new, (Span(new, 0, end),)))
    segments = crossing if number % 3 == 0 else unbroken
    prefills = (Prefill(version, 5, old, 464, prompt), Prefill(version + 1, 1, new, 0, prompt + at))
    return RolloutRecord(
        receipt=receipt(number),
        group=f"g{number // GROUP_SIZE:06d}",
        engine=f"engine{number % 2}",
        question=f"small letters: question number {number}",
        prompt_ids=tuple(rng.randrange(264) for _ in range(10 * tokens)),
        output_ids=tuple(rng.randrange(264) for _ in range(tokens)),
        logprobs=tuple(-6 * rng.random() for _ in range(tokens)),
        temperature=1.0,
        reward=rng.random(),
        finish_reason="length",
        spans=tuple(Span(s.version, s.start, s.end) for s in segments),
        segments=segments,
        prefills=prefills[: len(segments)],
        submitted_at=1.8e9 + number,
        finished_at=1.8e9 + number + rng.random(),
        session=f"g{number // GROUP_SIZE:06d}",
    )
