"""From ZeRO-3 over two processes to a real engine: it answers with the weights that DeepSpeed says it has."""

from __future__ import annotations

import pytest
import torch

from slime_backend.engine_client import EngineClient
from slime_backend.simulation.models import load_model
from tests.helpers import DEADLINES, difference, load, reference, versions
from tests.needs import needs_deepspeed
from tests.weight_sources.ranks import run_ranks

pytestmark = [pytest.mark.engine, pytest.mark.soak, needs_deepspeed]
PUBLISH = "tests.weight_sources.deepspeed_rank:publish_to_engine"


@pytest.fixture
def published(engine, sources, tiny_model, tmp_path, run_async):
    """`published(transport, left_out)`: prompt, answer, and a model with the weights that DeepSpeed itself gathered."""

    def go(transport, left_out=None):
        async def start():
            async with EngineClient(engine.url, deadlines=DEADLINES) as client:
                await load(client, sources["a"], tmp_path)

        run_async(start())
        settings = {"checkpoint": str(tiny_model), "url": engine.url, "transport": transport}
        found = run_ranks(PUBLISH, 2, tmp_path, **settings, version=next(versions), left_out=left_out)[0]
        assert found["unconfirmed"] == {}
        model = load_model(tiny_model)
        model.load_state_dict(torch.load(tmp_path / "0" / "master.pt"))
        return found["ids"], found["answer"], model

    return go


@pytest.mark.parametrize("transport", ["disk", "distributed"])
def test_the_engine_answers_with_the_trained_weights(published, models, transport):
    ids, answer, trained = published(transport)
    assert difference(trained, ids, answer) < 1e-5
    assert answer["output_ids"] == reference(trained, ids, answer)[1]
    assert difference(models["a"], ids, answer) > 1e-2


def test_control_a_bucket_that_is_left_out_is_seen(published):
    ids, answer, trained = published("distributed", left_out=2)
    assert difference(trained, ids, answer) > 1e-3
