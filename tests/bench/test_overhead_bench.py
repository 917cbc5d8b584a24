"""How `reef-slime bench overhead` judges what it measures. The measurement itself takes minutes and is not run here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slime_backend.bench import overhead
from slime_backend.bench.overhead import AGAIN, ON, SIDES, Comparison, interval_rank
from slime_backend.bench.rows import BenchError


def noisy(ratio: float, rounds: int, seed: int = 0) -> Comparison:
    """Rounds on a machine whose speed wanders by half, each side a twentieth off by itself."""
    rng = random.Random(seed)
    pace = [rng.uniform(500, 1000) for _ in range(rounds)]
    return Comparison.of(
        [p * rng.gauss(1, 0.05) for p in pace],
        [p * ratio * rng.gauss(1, 0.05) for p in pace],
    )


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (0.99, True), (0.95, False), (0.9, False)])
def test_a_loss_is_seen_through_the_noise(ratio: float, holds: bool) -> None:
    found = noisy(ratio, 400)
    assert found.ratio == pytest.approx(ratio, abs=0.008)
    assert overhead.row("dense", 8, ON, found).holds is holds


@pytest.mark.parametrize(("ratio", "holds"), [(1.0, True), (0.95, False), (1.05, False)])
def test_the_control_fails_where_two_engines_alike_differ_by_more_than_the_goal_allows(
    ratio: float, holds: bool
) -> None:
    assert overhead.row("dense", 8, AGAIN, noisy(ratio, 400)).holds is holds


def test_the_interval_holds_the_true_ratio_as_often_as_it_says() -> None:
    found = [noisy(0.97, 40, seed) for seed in range(400)]
    inside = sum(c.low <= 0.97 <= c.high for c in found) / len(found)
    assert 0.92 < inside < 0.99
    assert all(c.low < c.ratio < c.high for c in found)


@pytest.mark.parametrize(("count", "rank"), [(6, 0), (10, 1), (20, 5), (60, 21), (100, 39)])
def test_the_ranks_are_those_of_the_tables(count: int, rank: int) -> None:
    """Of the two-sided sign test at 5 %; ranks from 0."""
    assert interval_rank(count, 0.95) == rank
    with pytest.raises(BenchError, match="5 rounds are too few"):
        interval_rank(5, 0.95)


class Engine:
    """Answers as one whose hooks were switched does, unless it is `stuck` with them."""

    def __init__(self, stuck: bool | None = None) -> None:
        self.stuck, self.on = stuck, True
        self.asked: list[tuple[bool, list[int]]] = []

    async def call(self, method: str, path: str, *, body: Any) -> Any:
        assert (method, path) == ("POST", "/set_internal_state")
        self.on = bool(body["server_args"]["reef_slime_hooks"])
        return [True]

    async def flush(self) -> None:
        return None

    async def generate(self, body: Any) -> Any:
        self.asked.append((self.on, body["input_ids"]))
        recorded = self.on if self.stuck is None else self.stuck
        meta = {"kv_provenance": []} if recorded else {}
        return {"output_ids": [0] * body["sampling_params"]["max_new_tokens"], "meta_info": meta}


def test_each_round_gives_all_sides_the_same_prompts_in_another_order(run_async: Any) -> None:
    engine: Any = Engine()
    speeds = run_async(overhead.measure(engine, 2, 20, random.Random(0)), 30)
    assert {side: len(found) for side, found in speeds.items()} == dict.fromkeys(SIDES, 20)
    assert engine.on
    rounds = [engine.asked[i : i + 6] for i in range(0, len(engine.asked), 6)]
    assert len(rounds) == 20 + overhead.WARM_UP
    orders = set()
    for calls in rounds:
        assert sum(on for on, _ in calls) == 2  # a batch of two with the hooks in
        order = tuple(ids[0] for _, ids in calls[::2])
        assert sorted(order) == [0, 1, 2]
        assert [on for on, _ in calls[::2]] == [SIDES[side] == ON for side in order]
        batches = [[ids[1:] for _, ids in calls[i : i + 2]] for i in (0, 2, 4)]
        assert batches[0] == batches[1] == batches[2]
        assert batches[0][0] != batches[0][1]
        orders.add(order)
    assert len(orders) == 6


@pytest.mark.parametrize("stuck", [True, False])
def test_an_engine_that_does_not_switch_is_not_measured(run_async: Any, stuck: bool) -> None:
    engine: Any = Engine(stuck)
    with pytest.raises(BenchError, match="the answers show the opposite"):
        run_async(overhead.measure(engine, 2, 6, random.Random(0)), 30)
