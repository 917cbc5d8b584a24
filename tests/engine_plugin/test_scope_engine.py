"""Scoped prefix sharing on real engines: what a request may share and what it leaves behind, case by case.

Publications under load are in test_scope_load_engine.py.
"""

from __future__ import annotations

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
)
from tests.engine_plugin.engine_api import Background, Endless, Serve, go_on
from tests.engine_plugin.scoped import DENSE, HOOKS, RUNNING, Scoped
from tests.engine_plugin.tiny_models import Reference
from tests.waiting import ENDLESS

pytestmark = [pytest.mark.engine, pytest.mark.slow]


def test_the_hook_is_active(scoped: Scoped) -> None:
    assert scoped.api.report().hooks == dict.fromkeys(HOOKS, ACTIVE)


def test_first_request_after_a_publication_shares_nothing_and_the_second_everything(scoped: Scoped) -> None:
    ids = prompt(600)
    scoped.check_first_and_second(ids, "v0")
    scoped.publish("v1")
    scoped.check_first_and_second(ids, "v1")


def test_in_decode_a_request_keeps_its_kv_and_leaves_nothing_behind(scoped: Scoped) -> None:
    ids = prompt(200)
    call = decoding(scoped.api, ids)
    scoped.publish("v1")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0"], ["v0", "v1"]]
    assert len(answer["meta_info"]["prefills"]) == 1
    assert audit_difference(scoped.reference, ids, answer) < TOLERANCE
    scoped.check_nothing_is_left()
    scoped.check_first_and_second(ids, "v1")
    # What it sampled is not shared either: neither half was computed by v1 alone.
    assert scoped.api.generate(ids + answer["output_ids"], 1)["meta_info"]["cached_tokens"] <= len(ids)


def test_in_mid_chunked_prefill(scoped: Scoped) -> None:
    ids, call = paused_in_mid_prefill(scoped.api)
    scoped.api.load_and_resume(scoped.paths["v1"], "v1")
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0", "v1"]]
    assert len(answer["meta_info"]["prefills"]) == 1
    assert audit_difference(scoped.reference, ids, answer) < TOLERANCE
    scoped.check_nothing_is_left()
    scoped.check_first_and_second(ids, "v1")


def test_waiting_in_the_scheduler_and_in_the_tokenizer(scoped: Scoped) -> None:
    """Their prompts are in the cache when they arrive, and not when they are admitted."""
    api, known = scoped.api, prompt(300)
    api.generate(known, 1)
    running = [Endless(api, prompt(100)) for _ in range(RUNNING)]
    go_on(api, RUNNING, running)
    waiting = [Background(api.generate, known, 8) for _ in range(2)]
    api.until(lambda report: report.kv.waiting == 2, "two waiting in the scheduler")
    api.pause("in_place")
    late = Background(api.generate, known, 8)
    api.load_and_resume(scoped.paths["v1"], "v1")
    ended = [call.end() for call in running]  # they make room
    answers = [call.result() for call in (*waiting, late)]
    # Of two that are admitted in one batch neither can share; a later one may share what the others have so far.
    cached = sorted(a["meta_info"]["prefills"][0]["cached"] for a in answers)
    assert cached[0] == 0
    assert cached[-1] <= scoped.whole(300)
    for answer in answers:
        assert contexts(answer) == [["v1"]]
        assert plain_difference(scoped.reference, "v1", known, answer) < TOLERANCE
    assert [len(answer["meta_info"]["prefills"]) for answer in ended] == [1] * RUNNING


def test_retracted_twice_without_a_flush(scoped: Scoped) -> None:
    """A retract gives the KV up, so the request is admitted again: to the epoch of that moment."""
    api, ids = scoped.api, prompt(200)
    call = decoding(api, ids)
    for version in ("v1", "v2"):
        api.publish_without_flush(scoped.paths[version], version)
        go_on(api, 1, [call])
    answer = call.result()
    check_form(ids, answer)
    assert contexts(answer) == [["v0"], ["v1"], ["v2"]]
    assert [p["cached"] for p in answer["meta_info"]["prefills"]] == [0, 0, 0]
    assert audit_difference(scoped.reference, ids, answer) < TOLERANCE
    # Readmitted under v2, it is an ordinary request of v2: what it computed may be shared.
    longer = ids + answer["output_ids"]
    follower = api.generate(longer, 8)
    assert follower["meta_info"]["cached_tokens"] > len(ids)
    assert plain_difference(scoped.reference, "v2", longer, follower) < TOLERANCE


def test_streams_and_several_samples(scoped: Scoped) -> None:
    ids = prompt(150)
    stream = Background(scoped.api.stream, ids, ENDLESS, stream_interval=64)
    samples = Background(scoped.api.generate, ids, ENDLESS, sampling={"n": 2})
    go_on(scoped.api, 3, [stream, samples])
    scoped.publish("v1")
    go_on(scoped.api, 3, [stream, samples])
    scoped.api.call("/abort_request", {"abort_all": True})
    last = stream.result()[-1]
    for answer in (last, *samples.result()):
        assert len(answer["meta_info"]["prefills"]) == 1
        assert contexts(answer) == [["v0"], ["v0", "v1"]]
    for answer in samples.result():
        check_form(ids, answer)
        assert audit_difference(scoped.reference, ids, answer) < TOLERANCE
    scoped.check_nothing_is_left()
    for answer in scoped.api.generate(ids, 8, sampling={"n": 3}):
        assert answer["meta_info"]["cached_tokens"] in (0, scoped.whole(len(ids)))
        assert contexts(answer) == [["v1"]]
        assert plain_difference(scoped.reference, "v1", ids, answer) < TOLERANCE


def test_the_callers_own_keys_still_separate(scoped: Scoped) -> None:
    ids, number = prompt(300), scoped.api.report().epoch
    names = ("a", "b", f"{number}:", f"{number}:a", f"{number}:{number}:a", f"{number + 2}:a")
    options = [{}, *({"extra_key": name} for name in names), {"cache_salt": "s"}, {"extra_key": "a", "cache_salt": "s"}]
    for _ in range(2):
        for option in options:  # each finds nothing of the others, and then itself
            cached = [scoped.api.generate(ids, 1, **option)["meta_info"]["cached_tokens"] for _ in range(2)]
            assert cached == [0, scoped.whole(len(ids))], option
        scoped.publish("v1")  # two epochs: the name "<number + 2>:a" is now that of a's own entry


def test_a_rollback_and_a_bare_renaming_revive_nothing(scoped: Scoped) -> None:
    ids = prompt(300)
    scoped.check_first_and_second(ids, "v0")
    scoped.publish("v1")
    scoped.publish("v0")
    scoped.check_first_and_second(ids, "v0")
    scoped.api.label("renamed")
    scoped.check_first_and_second(ids, "v0")


def test_the_sweep_takes_what_is_unlocked_and_the_evidence_says_so(scoped: Scoped) -> None:
    api = scoped.api
    for length in (40, 700, 1500):
        api.generate(prompt(length), 4)
    call = decoding(api, prompt(200))
    before = api.pause("in_place")
    assert before.kv.tree_full_evictable > 2000
    assert before.kv.tree_full_protected >= 192
    api.load(scoped.paths["v1"])
    api.label("v1")
    after = api.report()
    assert after.epoch == after.kv.swept_epoch == before.epoch + 2
    assert after.kv.swept_tokens - before.kv.swept_tokens == before.kv.tree_full_evictable
    assert (after.kv.tree_full_evictable, after.kv.tree_swa_evictable) == (0, 0)
    assert after.kv.tree_full_protected == before.kv.tree_full_protected
    assert after.kv.full_free == before.kv.full_free + before.kv.tree_full_evictable
    api.resume()
    call.result()
    scoped.check_nothing_is_left()


def test_what_a_crossing_request_had_in_the_tree_goes_and_nothing_else(scoped: Scoped) -> None:
    api = scoped.api
    shared = prompt(260)
    calls = [decoding(api, shared + prompt(40)) for _ in range(2)]
    scoped.publish("v1")
    younger = [prompt(length) for length in (90, 400)]
    for ids in younger:
        api.generate(ids, 1)
    during = api.report()
    assert during.kv.requests_holding_kv == 2
    for call in calls:
        call.end()
    after = api.until(lambda report: report.kv.requests_holding_kv == report.kv.running == 0, "idle")
    assert after.kv.tree_full_evictable == during.kv.tree_full_evictable
    assert after.kv.tree_full_protected == after.kv.tree_swa_protected == 0
    assert after.kv.swept_tokens - during.kv.swept_tokens == during.kv.tree_full_protected
    for ids in younger:
        assert api.generate(ids, 1)["meta_info"]["cached_tokens"] == scoped.whole(len(ids))


def test_an_aborted_request_leaves_nothing_behind(scoped: Scoped) -> None:
    call = decoding(scoped.api, prompt(200))
    scoped.publish("v1")
    assert call.end()["meta_info"]["finish_reason"]["type"] == "abort"
    scoped.check_nothing_is_left()


def test_negative_control_without_the_hook_the_same_harness_sees_old_prefixes(
    serve: Serve, dense_paths: dict[str, str], dense_reference: Reference
) -> None:
    with serve(dense_paths["v0"]) as api:
        plain = Scoped(DENSE, api, dense_paths, dense_reference)
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
