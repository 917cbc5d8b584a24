"""Reads what W&B wrote offline: there is no reader in the package since 0.31."""

from __future__ import annotations

from pathlib import Path


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
