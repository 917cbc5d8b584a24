"""The planner's formulas: what must hold for any traffic, and cases small enough to do by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from slime_backend.planner.predict import ABORT_POLL_S, predict, predict_all, seconds_for
from slime_backend.planner.recommend import PERIODS, best, by_period, crossovers, recommend
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import PlanError, Traffic, quantiles
from slime_backend.planner.work import POLICIES, Mode

# Where a publication takes all work back, what comes of a period of a few steps hangs on which step is under way at its
# end, so with answers of a token or two more can be less. Where the work goes on, these hold for any traffic.
KEPT: tuple[Mode, ...] = ("off", "scoped")
SLACK = 1 + 1e-9
FEW = settings(max_examples=30)


@st.composite
def traffics(draw) -> Traffic:
    prompt = draw(st.integers(8, 4000))
    return Traffic(
        prompt=prompt,
        shared=draw(st.integers(0, prompt)),
        group=draw(st.integers(1, 32)),
        answers=tuple(draw(st.lists(st.integers(1, 2000).map(float), min_size=1, max_size=6))),
        in_flight=draw(st.integers(1, 128)),
        period_s=draw(st.floats(0.5, 2000)),
        chunk=draw(st.sampled_from([512, 2048, 8192])),
        together=draw(st.booleans()),
    )


speeds = st.builds(Speeds, st.floats(500, 5e4), st.floats(100, 2e4), st.floats(0, 2), st.floats(0, 0.01))


@FEW
@given(traffics(), speeds, st.sampled_from(KEPT), st.floats(1, 10))
def test_rarer_publications_never_mean_fewer_finished_tokens_or_more_lag(traffic, engine, mode, times):
    often = predict(mode, traffic, engine)
    rarely = predict(mode, replace(traffic, period_s=times * traffic.period_s), engine)
    assert rarely.tokens_per_s >= often.tokens_per_s / SLACK
    assert rarely.lag <= often.lag * SLACK
    assert rarely.mixed_share <= often.mixed_share * SLACK


@FEW
@given(traffics(), speeds)
def test_what_is_predicted_is_possible(traffic, engine):
    for found in predict_all(traffic, engine).values():
        assert found.tokens_per_s >= 0
        # A request's first token comes with its prefill, so a request of one token is not decoded at all; and where a
        # publication takes work back, each in flight gets one with every prefill.
        decoded = found.tokens_per_s * (1 - 1 / found.answer if found.answer else 0)
        assert decoded - traffic.in_flight / traffic.period_s <= engine.decode * SLACK
        assert found.prefilled_per_s >= 0
        assert 0 <= found.mixed_share <= 1
        assert 0 <= found.standstill_share <= 1
        assert found.lag >= 0


EASY = Traffic(prompt=100, shared=0, group=4, answers=(50.0,), in_flight=8, period_s=100, chunk=1000, together=False)
ENGINE = Speeds(prefill=1000, decode=100, standstill_s=1)
BESIDE = 7 / 50  # others that reach a prefill step with a request; half of them come behind it
FRESH = ((1 + BESIDE / 2) * 100 + 3 - BESIDE / 2) / 4  # tokens that a request computes among its siblings


def test_off_by_hand():
    """A request takes 100 / 1000 + 49 / 100 = 0.59 s, and 99 s are left of a period."""
    found = predict("off", EASY, ENGINE)
    assert found.tokens_per_s == pytest.approx(99 / 0.59 * 50 / 100)
    assert found.prefilled_per_token == pytest.approx(2)
    assert found.standstill_share == pytest.approx(0.01)


def test_scoped_by_hand():
    """A decode step ends one in 50 requests, so 1.07 of four compute the prompt; after a sweep all of a step do."""
    found = predict("scoped", EASY, ENGINE)
    cold = (1 + BESIDE) * (100 - FRESH)
    requests = (99 - cold / 1000) / (FRESH / 1000 + 0.49)
    assert found.tokens_per_s == pytest.approx(requests * 50 / 100)
    assert found.prefilled_per_s == pytest.approx((requests * FRESH + cold) / 100)


def test_retract_by_hand():
    """Eight in flight with 25 tokens each are prefilled again; one step takes them all, so none finds a prompt. It
    gives each of them a token."""
    found = predict("retract", EASY, ENGINE)
    requests = (99 - 8 * 125 / 1000 + 8 / 100) / (FRESH / 1000 + 0.49)
    assert found.tokens_per_s == pytest.approx(requests * 50 / 100)
    assert found.prefilled_per_s == pytest.approx((requests * FRESH + 1000) / 100)
    slime = predict("requeue", EASY, ENGINE)
    assert found.tokens_per_s - slime.tokens_per_s == pytest.approx(ABORT_POLL_S / (FRESH / 1000 + 0.49) * 50 / 100)


def test_lag_and_mixing_by_hand():
    """A token every 8 / rate seconds; on average an answer's token has 24.5 more to wait for."""
    found = predict("off", EASY, ENGINE)
    token_s = 8 / found.tokens_per_s
    assert found.lag == pytest.approx(24.5 * token_s / 100)
    assert found.mixed_share == pytest.approx(49 * token_s / 100)


def test_dropping_keeps_short_answers_only():
    traffic = replace(EASY, answers=(10.0, 1000.0), period_s=10)
    found = predict("drop", traffic, ENGINE)
    assert found.answer == pytest.approx(10)
    assert 0 < found.tokens_per_s < predict("requeue", traffic, ENGINE).tokens_per_s
    assert (found.lag, found.mixed_share) == (0, 0)


def test_where_publications_leave_no_time_nothing_is_finished():
    stuck = replace(EASY, period_s=1)
    assert all(p.tokens_per_s == 0 for p in predict_all(stuck, ENGINE).values())
    assert math.isinf(predict("off", stuck, ENGINE).prefilled_per_token)
    with pytest.raises(PlanError, match="no mode finishes anything; publish less often"):
        recommend(stuck, ENGINE)


def test_the_recommendation_is_the_fastest_or_the_first_among_equals():
    busy = replace(EASY, period_s=10)
    assert recommend(busy, ENGINE).mode == "scoped"
    alone = replace(busy, group=1)
    assert best(predict_all(alone, ENGINE)) == "off"  # nothing to share: off is as fast, and asks for less
    rare = replace(EASY, period_s=10_000)
    assert recommend(rare, ENGINE).mode == "retract"
    assert "within 3% of scoped" in recommend(rare, ENGINE).why


def test_a_crossover_is_where_the_recommendation_changes():
    for crossover in crossovers(PERIODS, by_period(EASY), ENGINE):
        just_below = best(predict_all(replace(EASY, period_s=crossover.at * 0.999), ENGINE))
        just_above = best(predict_all(replace(EASY, period_s=crossover.at * 1.001), ENGINE))
        assert (just_below, just_above) == (crossover.below, crossover.above)
    assert crossovers(PERIODS, by_period(EASY), ENGINE)


@FEW
@given(traffics(), speeds, st.sampled_from(POLICIES), st.floats(1, 1000))
def test_the_time_for_so_many_requests_is_the_period_in_which_they_are_finished(traffic, engine, mode, requests):
    """`seconds_for` and `predict` are one formula, solved for one unknown or the other."""
    seconds = seconds_for(mode, traffic, engine, requests)
    assume(seconds > 0.01)
    found = predict(mode, replace(traffic, period_s=seconds), engine)
    assert found.tokens_per_s * seconds / traffic.answer == pytest.approx(requests, rel=1e-6)


@FEW
@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=300))
def test_quantiles_keep_the_order_and_the_mean(lengths):
    found = quantiles(lengths)
    assert list(found) == sorted(found)
    assert min(lengths) <= found[0]
    assert found[-1] <= max(lengths)
    if len(lengths) % len(found) == 0:
        assert sum(found) / len(found) == pytest.approx(sum(lengths) / len(lengths))


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        ({"prompt": 0}, "prompt is 0; it must be at least 1"),
        ({"shared": 200}, "200 shared tokens are more than the prompt's 100"),
        ({"group": 0.5}, "group is 0.5"),
        ({"answers": ()}, "at least 1 token"),
        ({"in_flight": -1}, "in_flight is -1"),
        ({"period_s": math.inf}, "period_s is inf"),
    ],
)
def test_traffic_that_cannot_be_is_refused(change, seen):
    with pytest.raises(PlanError, match=seen):
        replace(EASY, **change)
