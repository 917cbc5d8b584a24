"""The same claims with the overlap schedule, 16-token pages, a pool that is no multiple of the page, and increments."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime_backend.evidence import why_not_loaded
from slime_backend.policy import decide
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
from tests.engine_plugin.engine_api import Api, Serve
from tests.engine_plugin.tiny_models import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]  # make test has overlap in test_scope_engine


@pytest.fixture(scope="module")
def overlap_engine(serve: Serve, dense_paths: dict[str, str]) -> Iterator[Api]:
    with serve(
        dense_paths["v0"],
        page_size=16,
        max_total_tokens=40007,
        overlap_schedule=True,
        extra=("--incremental-streaming-output",),
    ) as api:
        yield api


@pytest.fixture
def api(overlap_engine: Api, dense_paths: dict[str, str]) -> Api:
    reset(overlap_engine, dense_paths)
    return overlap_engine


def test_prefix_hits_and_batches_match_the_reference(api: Api, dense_reference: Reference) -> None:
    prompts = [prompt(length) for length in (5, 300, 1500)]
    for expect_hit in (False, True):
        for ids, answer in zip(prompts, api.generate(prompts, 24), strict=True):
            cached = answer["meta_info"]["prefills"][0]["cached"]
            assert cached == ((len(ids) - 1) // 16 * 16 if expect_hit else 0)
            assert plain_difference(dense_reference, "v0", ids, answer) < TOLERANCE


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_publication_with_a_step_in_flight(
    api: Api, dense_paths: dict[str, str], dense_reference: Reference, mode: str
) -> None:
    """Repeated, because whether a step is in flight when the pause arrives is up to the schedule."""
    for _ in range(3):
        reset(api, dense_paths)
        ids = prompt(200)
        call = decoding(api, ids)
        api.publish(dense_paths["v1"], "v1", mode)
        answer = call.result()
        check_form(ids, answer)
        assert contexts(answer) == [["v0"], ["v1"] if mode == "retract" else ["v0", "v1"]]
        assert audit_difference(dense_reference, ids, answer) < TOLERANCE


def test_an_update_waits_for_the_batch_that_a_pause_left_in_flight(api: Api, dense_paths: dict[str, str]) -> None:
    """Its result stays queued until the resume, whose loop expects it; what counts is that the device has finished."""
    off = decide("disjoint", "unsafe")
    for mode, queued in (("in_place", 1), ("retract", 0)):
        reset(api, dense_paths)
        call = decoding(api, prompt(200))
        at_pause = api.pause(mode)
        api.load(dense_paths["v1"])
        api.label("v1")
        after = api.report()
        api.resume()
        call.result()
        assert [report.kv.result_queue for report in (at_pause, after)] == [queued, queued]
        assert after.epoch == at_pause.epoch + 2
        assert after.kv.device_waits == at_pause.kv.device_waits + 2
        assert why_not_loaded([at_pause], [after], off) == []
        assert api.report().kv.forward_passes > at_pause.kv.forward_passes  # it counts what runs, once it may


def test_publication_inside_a_chunked_prefill(
    api: Api, dense_paths: dict[str, str], dense_reference: Reference
) -> None:
    ids, call = paused_in_mid_prefill(api)
    assert not api.report().kv.is_empty
    api.load_and_resume(dense_paths["v1"], "v1")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0", "v1"]]
    assert audit_difference(dense_reference, ids, answer) < TOLERANCE


def test_free_equals_capacity_after_a_flush(api: Api) -> None:
    api.generate(prompt(333), 5)
    assert not api.report().kv.is_empty
    assert api.flush() == 200
    kv = api.report().kv
    assert kv.is_empty, kv.leftovers()
    assert kv.full_free == kv.full_capacity == 40000
    assert kv.swa_capacity == 0


def test_a_stream_of_increments_keeps_the_whole_record(api: Api) -> None:
    ids = prompt(40)
    chunks = api.stream(ids, 10)
    assert len(chunks) > 1
    meta = chunks[-1]["meta_info"]
    assert meta["kv_provenance"] == [
        {"start": 0, "end": 10, "version": "v0", "context": [{"version": "v0", "start": 0, "end": 49}]}
    ]
    assert len(meta["prefills"]) == 1
