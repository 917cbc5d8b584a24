"""Full weights by disk: the trainer's ranks write them, then slime's driver (RayTrainGroup) makes the engines load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from slime_backend.import_hooks import ModuleFunction
from slime_backend.slime_hooks.engines.ray_engines import RayEngines
from slime_backend.slime_hooks.weights import publisher as publishers
from slime_backend.slime_hooks.weights.disk_reload import DiskReload
from slime_backend.slime_hooks.weights.publication_rows import log_from_driver, log_from_trainer


def _publish_in_driver(module: Any) -> None:
    def _reload_rollout_weights_from_disk(self: Any, disk_weight_dir: Path, weight_version: str) -> None:
        ray, args, manager = module.ray, self.args, self._rollout_manager
        if args.offload_rollout:
            ray.get(manager.onload_weights.remote())
        actors = ray.get(manager.get_updatable_engines_and_lock.remote())[0]
        try:
            if actors:
                figures = _publish(self, actors, disk_weight_dir, weight_version)
                if self._actor_handlers:
                    ray.get([actor.reef_note_publication.remote(figures) for actor in self._actor_handlers])
                else:  # --release-train: the trainer is gone
                    log_from_driver(self, figures)
        finally:
            if not args.update_weight_disk_keep_files:
                shutil.rmtree(disk_weight_dir, ignore_errors=True)

    module.RayTrainGroup._reload_rollout_weights_from_disk = _reload_rollout_weights_from_disk


def _publish(group: Any, actors: list[Any], directory: Path, version: str) -> dict[str, float]:
    args = group.args
    if not hasattr(group, "reef_publisher"):
        group.reef_publisher = publishers.make(args, str(int(version) - 1))
        group.reef_engines = RayEngines()
    publisher, engines = group.reef_publisher, group.reef_engines.of(actors)
    publisher.enroll(engines)
    local = args.update_weight_local_checkpoint_dir
    # The engines' working directory isn't ours.
    transport = DiskReload(local, pull=int(version), engines=engines) if local else DiskReload(str(directory.resolve()))
    figures: dict[str, float] = publisher.finish(publisher.start(transport, version))
    return figures


def _take_figures(module: Any) -> None:
    def reef_note_publication(self: Any, figures: dict[str, float]) -> None:
        self.weight_updater.update_weight_metrics.update(figures)
        log_from_trainer(self, module.is_megatron_main_rank())

    module.MegatronTrainRayActor.reef_note_publication = reef_note_publication


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.ray.actor_group", _publish_in_driver),
    ("slime.backends.megatron_utils.actor", _take_figures),
)
