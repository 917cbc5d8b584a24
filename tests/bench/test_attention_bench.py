"""`reef-slime bench attention` measured end to end on stand-ins for engines: they remember prompts and move a clock.

The peer takes a time for every token of a prompt, ours for the new ones. The clock is theirs, so ratios are exact.
"""

from __future__ import annotations

import random
import re
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.bench import attention
from slime_backend.bench.attention import decode_rows, hit_rows, prefill_rows, speed_row
from slime_backend.bench.rows import BenchError

PREFILL_S, DECODE_S = 0.01, 0.2  # of a token


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    made = SimpleNamespace(now=0.0)
    monkeypatch.setattr(attention, "time", SimpleNamespace(perf_counter=lambda: made.now))
    return made


class Engine:
    def __init__(self, name: str, clock: SimpleNamespace, wasteful: bool, forgetful: bool = False) -> None:
        self.name, self.clock, self.wasteful, self.forgetful = name, clock, wasteful, forgetful
        self.seen: list[list[int]] = []
        self.asked: list[list[int]] = []

    async def flush(self) -> None:
        self.seen.clear()

    async def generate(self, body: Any) -> Any:
        ids, tokens = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        self.asked.append(ids)
        found = 0 if self.forgetful else max((shared(ids, old) for old in self.seen), default=0)
        self.seen.append(ids)
        prefill = len(ids) if self.wasteful else len(ids) - found
        self.clock.now += PREFILL_S * prefill + DECODE_S * tokens
        return {"meta_info": {"cached_tokens": found}}


def shared(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.fixture
def engines(clock: SimpleNamespace) -> dict[str, Any]:
    return {"peer": Engine("peer", clock, wasteful=True), "ours": Engine("ours", clock, wasteful=False)}


def test_a_prefix_hit_is_timed_on_both_with_the_same_prompts(engines: Any, run_async: Any) -> None:
    (row,) = run_async(hit_rows(engines, random.Random(0), {10_000: 3}))
    assert (row.peer, row.ours, row.ratio) == (100_800, 840, 120.05)  # four digits of 100,840
    assert row.goal == "at least 20 times"
    assert row.holds
    assert engines["peer"].asked == engines["ours"].asked
    assert len(engines["ours"].asked) == 1 + 1 + 3  # the prefix, a round to warm up, three that count
    assert re.fullmatch(attention.PLOTS[0].cases, row.case)["x"] == "10000"


def test_what_is_no_hit_is_not_timed(engines: Any, clock: Any, run_async: Any) -> None:
    engines["ours"] = Engine("ours", clock, wasteful=False, forgetful=True)
    with pytest.raises(BenchError, match="ours found 0 of 1000 tokens in its cache"):
        run_async(hit_rows(engines, random.Random(0), {1000: 3}))


def test_a_prefill_is_of_new_tokens(engines: Any, run_async: Any) -> None:
    (row,) = run_async(prefill_rows(engines, random.Random(0), {500: 3}))
    assert (row.peer, row.ours, row.goal) == (5200, 5200, "at least 0.95 times")
    assert engines["peer"].asked == engines["ours"].asked


def test_decode_is_timed_without_the_prefill(engines: Any, run_async: Any) -> None:
    """Both sample as fast, so that the peer's slow prefill must not show."""
    (row,) = run_async(decode_rows(engines, random.Random(0), [(4, 2000)], rounds=3))
    assert (row.peer, row.ours, row.ratio) == (5, 5, 1)
    assert engines["peer"].asked == engines["ours"].asked


@pytest.mark.parametrize(("ours", "counts", "holds"), [(210, True, True), (190, True, False), (190, False, True)])
def test_the_goal_of_decoding_is_one_of_batches(ours: float, counts: bool, holds: bool) -> None:
    row = speed_row("decode", [100.0] * 3, [ours] * 3, counts)
    assert (row.ratio, row.holds) == (ours / 100, holds)
