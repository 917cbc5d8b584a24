"""Where a controller reads the schedulers' reports: from the route for nothing else, or from /server_info."""

from __future__ import annotations

from typing import Any

import pytest

from slime_backend.engine_client import EngineClient, EngineProtocolError, EngineRefused
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.http_server import Reply
from slime_backend.wire import REPORTS_PATH


async def read(twice: bool = False, **handlers: Any) -> tuple[list[str], list[Any]]:
    """(calls, reports) of an engine that answers the route as `handlers` say."""
    async with FakeEngine(ranks=2) as engine, EngineClient(engine.url) as client:
        for name, handler in handlers.items():
            setattr(engine, name, handler)
        reports = await client.reports()
        if twice:
            reports = await client.reports()
        return engine.calls, [(r.instance_id, rank.instance_id) for r, rank in zip(reports, engine.ranks, strict=True)]


def test_each_rank_reports(run_async: Any) -> None:
    calls, ids = run_async(read())
    assert calls == [REPORTS_PATH]
    assert len(ids) == 2
    assert all(a == b for a, b in ids)


def test_an_engine_without_the_route_is_asked_for_it_once(run_async: Any) -> None:
    calls, ids = run_async(read(twice=True, on_reef_slime_reports=None))
    assert calls == [REPORTS_PATH, "/server_info", "/server_info"]
    assert all(a == b for a, b in ids)


NO_HOOKS = {"instance_id": "x", "hooks": None, "epoch": 0, "kv": {}}


@pytest.mark.parametrize("answer", [[], {}, "text", [{"error": "no such tree"}], [NO_HOOKS]])
def test_anything_but_reports_proves_nothing(answer: Any, run_async: Any) -> None:
    async def answering(body: Any) -> Reply:
        return Reply(answer)

    with pytest.raises(EngineProtocolError) as raised:
        run_async(read(on_reef_slime_reports=answering))
    assert ("the scheduler made none: no such tree" in str(raised.value)) == ("no such tree" in str(answer))


@pytest.mark.parametrize("states", [[], None, [None], ["text"], [{}]])
def test_server_info_without_reports_is_named(states: Any, run_async: Any) -> None:
    async def answering(body: Any) -> Reply:
        return Reply({"internal_states": states})

    with pytest.raises(EngineProtocolError, match="server_info"):
        run_async(read(on_reef_slime_reports=None, on_server_info=answering))


def test_a_refusal_is_not_an_absence(run_async: Any) -> None:
    async def refusing(body: Any) -> Reply:
        return Reply({"detail": "no"}, 500)

    with pytest.raises(EngineRefused, match="HTTP 500"):
        run_async(read(on_reef_slime_reports=refusing))
