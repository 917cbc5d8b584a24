"""A host's own copy of the published weights, brought up to date: what slime's patched SGLang serves as /pull_weights.

The trainer writes `source/weight_v<N>` (N with six digits): a whole Hugging Face checkpoint, or a delta on version N-1.
A delta's index (model.safetensors.index.json) says so in its metadata (slime 0.3.1, update_weight_from_disk_delta.py):
`delta_encoding`, `base_version`, `compression_format` zstd, `checksum_format`. Its safetensors files hold, for each
changed tensor, the compressed change of its bytes, and in their metadata the checksum of the bytes after it:

    xor         as long as the tensor: new XOR old
    overwrite   n (u4), n positions (u4 each), n new bytes

Version 0 is the checkpoint that the engines were started with.
"""

from __future__ import annotations

import fcntl
import json
import logging
import mmap
import shutil
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from slime_backend.errors import ReefError

log = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
STATE = ".reef_slime"  # a directory next to the weights: which version they are, and the lock

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CheckpointError(ReefError, RuntimeError):
    """The published weights can't be brought here; the message names the file."""


def pull(local: str, *, base: str, source: str, target: int) -> None:
    """Bring the checkpoint in `local` to version `target`. Engines of one host may call this at once.

    Raises CheckpointError for a version that isn't there, doesn't fit or has a wrong checksum; `local` then counts as
    empty, and the next call begins from a whole checkpoint.
    """
    directory, versions = Path(local), Path(source)
    with _locked(directory):
        have = _read_state(directory)
        start, whole = _start(versions, Path(base), have, target)
        if whole is not None:
            _copy(whole, directory, start)
        for version in range(start + 1, target + 1):
            _apply(_directory(versions, version), directory, version)


def _start(versions: Path, base: Path, have: int | None, target: int) -> tuple[int, Path | None]:
    """The version to begin from, and the whole checkpoint to copy for it; None where `local` has it already."""
    for version in range(target, -1, -1):
        if version == have:
            return version, None
        if version == 0:
            return 0, base
        if _delta_metadata(_directory(versions, version)) is None:
            return version, _directory(versions, version)
    raise CheckpointError(f"{versions}: there is no version {target}")


def _directory(versions: Path, version: int) -> Path:
    directory = versions / f"weight_v{version:06d}"
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is missing: it was not published, or this host doesn't see the directory")
    return directory


def _delta_metadata(directory: Path) -> Mapping[str, Any] | None:
    """None for a whole checkpoint."""
    index = directory / INDEX
    if not index.is_file():
        return None
    metadata = json.loads(index.read_text()).get("metadata", {})
    return metadata if "delta_encoding" in metadata else None


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    state = directory / STATE
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # released with the file, also when this process is killed
        yield


def _read_state(directory: Path) -> int | None:
    try:
        return int((directory / STATE / "version").read_text())
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def _changing(directory: Path, version: int) -> Iterator[None]:
    """While its files change the directory is of no version; whoever is interrupted in it leaves it so."""
    state = directory / STATE / "version"
    state.unlink(missing_ok=True)
    yield
    state.write_text(str(version))


def _copy(whole: Path, directory: Path, version: int) -> None:
    log.info("local checkpoint %s: version %d, copied from %s", directory, version, whole)
    files = [path for path in whole.iterdir() if path.is_file()]
    with _changing(directory, version):
        for path in directory.iterdir():
            if path.is_file():
                path.unlink()
        for path in files:
            shutil.copyfile(path, directory / path.name)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a tensor's bytes lie."""

    file: Path
    start: int
    end: int


def _tensors(directory: Path) -> tuple[dict[str, _Place], dict[str, str]]:
    """Every tensor's place in the safetensors files of a directory, and what their metadata says of each."""
    places: dict[str, _Place] = {}
    notes: dict[str, str] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            header = json.loads(opened.read(length))
        notes |= header.pop("__metadata__", {})
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            places[name] = _Place(file, 8 + length + start, 8 + length + end)
    return places, notes


def _apply(delta: Path, directory: Path, version: int) -> None:
    """Apply one delta to the files in `directory`, in place."""
    metadata = _delta_metadata(delta)
    if metadata is None:
        raise CheckpointError(f"{delta} is a whole checkpoint")
    if int(metadata["base_version"]) != version - 1:
        raise CheckpointError(f"{delta} is a delta on version {int(metadata['base_version'])}, not on {version - 1}")
    if metadata["compression_format"] != "zstd":
        raise CheckpointError(f"{delta} is compressed with {metadata['compression_format']}; only zstd is known")
    change = _CHANGES.get(metadata["delta_encoding"])
    digest = _DIGESTS.get(metadata["checksum_format"])
    if change is None or digest is None:
        raise CheckpointError(
            f"{delta}: encoding {metadata['delta_encoding']!r} with checksum {metadata['checksum_format']!r} is unknown"
        )
    import zstandard

    changes, checksums = _tensors(delta)
    places, _ = _tensors(directory)
    unpack = zstandard.ZstdDecompressor().decompress
    with _changing(directory, version), ExitStack() as stack:
        opened = _Files(stack)
        for name, place in changes.items():
            if name not in places:
                raise CheckpointError(f"{delta} changes {name}, which {directory} doesn't hold")
            where = places[name]
            tensor = opened.view(where, write=True)
            change(tensor, np.frombuffer(unpack(opened.view(place).tobytes()), np.uint8))
            if digest(tensor) != checksums.get(name):
                raise CheckpointError(f"{delta}: {name} in {where.file} has a wrong checksum after the change")
            del tensor  # the file can't be closed under a view of it


class _Files:
    """Files mapped into memory while a delta is applied."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._maps: dict[Path, mmap.mmap] = {}

    def view(self, place: _Place, *, write: bool = False) -> Bytes:
        if place.file not in self._maps:
            file = self._stack.enter_context(place.file.open("r+b" if write else "rb"))
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            self._maps[place.file] = mmap.mmap(file.fileno(), 0, access=access)
        return np.frombuffer(self._maps[place.file], np.uint8, place.end - place.start, place.start)


def _xor(tensor: Bytes, change: Bytes) -> None:
    np.bitwise_xor(tensor, change, out=tensor)


def _overwrite(tensor: Bytes, change: Bytes) -> None:
    count = int(change[:4].view("<u4")[0])
    positions = change[4 : 4 + 4 * count].view("<u4")
    tensor[positions] = change[4 + 4 * count :]


_CHANGES: Mapping[str, Callable[[Bytes, Bytes], None]] = {"xor": _xor, "overwrite": _overwrite}


def _xxh3(data: Bytes) -> str:
    import xxhash

    return str(xxhash.xxh3_128_hexdigest(data.data))


def _blake3(data: Bytes) -> str:
    import blake3

    return str(blake3.blake3(data.data).hexdigest())


def _adler32(data: Bytes) -> str:
    return f"{zlib.adler32(data.data):08x}"


_DIGESTS: Mapping[str, Callable[[Bytes], str]] = {"xxh3-128": _xxh3, "blake3": _blake3, "adler32": _adler32}
