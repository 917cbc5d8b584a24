"""What both entry points do: slime's own loop and arguments, with ours, in processes that are prepared for it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

from slime_backend import cpu
from slime_backend.arguments import add_reef_arguments, configure_sglang_runtime
from slime_backend.cpu.flags import GpuFlagError, cpu_flags
from slime_backend.cpu.source import SourceMovedError
from slime_backend.engine_process import plugin_entry
from slime_backend.errors import ReefError
from slime_backend.policy import PolicyError
from slime_backend.slime_hooks import ray_start, refusals, worker_setup
from slime_backend.slime_hooks.contract import checkout, fit
from slime_backend.slime_hooks.contract.symbols import ContractError
from slime_backend.slime_hooks.rollouts.flags import set_rollout_functions

WRONG_USE = 2
USER_ERRORS = (
    checkout.SlimeNotFoundError,
    fit.SlimeMovedError,
    plugin_entry.PluginNotInstalledError,
    ContractError,
    ray_start.RayStartedTooEarlyError,
    PolicyError,
    GpuFlagError,
    SourceMovedError,
    ReefError,
)


def run(script: str) -> None:
    """Run slime's `script` ("train" or "train_async") with the arguments of the command line.

    Ends the process with one line on stderr and code 2 for what the user can put right: no slime, settings that
    the policy refuses, a Megatron-core that the CPU mode was not written for.
    """
    try:
        if cpu.requested():
            add_cpu_flags()
        worker_setup.setup()
        fit.check(checkout.root(), cpu=cpu.requested())
        loop = checkout.load_script(script)
        args = parse(asynchronous=script == "train_async")
        if not getattr(args, "rollout_external", False):
            plugin_entry.require()
        finish = at_end(args)
        ray_start.start(args)
    except USER_ERRORS as error:
        print(f"reef-slime: {error}", file=sys.stderr)
        sys.exit(WRONG_USE)
    loop.train(args)
    finish()


def at_end(args: Any) -> Callable[[], None]:
    """Return what is to be done after slime's loop: where samples come from a gateway, the last of them are
    acknowledged. A rollout function's module has that as `at_end(args)`."""
    if not getattr(args, "reef_gateway", None):
        return lambda: None
    module = importlib.import_module(args.reef_rollout_function_path.rpartition(".")[0])
    make = getattr(module, "at_end", None)
    return make(args) if make is not None else lambda: None


def parse(*, asynchronous: bool) -> Any:
    """slime's arguments and ours, with the pause mode, the radix cache and our rollout functions written into them.

    Raises PolicyError.
    """
    from slime.utils.arguments import parse_args

    args = parse_args(add_custom_arguments=add_reef_arguments)
    policy = configure_sglang_runtime(args)
    refusals.check(args, policy)
    if reason := getattr(args, "reef_sharing_reason", None):
        print(f"reef-slime: --disjoint-prefix-sharing=auto takes {args.disjoint_prefix_sharing}: {reason}", flush=True)
    print(f"reef-slime: {policy}", flush=True)
    set_rollout_functions(args, asynchronous=asynchronous)
    print(f"reef-slime: run directory {args.reef_run_dir}", flush=True)
    return args


def add_cpu_flags() -> None:
    """Append to sys.argv, which slime parses three times by itself, what a CPU needs. Raises GpuFlagError."""
    added = cpu_flags(sys.argv[1:])
    print(f"reef-slime: CPU mode adds {' '.join(added)}", flush=True)
    sys.argv.extend(added)
