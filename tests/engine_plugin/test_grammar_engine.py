"""Guided decoding under publications of a real engine: a grammar that is being compiled holds up nobody.

The engine has a tokenizer and xgrammar. A grammar is slow to compile where the engine says so: a sitecustomize of the
test's makes each compile wait for a file, so that the state is the test's choice and no timing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
from contextlib import asynccontextmanager

import pytest

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import Fleet, admit
from slime_backend.fleet.liveness import look
from slime_backend.policy import decide
from slime_backend.publication import PublicationError, publish
from slime_backend.transports import DiskTransport

pytestmark = pytest.mark.engine

DEADLINES = Deadlines(pause=20.0, flush=20.0, load=60.0, control=10.0, generate=120.0)
RETRACT = decide("disjoint", "retract")
numbers = itertools.count(1)

SLOW = """
import os, sys, time

def install():
    from sglang.srt.constrained.base_grammar_backend import BaseGrammarBackend
    dispatch = BaseGrammarBackend._init_value_dispatch

    def slowly(self, key, *args, **kwargs):
        while os.path.exists(os.environ["REEF_TEST_HOLD"]):
            time.sleep(0.01)
        return dispatch(self, key, *args, **kwargs)

    BaseGrammarBackend._init_value_dispatch = slowly

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "sglang.srt.constrained.grammar_manager":
            sys.meta_path.remove(self)
            install()
        return None

sys.meta_path.insert(0, Finder())
"""


@asynccontextmanager
async def one_engine(engine, version="v0"):
    async with EngineClient(engine.url, name="engine0", deadlines=DEADLINES) as client:
        await client.label(version)
        fleet = Fleet(RETRACT, version)
        await admit(fleet, client)
        yield fleet, client


@pytest.fixture(scope="module")
def start(tiny_model, tmp_path_factory):
    """start(hooks) -> context of (engine, the file that holds every compile while it exists)."""
    site = tmp_path_factory.mktemp("site")
    (site / "sitecustomize.py").write_text(SLOW)

    def begin(hooks):
        hold = site / f"hold-{next(numbers)}"
        settings = EngineSettings(
            model=str(tiny_model),
            max_total_tokens=20000,
            skip_tokenizer=False,
            hooks=hooks,
            extra=("--grammar-backend", "xgrammar"),
            environment={
                "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "REEF_TEST_HOLD": str(hold),
                "SGLANG_HEALTH_CHECK_TIMEOUT": "3",
            },
        )
        return running_engines([LocalEngine(settings, log_path=site / f"{hold.name}.log")]), hold

    return begin


@pytest.fixture(scope="module")
def hooked(start):
    context, hold = start(RUN_HOOKS)
    with context as (engine,):
        yield engine, hold


def guided(client):
    regex = f"(yes|no){{{next(numbers)},40}}"  # another one each time: nothing of it is compiled yet
    body = {"text": "is it?", "sampling_params": {"max_new_tokens": 6, "temperature": 0.0, "regex": regex}}
    return asyncio.create_task(client.generate(body))


async def waiting_for_its_grammar(client):
    while (await client.reports())[0].kv.grammar_queue < 1:
        await asyncio.sleep(0.01)


async def publication_with_a_grammar_under_way(engine, hold, source, root, version):
    """Returns (report or error, the answer, compiles still held at the publication's end)."""
    async with one_engine(engine) as (fleet, client):
        hold.touch()
        try:
            asked = guided(client)
            await waiting_for_its_grammar(client)
            try:
                result = await publish(fleet, DiskTransport(source, root), version)
            except PublicationError as error:
                result = error
            still = (await client.reports())[0].kv.grammar_queue
        finally:
            hold.unlink()
        return result, await asked, still


def test_a_publication_passes_while_a_grammar_is_compiled(hooked, sources, tmp_path, run_async):
    engine, hold = hooked
    report, answer, still = run_async(
        publication_with_a_grammar_under_way(engine, hold, sources["b"], tmp_path, "v1"), 120
    )
    assert report.unconfirmed == {}
    assert report.engines[0].flush_verified
    assert still == 1, "the grammar was ready before the end: the test shows nothing"
    assert answer["text"].startswith(("yes", "no"))
    assert answer["meta_info"]["prefills"][0]["version"] == "v1"


def test_a_schema_that_arrives_in_the_pause_and_one_in_flight(hooked, sources, tmp_path, run_async):
    """The first decodes under its grammar as the pause comes and goes on under it; the second comes during the load."""
    engine, _ = hooked
    second = []

    class Slow(DiskTransport):
        async def load(self, client, version):
            second.append(guided(client))  # SGLang's HTTP process keeps it until the resume
            await super().load(client, version)

    async def scenario():
        async with one_engine(engine) as (fleet, client):
            # Without the least number of words the answer may end after any of them.
            asked = {"max_new_tokens": 1000, "temperature": 1.0, "regex": "(yes|no){300,}"}
            body = {"text": "a", "sampling_params": asked}
            first = asyncio.create_task(client.generate(body))
            while (await client.reports())[0].kv.running < 1:
                await asyncio.sleep(0.01)
            report = await publish(fleet, Slow(sources["a"], tmp_path), "v2")
            return report, await first, await second[0]

    report, first, answer = run_async(scenario(), 120)
    assert report.unconfirmed == {}
    assert report.engines[0].requests_retracted == 1
    assert [s["version"] for s in first["meta_info"]["weight_versions"]] == ["v0", "v2"]
    assert re.fullmatch("(yes|no)+(y|ye|n)?", first["text"]), first["text"]
    assert answer["text"].startswith(("yes", "no"))


def test_a_paused_engine_is_alive_though_its_health_check_fails(hooked, run_async):
    engine, _ = hooked

    async def scenario():
        async with EngineClient(engine.url, deadlines=DEADLINES) as client:
            await client.pause("in_place")
            try:
                return await client.healthy(20.0), await look(client, process_alive=engine.alive)
            finally:
                await client.resume()

    healthy, found = run_async(scenario())
    assert not healthy
    assert found.life == "alive"
    assert found.reports[0].kv.paused


def test_negative_control_without_the_hook(start, sources, tmp_path, run_async):
    """SGLang refuses each flush; the engine is resumed for moments, then the publication ends, long before the flush's
    deadline, and says why. With a grammar that is ready in such a moment it passes."""
    context, hold = start(tuple(h for h in RUN_HOOKS if h != "grammar_flush"))
    with context as (engine,):
        error, answer, _ = run_async(
            publication_with_a_grammar_under_way(engine, hold, sources["b"], tmp_path, "v1"), 120
        )
        assert isinstance(error, PublicationError)
        assert "start the engine with the hook grammar_flush" in str(error)
        assert answer["text"].startswith(("yes", "no"))

        async def released():
            async with one_engine(engine) as (fleet, client):
                hold.touch()
                asked = guided(client)
                await waiting_for_its_grammar(client)
                refused = (await client.reports())[0].kv.flush_refused
                publication = asyncio.create_task(publish(fleet, DiskTransport(sources["b"], tmp_path), "v2"))
                while (await client.reports())[0].kv.flush_refused == refused:
                    await asyncio.sleep(0.01)
                hold.unlink()
                return await publication, await asked

        report, answer = run_async(released(), 120)
        assert report.unconfirmed == {}
        assert answer["text"].startswith(("yes", "no"))
