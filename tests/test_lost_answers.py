"""Each call of a publication loses its answer once, before or after its effect: what becomes of the one engine.

A report, a label that is read back and a label that is set can be asked for again; a flush and a resume are decided by
the schedulers' own counts. Only a pause and a load are neither: after a lost pause the engine stays what it was, and
only after a lost load its weights are unknown.
"""

from __future__ import annotations

from contextlib import suppress

import pytest

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.publication import PublicationError, publish
from slime_backend.simulation.transport import NameTransport
from slime_backend.wire import REPORTS_PATH
from tests.fake_fleet import fake_fleet

DEADLINES = Deadlines(pause=1.0, flush=5.0, load=1.0, control=0.5, generate=60.0)
FAULTS = ("drop_before", "drop_after", "hang_before", "hang_after")
OUTCOME = {
    REPORTS_PATH: "new",
    "/pause_generation": "old",
    "/flush_cache": "new",
    "/update_weights_from_disk": "unknown",
    "/update_weight_version": "new",
    "/model_info": "new",
    "/continue_generation": "new",
}
# The calls on a path in one publication, by their place: reports are read at five steps, the first before `prepare`.
PLACES = {REPORTS_PATH: (0, 1, 2, 3, 4)}
CASES = [
    (sharing, path, fault, place)
    for sharing in ("retract", "scoped")
    for path in OUTCOME
    for fault in FAULTS
    for place in PLACES.get(path, (0,))
    if (sharing, path) != ("scoped", "/flush_cache")  # nothing is flushed there
]


async def after_a_lost_answer(path, fault, place, sharing):
    async with fake_fleet(1, sharing, deadlines=DEADLINES) as (fleet, engines):
        engine = engines[0]
        engine.faults[path] = ["none"] * place + [fault]
        with suppress(PublicationError):
            await publish(fleet, NameTransport(), "v1")
        assert not engine.faults[path], "the call was never made: the case shows nothing"
        assert not engine.paused
        assert engine.label == engine.loaded or engine.label.startswith("unconfirmed-"), "a label lies"
        member = fleet.members["engine0"]
        outcome = {("confirmed", "v1"): "new", ("confirmed", "v0"): "old"}.get((member.status, member.version))
        await publish(fleet, NameTransport(), "v2")  # whatever it was, the next publication is whole
        assert [(m.name, m.version) for m in fleet.routable()] == [("engine0", "v2")]
        return outcome or "unknown"


@pytest.mark.parametrize(("sharing", "path", "fault", "place"), CASES, ids=lambda v: str(v).strip("/"))
def test_only_a_lost_load_leaves_an_engine_of_unknown_weights(run_async, sharing, path, fault, place):
    assert run_async(after_a_lost_answer(path, fault, place, sharing)) == OUTCOME[path]


@pytest.mark.parametrize("path", [REPORTS_PATH, "/model_info", "/update_weight_version"])
def test_negative_control_asked_once_the_engine_is_lost(run_async, monkeypatch, path):
    async def once(self, method, path, *, body=None, deadline=None):
        return await self.call(method, path, body=body, deadline=deadline)

    monkeypatch.setattr(EngineClient, "_asked_again", once)
    place = 3 if path == REPORTS_PATH else 0  # the reports that prove the label
    assert run_async(after_a_lost_answer(path, "hang_after", place, "retract")) == "unknown"
