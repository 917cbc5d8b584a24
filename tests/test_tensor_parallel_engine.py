"""Publications on a real engine with two tensor ranks: confirmed means both. The publication tests run on it too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from tests.helpers import DEADLINES

pytestmark = [pytest.mark.engine, pytest.mark.slow]
NO_NCCL = Path(__file__).parent / "engine_plugin" / "no_nccl"


@dataclass(frozen=True)
class TwoRanks:
    url: str
    failing_while: Path  # while this file exists, tensor rank 1's loads from disk fail


@pytest.fixture(scope="module")
def engine(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoRanks]:
    folder = tmp_path_factory.mktemp("tensor-parallel")
    failing_while = folder / "failing"
    path = os.pathsep.join([str(NO_NCCL), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = EngineSettings(
        model=str(tiny_model),
        max_total_tokens=40000,
        hooks=(*RUN_HOOKS, "scope"),
        extra=("--tp-size", "2"),
        environment={
            "PYTHONPATH": path,
            "FAILING_TENSOR_RANK": "1",
            "FAILING_WHILE": str(failing_while),
            "SGLANG_CPU_OMP_THREADS_BIND": "0|1",
        },
    )
    local = LocalEngine(settings, log_path=folder / "engine.log")
    with running_engines([local]):
        yield TwoRanks(local.url, failing_while)


def test_both_ranks_report(engine, run_async):
    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            return await client.reports()

    (report,) = run_async(scenario())
    assert [rank.tensor_rank for rank in report.ranks] == [0, 1]
    assert report.missing_ranks == {}
    assert len({rank.instance_id for rank in report.ranks}) == 2
    print(report)
