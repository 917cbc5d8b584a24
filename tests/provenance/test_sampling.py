"""Sample sizes of an audit against exact fractions, brute force, and draws by the audit's own choice."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.audit.sampling import Plan, Sample, chance_to_find, sample_size
from tests.provenance.examples import example

COUNTS = st.integers(1, 200).flatmap(lambda m: st.tuples(st.just(m), st.integers(0, m), st.integers(0, m)))


@given(COUNTS)
def test_the_chance_is_the_hypergeometric_one(counts):
    population, contaminated, checked = counts
    exact = 1 - Fraction(comb(population - contaminated, checked), comb(population, checked))
    assert chance_to_find(population, contaminated, checked) == pytest.approx(float(exact), abs=1e-12)


def test_the_chance_by_listing_every_draw():
    draws = list(itertools.combinations(range(8), 3))
    hits = sum(bool({0, 1} & set(draw)) for draw in draws)
    assert chance_to_find(8, 2, 3) == pytest.approx(hits / len(draws))


def test_one_in_ten_thousand_by_hand():
    """ln 0.01 / ln 0.9999 = 46049.4: the figure of docs/audit.md."""
    assert sample_size(10_000) == 46_050
    assert sample_size(1) == 1
    assert 1 - 0.9999**46_050 >= 0.99 > 1 - 0.9999**46_049
    assert sample_size(10_000, population=10_000) == 9_900  # the one of ten thousand: check 99 of 100
    assert sample_size(10_000, population=1_000_000) == pytest.approx(45_000, rel=0.01)  # fewer than without end


@given(st.integers(1, 2000), st.floats(0.01, 0.999), st.none() | st.integers(1, 3000))
def test_the_sample_size_is_the_smallest_that_is_enough(one_in, probability, population):
    n = sample_size(one_in, probability, population)
    if population is None:
        assert 1 - (1 - Fraction(1, one_in)) ** n >= probability * (1 - 1e-9)
        assert n == 1 or 1 - (1 - Fraction(1, one_in)) ** (n - 1) < probability * (1 + 1e-9)
    else:
        contaminated = -(-population // one_in)
        assert chance_to_find(population, contaminated, n) >= probability
        assert n == 1 or chance_to_find(population, contaminated, n - 1) < probability


@given(st.integers(1, 400), st.data())
def test_a_plan_grows_with_what_is_checked_and_ends_at_certainty(recorded, data):
    plan = Plan(recorded, data.draw(st.integers(0, recorded)))
    contaminated = data.draw(st.integers(1, recorded))
    chances = [plan.chance(contaminated, n) for n in range(1, recorded + 1)]
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(chances))
    assert chances[-1] == pytest.approx(1.0)
    one_in = data.draw(st.integers(1, 500))
    n = plan.rollouts(one_in)
    assert plan.chance(-(-recorded // one_in), n) >= plan.probability
    assert n == 1 or plan.chance(-(-recorded // one_in), n - 1) < plan.probability


def drawn(records, count, seed):
    sample = Sample(count, seed)
    for record in records:
        sample.offer(record.receipt, record.crossing)
    return sample.holds()


@given(st.lists(st.booleans(), min_size=1, max_size=80), st.integers(1, 40), st.integers(0, 99), st.randoms())
def test_a_sample_can_be_checked_while_the_run_grows(crossing, count, seed, shuffle):
    """Whatever is in it at the end was let in when it came; the order of the run plays no part; crossing come first."""
    rollouts = [(f"r{i}", c) for i, c in enumerate(crossing)]
    sample = Sample(count, seed)
    let_in = {receipt for receipt, c in rollouts if sample.offer(receipt, c)}
    assert sample.holds() <= let_in
    assert len(sample.holds()) == min(count, len(rollouts))
    crossed = {receipt for receipt, c in rollouts if c}
    assert len(sample.holds() & crossed) >= min(len(crossed), count // 2)
    other = Sample(count, seed)
    shuffle.shuffle(rollouts)
    for receipt, c in rollouts:
        other.offer(receipt, c)
    assert other.holds() == sample.holds()


def test_few_are_let_in_on_the_way():
    sample = Sample(100)
    let_in = sum(sample.offer(f"r{i}", False) for i in range(10_000))
    expected = 100 * (1 + math.log(100))  # of a random order
    assert abs(let_in - expected) < 5 * expected**0.5


@given(st.integers(1, 300), st.data())
def test_what_a_sample_finds_is_what_the_plan_asks_for(recorded, data):
    plan = Plan(recorded, data.draw(st.integers(0, recorded)))
    checked = data.draw(st.integers(0, recorded))
    one_in = plan.finds_one_in(checked)
    if one_in:
        assert plan.rollouts(one_in) <= checked
        assert one_in == recorded or plan.rollouts(one_in + 1) > checked
    else:
        assert plan.rollouts(1) > checked


@pytest.mark.parametrize("where", ["crossing", "pure", "both"])
def test_the_audits_own_choice_is_at_least_as_good_as_planned(where):
    """2000 audits of 400 rollouts, 8 of them contaminated: found as often as the plan says, less four sigma."""
    crossing = [dataclasses.replace(example("mixed"), receipt=f"m{i}") for i in range(100)]
    pure = [dataclasses.replace(example("pure"), receipt=f"p{i}") for i in range(300)]
    spots = {"crossing": crossing[:8], "pure": pure[:8], "both": crossing[:4] + pure[:4]}
    bad = {r.receipt for r in spots[where]}
    plan, checked, rounds = Plan(400, 100), 120, 2000
    random_records = crossing + pure
    random.Random(0).shuffle(random_records)
    hits = sum(bool(bad & drawn(random_records, checked, seed)) for seed in range(rounds))
    expected = plan.chance(len(bad), checked)
    assert hits / rounds >= expected - 4 * (expected * (1 - expected) / rounds) ** 0.5
    if where == "pure":  # where the bound is met exactly, it isn't a loose one
        assert hits / rounds <= expected + 4 * (expected * (1 - expected) / rounds) ** 0.5


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: chance_to_find(5, 6, 1), "can't draw 1 of 5 with 6"),
        (lambda: sample_size(10, 1.0), "certainty means checking all"),
        (lambda: sample_size(0), "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
