"""Ranks of a DeepSpeed engine over a tiny model, and what the source publishes from them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import publish as publish_all
from slime_backend.transports import DiskTransport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.weight_sources.deepspeed_zero import DeepSpeedZeroSource
from tests.helpers import DEADLINES, body, prompt
from tests.weight_sources.gathering import measure


def make_engine(checkpoint: str, stage: int, dtype: str = "float32") -> Any:
    from slime_backend.local_trainer.deepspeed_step import deepspeed, make_optimizer
    from slime_backend.local_trainer.grpo import GrpoConfig

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype))
    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": dtype == "bfloat16"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    optimizer = make_optimizer(model, GrpoConfig(learning_rate=1e-2))
    return deepspeed("cpu").initialize(model=model, optimizer=optimizer, config=settings)[0]


def train(engine: Any, steps: int) -> None:
    """The same batch on all ranks, so that any number of them does the same step."""
    for step in range(steps):
        ids = torch.arange(2 + step, 50 + step).unsqueeze(0)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()


def publish(rank: int, folder: Path, *, checkpoint: str, stage: int, dtype: str = "float32") -> dict[str, Any]:
    """Two steps, a publication after each; saves both, and the fp32 master of the last as DeepSpeed itself gives it."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = make_engine(checkpoint, stage, dtype)
    source = DeepSpeedZeroSource(engine, Path(checkpoint), bucket_bytes=1 << 16)
    names = []
    for version in ("v1", "v2"):
        train(engine, 1)
        if rank:
            source.follow()
            continue
        with source.leading():
            names = [name for name, _ in source.named_tensors()]
            source.save(folder / version)
    # A collective of all ranks.
    master = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    if rank == 0:
        torch.save(master, folder / "master.pt")
    return {"names": names, "buckets": len(list((folder / "v2").glob("*.safetensors"))) if rank == 0 else 0}


def memory(rank: int, folder: Path, *, checkpoint: str, how: Any, bucket_bytes: int) -> dict[str, int]:
    engine = make_engine(checkpoint, 3)
    return measure(engine, engine.module, Path(checkpoint), how, bucket_bytes, rank, folder)


def publish_to_engine(
    rank: int, folder: Path, *, checkpoint: str, url: str, transport: str, version: str, left_out: int | None
) -> dict[str, Any]:
    """A step in ZeRO-3 and one publication to a real engine that has the weights of `checkpoint`; then an answer of it.

    `left_out`: the number of a bucket that isn't sent. Saves the weights as DeepSpeed itself gathers them."""
    from deepspeed.utils import safe_get_full_fp32_param

    engine = make_engine(checkpoint, 3)
    train(engine, 1)
    master = {name: safe_get_full_fp32_param(p) for name, p in engine.module.named_parameters()}
    source = DeepSpeedZeroSource(engine, Path(checkpoint), bucket_bytes=1 << 16)
    if left_out is not None:
        del source._buckets[left_out]
    if rank:
        source.follow()
        return {}
    torch.save(master, folder / "master.pt")
    with source.leading():
        return asyncio.run(asyncio.wait_for(_published(source, url, transport, version, folder), 120))


async def _published(
    source: DeepSpeedZeroSource, url: str, transport: str, version: str, folder: Path
) -> dict[str, Any]:
    mover = DiskTransport(source, folder) if transport == "disk" else DistributedTransport(source, bucket_bytes=1 << 16)
    async with EngineClient(url, name="engine0", deadlines=DEADLINES) as client:
        fleet = Fleet(decide("disjoint", "retract"), await client.weight_version())
        await admit(fleet, client)
        try:
            report = await publish_all(fleet, mover, version)
        finally:
            await mover.close()
        ids = prompt(100)
        return {"unconfirmed": report.unconfirmed, "ids": ids, "answer": await client.generate(body(ids))}
