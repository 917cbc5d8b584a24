"""What both entry points do: slime's own loop and arguments, with ours, in processes that are prepared for it."""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from slime_backend import cpu
from slime_backend.arguments import add_reef_arguments, configure_sglang_runtime
from slime_backend.cpu.flags import cpu_flags
from slime_backend.engine_process import plugin_entry
from slime_backend.errors import ReefError
from slime_backend.planner.slime_args import WAITED_FOR
from slime_backend.slime_hooks import ray_start, refusals, summary, wandb_run, worker_setup
from slime_backend.slime_hooks.contract import checkout, fit
from slime_backend.slime_hooks.rollouts.flags import set_rollout_functions

FAILED, WRONG_USE = 1, 2
SHARING_FLAG = "--disjoint-prefix-sharing"


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
    except ReefError as error:
        print(f"reef-slime: {error}", file=sys.stderr)
        sys.exit(WRONG_USE)

    def train(args: Any) -> None:
        loop.train(args)
        finish()

    train_to_the_end(train, args)


def at_end(args: Any) -> Callable[[], None]:
    """Return what is to be done after slime's loop: where samples come from a gateway, the last of them are
    acknowledged. A rollout function's module has that as `at_end(args)`."""
    if not getattr(args, "reef_gateway", None):
        return lambda: None
    module = importlib.import_module(args.reef_rollout_function_path.rpartition(".")[0])
    make = getattr(module, "at_end", None)
    return make(args) if make is not None else lambda: None


def train_to_the_end(train: Callable[[Any], Any], args: Any) -> None:
    """Run slime's loop; whether it ends well or not, its last lines say what there is and where.

    A job that fails ends this process with code 1, its traceback before the summary.
    """
    try:
        train(args)
    except Exception as error:
        traceback.print_exc()
        sys.stderr.flush()
        _end(args, failed=_in_one_line(error))
        sys.exit(FAILED)
    except BaseException as error:  # Ctrl-C, or sys.exit by whatever runs inside
        _end(args, failed=type(error).__name__)
        raise
    _end(args)


def _end(args: Any, failed: str = "") -> None:
    if failed:
        wandb_run.finish(args)
    summary.print_summary(args, wandb_run.directory(), failed=failed)


def _in_one_line(error: Exception) -> str:
    """The error without the traceback that Ray puts into its text."""
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[-1] if lines else 'its traceback stands above'}"


def parse(*, asynchronous: bool) -> Any:
    """slime's arguments and ours, with the pause mode, the radix cache and our rollout functions written into them.

    Raises PolicyError.
    """
    from slime.utils.arguments import parse_args

    args = parse_args(add_custom_arguments=add_reef_arguments)
    share_where_nothing_is_in_flight(args, sys.argv[1:], asynchronous=asynchronous)
    policy = configure_sglang_runtime(args)
    refusals.check(args, policy)
    if reason := getattr(args, "reef_sharing_reason", None):
        print(f"reef-slime: --disjoint-prefix-sharing={args.disjoint_prefix_sharing}: {reason}", flush=True)
    print(f"reef-slime: {policy}", flush=True)
    set_rollout_functions(args, asynchronous=asynchronous)
    print(f"reef-slime: run directory {args.reef_run_dir}", flush=True)
    return args


def share_where_nothing_is_in_flight(args: Any, words: Sequence[str], *, asynchronous: bool) -> None:
    """Where nobody has chosen and slime's loop waits for its rollouts before it publishes, share prefixes and flush
    them, as slime alone does: `off` would compute the prompt of each of a group's samples again and buy nothing.

    Nothing is believed: the pause retracts, so a request that is in flight all the same is computed again, and the
    flush is verified by the scheduler's own counts.
    """
    chosen = any(word.partition("=")[0] == SHARING_FLAG for word in words)
    waited_for = getattr(args, "rollout_function_path", None) in (None, WAITED_FOR)
    if asynchronous or chosen or not waited_for or getattr(args, "colocate", False):
        return
    args.disjoint_prefix_sharing = "retract"
    args.reef_sharing_reason = (
        "not chosen, and in this loop no request is in flight when weights are published, so prefixes are shared and "
        f"flushed as by slime alone ({SHARING_FLAG}=off keeps the cache off)"
    )


def add_cpu_flags() -> None:
    """Append to sys.argv, which slime parses three times by itself, what a CPU needs. Raises GpuFlagError."""
    added = cpu_flags(sys.argv[1:])
    print(f"reef-slime: CPU mode adds {' '.join(added)}", flush=True)
    sys.argv.extend(added)
