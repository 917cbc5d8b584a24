"""Digests of the tensors that a source sends, in the form in which an engine digests those that it has.

    digests = of_checkpoint(read_checkpoint(Path("runs/x/weights/v1")))
    digests["model.layers.0.self_attn.qkv_proj.weight"]     # what SGLang joins, under SGLang's name

A tensor has its dtype, since an engine converts another one, and a digest for each form in which an engine may keep it
unchanged: as it is, and with rows of zeros up to a multiple of 64, as SGLang keeps embeddings (0.5.23,
srt/layers/vocab_parallel_embedding.py). A digest is the first 8 bytes of the SHA-256 of a tensor's bytes in row-major
order, in hexadecimal: SGLang's own on a CPU (0.5.23, srt/managers/mm_utils.py, tensor_hash). Reads every byte once: at
most a second for each GiB and core.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from slime_backend.weight_sources.base import SAFETENSORS_DTYPES
from slime_backend.weight_sources.checkpoint_check import Checkpoint

if TYPE_CHECKING:
    import torch

# SGLang's linear layer -> the checkpoint's that it joins along the first dimension, in this order.
FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
BUFFER_BYTES = 1 << 18  # stays in a core's cache between the read and the digest
ROWS = 64  # what SGLang pads the vocabulary to a multiple of
# The dtype as safetensors names it, then a digest for each form.
Forms = tuple[str, ...]
_JOINED_IN = {part: fused for fused, parts in FUSED.items() for part in parts}


def parts_of(name: str) -> tuple[str, ...]:
    """The checkpoint's names of what an engine has as `name`: its own, or those of the tensors that it joins."""
    path, _, kind = name.rpartition(".")
    owner, _, layer = path.rpartition(".")
    return tuple(f"{owner}.{part}.{kind}" for part in FUSED[layer]) if layer in FUSED and owner else (name,)


def of_checkpoint(found: Checkpoint) -> dict[str, Forms]:
    """The digests of a checkpoint on disk, and of its joined tensors. Raises OSError."""
    digests: dict[str, Forms] = {}
    for name, parts in [*((name, (name,)) for name in found.tensors), *_joined(found.tensors)]:
        digest = hashlib.sha256()
        for part in parts:
            _read_into(digest, found, part)
        digests[name] = (found.tensors[parts[0]].dtype, *_forms(digest, *_size(found, name)))
    return digests


def _joined(names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Every joined tensor whose parts are all among `names`: its name, and theirs in order."""
    known = set(names)
    for name in sorted(known):
        joined = _joined_name(name)
        if joined and known.issuperset(parts := parts_of(joined)) and parts[0] == name:
            yield joined, parts


def _joined_name(name: str) -> str:
    """The tensor in which an engine may join `name`, or ""."""
    path, _, kind = name.rpartition(".")
    owner, _, layer = path.rpartition(".")
    return f"{owner}.{_JOINED_IN[layer]}.{kind}" if owner and layer in _JOINED_IN else ""


def _read_into(digest: Any, found: Checkpoint, name: str) -> None:
    header = found.tensors[name]
    assert header.file is not None
    buffer = memoryview(bytearray(BUFFER_BYTES))
    with header.file.open("rb", buffering=0) as file:
        file.seek(header.start)
        left = header.end - header.start
        while left and (count := file.readinto(buffer[:left])):
            digest.update(buffer[:count])
            left -= count


@dataclass(slots=True)
class SentDigests:
    """Takes the digests of tensors while they are sent.

    sent = SentDigests()
    for name, tensor in sent.taking(source.named_tensors()): ...
    sent.digests

    A joined tensor's parts are digested one after the other, so a part that comes early is kept until its turn.
    """

    digests: dict[str, Forms] = field(default_factory=dict)
    _open: dict[str, _Joined] = field(default_factory=dict)

    def taking(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """The same tensors, once each is digested."""
        for name, tensor in tensors:
            dtype = SAFETENSORS_DTYPES.get(str(tensor.dtype), str(tensor.dtype))
            self._take(name, _bytes(tensor), tuple(tensor.shape), dtype)
            yield name, tensor

    def _take(self, name: str, content: Any, shape: tuple[int, ...], dtype: str) -> None:
        self.digests[name] = (dtype, *_forms(hashlib.sha256(content), shape, len(content)))
        joined = _joined_name(name)
        if not joined:
            return
        parts = self._open.setdefault(joined, _Joined(list(parts_of(joined))))
        parts.take(name, content)
        if not parts.missing:
            self.digests[joined] = (dtype, *_forms(parts.digest, (), 0))
            del self._open[joined]


@dataclass(slots=True)
class _Joined:
    missing: list[str]  # parts that aren't in the digest yet, in order
    digest: Any = field(default_factory=hashlib.sha256)
    early: dict[str, bytes] = field(default_factory=dict)

    def take(self, part: str, content: Any) -> None:
        self.early[part] = bytes(content)
        while self.missing and self.missing[0] in self.early:
            self.digest.update(self.early.pop(self.missing.pop(0)))


def _bytes(tensor: torch.Tensor) -> Any:
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _size(found: Checkpoint, name: str) -> tuple[tuple[int, ...], int]:
    header = found.tensors.get(name)
    return ((), 0) if header is None else (header.shape, header.end - header.start)


def _forms(digest: Any, shape: tuple[int, ...], nbytes: int) -> Forms:
    """Of a tensor whose bytes are in `digest`; a joined one has no rows of its own."""
    forms = [_short(digest)]
    missing = -shape[0] % ROWS if len(shape) == 2 else 0
    if missing and nbytes:
        digest.update(bytes(missing * (nbytes // shape[0])))
        forms.append(_short(digest))
    return tuple(forms)


def _short(digest: Any) -> str:
    return str(digest.digest()[:8].hex())
