"""`python -m slime_backend.local_trainer.deepspeed_rank SETTINGS` runs a trainer rank other than the controller."""

from __future__ import annotations

import sys

import torch.distributed as dist

from slime_backend.errors import RunError
from slime_backend.local_trainer.deepspeed_trainer import HOST, RankSettings, TrainerRank


def main() -> None:
    settings = RankSettings.model_validate_json(sys.argv[1])
    store = dist.TCPStore(HOST, settings.port, settings.ranks, is_master=False)
    try:
        TrainerRank(settings, store).follow()
    except RunError as error:
        sys.exit(str(error))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
