"""The flags, and the one place where they become engine settings.

`add_reef_arguments` has the form that slime's `parse_args(add_custom_arguments=...)` asks for.
"""

from __future__ import annotations

import argparse
from typing import Any, get_args

from slime_backend.fleet.weights import VerifyWeights
from slime_backend.planner.at_start import resolve_sharing
from slime_backend.planner.slime_args import start_facts
from slime_backend.policy import Policy, check_radix_setting, decide
from slime_backend.provenance.staleness import StalenessPolicy


def add_reef_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our flags to an argparse parser and return it."""
    group = parser.add_argument_group("reef-slime")
    group.add_argument(
        "--disjoint-prefix-sharing",
        nargs="?",
        const="retract",
        default="off",
        metavar="MODE",
        help=(
            "off (default where requests may be in flight): they keep their KV across a publication, the radix cache "
            "is off; retract (bare flag, and default of slime's synchronous loop): requests share prefixes, a "
            "publication retracts in-flight requests and flushes; "
            "scoped: requests share prefixes inside one weight version and keep their KV across a publication; "
            "auto: one of these, by the planner, which says why (docs/planner.md)"
        ),
    )
    group.add_argument(
        "--max-version-lag",
        type=_count,
        default=None,
        metavar="N",
        help="tokens sampled more than N publications before the trainer's version are too stale (default: none is)",
    )
    group.add_argument(
        "--staleness",
        choices=get_args(StalenessPolicy),
        default="correct",
        help=(
            "what happens beyond the bound. drop: the rollout is not trained on; mask_tokens: its stale tokens are "
            "not; correct (default): importance weights, 0 where the ratio isn't trusted"
        ),
    )
    group.add_argument(
        "--reef-run-dir",
        default=None,
        metavar="DIR",
        help="where the ledger of rollouts and publications goes (default: reef/ under --save, else runs/slime)",
    )
    group.add_argument(
        "--reef-save-weights",
        action="store_true",
        help="keep every published version in the run directory, for reef-slime audit (a whole checkpoint each time)",
    )
    group.add_argument(
        "--reef-keep-versions",
        type=_at_least_two,
        default=None,
        metavar="N",
        help="of --reef-save-weights: the last N versions only (default: all); an audit finds no others",
    )
    group.add_argument(
        "--reef-load-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long a publication waits for the engines to take the weights (default: %(default)s)",
    )
    group.add_argument(
        "--verify-weights",
        choices=get_args(VerifyWeights),
        default="auto",
        help=(
            "hold the content of each engine's weights against what was sent, before it is resumed. auto (default): "
            "all tensors where that takes under 100 ms, else a part of them, another one each time; full; sample; off"
        ),
    )
    group.add_argument(
        "--allow-kv-holder",
        action="append",
        default=[],
        metavar="NAME",
        help="let engines keep KV in a place that isn't verified; see docs/kv-holders.md",
    )
    group.add_argument(
        "--reef-gateway",
        metavar="URL",
        help="a gateway to take samples from, with --rollout-function-path reef_service.slime_rollout.generate_rollout",
    )
    group.add_argument("--reef-gateway-token-file", metavar="FILE", help="its first line is the gateway's admin token")
    return parser


def _count(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is negative; 0 allows the trainer's own version only")
    return number


def _at_least_two(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError(f"{number} is too few: rollouts of the version before are still in flight")
    return number


def configure_sglang_runtime(args: Any) -> Policy:
    """Derive the pause mode and the radix cache of the engines from one decision, and write both into `args`.

    Reads `args.colocate` (slime's flag; absent means disjoint), `args.disjoint_prefix_sharing` and, as an override to
    be checked, `args.sglang_disable_radix_cache`. Writes `args.sglang_disable_radix_cache` (bool) and
    `args.pause_generation_mode` (SGLang's word). Where the sharing is `auto` it also writes what the planner took to
    `args.disjoint_prefix_sharing`, and why to `args.reef_sharing_reason`. Nothing but plain values: Megatron pickles
    `args` into each checkpoint, which has to load where there is no reef-slime. `policy_of` is the policy again.

    Raises PolicyError where an override would share entries that can't be scoped.
    """
    sharing, why = resolve_sharing(getattr(args, "disjoint_prefix_sharing", "off"), lambda: start_facts(args))
    if why:
        args.disjoint_prefix_sharing, args.reef_sharing_reason = sharing, f"auto takes it: {why}"
    policy = policy_of(args)
    overrides = getattr(args, "sglang_overrides", None) or {}
    if overrides.get("disable_radix_cache") is False:
        check_radix_setting(policy, True, "the engine override disable_radix_cache=false")
    # A user may turn the cache off where the policy would share: slower, never wrong.
    args.sglang_disable_radix_cache = bool(getattr(args, "sglang_disable_radix_cache", False)) or not policy.radix_cache
    args.pause_generation_mode = policy.pause_mode
    return policy


def policy_of(args: Any) -> Policy:
    """The policy that the arguments stand for. Raises PolicyError."""
    layout = "colocated" if getattr(args, "colocate", False) else "disjoint"
    return decide(layout, getattr(args, "disjoint_prefix_sharing", "off"))  # type: ignore[arg-type]
