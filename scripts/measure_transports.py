"""Time the transports side by side on one live engine: `python scripts/measure_transports.py MODEL_DIR [ROUNDS]`.

Interleaved publications (disk, distributed, disk, ...) of the same weights; prints medians in milliseconds. `paused` is
what rollouts wait for, `prepare` runs during the generation.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
from pathlib import Path

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.models import load_model
from slime_backend.transports import DiskTransport, Transport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.weight_sources.torch_module import TorchModuleSource


async def measure(url: str, model: Path, rounds: int, scratch: Path) -> dict[str, list[tuple[float, float, float]]]:
    """Transport -> (prepare, load, paused) milliseconds of each round; the first round of each warms up."""
    source = TorchModuleSource(load_model(model), model)
    transports: list[Transport] = [DiskTransport(source, scratch), DistributedTransport(source)]
    times: dict[str, list[tuple[float, float, float]]] = {t.name: [] for t in transports}
    async with EngineClient(url, name="engine") as client:
        fleet = Fleet(decide("disjoint", "retract"), "v0")
        await admit(fleet, client)
        for i in range(rounds + 1):
            for transport in transports:
                report = await publish(fleet, transport, f"{transport.name}-{i}")
                outcome = report.engines[0]
                if i:
                    load_ms = outcome.times.get("load", 0.0)
                    times[transport.name].append((report.prepare_ms, load_ms, outcome.paused_ms or 0))
        for transport in transports:
            await transport.close()
    return times


def main() -> None:
    model = Path(sys.argv[1]).resolve()
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    with tempfile.TemporaryDirectory() as scratch:
        engine = LocalEngine(EngineSettings(model=str(model)), log_path=Path(scratch) / "engine.log")
        with running_engines([engine]):
            times = asyncio.run(measure(engine.url, model, rounds, Path(scratch) / "weights"))
    size = sum(f.stat().st_size for f in model.glob("*.safetensors")) / 2**20
    print(f"{size:.1f} MiB of weights, {rounds} rounds, medians in ms")
    for name, rows in times.items():
        prepare, load, paused = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{name:<12} prepare {prepare:7.1f}   load {load:7.1f}   paused {paused:7.1f}")


if __name__ == "__main__":
    main()
