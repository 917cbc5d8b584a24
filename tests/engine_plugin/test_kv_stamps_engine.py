"""Measured KV on a real engine in bfloat16: a stale prefix shows in the answer of the request that it was served to.

Honest publications beside them raise no contradiction: retracting and scoped, dense and with sliding windows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slime_backend.engine_process import RUN_HOOKS
from slime_backend.wire import KvSegment
from tests.engine_plugin.checks import prompt
from tests.engine_plugin.engine_api import Api, Endless, Serve

pytestmark = pytest.mark.engine
HEAD = 200  # tokens of a shared prefix


def segments(answer: Any) -> list[KvSegment]:
    return [KvSegment.from_json(segment) for segment in answer["meta_info"]["kv_provenance"]]


def is_contradicted(answer: Any) -> bool:
    found = segments(answer)
    assert all(segment.measured for segment in found)
    return any(segment.contradicted for segment in found)


@pytest.fixture(scope="module", params=["dense", "hybrid"])
def engine(request: pytest.FixtureRequest, serve: Serve) -> Iterator[tuple[Api, dict[str, str]]]:
    paths = request.getfixturevalue(f"{request.param}_paths")
    with serve(paths["v0"], hooks=(*RUN_HOOKS, "scope"), dtype="bfloat16", overlap_schedule=True) as api:
        yield api, paths


def publish(api: Api, paths: dict[str, str], number: int, mode: str) -> str:
    """One honest publication, by turns of two checkpoints, under a name of its own."""
    version = f"n{number}"
    path = paths["v1" if number % 2 else "v2"]
    api.publish(path, version, mode) if mode == "retract" else api.publish_without_flush(path, version)
    return version


def honest(api: Api, paths: dict[str, str], rounds: int, mode: str, requests: int) -> tuple[int, int]:
    """(answers, contradictions) over so many publications with requests in flight and a shared prefix before and after
    each. `scoped`: nothing is flushed, and the pause keeps KV."""
    answers: list[Any] = []
    head = prompt(HEAD)
    for number in range(rounds):
        answers += api.generate([head + prompt(4) for _ in range(requests)], 4)
        flight = Endless(api, [prompt(40), head + prompt(3)]).started()
        if mode == "retract":
            publish(api, paths, number, mode)
        else:
            api.pause("in_place")
            api.load_and_resume(paths["v1" if number % 2 else "v2"], f"s{number}")
        answers += flight.result()
        answers += api.generate([head + prompt(4) for _ in range(requests)], 4)
    return len(answers), sum(map(is_contradicted, answers))


@pytest.mark.parametrize("mode", ["retract", "scoped"])
def test_an_honest_engine_contradicts_nothing(engine: tuple[Api, dict[str, str]], mode: str) -> None:
    api, paths = engine
    answers, contradictions = honest(api, paths, 4, mode, requests=8)
    assert (answers, contradictions) == (4 * 18, 0)


@pytest.mark.slow
@pytest.mark.soak
@pytest.mark.parametrize("mode", ["retract", "scoped"])
def test_five_thousand_honest_answers(engine: tuple[Api, dict[str, str]], mode: str) -> None:
    api, paths = engine
    answers, contradictions = honest(api, paths, 25, mode, requests=100)
    print(f"{answers} answers, {contradictions} contradictions")
    assert (answers, contradictions) == (25 * 202, 0)


def stale_prefixes(api: Api, paths: dict[str, str], rounds: int) -> int:
    """Prefixes that the weights before computed, matched by a request of the new version; how many its answer names."""
    named = 0
    for number in range(rounds):
        head = prompt(HEAD)
        api.generate(head, 1)
        api.pause("in_place")
        api.load_and_resume(paths["v1" if number % 2 else "v2"], f"u{number}")
        answer = api.generate(head + prompt(4), 4)
        assert answer["meta_info"]["cached_tokens"] == HEAD
        assert answer["meta_info"]["kv_provenance"][0]["context"][0]["version"] == f"u{number}"  # the claim
        named += is_contradicted(answer)
    return named


@pytest.fixture(scope="module")
def unscoped(serve: Serve, dense_paths: dict[str, str]) -> Iterator[Api]:
    with serve(dense_paths["v0"], hooks=RUN_HOOKS, dtype="bfloat16") as api:
        yield api


def test_a_stale_prefix_shows_in_the_answer(unscoped: Api, dense_paths: dict[str, str]) -> None:
    assert stale_prefixes(unscoped, dense_paths, 5) == 5


@pytest.mark.slow
@pytest.mark.soak
def test_a_hundred_stale_prefixes(unscoped: Api, dense_paths: dict[str, str]) -> None:
    assert stale_prefixes(unscoped, dense_paths, 100) == 100
