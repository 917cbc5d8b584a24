"""`Speeds` is how fast one engine is: given, from a model's size, or measured (from_bench.py, from_ledger.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slime_backend.planner.traffic import PlanError

# The share of a GPU's peak arithmetic that prefilling reaches, and of its peak bandwidth that decoding reaches: common
# figures, not measured.
ARITHMETIC_SHARE, BANDWIDTH_SHARE = 0.5, 0.7
BYTES = 2  # per bf16 weight
LOAD_GB_S = 5.0  # loading weights into a paused engine
STEPS_S = 0.03  # a publication without its bytes
PREFILL_TO_DECODE = 4.0  # the ratio of the speeds where it isn't known


@dataclass(frozen=True, slots=True)
class Speeds:
    """These are one engine's speeds, decoding with the traffic's requests in flight. Raises PlanError if impossible."""

    prefill: float  # tokens per second
    decode: float  # tokens per second
    standstill_s: float  # from the pause to the resume of a publication in place, with its bytes
    admission_s: float = 0.0  # that each prefill step takes in addition to its tokens

    def __post_init__(self) -> None:
        for name in ("prefill", "decode"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                raise PlanError(f"a {name} speed of {getattr(self, name):g} tokens per second; give more than 0")
        for name in ("standstill_s", "admission_s"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) >= 0):
                raise PlanError(f"{name} is {getattr(self, name):g}; it can't be negative")


def of_model(billions: float, tflops: float, gb_s: float, in_flight: float, standstill_s: float | None) -> Speeds:
    """Estimate the speeds of a dense bf16 model with `billions` billion active parameters.

    `tflops` and `gb_s` are the peak arithmetic and memory bandwidth of all GPUs of the engine.

    Prefilling takes 2 operations per parameter and token. A decode step reads each weight once and computes as much per
    token. Reading the KV is left out: with long contexts decoding is slower than estimated.
    """
    if min(billions, tflops, gb_s) <= 0:
        raise PlanError("a model size, its arithmetic and its bandwidth must be more than 0")
    per_token = 2 * billions * 1e9 / (ARITHMETIC_SHARE * tflops * 1e12)
    reading = BYTES * billions / (BANDWIDTH_SHARE * gb_s)
    batch = max(1.0, in_flight)
    if standstill_s is None:
        standstill_s = STEPS_S + BYTES * billions / LOAD_GB_S
    return Speeds(1 / per_token, batch / max(reading, batch * per_token), standstill_s)
