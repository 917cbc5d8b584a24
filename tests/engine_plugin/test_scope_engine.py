"""Scoped prefix sharing on real engines: both trees, both tree cores, both page sizes, with and without overlap.

Every engine runs under SGLang's strict memory checks, which end the scheduler on the first leaked or doubled slot.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
from checks import (
    TOLERANCE,
    audit_difference,
    check_form,
    contexts,
    decoding,
    logprobs,
    plain_difference,
    prompt,
    reset,
)
from engine_api import Api, Background, Serve
from tiny_models import Reference

from slime_backend.engine_client import EngineClient
from slime_backend.engine_process import DEFAULT_HOOKS
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import PublicationReport, publish
from slime_backend.wire import ACTIVE

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HOOKS = (*DEFAULT_HOOKS, "scope")
PUBLICATIONS = int(os.environ.get("REEF_PUBLICATIONS", "20"))  # 200 for a release
RUNNING = 6  # --max-running-requests: further ones wait in the scheduler
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}


@dataclass(frozen=True)
class Kind:
    hybrid: bool
    core: str
    page: int
    overlap: bool

    def __str__(self) -> str:
        model, schedule = "hybrid" if self.hybrid else "dense", "overlap" if self.overlap else "plain"
        return f"{model}-{self.core}-page{self.page}-{schedule}"


KINDS = [
    Kind(False, "rust", 1, False),
    Kind(True, "rust", 16, True),
]
if os.environ.get("REEF_ALL_KINDS"):  # an engine each; for a release
    KINDS += [Kind(False, "python", 16, True), Kind(True, "python", 1, False)]


@dataclass(frozen=True)
class Scoped:
    """A running engine, the checkpoints it may load, and what answers are compared with."""

    kind: Kind
    api: Api
    paths: dict[str, str]
    reference: Reference

    def publish(self, version: str, name: str | None = None) -> None:
        self.api.publish(self.paths[version], name or version, "in_place")

    def whole(self, length: int) -> int:
        """Tokens of a prompt that a later request can reuse: all but the last, in whole pages."""
        return (length - 1) // self.kind.page * self.kind.page

    def check_first_and_second(self, ids: list[int], version: str, **options: Any) -> None:
        """The first computes everything, the second shares, both greedy by `version` alone."""
        for cached in (0, self.whole(len(ids))):
            answer = self.api.generate(ids, 8, sampling={"temperature": 0.0}, **options)
            assert answer["meta_info"]["cached_tokens"] == cached
            assert [p["cached"] for p in answer["meta_info"]["prefills"]] == [cached]
            rows = self.reference.rows(version, ids + answer["output_ids"])[len(ids) - 1 :]
            assert answer["output_ids"] == rows.argmax(-1).tolist()
            expected = rows.max(-1).values.tolist()
            assert max(abs(a - b) for a, b in zip(logprobs(answer), expected, strict=True)) < TOLERANCE

    def check_nothing_is_left(self) -> None:
        """Once its last request has ended, an engine keeps nothing of an older epoch, and has lost no slot."""
        self.api.until(lambda report: report.kv.is_empty, "empty")


@pytest.fixture(scope="module", params=KINDS, ids=str)
def running(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Scoped]:
    kind: Kind = request.param
    family = "hybrid" if kind.hybrid else "dense"
    paths = request.getfixturevalue(f"{family}_paths")
    with serve(
        paths["v0"],
        hooks=HOOKS,
        page_size=kind.page,
        overlap_schedule=kind.overlap,
        extra=("--max-running-requests", str(RUNNING)),
        environment={**STRICT, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": kind.core},
    ) as api:
        yield Scoped(kind, api, paths, request.getfixturevalue(f"{family}_reference"))


@pytest.fixture
def engine(running: Scoped) -> Scoped:
    reset(running.api, running.paths)
    return running


def test_the_hook_is_active(engine: Scoped) -> None:
    assert engine.api.report().hooks == dict.fromkeys(HOOKS, ACTIVE)


def test_first_request_after_a_publication_shares_nothing_and_the_second_everything(engine: Scoped) -> None:
    ids = prompt(600)
    engine.check_first_and_second(ids, "v0")
    engine.publish("v1")
    engine.check_first_and_second(ids, "v1")


def test_in_decode_a_request_keeps_its_kv_and_leaves_nothing_behind(engine: Scoped) -> None:
    ids = prompt(200)
    call = decoding(engine.api, ids, 300)
    engine.publish("v1")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0"], ["v0", "v1"]]
    assert len(answer["meta_info"]["prefills"]) == 1
    assert audit_difference(engine.reference, ids, answer) < TOLERANCE
    engine.check_nothing_is_left()
    engine.check_first_and_second(ids, "v1")
    # What it sampled is not shared either: neither half was computed by v1 alone.
    assert engine.api.generate(ids + answer["output_ids"], 1)["meta_info"]["cached_tokens"] <= len(ids)


def paused_in_mid_prefill(api: Api) -> tuple[list[int], Background]:
    """A request of eight chunks, some of which are computed. Tried again when the pause comes too early or too late."""
    for attempt in range(20):
        ids = prompt(4000)
        call = Background(api.generate, ids, 12)
        time.sleep(0.05 * (attempt % 5 + 1))
        if api.pause("in_place").kv.chunked:
            return ids, call
        api.resume()
        call.result()
    raise TimeoutError("no pause met a chunked prefill")


def test_in_mid_chunked_prefill(engine: Scoped) -> None:
    ids, call = paused_in_mid_prefill(engine.api)
    engine.api.load(engine.paths["v1"])
    engine.api.label("v1")
    engine.api.resume()
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0", "v1"]]
    assert len(answer["meta_info"]["prefills"]) == 1
    assert audit_difference(engine.reference, ids, answer) < TOLERANCE
    engine.check_nothing_is_left()
    engine.check_first_and_second(ids, "v1")


def test_waiting_in_the_scheduler_and_in_the_tokenizer(engine: Scoped) -> None:
    """Their prompts are in the cache when they arrive, and not when they are admitted."""
    api, known = engine.api, prompt(300)
    api.generate(known, 1)
    running = [Background(api.generate, prompt(100), 250) for _ in range(RUNNING)]
    api.until(lambda report: report.kv.running == RUNNING, "full")
    waiting = [Background(api.generate, known, 8) for _ in range(2)]
    api.until(lambda report: report.kv.waiting == 2, "two waiting in the scheduler")
    api.pause("in_place")
    late = Background(api.generate, known, 8)
    api.load(engine.paths["v1"])
    api.label("v1")
    api.resume()
    answers = [call.result() for call in (*waiting, late)]
    # Of two that are admitted in one batch neither can share; a later one may share what the others have so far.
    cached = sorted(a["meta_info"]["prefills"][0]["cached"] for a in answers)
    assert cached[0] == 0
    assert cached[-1] <= engine.whole(300)
    for answer in answers:
        assert contexts(answer) == [["v1"]]
        assert plain_difference(engine.reference, "v1", known, answer) < TOLERANCE
    for call in running:
        assert len(call.result()["meta_info"]["prefills"]) == 1


def test_retracted_twice_without_a_flush(engine: Scoped) -> None:
    """A retract gives the KV up, so the request is admitted again: to the epoch of that moment."""
    api, ids = engine.api, prompt(200)
    call = decoding(api, ids, 400)
    for version in ("v1", "v2"):
        api.publish_without_flush(engine.paths[version], version)
        api.until(lambda report: report.kv.running > 0, "decoding again")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0"], ["v1"], ["v2"]]
    assert [p["cached"] for p in answer["meta_info"]["prefills"]] == [0, 0, 0]
    assert audit_difference(engine.reference, ids, answer) < TOLERANCE
    # Readmitted under v2, it is an ordinary request of v2: what it computed may be shared.
    longer = ids + answer["output_ids"]
    follower = api.generate(longer, 8)
    assert follower["meta_info"]["cached_tokens"] > len(ids)
    assert plain_difference(engine.reference, "v2", longer, follower) < TOLERANCE


def test_streams_and_several_samples(engine: Scoped) -> None:
    ids = prompt(150)
    stream = Background(engine.api.stream, ids, 150)
    samples = Background(engine.api.generate, ids, 150, sampling={"n": 2})
    engine.api.until(lambda report: report.kv.running == 3, "three decoding")
    engine.publish("v1")
    last = stream.result()[-1]
    for answer in (last, *samples.result()):
        assert len(answer["meta_info"]["prefills"]) == 1
        assert contexts(answer) == [["v0"], ["v0", "v1"]]
    for answer in samples.result():
        check_form(ids, answer)
        assert audit_difference(engine.reference, ids, answer) < TOLERANCE
    engine.check_nothing_is_left()
    for answer in engine.api.generate(ids, 8, sampling={"n": 3}):
        assert answer["meta_info"]["cached_tokens"] in (0, engine.whole(len(ids)))
        assert contexts(answer) == [["v1"]]
        assert plain_difference(engine.reference, "v1", ids, answer) < TOLERANCE


def test_the_callers_own_keys_still_separate(engine: Scoped) -> None:
    ids, number = prompt(300), engine.api.report().epoch
    names = ("a", "b", f"{number}:", f"{number}:a", f"{number}:{number}:a", f"{number + 2}:a")
    options = [{}, *({"extra_key": name} for name in names), {"cache_salt": "s"}, {"extra_key": "a", "cache_salt": "s"}]
    for _ in range(2):
        for option in options:  # each finds nothing of the others, and then itself
            cached = [engine.api.generate(ids, 1, **option)["meta_info"]["cached_tokens"] for _ in range(2)]
            assert cached == [0, engine.whole(len(ids))], option
        engine.publish("v1")  # two epochs: the name "<number + 2>:a" is now that of a's own entry


def test_a_rollback_and_a_bare_renaming_revive_nothing(engine: Scoped) -> None:
    ids = prompt(300)
    engine.check_first_and_second(ids, "v0")
    engine.publish("v1")
    engine.publish("v0")
    engine.check_first_and_second(ids, "v0")
    engine.api.label("renamed")
    engine.check_first_and_second(ids, "v0")


def test_the_sweep_takes_what_is_unlocked_and_the_evidence_says_so(engine: Scoped) -> None:
    api = engine.api
    for length in (40, 700, 1500):
        api.generate(prompt(length), 4)
    call = decoding(api, prompt(200), 400)
    before = api.pause("in_place")
    assert before.kv.tree_full_evictable > 2000
    assert before.kv.tree_full_protected >= 192
    api.load(engine.paths["v1"])
    api.label("v1")
    after = api.report()
    assert after.epoch == after.kv.swept_epoch == before.epoch + 2
    assert after.kv.swept_tokens - before.kv.swept_tokens == before.kv.tree_full_evictable
    assert (after.kv.tree_full_evictable, after.kv.tree_swa_evictable) == (0, 0)
    assert after.kv.tree_full_protected == before.kv.tree_full_protected
    assert after.kv.full_free == before.kv.full_free + before.kv.tree_full_evictable
    api.resume()
    call.result()
    engine.check_nothing_is_left()


def test_what_a_crossing_request_had_in_the_tree_goes_and_nothing_else(engine: Scoped) -> None:
    api = engine.api
    shared = prompt(260)
    calls = [decoding(api, shared + prompt(40), tokens) for tokens in (500, 560)]
    engine.publish("v1")
    younger = [prompt(length) for length in (90, 400)]
    for ids in younger:
        api.generate(ids, 1)
    during = api.report()
    assert during.kv.requests_holding_kv == 2, "they ended too early for this test"
    for call in calls:
        call.result()
    after = api.until(lambda report: report.kv.requests_holding_kv == report.kv.running == 0, "idle")
    assert after.kv.tree_full_evictable == during.kv.tree_full_evictable
    assert after.kv.tree_full_protected == after.kv.tree_swa_protected == 0
    assert after.kv.swept_tokens - during.kv.swept_tokens == during.kv.tree_full_protected
    for ids in younger:
        assert api.generate(ids, 1)["meta_info"]["cached_tokens"] == engine.whole(len(ids))


def test_an_aborted_request_leaves_nothing_behind(engine: Scoped) -> None:
    call = decoding(engine.api, prompt(200), 20000, rid="crossing")
    engine.publish("v1")
    engine.api.call("/abort_request", {"rid": "crossing"})
    assert call.result()["meta_info"]["finish_reason"]["type"] == "abort"
    engine.check_nothing_is_left()


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


async def publish_under_load(engine: Scoped, publications: int) -> tuple[list[PublicationReport], list[Any]]:
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
                await asyncio.sleep(0.05)
                await client.call("POST", "/abort_request", body={"rid": rid})
            answers.append((ids, await task))

    async def more_answers(count: int) -> None:
        wanted = len(answers) + count
        while len(answers) < wanted:
            await asyncio.sleep(0.01)

    async with EngineClient(engine.api.url, name="engine0") as client:
        fleet = Fleet(decide("disjoint", "scoped"), "v0")
        await admit(fleet, client)
        workers = [asyncio.create_task(load(client)) for _ in range(RUNNING + 3)]
        reports = []
        try:
            for i in range(publications):
                reports.append(await publish(fleet, PathTransport(engine.paths), f"{i}-v{i % 3}"))
                await asyncio.wait_for(more_answers(2), 60)
        finally:
            done.set()
            with suppress(asyncio.CancelledError):
                await asyncio.gather(*workers)
        # The last sweep, of an engine at rest.
        reports.append(await publish(fleet, PathTransport(engine.paths), "end-v0"))
    return reports, answers


@pytest.mark.soak
def test_many_publications_under_load_leak_nothing(engine: Scoped, run_async: Any) -> None:
    reports, answers = run_async(publish_under_load(engine, PUBLICATIONS), 500)
    outcomes = [outcome for report in reports for outcome in report.engines]
    assert len(outcomes) == PUBLICATIONS + 1
    assert all(outcome.confirmed and outcome.sweep_verified for outcome in outcomes)
    assert sum(outcome.requests_retracted for outcome in outcomes) == 0
    assert sum(outcome.in_flight for outcome in outcomes) > PUBLICATIONS
    assert sum(outcome.tokens_swept for outcome in outcomes) > 50 * PUBLICATIONS
    engine.check_nothing_is_left()
    whole = [(ids, a) for ids, a in answers if a["meta_info"]["finish_reason"]["type"] == "length"]
    assert len(whole) > PUBLICATIONS
    assert sum(len(a["meta_info"]["weight_versions"]) > 1 for _, a in whole) > PUBLICATIONS // 10
    assert sum(a["meta_info"]["prefills"][0]["cached"] > 0 for _, a in whole) > PUBLICATIONS // 10
    for ids, answer in whole[:: max(1, len(whole) // 20)]:
        named = relabelled(answer)
        assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"])
        assert answer["meta_info"]["cached_tokens"] <= len(ids)
        assert audit_difference(engine.reference, ids, named) < TOLERANCE


def relabelled(answer: Any) -> Any:
    """The same answer with each version named after the checkpoint that it was: "17-v2" is "v2"."""

    def plain(span: dict[str, Any]) -> dict[str, Any]:
        return {**span, "version": span["version"].rpartition("-")[2]}

    segments = [
        {**plain(segment), "context": [plain(span) for span in segment["context"]]}
        for segment in answer["meta_info"]["kv_provenance"]
    ]
    return {**answer, "meta_info": {**answer["meta_info"], "kv_provenance": segments}}


def test_negative_control_without_the_hook_the_same_harness_sees_old_prefixes(
    serve: Serve, dense_paths: dict[str, str], dense_reference: Reference
) -> None:
    with serve(dense_paths["v0"]) as api:
        plain = Scoped(KINDS[0], api, dense_paths, dense_reference)
        ids = prompt(600)
        plain.check_first_and_second(ids, "v0")
        plain.publish("v1")
        with pytest.raises(AssertionError):
            plain.check_first_and_second(ids, "v1")
        answer = api.generate(ids, 8)
        assert answer["meta_info"]["cached_tokens"] == 599
        assert contexts(answer) == [["v1"]]  # it claims the new weights
        assert plain_difference(dense_reference, "v1", ids, answer) > 1e-2


@pytest.mark.soak
def test_where_kv_is_lent_past_the_key_the_hook_says_so(serve: Serve, dense_paths: dict[str, str]) -> None:
    with serve(dense_paths["v0"], hooks=HOOKS, extra=("--enable-streaming-session",)) as api:
        assert "streaming session" in api.report().hooks["scope"]
        ids = prompt(100)
        api.generate(ids, 1)
        assert api.generate(ids, 1)["meta_info"]["cached_tokens"] == 99
        assert api.report().kv.swept_epoch is None
