"""A run directory made without an engine: rollouts scored by the models that they claim, exactly as an engine would.

What is not tested here: that a real engine's own log-probs agree (tests/test_run_engine.py).
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_backend.audit.scorer import Mix, Scorer
from slime_backend.provenance.records import RolloutRecord
from slime_backend.simulation.models import load_model, make_tiny_model
from slime_backend.wire import KvSegment, Prefill, Span

PROMPT, OUTPUT = 60, 24


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Several would wait for each other on a machine that has other work."""
    torch.set_num_threads(1)


def span(version: str, start: int, end: int) -> Span:
    return Span(version, start, end)


def pure(version: str) -> tuple[KvSegment, ...]:
    return (KvSegment(0, OUTPUT, version, (span(version, 0, PROMPT + OUTPUT - 1),)),)


def carried(old: str, new: str, at: int) -> tuple[KvSegment, ...]:
    """An in-place publication after `at` tokens: older KV stays."""
    boundary = PROMPT + at - 1
    return (
        KvSegment(0, at, old, (span(old, 0, boundary),)),
        KvSegment(at, OUTPUT, new, (span(old, 0, boundary), span(new, boundary, PROMPT + OUTPUT - 1))),
    )


def recomputed(old: str, new: str, at: int) -> tuple[KvSegment, ...]:
    """A retracting publication after `at` tokens: all KV is new afterwards."""
    return (
        KvSegment(0, at, old, (span(old, 0, PROMPT + at - 1),)),
        KvSegment(at, OUTPUT, new, (span(new, 0, PROMPT + OUTPUT - 1),)),
    )


class MadeRun:
    """A run directory with weights v0..v2 and rollouts written by `add`."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        for i in range(3):
            make_tiny_model(directory / "weights" / f"v{i}", seed=i, hidden_size=64)
        self.scorer = Scorer(directory / "weights", load_model)
        self.rng = random.Random(0)

    def record(
        self,
        truth: tuple[KvSegment, ...],
        claim: tuple[KvSegment, ...] | None = None,
        *,
        mix: Mix | None = None,
        cached: int = 0,
    ) -> RolloutRecord:
        """A rollout whose log-probs follow `truth`, under mixed weights if asked, and whose record claims `claim` (the
        truth, if not given). `cached`: tokens of the prompt that it found in the radix cache."""
        ids = tuple(self.rng.randrange(256) for _ in range(PROMPT + OUTPUT))
        claim = truth if claim is None else claim
        base: dict[str, Any] = {
            "receipt": f"r{self.rng.randrange(10**9)}",
            "group": "g",
            "engine": "engine0",
            "question": "q",
            "prompt_ids": ids[:PROMPT],
            "output_ids": ids[PROMPT:],
            "logprobs": (),
            "temperature": 1.0,
            "reward": 0.5,
            "finish_reason": "length",
            "spans": tuple(span(s.version, s.start, s.end) for s in claim),
            "segments": claim,
            "prefills": (Prefill(1, 0, claim[0].version, cached, PROMPT),),
            "submitted_at": 0.0,
            "finished_at": 1.0,
        }
        blank = RolloutRecord(**base)
        base["logprobs"] = tuple(self.scorer.score_all(blank, truth, mix))
        return RolloutRecord(**base)

    def write(self, records: list[RolloutRecord]) -> None:
        text = "".join(json.dumps(r.to_json()) + "\n" for r in records)
        (self.directory / "rollouts.jsonl").write_text(text)


@pytest.fixture(scope="session")
def made_run(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return MadeRun(tmp_path_factory.mktemp("run"))
