"""The host's own copy: whole versions and deltas, as slime's trainer writes them (format in local_checkpoint.py)."""

from __future__ import annotations

import json
import struct
import threading
import zlib

import numpy as np
import pytest

from slime_backend.slime_hooks.engines.local_checkpoint import CheckpointError, pull

zstandard = pytest.importorskip("zstandard", reason="deltas are zstd-compressed")


def write_safetensors(path, tensors, notes=None):
    """`tensors`: name -> bytes."""
    header, offset = {}, 0
    for name, data in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    if notes:
        header["__metadata__"] = notes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensors.values()))


def whole(directory, tensors):
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    write_safetensors(directory / "model.safetensors", tensors)


def change(old, new, encoding):
    old, new = np.frombuffer(old, np.uint8), np.frombuffer(new, np.uint8)
    if encoding == "xor":
        return (old ^ new).tobytes()
    where = np.flatnonzero(old != new).astype("<u4")
    return struct.pack("<I", len(where)) + where.tobytes() + new[where].tobytes()


def delta(root, version, old, new, encoding="xor", base=None):
    directory = root / f"weight_v{version:06d}"
    directory.mkdir(parents=True)
    changed = {n: d for n, d in new.items() if old[n] != d}
    packed = {n: zstandard.ZstdCompressor().compress(change(old[n], d, encoding)) for n, d in changed.items()}
    write_safetensors(
        directory / "model-00000-of-00001.safetensors",
        packed,
        {n: f"{zlib.adler32(d):08x}" for n, d in changed.items()},
    )
    index = {
        "metadata": {
            "version": f"{version:06d}",
            "base_version": f"{version - 1 if base is None else base:06d}",
            "delta_encoding": encoding,
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
    }
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def tensors_in(directory):
    found = {}
    for file in directory.glob("*.safetensors"):
        data = file.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        for name, entry in json.loads(data[8 : 8 + length]).items():
            start, end = entry["data_offsets"]
            found[name] = data[8 + length + start : 8 + length + end]
    return found


V0 = {"a": bytes(range(64)), "b": b"\0" * 32, "c": b"same"}
V1 = {**V0, "a": bytes(range(1, 65))}
V2 = {**V1, "b": b"\0" * 31 + b"\7", "a": bytes(64)}


@pytest.fixture
def published(tmp_path):
    whole(tmp_path / "base", V0)
    (tmp_path / "source").mkdir()
    return tmp_path


def bring(root, target):
    pull(str(root / "local"), base=str(root / "base"), source=str(root / "source"), target=target)


def test_version_0_is_the_checkpoint_that_the_engines_started_with(published):
    bring(published, 0)
    assert tensors_in(published / "local") == V0
    assert (published / "local" / "config.json").exists()


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_deltas_are_applied_in_order(published, encoding):
    delta(published / "source", 1, V0, V1, encoding)
    delta(published / "source", 2, V1, V2, encoding)
    bring(published, 1)
    assert tensors_in(published / "local") == V1
    bring(published, 2)
    assert tensors_in(published / "local") == V2
    bring(published, 2)  # again: nothing left to do
    assert tensors_in(published / "local") == V2


def test_a_host_that_comes_late_catches_up_from_the_base(published):
    delta(published / "source", 1, V0, V1)
    delta(published / "source", 2, V1, V2)
    bring(published, 2)
    assert tensors_in(published / "local") == V2


def test_a_whole_version_replaces_what_is_there(published):
    bring(published, 0)
    (published / "local" / "old-shard.safetensors").write_bytes(b"x")
    whole(published / "source" / "weight_v000001", V1)
    bring(published, 1)
    assert tensors_in(published / "local") == V1
    delta(published / "source", 2, V1, V2)
    bring(published, 2)
    assert tensors_in(published / "local") == V2


def test_a_wrong_checksum_is_refused_and_the_next_pull_starts_over(published):
    delta(published / "source", 1, V0, V1)
    wrong = delta(published / "source", 2, {**V1, "a": bytes([9] * 64)}, V2)  # made on other weights
    with pytest.raises(CheckpointError, match=r"a in .* has a wrong checksum"):
        bring(published, 2)
    for file in wrong.iterdir():
        file.unlink()
    wrong.rmdir()
    delta(published / "source", 2, V1, V2)
    bring(published, 2)
    assert tensors_in(published / "local") == V2


def test_a_delta_on_another_version_is_refused(published):
    delta(published / "source", 1, V0, V1, base=7)
    with pytest.raises(CheckpointError, match="on version 7, not on 0"):
        bring(published, 1)


def test_a_missing_version_is_named(published):
    with pytest.raises(CheckpointError, match="weight_v000003 is missing"):
        bring(published, 3)


def test_engines_of_one_host_may_pull_at_once(published):
    delta(published / "source", 1, V0, V1)
    delta(published / "source", 2, V1, V2)
    threads = [threading.Thread(target=bring, args=(published, 2)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tensors_in(published / "local") == V2
