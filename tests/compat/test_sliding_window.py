"""Attention, evidence and provenance of the older generation on a model with sliding windows, overlap schedule on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from tests.engine_plugin.checks import (
    TOLERANCE,
    audit_difference,
    check_form,
    contexts,
    decoding,
    paused_in_mid_prefill,
    plain_difference,
    prompt,
    reset,
)
from tests.engine_plugin.engine_api import Api, go_on
from tests.engine_plugin.tiny_models import WINDOW, Reference, write_checkpoints

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("older_generation")]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return write_checkpoints(tmp_path_factory.mktemp("hybrid"), hybrid=True)


@pytest.fixture(scope="module")
def hf(paths: dict[str, str]) -> Reference:
    return Reference(paths)


@pytest.fixture(scope="module")
def hybrid_engine(paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    settings = EngineSettings(
        model=paths["v0"], max_total_tokens=40000, chunked_prefill_size=512, hooks=RUN_HOOKS, overlap_schedule=True
    )
    engine = LocalEngine(settings, log_path=tmp_path_factory.mktemp("engine") / "engine.log")
    with running_engines([engine]):
        yield Api(engine.url)


@pytest.fixture
def api(hybrid_engine: Api, paths: dict[str, str]) -> Api:
    reset(hybrid_engine, paths)
    return hybrid_engine


def test_fresh_prefix_hit_and_chunked_prompts_match_the_reference(api: Api, hf: Reference) -> None:
    for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 700, 3000):  # 3000 takes six chunks of 512
        ids = prompt(length)
        for cached in (0, length - 1):
            answer = api.generate(ids, 24)
            assert answer["meta_info"]["cached_tokens"] == cached
            assert plain_difference(hf, "v0", ids, answer) < TOLERANCE


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_requests_that_live_through_two_publications_can_be_audited(
    api: Api, hf: Reference, paths: dict[str, str], mode: str
) -> None:
    """Exactly, token by token, from what their record says; and it agrees with the sampled spans."""
    prompts = [prompt(length) for length in (50, 300, 900)]
    calls = [decoding(api, ids) for ids in prompts]
    for version in ("v1", "v2"):
        api.publish(paths[version], version, mode)
        go_on(api, 3, calls)
    for ids, call in zip(prompts, calls, strict=True):
        answer = call.end()
        check_form(ids, answer)
        assert audit_difference(hf, ids, answer) < TOLERANCE
        last = contexts(answer)[-1]
        assert last == (["v0", "v1", "v2"] if mode == "in_place" else ["v2"])


def test_a_retract_and_flush_empty_both_pools(api: Api) -> None:
    ids = prompt(1000)
    api.generate(ids, 8)
    call = decoding(api, ids)
    used = api.report().kv
    assert used.swa_capacity > 0
    assert used.tree_full_evictable + used.tree_full_protected >= 1000
    assert used.swa_free < used.swa_capacity
    api.pause("retract")
    assert api.flush() == 200
    flushed = api.report().kv
    assert flushed.is_empty, flushed.leftovers()
    assert flushed.waiting == 1
    api.resume()
    call.result()


def test_an_in_place_publication_in_mid_prefill_is_recorded(api: Api, hf: Reference, paths: dict[str, str]) -> None:
    ids, call = paused_in_mid_prefill(api)
    api.load_and_resume(paths["v1"], "v1")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0", "v1"]]
    assert answer["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 12}]
    assert audit_difference(hf, ids, answer) < TOLERANCE
