"""Which mode a slime job takes that names none: prefixes are shared only where slime's loop waits for its rollouts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend.arguments import configure_sglang_runtime
from slime_backend.planner.slime_args import WAITED_FOR
from slime_backend.slime_hooks.entry import share_where_nothing_is_in_flight


def resolved(words: list[str], *, asynchronous: bool = False, **given: Any) -> str:
    args = SimpleNamespace(disjoint_prefix_sharing="off", rollout_function_path=WAITED_FOR, **given)
    share_where_nothing_is_in_flight(args, words, asynchronous=asynchronous)
    policy = configure_sglang_runtime(args)
    assert policy.safe
    assert (args.pause_generation_mode, args.sglang_disable_radix_cache) == (policy.pause_mode, not policy.radix_cache)
    return args.disjoint_prefix_sharing


def test_the_loop_that_waits_shares_and_flushes() -> None:
    assert resolved(["--lr", "1e-6"]) == "retract"


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ([], {"asynchronous": True}),
        ([], {"colocate": True}),
        (["--disjoint-prefix-sharing=off"], {}),
        (["--disjoint-prefix-sharing", "off"], {}),
    ],
)
def test_elsewhere_and_where_it_is_chosen_nothing_changes(words: list[str], options: Any) -> None:
    assert resolved(words, **options) == "off"


def test_another_rollout_function_may_leave_requests_in_flight() -> None:
    args = SimpleNamespace(disjoint_prefix_sharing="off", rollout_function_path="mine.rollout")
    share_where_nothing_is_in_flight(args, [], asynchronous=False)
    assert args.disjoint_prefix_sharing == "off"
