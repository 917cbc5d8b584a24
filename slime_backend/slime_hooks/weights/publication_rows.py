"""Each publication is a row of slime's tracker as soon as it is over, under the step of the training that follows it.

slime logs what its updater measured with its next training step. The last publication has none, and with
`--release-train` the process that would log it is gone.
"""

from __future__ import annotations

import functools
from typing import Any

from slime_backend.import_hooks import ModuleFunction
from slime_backend.slime_hooks.weights.publisher import FAMILY

STEP = "rollout/step"


def log_publication(args: Any, figures: dict[str, float], rollout_id: int) -> None:
    """Log `figures` under the step of `rollout_id`; W&B gets the row now, not with the next one."""
    from slime.observability import logging_utils
    from slime.observability.metric_utils import compute_rollout_step

    logging_utils.log(args, {**figures, STEP: compute_rollout_step(args, rollout_id)}, step_key=STEP)


def log_from_trainer(trainer: Any, is_main_rank: bool) -> None:
    """Take the figures of a publication out of slime's updater; the rank that logs for the trainer logs them."""
    metrics = trainer.weight_updater.update_weight_metrics
    figures = {name: metrics.pop(name) for name in list(metrics) if name.startswith(f"{FAMILY}/")}
    if figures and is_main_rank:
        log_publication(trainer.args, figures, trainer.reef_next_rollout)


def log_from_driver(group: Any, figures: dict[str, float]) -> None:
    """Log the publication of a trainer that was released."""
    known = getattr(group, "reef_next_rollout", None)
    log_publication(group.args, figures, (group.args.start_rollout_id or 0) if known is None else known)


def _in_trainer(module: Any) -> None:
    actor = module.MegatronTrainRayActor
    init, train, update = actor.init, actor.train, actor.update_weights

    @functools.wraps(init)
    def init_and_note(self: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = init(self, *args, **kwargs)
        # slime's driver takes what was loaded only where the job doesn't say where to start.
        given = self.args.start_rollout_id
        self.reef_next_rollout = loaded if given is None else given
        return loaded

    @functools.wraps(train)
    def train_and_note(self: Any, rollout_id: int, *args: Any, **kwargs: Any) -> Any:
        result = train(self, rollout_id, *args, **kwargs)
        self.reef_next_rollout = rollout_id + 1
        return result

    @functools.wraps(update)
    def update_weights(self: Any) -> Any:
        result = update(self)
        if not (self.args.debug_train_only or self.args.debug_rollout_only):
            log_from_trainer(self, module.is_megatron_main_rank())
        return result

    actor.init, actor.train, actor.update_weights = init_and_note, train_and_note, update_weights


def _in_driver(module: Any) -> None:
    async_train = module.RayTrainGroup.async_train

    @functools.wraps(async_train)
    def async_train_and_note(self: Any, rollout_id: int, *args: Any, **kwargs: Any) -> Any:
        self.reef_next_rollout = rollout_id + 1
        return async_train(self, rollout_id, *args, **kwargs)

    module.RayTrainGroup.async_train = async_train_and_note


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.backends.megatron_utils.actor", _in_trainer),
    ("slime.ray.actor_group", _in_driver),
)
