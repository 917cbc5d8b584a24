"""This module wraps the local trainer's model in DeepSpeed and runs one step of GRPO on one of its ranks.

A step is the same as `grpo_step`, to rounding: each rank runs its share of the samples, with advantages and shares of
the loss computed over all of them, and ZeRO adds the gradients up. torch's Adam is handed to DeepSpeed, whose own for
the CPU would be compiled first.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slime_backend.errors import RunError
from slime_backend.local_trainer.grpo import (
    GrpoConfig,
    Sample,
    StepBatch,
    Trained,
    make_optimizer,
    part_losses,
    step_metrics,
)
from slime_backend.local_trainer.shared_prefix import SharedPrefix
from slime_backend.tracking.columns import StepMetrics


def deepspeed(device: str) -> Any:
    """Import DeepSpeed and return the module, here only, since it takes seconds. Raises RunError without it.

    Without DS_ACCELERATOR it would look for GPUs and warn where there are none.
    """
    if device == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    try:
        import deepspeed
    except ImportError as error:
        raise RunError(f"trainer=deepspeed: {error}; run: pip install 'reef-slime[deepspeed]'") from error
    # For inference only, and a minute of compiling where it isn't switched off (deepspeed/comm/torch.py, build_shm_op).
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    # At every step: it calls torch's collectives by names that torch 2.14 would like others for.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    return deepspeed


class Applied(torch.nn.Module):
    """This module calls a function with the model, so that DeepSpeed sees a step as one forward."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, function: Callable[[Any], Tensor]) -> Tensor:
        return function(self.model)


def make_deepspeed_engine(model: Any, grpo: GrpoConfig, stage: int, device: str = "cpu") -> Any:
    """Return DeepSpeed's engine around `Applied(model)`, on every rank of the default process group."""
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": grpo.max_grad_norm,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 1 << 24,  # numbers; its own default is a buffer of 2 GB
            "stage3_param_persistence_threshold": 0,
        },
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = make_optimizer(model, grpo)
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))  # it asks for its launcher's variable
    engine, *_ = deepspeed(device).initialize(model=Applied(model), optimizer=optimizer, config=settings)
    model.eval()  # as the torch trainer's: dropout would make its log-probs differ from an engine's
    return engine


def deepspeed_step(engine: Any, groups: Sequence[Sequence[Sample]], config: GrpoConfig) -> StepMetrics:
    """Run `grpo_step` on all ranks, with all groups on each; returns the same metrics on each.

    The graphs of all micro-batches live until the one backward. A gradient that isn't finite is an error here too, but
    found after the update.
    """
    batch = StepBatch.of(groups, config)
    ranks = dist.get_world_size()
    trained = Trained()

    def loss_of(model: Any) -> Tensor:
        prefix = SharedPrefix.run(model, batch.prompts)
        parts = batch.parts(config, dist.get_rank(), ranks)
        return torch.stack(list(part_losses(model, prefix, batch, parts, config, trained))).sum()

    engine.backward(engine(loss_of) * ranks)  # ZeRO averages over ranks
    total = _add_up(trained)
    norm = 0.0
    if total.signal:
        engine.step()
        norm = float(engine.get_global_grad_norm())
    else:
        engine.optimizer.zero_grad()
    if not math.isfinite(norm) or not math.isfinite(total.loss):
        raise FloatingPointError(
            f"gradient norm {norm}, loss {total.loss}: the weights are no longer usable; lower learning_rate"
        )
    return step_metrics(batch, total, config, norm)


def _add_up(local: Trained) -> Trained:
    """Return the sums and rows of all ranks' losses."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (local.rows(), local.loss, local.signal))
    total = Trained(shared_prefix=local.shared_prefix)
    for (now, behaviour, stale, fresh), loss, signal in parts:
        total.now.append(now)
        total.behaviour.append(behaviour)
        total.stale.append(stale)
        total.fresh.append(fresh)
        total.loss += loss
        total.signal = total.signal or signal
    return total
