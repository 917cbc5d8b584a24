"""What SGLang's digests show on a real engine: every planted fault of a load, by the smallest step that a dtype has.

A version differs from the one before by one element of each tensor, moved to the next number that the dtype has.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.transports import CheckpointTransport
from tests.helpers import fleet_on, versions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.engine
RETRACT = decide("disjoint", "retract")
Tensors = dict[str, Any]


class Loads(CheckpointTransport):
    """Announces one checkpoint and loads another, or nothing."""

    counted = False  # the counts of loads would show the last of these faults as well; here the content must

    def __init__(self, announced: Path, loaded: Path | None) -> None:
        super().__init__(announced)
        self.loaded = loaded

    async def load(self, client: EngineClient, version: str) -> None:
        if self.loaded is not None:
            await self._load(client, self.loaded)


def one_old(old: Tensors, new: Tensors, rng: random.Random) -> Tensors:
    missed = rng.choice(sorted(new))
    return {**new, missed: old[missed]}


def half_old(old: Tensors, new: Tensors, rng: random.Random) -> Tensors:
    names = sorted(new)
    return {**new, **{name: old[name] for name in names[len(names) // 2 :]}}


def one_bit(old: Tensors, new: Tensors, rng: random.Random) -> Tensors:
    name = rng.choice(sorted(new))
    flipped = new[name].clone()
    content = flipped.reshape(-1).view(torch.uint8)
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    # Never a NaN: the checkpoint must be one that is served.
    return {**new, name: flipped} if torch.isfinite(flipped).all() else one_bit(old, new, rng)


FAULTS: Mapping[str, Callable[[Tensors, Tensors, random.Random], Tensors] | None] = {
    "nothing loaded": None,
    "one tensor missed": one_old,
    "loaded in part": half_old,
    "the version before": lambda old, new, rng: old,
    "one bit flipped": one_bit,
}


class Run:
    """Versions of one model, each a step after the last one."""

    def __init__(self, model: Path, root: Path, seed: int) -> None:
        from safetensors.torch import load_file

        self.model, self.root, self.rng = model, root, random.Random(seed)
        self.tensors = load_file(str(model / "model.safetensors"))
        self.before = self.tensors
        self.number = 0

    def step(self) -> Path:
        self.before = self.tensors
        self.tensors = {name: _moved(tensor, self.rng) for name, tensor in self.tensors.items()}
        return self.write(self.tensors)

    def write(self, tensors: Tensors) -> Path:
        from safetensors.torch import save_file

        self.number += 1
        directory = self.root / f"checkpoint{self.number}"
        directory.mkdir()
        for file in self.model.glob("*.json"):
            shutil.copy(file, directory)
        save_file({name: t.contiguous() for name, t in tensors.items()}, str(directory / "model.safetensors"))
        return directory


def _moved(tensor: Any, rng: random.Random) -> Any:
    moved = tensor.clone()
    at = moved.reshape(-1)
    index = rng.randrange(len(at))
    at[index] = torch.nextafter(at[index], torch.tensor(torch.inf, dtype=at.dtype))
    return moved


async def faults_found(run: Run, fleet: Any, fault: str, rounds: int) -> int:
    """How many of so many loads with the fault were found by the content of the weights, and nothing else."""
    found = 0
    for _ in range(rounds):
        report = await publish(fleet, CheckpointTransport(run.step()), next(versions))  # an honest one
        assert [e.weights_verified for e in report.engines] == [True]
        # What the engine adds itself (tables of positions) isn't sent, and not compared.
        assert report.engines[0].tensors_verified == len(run.tensors)
        announced = run.step()
        planted = FAULTS[fault]
        loaded = None if planted is None else run.write(planted(run.before, run.tensors, run.rng))
        try:
            await publish(fleet, Loads(announced, loaded), next(versions))
        except PublicationError as error:
            (outcome,) = error.report.engines
            found += outcome.failed_step == "weights" and outcome.weights_verified is False
    return found


def check_faults(engine: Any, model: Path, root: Path, run_async: Any, rounds: int) -> None:
    async def scenario() -> dict[str, int]:
        found = {}
        for number, fault in enumerate(FAULTS):
            folder = root / str(number)
            folder.mkdir()
            run = Run(model, folder, number)
            async with fleet_on(engine, RETRACT) as (fleet, client):
                await client.load_from_disk(str(model))
                await publish(fleet, CheckpointTransport(run.step()), next(versions))
                found[fault] = await faults_found(run, fleet, fault, rounds)
        return found

    found = run_async(scenario(), 600)
    print(found)
    assert found == dict.fromkeys(FAULTS, rounds)


def test_every_fault_of_a_load_is_found_by_content(engine, tiny_model, tmp_path, run_async):
    check_faults(engine, tiny_model, tmp_path, run_async, rounds=2)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def own_engine(request, tiny_model, tmp_path_factory) -> Iterator[tuple[Any, Path]]:
    from safetensors.torch import load_file, save_file

    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines

    root = tmp_path_factory.mktemp(request.param)
    model = root / "model"
    shutil.copytree(tiny_model, model)
    dtype = getattr(torch, request.param)
    file = str(model / "model.safetensors")
    save_file({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, file)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": request.param, "torch_dtype": request.param}))
    settings = EngineSettings(model=str(model), max_total_tokens=40000, hooks=RUN_HOOKS, dtype=request.param)
    with running_engines([local := LocalEngine(settings, log_path=root / "engine.log")]):
        yield local, model


@pytest.mark.slow
@pytest.mark.soak
def test_a_hundred_of_each_fault(own_engine, tmp_path, run_async):
    engine, model = own_engine
    check_faults(engine, model, tmp_path, run_async, rounds=100)


@pytest.mark.slow
@pytest.mark.soak
def test_no_alarm_in_two_hundred_publications(own_engine, tmp_path, run_async):
    engine, model = own_engine

    async def scenario() -> list[bool | None]:
        run = Run(model, tmp_path, 99)
        async with fleet_on(engine, RETRACT) as (fleet, client):
            await client.load_from_disk(str(model))
            reports = [await publish(fleet, CheckpointTransport(run.step()), next(versions)) for _ in range(200)]
        return [report.engines[0].weights_verified for report in reports]

    assert run_async(scenario(), 600) == [True] * 200
