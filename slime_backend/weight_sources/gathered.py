"""Weights whose pieces lie on several processes, brought to one of them a bucket at a time.

    if rank == 0:
        with source.leading():          # at its end, however it ends, the others are notified
            await publish(fleet, DistributedTransport(source), "v7")
    else:
        source.follow()                 # gathers whatever rank 0 asks for, until that end

Each bucket is one short collective operation that rank 0 announces. So nobody is left waiting where a publication ends
in the middle, and followers never hold more than their own pieces.

Memory on rank 0, besides the weights that it has anyway: the bucket that is gathered, and the one that a consumer still
holds while it asks for the next (tests/weight_sources/measure_gathering.py).
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from slime_backend.errors import RunError
from slime_backend.weight_sources.buckets import BUCKET_BYTES, in_groups
from slime_backend.weight_sources.checkpoint import read_shapes, write_checkpoint

# How long a follower stands by for the next bucket. Between two of them an engine may load a model, and the local
# trainer's followers stand by while rollouts are generated; a leader that is gone ends the wait at once.
STAND_BY_S = 24 * 3600.0
PIECE_S = 600.0  # one piece of one tensor; the other rank has been asked to send it
_OVER = -1


class SourceError(RunError):
    """The weights can't be published from here; one line."""


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the Hugging Face checkpoint. `gather` is called on all ranks in step and returns it on the
    leader, contiguous; what it returns elsewhere is not used."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    gather: Callable[[], torch.Tensor | None]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class GatheredSource:
    """A WeightSource over parts. Made on every rank of the default process group, with the same parts in one order.

    `ranks`: those that hold pieces, the leader (global rank 0) first; one rank where it has everything itself, and the
    others' `follow` returns at once then. `template`: the directory whose config.json and tokenizer files each saved
    checkpoint repeats; if it holds weights too, names and shapes must be the same.

    Raises SourceError.
    """

    def __init__(
        self, parts: Sequence[Part], template: Path, *, ranks: Sequence[int], bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        _check_against(template, parts)
        self.template = template
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.ranks = tuple(ranks)
        self._buckets = list(in_groups(parts, lambda part: part.nbytes, bucket_bytes))
        self._lock = threading.Lock()  # buckets are asked for by threads of the transport
        self._leading = False
        several = len(ranks) > 1
        self._control = _gloo_group(ranks, STAND_BY_S) if several else None
        self._data = _gloo_group(ranks, PIECE_S) if several else None  # of tensors on a CPU, whatever the trainer uses

    @property
    def largest_bucket_bytes(self) -> int:
        return max(sum(part.nbytes for part in bucket) for bucket in self._buckets)

    @contextmanager
    def leading(self) -> Iterator[None]:
        """On rank 0, around everything that reads this source."""
        self._leading = True
        try:
            yield
        except BaseException:
            with suppress(RuntimeError):  # a rank that is gone is what ended the block, or comes to light there
                self._end_leading()
            raise
        try:
            self._end_leading()
        except RuntimeError as error:
            raise SourceError(f"the other ranks couldn't be told that it is over: {_first_line(error)}") from error

    def _end_leading(self) -> None:
        with self._lock:
            self._leading = False
            self._announce(_OVER)

    def follow(self) -> None:
        """On the other ranks, while rank 0 is inside of `leading`: gather with it."""
        if self._control is None or self.rank not in self.ranks:
            return
        while (index := self._announce()) != _OVER:
            for part in self._buckets[index]:
                part.gather()

    def buckets(self) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """On rank 0: every tensor once, in buckets. The next bucket is gathered when it is asked for."""
        for index in range(len(self._buckets)):
            yield self._bucket(index)

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(len(self._buckets)):
            bucket = self._bucket(index)
            while bucket:  # each is the consumer's alone as soon as it is handed over
                yield bucket.pop(0)

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {part.name: (part.shape, part.dtype) for bucket in self._buckets for part in bucket}

    def save(self, directory: Path) -> None:
        write_checkpoint(directory, self.template, self.buckets())

    def _bucket(self, index: int) -> list[tuple[str, torch.Tensor]]:
        with self._lock:
            if self._control is not None and not self._leading:
                raise SourceError("the other ranks stand by only inside of `with source.leading():` on rank 0")
            try:
                self._announce(index)
                gathered = [(part.name, part.gather()) for part in self._buckets[index]]
            except RuntimeError as error:
                name = self._buckets[index][0].name
                raise SourceError(f"the other ranks' pieces of {name} didn't come: {_first_line(error)}") from error
        return [(name, tensor) for name, tensor in gathered if tensor is not None]

    def _announce(self, index: int = _OVER) -> int:
        """The leader's `index`, on every rank."""
        if self._control is None:
            return index
        order = torch.tensor([index])
        dist.broadcast(order, src=self.ranks[0], group=self._control)
        return int(order)

    def _collect(self, piece: torch.Tensor, group: dist.ProcessGroup | None, *, dim: int = 0) -> torch.Tensor | None:
        """All ranks' pieces, of one shape and contiguous, joined along `dim` on the leader. Over `group` unless they
        lie on a CPU. Received in place: gloo's own gather would take the whole a second time."""
        if self._data is None:
            return piece
        if piece.device.type == "cpu":
            group = self._data
        if self.rank != self.ranks[0]:
            dist.send(piece, self.ranks[0], group)
            return None
        size = piece.shape[dim]
        whole = piece.new_empty([size * len(self.ranks) if d == dim else s for d, s in enumerate(piece.shape)])
        for number, rank in enumerate(self.ranks):
            place = whole.narrow(dim, number * size, size)
            if rank == self.rank:
                place.copy_(piece)
            elif place.is_contiguous():
                dist.recv(place, rank, group)
            else:
                received = torch.empty_like(piece)
                dist.recv(received, rank, group)
                place.copy_(received)
        return whole


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]


def _gloo_group(ranks: Sequence[int], timeout_s: float) -> dist.ProcessGroup:
    """On every rank of the default group, also those that aren't in it."""
    group: Any = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s), backend="gloo")
    return cast(dist.ProcessGroup, group)


def _check_against(template: Path, parts: Sequence[Part]) -> None:
    """The engine drops what it doesn't know and keeps what it doesn't get, so a wrong name would pass unseen."""
    known = read_shapes(template)
    made = {part.name: part.shape for part in parts}
    if len(made) != len(parts):
        raise SourceError("two parts have the same name")
    if not known:
        return
    for name, shape in made.items():
        if name not in known:
            raise SourceError(f"{name} is no tensor of {template}; are the model's modules wrapped or renamed?")
        if known[name] != shape:
            raise SourceError(f"{name} has shape {list(shape)}, and {list(known[name])} in {template}")
    # A checkpoint may hold the tied copy as well.
    tied = (
        {"lm_head.weight"} if json.loads((template / "config.json").read_text()).get("tie_word_embeddings") else set()
    )
    missing = sorted(set(known) - set(made) - tied)
    if missing:
        raise SourceError(f"{len(missing)} tensors of {template} aren't in the model, the first is {missing[0]}")
