"""Every symbol and flag of slime that this package names, calls or changes, in one place.

`params` are those that we pass or rely on, `fields` those that we read or write. The tests hold this against the
contract file (tests/contracts) and against the source of this package, so a symbol can neither be touched unlisted nor
move unnoticed. `missing(contract)` says what a slime with that contract lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from slime_backend.slime_hooks.contract.symbols import FLAGS_FILE, FLAGS_KEY


@dataclass(frozen=True, slots=True)
class Touch:
    """A function, a class, or a method ("Class.method") of one module; or, with `bound`, a name that the module imports
    and that a contract doesn't list: only a checkout can be asked for it."""

    symbol: str
    params: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    bound: bool = False


ACCELERATOR_METHODS: tuple[tuple[str, tuple[str, ...]], ...] = (
    *((name, ()) for name in ("is_available", "current_device", "device_count", "empty_cache")),
    *((name, ("device",)) for name in ("synchronize", "current_stream", "default_stream", "mem_get_info")),
    *((name, ("device",)) for name in ("memory_allocated", "memory_reserved")),
    *((name, ("index",)) for name in ("device", "device_name", "set_device")),
    ("stream", ("stream",)),
    ("autocast", ("*args", "**kwargs")),
)

CONNECT = ("rollout_engines", "rollout_engine_lock", "engine_gpu_counts")

TOUCHED: Mapping[str, tuple[Touch, ...]] = {
    # Entry points and versions: entry.py, compat.py
    "slime.utils.arguments": (Touch("parse_args", ("add_custom_arguments",)),),
    "slime.backends.sglang_utils.sglang_engine": (
        Touch("SGLangEngine.update_weights_from_distributed", ("names", "dtypes", "shapes", "group_name")),
        Touch("SGLangEngine.update_weights_from_tensor", ("serialized_named_tensors",)),
        Touch("SGLangEngine.continue_generation", ("self",)),
        Touch("SGLangEngine.get_weight_version", ("self",)),
        Touch("SGLangEngine._make_request", ("endpoint", "payload")),
        Touch("ServerArgs", bound=True),
        Touch("dataclasses", bound=True),
        Touch("get_server_info", bound=True),
        # engine.py
        Touch("SGLangEngine._init_normal", ("server_args_dict",)),
        Touch("SGLangEngine._register_to_router", ("server_args_dict",)),
        Touch("SGLangEngine.pause_generation", ("self",)),
        Touch("SGLangEngine.pull_weights", ("target_version",)),
        Touch("SGLangEngine.shutdown", ("self",)),
        Touch("kill_process_tree", bound=True),
        Touch("requests", bound=True),
    ),
    "slime.backends.megatron_utils.initialize": (Touch("init", ("args",)), Touch("np", bound=True)),
    # The CPU mode: cpu/
    "slime.utils.accelerator": (
        Touch("register_accelerator", ("name", "factory", "is_available", "communication_backends")),
    ),
    "slime.utils.accelerator.base": (*(Touch(f"Accelerator.{name}", params) for name, params in ACCELERATOR_METHODS),),
    "slime.backends.megatron_utils.sglang": (),
    "slime.backends.megatron_utils.arguments": (Touch("_set_default_megatron_args", ("args",)),),
    # Publications: servers.py, train_group.py, updaters.py, delta_disk.py
    "slime.ray.rollout": (
        Touch("ServerGroup.start_engines", ("port_cursors",)),
        Touch("start_rollout_servers", ("args", "pg")),
        Touch("RolloutServer", fields=("update_weights",)),
        Touch("RolloutServer.all_engines", ("self",)),
        Touch("RolloutManager.get_updatable_engines_and_lock", ("self",)),
        Touch("RolloutManager.onload_weights", ("self",)),
    ),
    "slime.ray.actor_group": (
        Touch("RayTrainGroup.async_train", ("rollout_id",)),
        Touch("RayTrainGroup._reload_rollout_weights_from_disk", ("disk_weight_dir", "weight_version")),
        Touch("ray", bound=True),
    ),
    "slime.backends.megatron_utils.update_weight.update_weight_from_distributed": (
        Touch("UpdateWeightFromDistributed.connect_rollout_engines", CONNECT),
        Touch("UpdateWeightFromDistributed.update_weights", ("self",)),
        Touch(
            "update_weights_from_distributed",  # whose place ours takes
            (
                *("group_name", "group", "weight_version", "rollout_engines", "converted_named_tensors"),
                "load_format",
            ),
        ),
        Touch(
            "connect_rollout_engines_from_distributed", ("args", "group_name", "rollout_engines", "engine_gpu_counts")
        ),
        Touch("init_process_group", bound=True),
    ),
    "slime.backends.megatron_utils.update_weight.update_weight_from_tensor": (
        Touch("UpdateWeightFromTensor.connect_rollout_engines", CONNECT),
        Touch("UpdateWeightFromTensor.update_weights", ("self",)),
    ),
    "slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta": (
        Touch("UpdateWeightFromDiskDelta.connect_rollout_engines", CONNECT[:2]),
        Touch("UpdateWeightFromDiskDelta.update_weights", ("self",)),
        Touch("UpdateWeightFromDiskDelta._reload_engines", ("self",)),
    ),
    "slime.utils.distributed_utils": (Touch("get_gloo_group", ()),),
    # Rollouts: rollouts.py, generate_calls.py, rollout_ledger.py, stale_samples.py
    "slime.utils.types": (
        Touch("Sample._apply_meta_info", ("args", "meta_info", "new_token_count", "update_terminal_info")),
        Touch("Sample.append_response_tokens", ("tokens", "log_probs", "trainable", "meta_info")),
        Touch(
            "Sample",
            fields=(
                *("group_index", "index", "prompt", "tokens", "response_length", "reward", "loss_mask"),
                *("rollout_log_probs", "remove_sample", "status", "metadata", "session_id"),
            ),
        ),
    ),
    "slime.rollout.sglang_rollout": (
        Touch("generate_and_rm_group", ("args", "group", "sampling_params", "evaluation")),
        Touch("generate_rollout", ("args", "rollout_id", "data_source", "evaluation")),
    ),
    "slime.rollout.fully_async_rollout": (
        Touch("generate_rollout_fully_async", ("args", "rollout_id", "data_buffer", "evaluation")),
    ),
    "slime.rollout.base_types": (
        Touch("call_rollout_fn", ("fn", "evaluation")),
        Touch("RolloutFnTrainOutput", fields=("samples",)),
    ),
    "slime.rollout.sample_hooks": (Touch("apply_rollout_sample_hooks", ("args", "value")),),
    "slime.utils.misc": (
        Touch("load_function", ("path",)),
        Touch("get_current_node_ip", ()),
        Touch("get_free_port", ("start_port", "consecutive")),
    ),
    "slime.observability.rollout_metrics": (
        Touch("log_rollout_data", ("rollout_id", "args", "samples", "rollout_extra_metrics", "rollout_time")),
    ),
    "slime.observability.logging_utils": (
        Touch("log", ("args", "metrics", "step_key")),
        Touch("finish_tracking", ("args",)),
    ),
    # The W&B run: wandb_run.py
    "slime.observability.wandb_utils": (
        Touch("init_wandb_primary", ("args",)),
        Touch("init_wandb_secondary", ("args", "role")),
        Touch("_init_wandb_common", ()),
        Touch("wandb", bound=True),
    ),
    "slime.observability.metric_utils": (Touch("compute_rollout_step", ("args", "rollout_id")),),
    # The trainer: importance.py, saved_weights.py
    "slime.backends.megatron_utils.loss": (
        Touch(
            "vanilla_tis_function",  # whose place ours takes
            ("args", "pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "**kwargs"),
        ),
    ),
    "slime.backends.megatron_utils.actor": (
        Touch("MegatronTrainRayActor.update_weights", ("self",)),
        Touch("MegatronTrainRayActor.init", ("args", "role")),
        Touch("MegatronTrainRayActor.train", ("rollout_id",)),
        Touch("is_megatron_main_rank", bound=True),
    ),
    "slime.backends.megatron_utils.hf_checkpoint_saver": (
        Touch("save_hf_model_to_path", ("args", "output_dir", "model")),
    ),
}

# The package of slime's weight updaters.
UPDATERS = next(module for module in TOUCHED if module.endswith("_from_disk_delta")).rpartition(".")[0]

FLAGS = (
    "--colocate",
    "--custom-rollout-log-function-path",
    "--custom-tis-function-path",
    "--debug-rollout-only",
    "--hf-checkpoint",
    "--reward-key",
    "--rollout-function-path",
    "--rollout-sample-filter-path",
    "--rollout-sample-hook-path",
    "--rollout-temperature",
    "--save-debug-rollout-data",
    "--tis-clip",
    "--update-weight-mode",
    "--update-weights-interval",
    "--release-train",
    "--use-rollout-logprobs",
    "--use-tis",
)


# Where a module was in the releases of slime before 624b824a: the tag v0.3.1, and the image of 2026-08-10.
EARLIER: Mapping[str, str] = {
    "slime.observability.logging_utils": "slime.utils.logging_utils",
    "slime.observability.metric_utils": "slime.utils.metric_utils",
}
# Only the CPU mode needs these; they came with slime e593fa0a (2026-08-20).
# Where slime has this function, it is what calls our log function; before, slime/ray/rollout.py calls it alike.
SINCE_624B824A = ("slime.observability.rollout_metrics",)
CPU_ONLY = ("slime.utils.accelerator", "slime.utils.accelerator.base")


def symbols() -> dict[str, list[str]]:
    """Module -> the top-level names that are touched in it, for `contract.make_contract`."""
    found: dict[str, list[str]] = {}
    for module, touches in TOUCHED.items():
        names = [touch.symbol.partition(".")[0] for touch in touches if not touch.bound]
        for place in filter(None, (module, EARLIER.get(module))):
            found[place] = list(dict.fromkeys([*found.get(place, ()), *names]))
    return found


def bound_names() -> dict[str, list[str]]:
    """Module -> the names of its imports that are touched."""
    found = {module: [touch.symbol for touch in touches if touch.bound] for module, touches in TOUCHED.items()}
    return {module: names for module, names in found.items() if names}


def missing(contract: Mapping[str, Any], *, cpu: bool = True) -> list[str]:
    """What of the above a slime with this contract lacks, one line each; empty where everything fits."""
    lines = []
    modules = contract["modules"]
    for module, touches in TOUCHED.items():
        entry = modules.get(module) or modules.get(EARLIER.get(module, ""))
        if entry is None:
            if module not in SINCE_624B824A and (cpu or module not in CPU_ONLY):
                lines.append(f"{module}: the module is gone")
            continue
        for touch in touches:
            if touch.bound:
                continue
            lines += _lacks(f"{entry['file']}: {touch.symbol}", touch, entry["symbols"])
    lines += [f"{FLAGS_FILE}: {flag}: the flag is gone" for flag in FLAGS if flag not in contract[FLAGS_KEY]]
    return lines


def _lacks(where: str, touch: Touch, known: Mapping[str, Any]) -> list[str]:
    name, _, method = touch.symbol.partition(".")
    found = known.get(name)
    if found is not None and method:
        found = found.get("methods", {}).get(method)
    if found is None:
        return [f"{where}: it is gone"]
    lines = []
    has = found.get("params", ())
    lost = [param for param in touch.params if param not in has]
    if lost:
        lines.append(f"{where}: takes ({', '.join(has)}) and no longer {', '.join(lost)}")
    lost = [name for name in touch.fields if name not in found.get("fields", ())]
    if lost:
        lines.append(f"{where}: has no field {', '.join(lost)}")
    return lines
