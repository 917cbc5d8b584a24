"""A real engine with two tensor ranks, one of which runs without the plugin: named, not admitted, and nobody hangs."""

from __future__ import annotations

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import EngineUnfit, Fleet, admit
from slime_backend.policy import decide
from tests import tensor_parallel
from tests.helpers import DEADLINES, body, prompt

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]


def test_a_rank_without_the_plugin_is_named_and_its_engine_serves_on(tiny_model, tmp_path, run_async):
    settings = EngineSettings(
        model=str(tiny_model),
        max_total_tokens=40000,
        hooks=RUN_HOOKS,
        extra=tensor_parallel.flags(2),
        environment={**tensor_parallel.environment(2), "BLIND_TENSOR_RANK": "1"},
    )
    engine = LocalEngine(settings, log_path=tmp_path / "engine.log")

    async def scenario():
        async with EngineClient(engine.url, name="engine0", deadlines=DEADLINES) as client:
            with pytest.raises(EngineUnfit) as refused:
                await admit(Fleet(decide("disjoint", "retract"), "v0"), client)
            # A load of both ranks is still answered: only a rank that announced itself is waited for.
            await client.load_from_disk(str(tiny_model))
            return str(refused.value), await client.generate(body(prompt(50)))

    with running_engines([engine]):
        message, answer = run_async(scenario(), 120)
    assert "tensor rank 1: reef-slime isn't loaded in its process" in message
    assert len(answer["output_ids"]) == 8
