"""The policy table, and that nothing heavy is needed to read it."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from slime_backend.arguments import add_reef_arguments, configure_sglang_runtime, policy_of
from slime_backend.policy import Layout, PolicyError, PrefixSharing, check_radix_setting, decide

TABLE = [
    # layout, sharing, pause, radix cache, after the pause
    ("colocated", "off", "retract", True, "flush"),
    ("colocated", "retract", "retract", True, "flush"),
    ("colocated", "scoped", "retract", True, "flush"),
    ("disjoint", "off", "in_place", False, "nothing"),
    ("disjoint", "retract", "retract", True, "flush"),
    ("disjoint", "scoped", "in_place", True, "sweep"),
]


@pytest.mark.parametrize(("layout", "sharing", "pause", "radix", "after"), TABLE)
def test_table(layout, sharing, pause, radix, after):
    policy = decide(layout, sharing)
    assert (policy.pause_mode, policy.radix_cache, policy.after_pause) == (pause, radix, after)
    assert policy.safe


def test_the_negative_control_is_the_only_unsafe_policy():
    assert not decide("disjoint", "unsafe").safe
    with pytest.raises(PolicyError, match="negative control"):
        decide("colocated", "unsafe")


@pytest.mark.parametrize(("layout", "sharing"), [("joint", "off"), ("disjoint", "on"), ("disjoint", "")])
def test_unknown_words_are_named(layout, sharing):
    with pytest.raises(PolicyError, match="is unknown; use one of"):
        decide(layout, sharing)


SHARING: list[tuple[Layout, PrefixSharing]] = [
    ("colocated", "off"),
    ("disjoint", "retract"),
    ("disjoint", "scoped"),
]


def test_radix_cache_is_refused_only_where_unscoped_kv_is_kept():
    with pytest.raises(PolicyError) as refused:
        check_radix_setting(decide("disjoint", "off"), True, "--flag")
    # The message names the flag and the three ways out.
    assert "--flag" in str(refused.value)
    assert "remove --flag" in str(refused.value)
    assert "--disjoint-prefix-sharing (retract" in str(refused.value)
    assert "--disjoint-prefix-sharing=scoped" in str(refused.value)
    for layout, sharing in SHARING:
        check_radix_setting(decide(layout, sharing), True, "--flag")
    check_radix_setting(decide("disjoint", "off"), False, "--flag")


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--colocate", action="store_true")
    parser.add_argument("--sglang-disable-radix-cache", action="store_true")
    return add_reef_arguments(parser).parse_args(flags)


@pytest.mark.parametrize(
    ("flags", "pause", "radix_off"),
    [
        ([], "in_place", True),
        (["--disjoint-prefix-sharing"], "retract", False),
        (["--disjoint-prefix-sharing=scoped"], "in_place", False),
        (["--disjoint-prefix-sharing", "off"], "in_place", True),
        (["--colocate"], "retract", False),
        (["--colocate", "--disjoint-prefix-sharing=scoped"], "retract", False),
        (["--disjoint-prefix-sharing", "--sglang-disable-radix-cache"], "retract", True),  # slower, never wrong
    ],
)
def test_one_decision_sets_pause_and_radix_cache(flags, pause, radix_off):
    args = parse(*flags)
    policy = configure_sglang_runtime(args)
    assert (args.pause_generation_mode, args.sglang_disable_radix_cache) == (pause, radix_off)
    assert policy_of(args) == policy
    # What slime saves with each checkpoint loads where there is no reef-slime.
    assert not any("slime_backend" in type(value).__module__ for value in vars(args).values())


def test_an_override_that_reenables_the_cache_is_refused():
    args = parse()
    args.sglang_overrides = {"disable_radix_cache": False}
    with pytest.raises(PolicyError, match="disable_radix_cache=false"):
        configure_sglang_runtime(args)
    shared = parse("--disjoint-prefix-sharing")
    shared.sglang_overrides = {"disable_radix_cache": False}
    configure_sglang_runtime(shared)


def test_importing_the_policy_imports_nothing_heavy():
    code = (
        "import sys; import slime_backend.policy, slime_backend.wire, slime_backend.arguments; "
        "print([m for m in ('torch', 'sglang', 'transformers', 'pydantic') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
