"""slime's delta updates by disk (UpdateWeightFromDiskDelta), put behind our transaction: the ranks write the delta,
each host brings its local checkpoint up to date, and each engine reads that."""

from __future__ import annotations

import functools
from typing import Any

from slime_backend.import_hooks import ModuleFunction
from slime_backend.slime_hooks.rollouts.stale_samples import BASE_VERSION
from slime_backend.slime_hooks.weights.disk_reload import DiskReload
from slime_backend.slime_hooks.weights.errors import PublicationFailed
from slime_backend.slime_hooks.weights.rank_link import link_of
from slime_backend.slime_hooks.weights.ranks import publish_together


def _delta(module: Any) -> None:
    updater_class = module.UpdateWeightFromDiskDelta
    connect, update = updater_class.connect_rollout_engines, updater_class.update_weights

    @functools.wraps(connect)
    def connect_rollout_engines(self: Any, rollout_engines: Any, rollout_engine_lock: Any, **rest: Any) -> None:
        link_of(self).actors = list(rollout_engines)
        connect(self, rollout_engines, rollout_engine_lock, **rest)

    @functools.wraps(update)
    def update_weights(self: Any) -> None:
        is_baseline = not self._baseline_captured
        update(self)
        if is_baseline:
            _serve_base(self)

    def _reload_engines(self: Any) -> None:
        link = link_of(self)
        if self._post_write_hook is not None:
            self._post_write_hook(self.args, self._version_dir, list(self.rollout_engines))
        link.ranks.gather(None)  # each rank's files are there before an engine pulls them
        leader = link.leader(
            str(self.weight_version),
            BASE_VERSION,
            lambda engines: DiskReload(
                self.args.update_weight_local_checkpoint_dir, pull=self.weight_version, engines=engines
            ),
        )
        self.update_weight_metrics.update(publish_together(link.ranks, leader))

    updater_class.connect_rollout_engines = connect_rollout_engines
    updater_class.update_weights = update_weights
    updater_class._reload_engines = _reload_engines


def _serve_base(updater: Any) -> None:
    """Delta publishes nothing the first time: the engines serve the checkpoint that they were started with.

    Raises PublicationFailed for an engine that serves anything else: a delta on top of it would be wrong.
    """
    link = link_of(updater)
    problem = ""
    if (publisher := link.leads(BASE_VERSION)) is not None:
        try:
            publisher.enroll(link.engines.of(link.actors))
            others = [m.name for m in publisher.members() if m.status != "confirmed"]
            if others:
                raise PublicationFailed(
                    f"delta updates start from --hf-checkpoint, but {', '.join(others)} serve other weights than "
                    f"those labelled {BASE_VERSION!r}; restart these engines"
                )
            publisher.settle_routing()
        except PublicationFailed as error:
            problem = str(error)
    if problem := link.ranks.share(problem):
        raise PublicationFailed(problem)


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta", _delta),
)
