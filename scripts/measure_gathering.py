"""Measure the memory of publishing from ZeRO-3: `python scripts/measure_gathering.py [BUCKET_MIB] [HIDDEN]`.

Makes a model (hidden size 1024, some 200 MiB), partitions it over two processes, and publishes it in buckets of 16 MiB
in each of the ways of slime_backend/bench/gathering.py, each in fresh processes. Prints the peak above what was there
before on both ranks, in MiB and in buckets. Needs DeepSpeed; nothing is kept.
"""

from __future__ import annotations

import os
import sys
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from slime_backend.bench.gathering import HOWS, How, measure
from slime_backend.local_trainer.deepspeed_step import make_deepspeed_engine
from slime_backend.local_trainer.grpo import GrpoConfig
from slime_backend.simulation.models import load_model, make_tiny_model

RANKS = 2


def rank_main(rank: int, folder: str, model: str, how: How, bucket_bytes: int) -> None:
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = str(rank)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.FileStore(f"{folder}/store-{how}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    loaded = load_model(model)
    engine = make_deepspeed_engine(loaded, GrpoConfig(), stage=3)
    found = measure(engine, loaded, Path(model), how, bucket_bytes, rank, Path(folder) / how)
    parts: list[Any] = [None] * RANKS
    dist.all_gather_object(parts, found)
    if rank == 0:
        mib, bucket = 2.0**20, parts[0]["bucket"]
        if how == HOWS[0]:
            print(
                f"model {parts[0]['whole'] / mib:.1f} MiB, largest bucket {bucket / mib:.2f} MiB, peaks above before:"
            )
        cells = [
            f"rank {i} {kind} {part[kind] / mib:7.2f} MiB {part[kind] / bucket:5.2f} buckets"
            for i, part in enumerate(parts)
            for kind in ("allocated", "resident")
        ]
        print(f"{how:<11}" + "   ".join(cells), flush=True)
    dist.destroy_process_group()


def main() -> None:
    bucket_bytes = int(float(sys.argv[1]) * 2**20) if len(sys.argv) > 1 else 16 << 20
    hidden = int(sys.argv[2]) if len(sys.argv) > 2 else 1024
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_model(Path(folder) / "model", hidden_size=hidden, layers=6)
        for how in HOWS:
            mp.spawn(rank_main, (folder, str(model), how, bucket_bytes), nprocs=RANKS)


if __name__ == "__main__":
    main()
