"""The verdict's three outcomes, and what each says."""

from __future__ import annotations

from slime_backend.audit.conclusion import conclude
from slime_backend.audit.sampling import Plan


def test_enough_checked_and_all_holds():
    found = conclude(Plan(1296, 400), 240, [])
    assert found.outcome == "clean"
    assert found.finds_one_in >= 20
    assert str(found).startswith(
        f"clean: 240 of 1,296 rollouts audited: one contaminated in {found.finds_one_in} would"
    )


def test_everything_checked():
    assert conclude(Plan(7, 7), 7, []).text == "all 7 rollouts audited"
    assert conclude(Plan(7, 7), 7, [], one_in=10_000).outcome == "clean"


def test_too_little_checked_says_how_much_would_do():
    plan = Plan(1296, 400)
    found = conclude(plan, 12, [])
    assert found.outcome == "not enough samples"
    enough = plan.rollouts(20)
    assert f"{enough} are enough for one in 20" in found.text
    assert conclude(plan, enough, []).outcome == "clean"
    assert conclude(plan, enough - 1, []).outcome == "not enough samples"
    assert conclude(plan, enough, [], one_in=100).outcome == "not enough samples"


def test_nothing_checked():
    assert conclude(Plan(50, 0), 0, [], gone=50).outcome == "not enough samples"
    assert "the weights of 50 more were no longer there" in conclude(Plan(50, 0), 0, [], gone=50).text
    assert conclude(Plan(0, 0), 0, []).outcome == "not enough samples"


def test_one_violation_is_enough_whatever_was_checked():
    found = conclude(Plan(1296, 400), 12, ["stale prefix", "wrong label", "stale prefix"])
    assert found.outcome == "contaminated"
    assert found.text == "3 of the audited rollouts don't hold: 2 stale prefix, 1 wrong label"
