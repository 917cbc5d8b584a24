"""The planner's formulas against an engine that is simulated step by step (simulated.py): no figure of it goes in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from slime_backend.planner.predict import predict
from slime_backend.planner.speeds import Speeds
from slime_backend.planner.traffic import Traffic
from slime_backend.planner.work import MODES, Mode
from tests.planner.simulated import Found, simulate

ANSWERS = (24.0, 40.0, 60.0, 90.0, 140.0, 256.0)
BASE = Traffic(
    prompt=256, shared=0, group=8, answers=ANSWERS, in_flight=16, period_s=4, chunk=2048, together=False
)  # close to what bench modes measures
TRAFFICS = {
    "base": BASE,
    "often": replace(BASE, period_s=2),
    "seldom": replace(BASE, period_s=30),
    "common beginning": replace(BASE, shared=200),
    "alone": replace(BASE, group=1),
    "long prompts": replace(BASE, prompt=1500, period_s=20),
    "small steps": replace(BASE, chunk=512, period_s=6),
    "many in flight": replace(BASE, in_flight=64, period_s=8),
}
SPEEDS = Speeds(prefill=4000, decode=600, standstill_s=0.1, admission_s=0.01)
CLOSE = 0.12
DROPPING = 0.2  # what a standstill leaves room for are a few complete answers or none


def apart(mode: Mode, traffic: Traffic, seen: Found) -> dict[str, float]:
    """Figure -> how far the prediction is off, of what the simulation shows."""
    found = predict(mode, traffic, SPEEDS)
    pairs = {
        "tokens_per_s": (found.tokens_per_s, seen.tokens_per_s),
        "prefilled_per_token": (found.prefilled_per_token, seen.prefilled_per_token),
        "lag": (found.lag, seen.lag),
        "mixed_share": (found.mixed_share, seen.mixed_share),
    }
    return {name: abs(a - b) / b if b else abs(a) for name, (a, b) in pairs.items()}


@pytest.mark.parametrize("name", TRAFFICS)
@pytest.mark.parametrize("mode", MODES)
def test_a_prediction_is_what_the_simulation_shows(mode, name):
    traffic = TRAFFICS[name]
    seen = simulate(mode, traffic, SPEEDS, 100)
    if not seen.tokens_per_s:
        assert predict(mode, traffic, SPEEDS).tokens_per_s == 0
        return
    found = apart(mode, traffic, seen)
    if seen.lag > 10:  # hardly an answer ends, so hardly one shows how long it took
        found.pop("lag")
    assert max(found.values()) <= (DROPPING if mode == "drop" else CLOSE), found


def test_the_formulas_of_another_mode_would_not_do():
    seen = simulate("retract", BASE, SPEEDS, 100)
    for mode in ("drop", "off", "scoped"):
        assert max(apart(mode, BASE, seen).values()) > 2 * CLOSE
