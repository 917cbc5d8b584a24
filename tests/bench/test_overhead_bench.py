"""How `reef-slime bench overhead` judges what it measures. The measurement itself takes minutes and is not run here."""

from __future__ import annotations

import random
from typing import Any

import pytest

from slime_backend.bench import overhead
from slime_backend.bench.overhead import AGAIN, HOOKS, OFF, ON, Comparison, interval_rank
from slime_backend.bench.rows import BenchError
from slime_backend.engine_plugin import HOOK_MODULES


def noisy(ratio: float, rounds: int, seed: int = 0) -> Comparison:
    """Rounds on a machine whose speed wanders by half, each side a twentieth off by itself."""
    rng = random.Random(seed)
    pace = [rng.uniform(500, 1000) for _ in range(rounds)]
    return Comparison.of(
        [p * rng.gauss(1, 0.05) for p in pace],
        [p * ratio * rng.gauss(1, 0.05) for p in pace],
    )


def test_every_hook_is_on_and_only_the_attention_elsewhere() -> None:
    assert set(HOOKS[ON]) == set(HOOK_MODULES)
    assert HOOKS[OFF] == HOOKS[AGAIN] == ("cpu_attention",)


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


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(BenchError, match="5 rounds are too few"):
        interval_rank(5, 0.95)


def test_each_round_gives_all_sides_the_same_prompts_in_another_order(run_async: Any) -> None:
    asked: list[tuple[str, list[Any]]] = []

    class Engine:
        def __init__(self, name: str) -> None:
            self.name = name

        async def generate(self, body: Any) -> Any:
            asked.append((self.name, body["input_ids"]))
            return {"output_ids": [0] * body["sampling_params"]["max_new_tokens"]}

    engines: Any = {side: Engine(side) for side in HOOKS}
    speeds = run_async(overhead.measure(engines, 2, 16, 10, random.Random(0)), 30)
    assert {side: len(found) for side, found in speeds.items()} == dict.fromkeys(HOOKS, 10)
    rounds = [asked[i : i + 6] for i in range(0, len(asked), 6)]
    assert len(rounds) == 10 + overhead.WARM_UP
    firsts = set()
    for calls in rounds:
        assert sorted(name for name, _ in calls) == sorted([*HOOKS] * 2)
        prompts = [[ids for name, ids in calls if name == side] for side in HOOKS]
        assert prompts[0] == prompts[1] == prompts[2]
        assert prompts[0][0] != prompts[0][1]
        firsts.add(calls[0][0])
    assert firsts == set(HOOKS)
