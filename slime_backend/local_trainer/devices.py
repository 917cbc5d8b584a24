"""`place` decides which GPUs each engine and the trainer get.

    device: cuda, engines: 2, engine_flags: [--tp-size, 2]      engine0: 0,1   engine1: 2,3   trainer: 4

Engines come first, in order, each with as many as its flags ask for, and sees no others (CUDA_VISIBLE_DEVICES); the
trainer has the next one, or what `trainer_device` names. Nothing is shared: two engines on one GPU would each take most
of its memory. On a CPU there is nothing to place.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from slime_backend.config import EnginesConfig, TrainerConfig
from slime_backend.errors import RunError

COUNT_S = 120.0  # importing torch on a busy machine
# Flags whose product is the number of an engine's GPUs.
_SIZES = {
    "tp": ("--tp-size", "--tensor-parallel-size", "--tp"),
    "pp": ("--pp-size", "--pipeline-parallel-size", "--pp"),
    "dp": ("--dp-size", "--data-parallel-size", "--dp"),
}
_PLACING = ("--base-gpu-id", "--gpu-id-step")  # they choose among all GPUs


@dataclass(frozen=True, slots=True)
class Placement:
    """A placement has the CUDA_VISIBLE_DEVICES of each engine (empty on a CPU) and the trainer's torch device."""

    engines: tuple[tuple[str, ...], ...]
    trainer: str


def place(
    engines: EnginesConfig, trainer: TrainerConfig | None, *, visible: Callable[[], Sequence[str]] | None = None
) -> Placement:
    """Place the engines and, where one runs, the trainer; `visible` returns the names of the GPUs to use.

    Raises RunError where there are fewer GPUs than engines and trainer need.
    """
    names: list[str] = []
    each = gpus_per_engine(engines.flags) if engines.device == "cuda" else 0
    wanted = _trainer_device(engines, trainer) if trainer else "cpu"
    on_gpu = wanted.startswith("cuda")
    if each or on_gpu:
        names = list((visible or visible_gpus)())
    needed = engines.count * each
    groups = tuple(tuple(names[i * each : (i + 1) * each]) for i in range(engines.count))
    index = int(wanted.partition(":")[2] or needed) if on_gpu else None
    if needed + (on_gpu and index == needed) > len(names) or (index is not None and index >= len(names)):
        and_trainer = f" and trainer_device={wanted.partition(':')[0]}:{index}" if index is not None else ""
        raise RunError(
            f"device={engines.device}: engines={engines.count} of {each} GPU{'s' if each != 1 else ''} each"
            f"{and_trainer} need {max(needed, (index or 0) + (index is not None))} GPUs, {len(names)} are visible; "
            "lower engines or --tp-size, set trainer_device=cpu, or make more visible (CUDA_VISIBLE_DEVICES)"
        )
    if index is not None and index < needed:
        raise RunError(
            f"trainer_device={wanted} is engine{index // each}'s: engines={engines.count} of {each} GPUs each have "
            f"cuda:0 to cuda:{needed - 1}; give a later one, or leave trainer_device out"
        )
    return Placement(groups, "cpu" if index is None else f"cuda:{index}")


def _trainer_device(engines: EnginesConfig, trainer: TrainerConfig) -> str:
    """Return the device that the config names, else a GPU where the engines have some.

    DeepSpeed's own processes are on the CPU.
    """
    return trainer.device or ("cuda" if engines.device == "cuda" and trainer.kind == "torch" else "cpu")


def gpus_per_engine(flags: Sequence[str]) -> int:
    """Return how many GPUs an engine with these flags takes. Raises RunError for flags that place it themselves."""
    flat = [part for flag in flags for part in (flag.split("=", 1) if flag.startswith("--") else [flag])]
    for flag in _PLACING:
        if flag in flat:
            raise RunError(
                f"engine_flags has {flag}: each engine sees its own GPUs only, counted from 0; leave it out, and "
                "choose GPUs by CUDA_VISIBLE_DEVICES"
            )
    sizes = {name: _size(flat, spellings) for name, spellings in _SIZES.items()}
    if "--enable-dp-attention" in flat:  # its ranks share the tensor-parallel group's GPUs
        sizes["dp"] = 1
    return sizes["tp"] * sizes["pp"] * sizes["dp"]


def _size(flat: Sequence[str], spellings: Sequence[str]) -> int:
    """Return the value of the last of these flags, as SGLang reads them."""
    size = 1
    for flag, value in itertools.pairwise(flat):
        if flag in spellings:
            if not value.isdecimal() or int(value) < 1:
                raise RunError(f"engine_flags: {flag} {value!r} must be an integer of at least 1")
            size = int(value)
    return size


def visible_gpus() -> list[str]:
    """Return the names for CUDA_VISIBLE_DEVICES of the GPUs that this process may use, in torch's order."""
    return names_of(os.environ, _count())


def names_of(environment: Mapping[str, str], count: int) -> list[str]:
    listed = environment.get("CUDA_VISIBLE_DEVICES")
    if listed is None:
        return [str(i) for i in range(count)]
    return [name.strip() for name in listed.split(",")][:count]


@cache
def _count() -> int:
    """Count the GPUs in a child, so that this process doesn't initialise CUDA yet. Raises RunError."""
    command = [sys.executable, "-c", "import torch; print(torch.cuda.device_count())"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=COUNT_S, check=True)
        return int(found.stdout.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise RunError(f"the GPUs can't be counted: {error}; is torch installed with CUDA?") from error
