"""`--reef-save-weights`: every published version as a Hugging Face checkpoint in `<run dir>/weights/<version>`, which
is what `reef-slime audit` recomputes rollouts from; with `--reef-keep-versions N` the last N. `weights/default` is the
checkpoint that the engines started with.
"""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from slime_backend.import_hooks import ModuleFunction
from slime_backend.slime_hooks.rollouts.stale_samples import BASE_VERSION


def save_published(module: Any) -> None:
    """slime.backends.megatron_utils.actor: save what was published, on all ranks, as slime's own export needs."""
    original = module.MegatronTrainRayActor.update_weights

    @functools.wraps(original)
    def update_weights(self: Any) -> Any:
        if not getattr(self.args, "reef_save_weights", False):
            return original(self)
        import torch.distributed as dist
        from slime.backends.megatron_utils.hf_checkpoint_saver import save_hf_model_to_path

        before = self.weight_updater.weight_version
        result = original(self)
        version = self.weight_updater.weight_version
        weights = Path(self.args.reef_run_dir) / "weights"
        if dist.get_rank() == 0:
            _link_base(weights, Path(self.args.hf_checkpoint))
        if version != before:
            save_hf_model_to_path(self.args, weights / str(version), self.model)
            if dist.get_rank() == 0:
                remove_old(weights, int(version), getattr(self.args, "reef_keep_versions", None))
        return result

    module.MegatronTrainRayActor.update_weights = update_weights


def remove_old(weights: Path, version: int, keep: int | None) -> list[str]:
    """Remove the versions before the last `keep`; their names. None: nothing goes."""
    if keep is None:
        return []
    numbers = sorted(int(p.name) for p in weights.iterdir() if p.name.isdecimal())
    gone = [str(number) for number in numbers if number <= version - keep]
    for name in gone:
        # The config first: without it the directory is no version for an audit, also after a kill half-way.
        (weights / name / "config.json").unlink(missing_ok=True)
        shutil.rmtree(weights / name)
    return gone


def _link_base(weights: Path, checkpoint: Path) -> None:
    weights.mkdir(parents=True, exist_ok=True)
    base = weights / BASE_VERSION
    if not base.is_symlink():
        base.symlink_to(checkpoint.resolve(), target_is_directory=True)


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (("slime.backends.megatron_utils.actor", save_published),)
