"""Scoped prefix sharing on real engines: many publications while requests come and go."""

from __future__ import annotations

import asyncio
import os
import random
from contextlib import suppress
from typing import Any

import pytest

from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationReport, publish
from tests.engine_plugin.checks import TOLERANCE, audit_difference, prompt
from tests.engine_plugin.scoped import RUNNING, Scoped
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]

PUBLICATIONS = int(os.environ.get("REEF_PUBLICATIONS", "20"))  # 200 for a release


class PathTransport:
    """Loads checkpoints that are there already; `version` ends in the name of one."""

    name = "path"

    def __init__(self, paths: dict[str, str]) -> None:
        self.paths = paths

    async def prepare(self, version: str, clients: Any) -> None:
        return None

    async def load(self, client: EngineClient, version: str) -> None:
        await client.load_from_disk(self.paths[version.rpartition("-")[2]])

    async def close(self) -> None:
        return None


async def publish_under_load(scoped: Scoped, publications: int) -> tuple[list[PublicationReport], list[Any]]:
    """Publish over and over while requests of all lengths, sharing prefixes, come and go."""
    chance = random.Random(3)
    shared = [prompt(length) for length in (64, 400, 1200)]
    answers: list[Any] = []
    done = asyncio.Event()

    async def load(client: EngineClient) -> None:
        while not done.is_set():
            ids = chance.choice(shared) + prompt(chance.choice((3, 20, 150, 700)))
            sampling = {"max_new_tokens": chance.choice((1, 2, 8, 80)), "temperature": 1.0, "ignore_eos": True}
            rid = f"r{chance.getrandbits(60)}"
            body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}
            task = asyncio.create_task(client.generate(body))
            if chance.random() < 0.1:
                await asyncio.sleep(0.05)  # wherever it is by then
                await client.call("POST", "/abort_request", body={"rid": rid})
            answers.append((ids, await task))

    async with EngineClient(scoped.api.url, name="engine0") as client:
        fleet = Fleet(decide("disjoint", "scoped"), "v0")
        await admit(fleet, client)
        workers = [asyncio.create_task(load(client)) for _ in range(RUNNING + 3)]
        reports = []
        try:
            for i in range(publications):
                reports.append(await publish(fleet, PathTransport(scoped.paths), f"{i}-v{i % 3}"))
                wanted = len(answers) + 2
                await until(lambda: len(answers) >= wanted, "two more answers")  # noqa: B023
        finally:
            done.set()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*workers)
        # The last sweep, of an engine at rest.
        reports.append(await publish(fleet, PathTransport(scoped.paths), "end-v0"))
    return reports, answers


def test_many_publications_under_load_leak_nothing(scoped: Scoped, run_async: Any) -> None:
    reports, answers = run_async(publish_under_load(scoped, PUBLICATIONS), 500)
    outcomes = [outcome for report in reports for outcome in report.engines]
    assert len(outcomes) == PUBLICATIONS + 1
    assert all(outcome.confirmed and outcome.sweep_verified for outcome in outcomes)
    assert sum(outcome.requests_retracted for outcome in outcomes) == 0
    assert sum(outcome.in_flight for outcome in outcomes) > PUBLICATIONS
    assert sum(outcome.tokens_swept for outcome in outcomes) > 50 * PUBLICATIONS
    scoped.check_nothing_is_left()
    whole = [(ids, a) for ids, a in answers if a["meta_info"]["finish_reason"]["type"] == "length"]
    assert len(whole) > PUBLICATIONS
    assert sum(len(a["meta_info"]["weight_versions"]) > 1 for _, a in whole) > PUBLICATIONS // 10
    assert sum(a["meta_info"]["prefills"][0]["cached"] > 0 for _, a in whole) > PUBLICATIONS // 10
    for ids, answer in whole[:: max(1, len(whole) // 20)]:
        named = relabelled(answer)
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
        assert answer["meta_info"]["cached_tokens"] <= len(ids)
        assert audit_difference(scoped.reference, ids, named) < TOLERANCE


def relabelled(answer: Any) -> Any:
    """The same answer with each version named after the checkpoint that it was: "17-v2" is "v2"."""

    def plain(span: dict[str, Any]) -> dict[str, Any]:
        return {**span, "version": span["version"].rpartition("-")[2]}

    segments = [
        {**plain(segment), "context": [plain(span) for span in segment["context"]]}
        for segment in answer["meta_info"]["kv_provenance"]
    ]
    return {**answer, "meta_info": {**answer["meta_info"], "kv_provenance": segments}}
