"""Requests are spread over the engines whatever they have in common, and find their prefixes where that is free."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reef_service.data_plane.router import BLOCK, SLACK, Router
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, Member
from slime_backend.policy import decide

SYSTEM = list(range(1000))  # a system prompt that everybody has


def fleet_of(engines: int) -> Fleet:
    made = Fleet(decide("disjoint", "retract"), "v0")
    for i in range(engines):
        member = Member(EngineClient(f"http://127.0.0.1:{i + 1}", name=f"engine{i}"))
        made.add(member)
        made.confirm(member, "v0")
    return made


def send(router: Router, prompt: list[int], session: str = "") -> Member:
    member = router.choose_for(prompt, session)(router.fleet.routable())
    member.in_flight += 1
    return member


def loads(fleet: Fleet) -> list[int]:
    return [m.in_flight for m in fleet.members.values()]


@pytest.mark.parametrize(("engines", "turns"), [(8, 32), (64, 256), (8, 9), (8, 16), (3, 100)])
@pytest.mark.parametrize("sessions", [True, False])
def test_first_turns_with_one_system_prompt_keep_every_engine_busy(engines, turns, sessions):
    fleet = fleet_of(engines)
    router = Router(fleet)
    for i in range(turns):
        send(router, [*SYSTEM, 5000 + i], f"s{i}" if sessions else "")
    assert min(loads(fleet)) >= 1
    assert max(loads(fleet)) <= 1.25 * min(loads(fleet)) + 1


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 9), st.integers(1, 6), st.integers(0, 2**32), st.integers(0, 1500))
def test_a_request_of_no_session_goes_to_no_engine_with_much_more_to_do(engines, groups, seed, shared):
    """Whatever came before and ended: the engine that is chosen has at most a quarter more than the least busy one."""
    rng = random.Random(seed)
    fleet = fleet_of(engines)
    router = Router(fleet)
    running: list[Member] = []
    for i in range(120):
        least = min(loads(fleet))
        group = rng.randrange(groups)
        chosen = send(router, [*SYSTEM[:shared], *[9000 + group] * 300, i])
        assert chosen.in_flight - 1 <= least + least // 4
        running.append(chosen)
        while running and rng.random() < 0.4:
            running.pop(rng.randrange(len(running))).in_flight -= 1


def test_sessions_that_begin_one_by_one_are_spread_and_stay():
    """Each first turn finds every engine idle: by the prefix alone all of them would be one engine's for good."""
    fleet = fleet_of(4)
    router = Router(fleet)
    homes = {}
    for i in range(32):
        member = send(router, [*SYSTEM, 5000 + i], f"s{i}")
        homes[f"s{i}"] = member.name
        member.in_flight -= 1
    assert sorted(list(homes.values()).count(f"engine{i}") for i in range(4))[0] >= 6
    for name, home in homes.items():
        assert send(router, [*SYSTEM, 5000 + int(name[1:]), 1, 2], name).name == home
    assert max(loads(fleet)) <= 10


def test_busy_engines_still_compute_a_groups_prompt_on_few_of_them():
    """All are busy, so that a prefill costs: groups of 8 with a prompt each are on fewer engines than by load alone."""
    fleet = fleet_of(8)
    router = Router(fleet)
    for member in fleet.members.values():
        member.in_flight = 24
    pairs = set()
    for group in range(6):
        for i in range(8):
            pairs.add((group, send(router, [7000 + group] * 5 * BLOCK + [i]).name))
    assert len(pairs) <= 6 * 3
    assert max(loads(fleet)) <= 1.25 * min(loads(fleet)) + 1


def test_a_session_leaves_a_crowded_engine_and_is_counted_once():
    fleet = fleet_of(2)
    router = Router(fleet)
    home = send(router, SYSTEM, "s")
    home.in_flight = SLACK + 1
    assert send(router, SYSTEM, "s") is not home
    assert sum(router._held.values()) == 1
