"""The gateway in front of a real engine with sliding-window layers: branches of a session reuse what they share.

A window is kept where the gateway marks that other prompts will leave this one. The control asks the same of the same
engine with an empty list of anchors in the request, which the gateway passes on as it is.
"""

from __future__ import annotations

import itertools
import random
import shutil
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.wire import ANCHORS_HOOK
from tests.reef_service.engine_gateway import gateway_on_fleet
from tests.reef_service.harness import Client

pytestmark = [pytest.mark.engine, pytest.mark.soak]  # make test has the gateway on a dense engine

chance = random.Random(5)
names = (f"h{i}" for i in itertools.count())


def text(length):
    """Tokens without a message mark, and unlike any others."""
    return [chance.randrange(256) for _ in range(length)]


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
    from slime_backend.simulation.models import make_tiny_model

    place = tmp_path_factory.mktemp("hybrid")
    model = make_tiny_model(place / "model", hybrid=True)
    # The engine's copy has no chat template: it must not find message boundaries in the answers by itself.
    served = shutil.copytree(model, place / "served", ignore=shutil.ignore_patterns("chat_template*"))
    assert "chat_template" not in (served / "tokenizer_config.json").read_text()
    settings = EngineSettings(model=str(served), max_total_tokens=20000, hooks=RUN_HOOKS)
    engine = LocalEngine(settings, log_path=place / "engine.log")
    with running_engines([engine]):
        yield engine, model


class Session:
    """One conversation in token ids; `anchored` or, as the control, without any hint."""

    def __init__(self, client: Client, anchored: bool) -> None:
        self.client, self.anchored, self.name = client, anchored, next(names)

    async def ask(self, ids):
        """All tokens after the answer, and how many of the prompt were found in the cache."""
        sampling: dict[str, Any] = {"max_new_tokens": 40, "ignore_eos": True}
        if not self.anchored:
            sampling["custom_params"] = {"kv_anchors": []}
        body = {"input_ids": ids, "sampling_params": sampling}
        status, answer = await self.client.post("/generate", body, x_reef_session=self.name)
        assert status == 200, answer
        return [*ids, *answer["output_ids"]], answer["meta_info"]["cached_tokens"]


@asynccontextmanager
async def gateway_on_hybrid(hybrid, tmp_path):
    engine, model = hybrid
    async with gateway_on_fleet(engine, model, tmp_path) as (client, gateway), EngineClient(engine.url) as control:
        assert gateway.fleet.has_hook(ANCHORS_HOOK)
        yield client, control


@pytest.mark.parametrize("anchored", [True, False], ids=["with anchors", "without"])
def test_branches_behind_a_turn_after_a_publication(hybrid, tmp_path, run_async, anchored):
    """After a publication the first branch computes everything; the others reuse the turn that they go on from."""

    async def work():
        async with gateway_on_hybrid(hybrid, tmp_path) as (client, control):
            session = Session(client, anchored)
            turn, first = await session.ask(text(600))
            await control.flush()
            _, recomputed = await session.ask(turn + text(300))
            branches = [(await session.ask(turn + text(300)))[1] for _ in range(3)]
            return len(turn), first, recomputed, branches

    turn, first, recomputed, branches = run_async(work(), 120)
    print(f"of {turn} shared tokens the branches found {branches}")
    assert (first, recomputed) == (0, 0)
    assert branches[0] == (turn if anchored else 0)
    if anchored:
        assert branches == [turn] * 3


@pytest.mark.parametrize("anchored", [True, False], ids=["with anchors", "without"])
def test_a_conversation_that_was_cut_and_gone_on_with_elsewhere(hybrid, tmp_path, run_async, anchored):
    """A client that rewrites the end of its context: what stays alike is learnt at one cut, and found at the next."""

    async def work():
        async with gateway_on_hybrid(hybrid, tmp_path) as (client, control):
            session = Session(client, anchored)
            head = text(500)
            await session.ask(head + text(200))
            await control.flush()
            _, recomputed = await session.ask(head + text(200))
            return recomputed, (await session.ask(head + text(200)))[1]

    recomputed, found = run_async(work(), 120)
    print(f"of 500 shared tokens {found} were found")
    assert (recomputed, found) == (0, 500 if anchored else 0)
