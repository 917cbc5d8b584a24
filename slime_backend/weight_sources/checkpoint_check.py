"""Whether a checkpoint is complete, and whether an engine that serves another one can load it.

SGLang keeps the old values of a tensor that a checkpoint lacks and answers success; a file that is cut off, or a name
that its model doesn't know, ends its scheduler (0.5.23, model_loader/loader.py). So everything that the headers show is
compared before any engine is paused. Reads headers only, a few milliseconds for hundreds of files; imports no torch.

    found = read_checkpoint(Path("runs/x/weights/v1"))       # complete in itself
    check_same_model(found, read_checkpoint(served))         # the names, shapes and kinds of numbers that are served
    check_finite(Path("runs/x/weights/v1"))                  # reads every byte
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from slime_backend.errors import RunError

INDEX = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; safetensors' own limit
READ_BYTES = 1 << 24  # at once, where all of a file is read

ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 1),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 2),
    **dict.fromkeys(("I32", "U32", "F32"), 4),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 8),
}
# An engine converts between these while it loads; any other kind of number has scales, or is something else.
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
# All bits of the exponent are set in infinities and NaN: (type to read the bytes as, those bits).
EXPONENTS: Mapping[str, tuple[str, int]] = {
    "F64": ("<u8", 0x7FF0_0000_0000_0000),
    "F32": ("<u4", 0x7F80_0000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
    "F8_E5M2": ("<u1", 0x7C),
    "F8_E4M3": ("<u1", 0x7F),  # the one NaN; this format has no infinities
}
# Keys of config.json that decide what an engine computes. It reads them at its start only, so another value in a
# checkpoint that is loaded later has no effect there, and the weights were made for it.
ARCHITECTURE = (
    "model_type",
    "architectures",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_act",
    "rms_norm_eps",
    "rope_theta",
    "sliding_window",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "quantization_config",
    "text_config",
    "vision_config",
)
# Buffers that some programs save with a model; engines compute them, or leave them alone.
_BUFFERS = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)|position_ids|attn\.masked_bias)$")
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.safetensors")
_LAYER = re.compile(r"(^|\.)layers\.(\d+)\.")


class CheckpointUnfit(RunError):
    """A checkpoint, or a source of weights, can't be published; one line with the file, the tensor and the way out."""


@dataclass(frozen=True, slots=True)
class TensorHeader:
    """What a file's header states about one tensor: its dtype as safetensors writes it, and its bytes in `file`."""

    shape: tuple[int, ...]
    dtype: str
    file: Path | None = None  # None in memory
    start: int = 0
    end: int = 0

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEM_BYTES.get(self.dtype, 8)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The tensors and the config of a model. `where` names it in messages."""

    where: str
    tensors: Mapping[str, TensorHeader]
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(header.nbytes for header in self.tensors.values())

    def of(self, name: str) -> str:
        """Where the tensor `name` lies, for a message."""
        file = self.tensors[name].file
        return f"{file}: {name}" if file is not None else f"{self.where}: {name}"


def read_checkpoint(directory: Path) -> Checkpoint:
    """The headers of a complete Hugging Face checkpoint.

    Raises CheckpointUnfit where a file is cut off or isn't safetensors, where files don't belong to one set of shards,
    and where a tensor is there twice.
    """
    config = read_config(directory)
    tensors: dict[str, TensorHeader] = {}
    try:
        files, places = _shards(directory)
        for file in files:
            for name, header in read_header(file).items():
                if name in tensors:
                    raise CheckpointUnfit(
                        f"{file}: {name} is in {tensors[name].file} as well; the files of two saves are mixed, so save "
                        "the checkpoint again into an empty directory"
                    )
                tensors[name] = header
    except OSError as error:
        raise CheckpointUnfit(f"{error.filename or directory}: it can't be read ({error.strerror or error})") from error
    for name, place in places.items():
        if name not in tensors or (held := tensors[name].file) is None or held.name != place:
            raise CheckpointUnfit(
                f"{directory / INDEX} places {name} in {place}, which doesn't hold it; index and files are of "
                "different saves, so save the checkpoint again into an empty directory"
            )
    if not tensors:
        raise CheckpointUnfit(f"{directory}: its files hold no tensor")
    return Checkpoint(str(directory), tensors, config)


def read_config(directory: Path) -> dict[str, Any]:
    """Raises CheckpointUnfit where there is no config.json, or none that is a JSON object."""
    file = directory / "config.json"
    if not file.is_file():
        raise CheckpointUnfit(f"{directory}: no Hugging Face checkpoint (config.json and *.safetensors)")
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointUnfit(f"{file}: not JSON ({error}); copy it from the model again") from error
    if not isinstance(config, dict):
        raise CheckpointUnfit(f"{file}: not a JSON object; copy it from the model again")
    return config


def read_header(file: Path) -> dict[str, TensorHeader]:
    """Name -> header of the tensors in one safetensors file. Raises CheckpointUnfit, OSError."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        first = opened.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if len(first) < 8 or length > MAX_HEADER:
            raise CheckpointUnfit(f"{file}: {size} bytes that aren't a safetensors file; write or copy it again")
        raw = opened.read(length)
    if len(raw) < length:
        raise CheckpointUnfit(
            f"{file} is cut off: it has {size} bytes, and its header alone {8 + length}; write or copy it again"
        )
    try:
        entries = json.loads(raw)
        entries.pop("__metadata__", None)
        found = {name: _tensor(file, 8 + length, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnfit(f"{file}: its header isn't that of a safetensors file; write or copy it again") from error
    _check_places(file, size, 8 + length, found)
    return found


def _tensor(file: Path, data: int, entry: Mapping[str, Any]) -> TensorHeader:
    start, end = entry["data_offsets"]
    return TensorHeader(tuple(int(s) for s in entry["shape"]), str(entry["dtype"]), file, data + start, data + end)


def _check_places(file: Path, size: int, data: int, found: Mapping[str, TensorHeader]) -> None:
    """Each tensor has the bytes that its shape needs, one behind the other to the file's end."""
    at = data
    for name, header in sorted(found.items(), key=lambda item: (item[1].start, item[1].end)):
        item = ITEM_BYTES.get(header.dtype)
        if header.start != at or (item is not None and header.end - header.start != prod(header.shape) * item):
            raise CheckpointUnfit(
                f"{file}: {name} ({header.dtype} {list(header.shape)}) has the bytes {header.start} to {header.end} in "
                "the header, which don't fit; write the file again"
            )
        at = header.end
    if size != at:
        what = "is cut off" if size < at else "goes on behind its last tensor"
        raise CheckpointUnfit(
            f"{file} {what}: it has {size} bytes, and {at} by its header; was it still being written? Write or copy it "
            "again"
        )


def _shards(directory: Path) -> tuple[list[Path], dict[str, str]]:
    """The files that an engine loads, and name -> file by the index, empty without one."""
    files = sorted(directory.glob("*.safetensors"))
    if not files:
        others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for p in directory.glob(pattern))
        why = f"only {others[0]}: save the model as safetensors" if others else "config.json and *.safetensors"
        raise CheckpointUnfit(f"{directory}: no Hugging Face checkpoint ({why})")
    if (directory / INDEX).is_file():
        return _indexed(directory, files)
    # As SGLang does: Mistral's own file next to the same weights under Hugging Face's names.
    if [file.name for file in files] == ["consolidated.safetensors", "model.safetensors"]:
        return files[1:], {}
    _check_one_set(directory, files)
    return files, {}


def _indexed(directory: Path, files: Sequence[Path]) -> tuple[list[Path], dict[str, str]]:
    index = directory / INDEX
    try:
        places = {str(name): str(file) for name, file in json.loads(index.read_text())["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointUnfit(f"{index}: no JSON with a weight_map; save the checkpoint again") from error
    there = {file.name for file in files}
    for name in sorted(set(places.values()) - there):
        raise CheckpointUnfit(f"{index} names {name}, which isn't there; was the checkpoint copied completely?")
    # Others, such as an adapter's, are no shards: an engine with this index leaves them alone.
    left = [n for n in sorted(there - set(places.values())) if n == "model.safetensors" or _SHARD.fullmatch(n)]
    if left:
        raise CheckpointUnfit(
            f"{directory / left[0]} isn't in {INDEX}: it is left over from another save, or the index is; save the "
            "checkpoint again into an empty directory"
        )
    return [directory / name for name in sorted(set(places.values()))], places


def _check_one_set(directory: Path, files: Sequence[Path]) -> None:
    """Without an index an engine loads every file there is."""
    for file in files:
        if file.name.startswith("adapter_"):
            raise CheckpointUnfit(f"{file} is an adapter's, and an engine would load it with the model; move it away")
    shards = {file: match for file in files if (match := _SHARD.fullmatch(file.name))}
    if not shards:
        return
    sets = {(match["stem"], match["count"]) for match in shards.values()}
    odd = [file for file in files if file not in shards]
    if len(sets) > 1 or odd:
        raise CheckpointUnfit(
            f"{odd[0] if odd else max(shards)} isn't of the same save as {min(shards)}; save the checkpoint again into "
            "an empty directory"
        )
    ((stem, count),) = sets
    there = {int(match["number"]) for match in shards.values()}
    for number in range(1, int(count) + 1):
        if number not in there:
            raise CheckpointUnfit(f"{directory}: shard {number} of {int(count)} of {stem} is missing; copy it again")


# ---- against what an engine serves --------------------------------------------------------------------------------


def check_same_model(found: Checkpoint, served: Checkpoint) -> None:
    """Raise CheckpointUnfit unless `found` has the config, names, shapes and kinds of numbers of `served`.

    A tied copy of the embeddings, buffers that engines compute, and layers that only a draft model reads may be absent
    or additional. An empty side has nothing to compare.
    """
    _check_config(found, served)
    if not found.tensors or not served.tensors:
        return
    optional = _optional(found, served)
    missing = [n for n in sorted(served.tensors.keys() - found.tensors.keys()) if not optional(n)]
    extra = [n for n in sorted(found.tensors.keys() - served.tensors.keys()) if not optional(n)]
    if missing and extra:
        raise CheckpointUnfit(
            f"{found.of(extra[0])} is no tensor of {served.where}, which the engine serves, and {missing[0]} is "
            f"missing ({len(extra)} unknown, {len(missing)} missing): is it another model, or a wrapped module's?"
        )
    if missing:
        raise CheckpointUnfit(
            f"{found.where}: {missing[0]} is missing ({len(missing)} of the {len(served.tensors)} tensors of "
            f"{served.where}, which the engine serves); it would keep its old values, so save the complete model"
        )
    if extra:
        raise CheckpointUnfit(
            f"{found.of(extra[0])} is no tensor of {served.where}, which the engine serves ({len(extra)} of "
            f"{len(found.tensors)}); it would end the engine, so save the model without it"
        )
    for name, header in found.tensors.items():
        other = served.tensors.get(name)
        if other is None:
            continue
        if header.shape != other.shape:
            raise CheckpointUnfit(
                f"{found.of(name)} has shape {list(header.shape)}, and {list(other.shape)} in {served.where}, which "
                "the engine serves: is it another model?"
            )
        if header.dtype != other.dtype and not {header.dtype, other.dtype} <= FLOATS:
            raise CheckpointUnfit(
                f"{found.of(name)} is {header.dtype}, and {other.dtype} in {served.where}, which the engine serves; "
                "save it with the same quantization"
            )


def check_same_config(found: Path, other: Path) -> None:
    """Raise CheckpointUnfit where the two directories' config.json are of different models."""
    for key, here, there in _differences(read_config(found), read_config(other)):
        raise CheckpointUnfit(f"{found}: config.json has {key}={_short(here)}, and {_short(there)} in {other}")


def _check_config(found: Checkpoint, served: Checkpoint) -> None:
    for key, here, there in _differences(found.config, served.config):
        raise CheckpointUnfit(
            f"{found.where}: config.json has {key}={_short(here)}, and {_short(there)} in {served.where}, which the "
            "engine serves; it is another model, or its config was changed: an engine reads it at its start only"
        )


def _differences(found: Mapping[str, Any], served: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Of keys that both sides set: what one program leaves out is the default that another one writes."""
    for key in ARCHITECTURE:
        here, there = found.get(key), served.get(key)
        if here is None or there is None:
            continue
        if key in ("text_config", "vision_config") and isinstance(here, dict) and isinstance(there, dict):
            yield from ((f"{key}.{inner}", a, b) for inner, a, b in _differences(here, there))
        elif here != there:
            yield key, here, there


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:79] + "…"


def _optional(found: Checkpoint, served: Checkpoint) -> Any:
    """Whether a tensor of this name may be on one side only."""
    ties = [_setting(side.config, "tie_word_embeddings") for side in (found, served)]
    tied = True in ties or (False not in ties and "lm_head.weight" not in served.tensors)
    layers = _setting(served.config, "num_hidden_layers")

    def optional(name: str) -> bool:
        if _BUFFERS.search(name) or name.startswith("mtp."):
            return True
        if name.endswith("lm_head.weight"):
            return tied
        layer = _LAYER.search(name)  # a draft model's layers are counted on from the model's own
        return (
            layer is not None
            and isinstance(layers, int)
            and name.startswith("model.layers.")
            and (int(layer[2]) >= layers)
        )

    return optional


def _setting(config: Mapping[str, Any], key: str) -> Any:
    value = config.get(key)
    inner = config.get("text_config")
    return inner.get(key) if value is None and isinstance(inner, dict) else value


# ---- the values ---------------------------------------------------------------------------------------------------


def check_finite(checkpoint: Checkpoint) -> None:
    """Raise CheckpointUnfit for a NaN or an infinity in any tensor of a known floating-point type. Reads every byte."""
    files: dict[Path, list[tuple[str, TensorHeader]]] = {}
    for name, header in checkpoint.tensors.items():
        if header.dtype in EXPONENTS and header.file is not None:
            files.setdefault(header.file, []).append((name, header))
    for file, tensors in files.items():
        with file.open("rb") as opened:
            for name, header in sorted(tensors, key=lambda item: item[1].start):
                at = _first_not_finite(opened, header)
                if at is not None:
                    raise CheckpointUnfit(
                        f"{file}: {name} has a NaN or an infinity (element {at} of {prod(header.shape)}); an engine "
                        "would load it and answer with it: did the training diverge?"
                    )


def _first_not_finite(opened: Any, header: TensorHeader) -> int | None:
    import numpy as np

    kind, bits = EXPONENTS[header.dtype]
    mask = np.array(bits, np.dtype(kind))
    at = header.start
    while at < header.end:
        opened.seek(at)
        raw = opened.read(min(READ_BYTES, header.end - at))
        if not raw:
            raise CheckpointUnfit(f"{header.file} became shorter while it was read; is somebody writing to it?")
        values = np.frombuffer(raw, np.dtype(kind))
        wrong = (values & mask) == mask
        if wrong.any():
            return (at - header.start) // mask.itemsize + int(wrong.argmax())
        at += len(raw)
    return None
