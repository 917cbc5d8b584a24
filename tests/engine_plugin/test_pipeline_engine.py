"""A pause that changes nothing but its flag: SGLang's pipeline-parallel loop never reads it, so two stages go on
generating while weights are loaded. Refused at admission; where a user allows it, the count of forward passes tells."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from checks import prompt
from engine_api import Api, Background, Serve

from slime_backend.engine_client import EngineClient
from slime_backend.evidence import why_not_loaded, why_not_paused
from slime_backend.fleet import EngineUnfit, Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, PublicationReport, publish
from slime_backend.publication import transaction as publication
from slime_backend.transports.disk import CheckpointTransport

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
TOKENS = 20000  # of a request that doesn't end while it is looked at
OFF = decide("disjoint", "off")
ALLOWED = frozenset({"pipeline_parallel"})


@pytest.fixture(scope="module")
def stages(serve: Serve, dense_paths: dict[str, str]) -> Iterator[Api]:
    environment = {"PYTHONPATH": f"{HERE / 'no_nccl'}:{ROOT}", "SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    with serve(dense_paths["v0"], radix_cache=False, extra=("--pp-size", "2"), environment=environment) as api:
        yield api


@pytest.fixture
def generating(stages: Api) -> Iterator[Api]:
    """Two stages with a request in flight, which is ended afterwards."""
    call = Background(stages.generate, prompt(50), TOKENS)
    stages.until(lambda report: report.kv.running == 1, "a running request")
    yield stages
    stages.call("/abort_request", {"abort_all": True})
    stages.resume()
    call.result()


def test_the_flag_says_paused_and_the_forward_passes_say_not(generating: Api) -> None:
    before = generating.reports()
    assert generating.call("/pause_generation", {"mode": "in_place"})[0] == 200
    generating.until(lambda report: report.kv.paused, "the flag of a pause")
    at_pause = generating.reports()
    assert why_not_paused(before, at_pause, OFF) == []  # the verdict by the flag alone
    generating.until(lambda report: report.kv.forward_passes > at_pause[0].kv.forward_passes + 5, "forward passes")
    (reason,) = why_not_loaded(at_pause, generating.reports(), OFF)
    assert "forward passes while paused" in reason


def test_two_stages_are_refused_at_admission(stages: Api, run_async: Any) -> None:
    async def scenario() -> None:
        async with EngineClient(stages.url) as client:
            await admit(Fleet(OFF, "v0"), client)

    with pytest.raises(EngineUnfit, match=r"pipeline_parallel.*--pp-size 1"):
        run_async(scenario())


def publish_to_stages(api: Api, checkpoint: str, run_async: Any) -> PublicationReport:
    """One publication under the default policy, on an engine that somebody has allowed."""

    async def scenario() -> PublicationReport:
        async with EngineClient(api.url) as client:
            fleet = Fleet(OFF, "v0", allow=ALLOWED)
            await admit(fleet, client)
            return await publish(fleet, CheckpointTransport(Path(checkpoint)), "v1")

    report: PublicationReport = run_async(scenario())
    return report


def test_a_publication_to_two_stages_is_not_confirmed(
    generating: Api, dense_paths: dict[str, str], run_async: Any
) -> None:
    with pytest.raises(PublicationError, match="forward passes while paused"):
        publish_to_stages(generating, dense_paths["v1"], run_async)


def test_by_the_flag_alone_it_would_be_confirmed(
    generating: Api, dense_paths: dict[str, str], run_async: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control of the test above."""
    monkeypatch.setattr(publication, "why_not_loaded", lambda at_pause, after, policy: [])
    report = publish_to_stages(generating, dense_paths["v1"], run_async)
    assert (report.state, report.unconfirmed) == ("resumed", {})
