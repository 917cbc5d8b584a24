"""Reads what W&B wrote offline: there is no reader in the package since 0.31."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def history(path: Path) -> list[dict[str, Any]]:
    """The rows of a .wandb file in their order, each with its `_step`."""
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in read_wandb(path)
        if record.WhichOneof("record_type") == "history"
    ]


def step_metrics(path: Path) -> dict[str, str]:
    """Metric or pattern -> its step metric, as the file defines them."""
    defined = [r.metric for r in read_wandb(path) if r.WhichOneof("record_type") == "metric"]
    return {metric.name or metric.glob_name: metric.step_metric for metric in defined}


def has_ended(path: Path) -> bool:
    """Whether the run was closed."""
    return any(record.WhichOneof("record_type") == "exit" for record in read_wandb(path))


def read_wandb(path: Path) -> list:
    """Every record of a .wandb file, or of the one below a directory: a LevelDB log behind 7 bytes, in blocks of
    32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data = (path if path.is_file() else next(path.rglob("*.wandb"))).read_bytes()
    position, whole, records = 7, b"", []
    while position + 7 <= len(data):
        room = 32768 - position % 32768
        if room < 7:
            position += room
            continue
        length, kind = int.from_bytes(data[position + 4 : position + 6], "little"), data[position + 6]
        whole += data[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # whole, or the last part
            records.append(wandb_internal_pb2.Record.FromString(whole))
            whole = b""
    return records
