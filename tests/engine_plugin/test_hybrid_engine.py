"""Attention, evidence and provenance on a real engine with sliding-window layers, without the overlap schedule."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from slime_backend.wire import ACTIVE
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
from tests.engine_plugin.engine_api import Api, Background, Serve, go_on
from tests.engine_plugin.tiny_models import WINDOW, Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]


@pytest.fixture(scope="module")
def hybrid_engine(serve: Serve, hybrid_paths: dict[str, str]) -> Iterator[Api]:
    with serve(hybrid_paths["v0"]) as api:
        yield api


@pytest.fixture
def api(hybrid_engine: Api, hybrid_paths: dict[str, str]) -> Api:
    reset(hybrid_engine, hybrid_paths)
    return hybrid_engine


def test_all_hooks_report_active(api: Api) -> None:
    assert api.report().hooks == dict.fromkeys(("cpu_attention", "kv_evidence", "kv_spans"), ACTIVE)


# --- attention ---------------------------------------------------------------------------------------------------


def test_fresh_prefix_hit_and_chunked_prompts_match_the_reference(api: Api, hybrid_reference: Reference) -> None:
    for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 700, 3000):  # 3000 takes six chunks of 512
        ids = prompt(length)
        for expect_hit in (False, True):
            answer = api.generate(ids, 24)
            assert (answer["meta_info"]["prefills"][0]["cached"] > 0) == (expect_hit and length > 1)
            assert plain_difference(hybrid_reference, "v0", ids, answer) < TOLERANCE


def test_a_batch_of_very_different_lengths_matches_the_reference(api: Api, hybrid_reference: Reference) -> None:
    prompts = [prompt(length) for length in (3, 60, 130, 500, 1500, 2500)]
    for ids, answer in zip(prompts, api.generate(prompts, 40), strict=True):
        assert plain_difference(hybrid_reference, "v0", ids, answer) < TOLERANCE


# --- evidence ----------------------------------------------------------------------------------------------------


def test_empty_after_retract_and_flush_with_waiting_requests_and_not_before(api: Api) -> None:
    calls = [decoding(api, prompt(150)) for _ in range(3)]
    paused = api.pause("retract").kv
    assert (paused.paused, paused.pause_mode, paused.waiting) == (True, "retract", 3)
    assert (paused.in_flight_at_pause, paused.retracted_at_pause) == (3, 3)
    assert paused.tokens_at_pause >= 3 * 150
    late = Background(api.generate, prompt(50), 4)
    api.until(lambda report: report.kv.waiting == 4 or report.kv.paused, "late request queued")
    flushes = api.report().kv.flush_epoch
    assert api.flush() == 200
    flushed = api.report().kv
    assert flushed.is_empty, flushed.leftovers()
    assert flushed.waiting >= 3
    assert flushed.flush_epoch == flushes + 1
    api.resume()
    assert api.report().kv.pause_mode is None
    go_on(api, 3, calls)
    for call in calls:
        assert [p["cached"] for p in call.end()["meta_info"]["prefills"]] == [0, 0]
    late.result()
    assert not api.report().kv.is_empty  # the finished requests' prefixes are in the tree


def test_retracted_but_unflushed_cache_entries_are_not_empty(api: Api) -> None:
    api.generate(prompt(300), 4)
    call = decoding(api, prompt(150))
    retracted = api.pause("retract").kv
    assert retracted.requests_holding_kv == 0
    assert not retracted.is_empty
    assert any(item.startswith("tree_full_evictable") for item in retracted.leftovers())
    assert any(item.startswith("tree_swa_evictable") for item in retracted.leftovers())
    api.resume()
    call.result()


def test_in_place_pause_is_not_empty_and_its_refused_flush_is_explained(api: Api) -> None:
    call = decoding(api, prompt(150))
    held = api.pause("in_place").kv
    assert not held.is_empty
    assert (held.requests_holding_kv, held.retracted_at_pause, held.tokens_at_pause) == (1, 0, 0)
    assert api.flush() == 400
    refused = api.report().kv
    assert (refused.flush_refused, refused.flush_epoch) == (held.flush_refused + 1, held.flush_epoch)
    assert refused.last_refusal is not None
    assert refused.last_refusal["requests_holding_kv"] == 1
    assert refused.last_refusal["pause_mode"] == "in_place"
    api.resume()
    call.result()


# --- provenance --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("modes", list(itertools.product(("in_place", "retract"), repeat=2)), ids="+".join)
def test_two_publications_in_flight_audit_exactly(
    api: Api, hybrid_paths: dict[str, str], hybrid_reference: Reference, modes: tuple[str, str]
) -> None:
    ids = prompt(200)
    call = decoding(api, ids)
    for version, mode in zip(("v1", "v2"), modes, strict=True):
        api.publish(hybrid_paths[version], version, mode)
        go_on(api, 1, [call])
    answer = call.end()
    check_form(ids, answer)
    assert [segment["version"] for segment in answer["meta_info"]["kv_provenance"]] == ["v0", "v1", "v2"]
    expected = [["v0"]]
    for version, mode in zip(("v1", "v2"), modes, strict=True):
        expected.append([version] if mode == "retract" else [*expected[-1], version])
    assert contexts(answer) == expected
    assert audit_difference(hybrid_reference, ids, answer) < TOLERANCE
    prefills = answer["meta_info"]["prefills"]
    assert len(prefills) == 1 + modes.count("retract")
    assert all((item["order"], item["cached"]) == (0, 0) for item in prefills)
    # Negative control: the claim that one version did it all is far off, so the audit above can fail.
    assert plain_difference(hybrid_reference, "v2", ids, answer) > 1e-2


def test_publication_inside_a_chunked_prefill(
    api: Api, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    ids, call = paused_in_mid_prefill(api)
    api.load_and_resume(hybrid_paths["v1"], "v1")
    answer = call.result()
    check_form(ids, answer)
    assert answer["meta_info"]["weight_versions"] == [{"version": "v1", "start": 0, "end": 12}]
    assert contexts(answer) == [["v0", "v1"]]
    assert audit_difference(hybrid_reference, ids, answer) < TOLERANCE
    assert len(answer["meta_info"]["prefills"]) == 1


def test_a_prefix_of_other_weights_fails_the_audit(
    api: Api, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    """The matched prefix is only claimed to be of the current epoch. Without a flush the claim is false, and shows."""
    ids = prompt(600)
    api.generate(ids, 1)
    api.load(hybrid_paths["v1"])
    api.label("v1")
    answer = api.generate(ids, 12)
    assert answer["meta_info"]["prefills"] == [
        {"epoch": api.report().epoch, "order": 0, "version": "v1", "cached": 599, "total": 600}
    ]
    assert contexts(answer) == [["v1"]]
    assert audit_difference(hybrid_reference, ids, answer) > 1e-2


def test_a_version_given_with_the_weights_and_a_bare_renaming(
    api: Api, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    ids = prompt(100)
    before = api.report().epoch
    call = decoding(api, ids)
    api.pause("in_place")
    api.load(hybrid_paths["v1"], "v1")  # label and weights in one call
    api.resume()
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0"], ["v0", "v1"]]
    assert audit_difference(hybrid_reference, ids, answer) < TOLERANCE
    api.label("renamed")
    assert api.report().epoch == before + 2


def test_every_form_of_response_carries_the_same_record(api: Api) -> None:
    ids = prompt(90)
    whole = {"start": 0, "version": "v0"}
    for answer in api.generate(ids, 8, sampling={"n": 3}):
        check_form(ids, answer)
        assert len(answer["meta_info"]["prefills"]) == 1
    chunks = api.stream(ids, 8)
    assert len(chunks) > 1
    assert not any(chunk["meta_info"].get("kv_provenance") for chunk in chunks[:-1])
    check_form(ids, chunks[-1])
    without_logprobs = api.generate(ids, 8, return_logprob=False)
    check_form(ids, without_logprobs)
    single = api.generate(ids, 1)
    assert single["meta_info"]["kv_provenance"] == [
        {**whole, "end": 1, "context": [{"version": "v0", "start": 0, "end": 90}]}
    ]
    assert api.generate(ids, 0)["meta_info"]["kv_provenance"] == []


def test_an_aborted_request_tells_how_far_it_came(
    api: Api, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    ids = prompt(100)
    call = decoding(api, ids)
    api.publish(hybrid_paths["v1"], "v1", "in_place")
    answer = call.result()
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    check_form(ids, answer)
    assert audit_difference(hybrid_reference, ids, answer) < TOLERANCE
