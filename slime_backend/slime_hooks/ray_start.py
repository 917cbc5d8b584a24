"""Starts Ray, or joins the running cluster, so that every worker is prepared by `worker_setup.setup`."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from slime_backend import cpu
from slime_backend.cpu import environment, loopback
from slime_backend.errors import ReefError
from slime_backend.slime_hooks import patches, worker_setup
from slime_backend.slime_hooks.contract import checkout

# Read by every worker; a cluster's workers don't inherit the driver's environment.
PASSED_ON = (checkout.VARIABLE, cpu.VARIABLE, patches.VARIABLE, loopback.PORT_VARIABLE)
# CPU mode: enough for the batches of a tiny model; the default is a third of all memory.
OBJECT_STORE_BYTES = 256 * 2**20
# CPU mode: the rollout manager, slime's lock and its helpers next to one logical core per trainer and engine.
EXTRA_CPUS = 4


class RayStartedTooEarlyError(ReefError, RuntimeError):
    """Ray runs already in this process, without our hook."""


def start(args: Any) -> None:
    """Call `ray.init`. `args`: slime's parsed arguments, for the number of (logical) GPUs of the CPU mode.

    Joins the cluster of RAY_ADDRESS or of `ray job submit`, as slime's own first Ray call would.
    """
    import ray

    if ray.is_initialized():
        raise RayStartedTooEarlyError(
            "Ray was initialised before reef-slime could install its worker hook; remove that ray.init(), or pass it "
            f"runtime_env={{'worker_process_setup_hook': {worker_setup.HOOK!r}}} and call slime's train() yourself"
        )
    options: dict[str, Any] = {"runtime_env": runtime_env()}
    if cpu.requested() and not os.environ.get("RAY_ADDRESS"):
        options |= local_cpu_options(args)
    with environment.unhidden_gpus() if cpu.requested() else contextlib.nullcontext():
        ray.init(**options)


def runtime_env() -> dict[str, Any]:
    """Our part of the job's runtime environment. Ray refuses a variable that `ray job submit` has given already."""
    job = json.loads(os.environ.get("RAY_JOB_CONFIG_JSON_ENV_VAR") or "{}")
    given = (job.get("runtime_env") or {}).get("env_vars") or {}
    passed = {name: os.environ[name] for name in PASSED_ON if os.environ.get(name) and name not in given}
    return {"worker_process_setup_hook": worker_setup.HOOK, **({"env_vars": passed} if passed else {})}


def local_cpu_options(args: Any) -> dict[str, Any]:
    """A Ray of our own on the loopback, with as many logical GPUs as the job places trainers and engines on."""
    trainers = args.actor_num_nodes * args.actor_num_gpus_per_node
    gpus = trainers + (args.rollout_num_gpus or 0)
    return {
        "address": "local",
        "num_gpus": gpus,
        "num_cpus": gpus + EXTRA_CPUS,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
        "_node_ip_address": "127.0.0.1",
        # One idle worker per core at the start: slime's actors have environments of their own and can't use them.
        "_system_config": {"prestart_worker_first_driver": False},
    }
