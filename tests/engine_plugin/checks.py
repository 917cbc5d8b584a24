"""Assertions shared by the engine tests."""

from __future__ import annotations

import itertools
import random
from typing import Any

from tests.engine_plugin.engine_api import Api, Background, Endless
from tests.engine_plugin.tiny_models import Reference

TOLERANCE = 1e-5  # float32 engine against Hugging Face eager, tokens at temperature 1
_random = random.Random(7)


def prompt(length: int) -> list[int]:
    """A prompt that no other call returns, so its prefix is in no cache."""
    return [_random.randrange(5, 500) for _ in range(length)]


def logprobs(answer: Any) -> list[float]:
    return [item[0] for item in answer["meta_info"]["output_token_logprobs"]]


def plain_difference(reference: Reference, version: str, ids: list[int], answer: Any) -> float:
    """Largest log-prob difference between an answer and one version's plain forward."""
    expected = reference.plain(version, ids + answer["output_ids"])[len(ids) - 1 :].tolist()
    return max(abs(a - b) for a, b in zip(logprobs(answer), expected, strict=True))


def audit_difference(reference: Reference, ids: list[int], answer: Any) -> float:
    """Largest log-prob difference between an answer and what its kv_provenance says it was computed from."""
    tokens, got = ids + answer["output_ids"], logprobs(answer)
    worst = 0.0
    for segment in answer["meta_info"]["kv_provenance"]:
        expected = reference.segment(tokens, len(ids), segment)
        worst = max(worst, *(abs(a - b) for a, b in zip(expected, got[segment["start"] : segment["end"]], strict=True)))
    return worst


def check_form(ids: list[int], answer: Any) -> None:
    """Segments tile the output, contexts tile what each came from, and versions agree with SGLang's own spans."""
    meta = answer["meta_info"]
    segments = meta["kv_provenance"]
    assert segments[0]["start"] == 0
    assert segments[-1]["end"] == meta["completion_tokens"] == len(answer["output_ids"])
    for left, right in itertools.pairwise(segments):
        assert left["end"] == right["start"]
    for segment in segments:
        assert segment["start"] < segment["end"]
        context = segment["context"]
        assert context[0]["start"] == 0
        assert context[-1]["end"] == len(ids) + segment["end"] - 1
        for left, right in itertools.pairwise(context):
            assert left["end"] == right["start"]
            assert left["version"] != right["version"]
    sampled: list[dict[str, Any]] = []
    for segment in segments:
        if sampled and sampled[-1]["version"] == segment["version"]:
            sampled[-1]["end"] = segment["end"]
        else:
            sampled.append({key: segment[key] for key in ("version", "start", "end")})
    assert sampled == meta["weight_versions"]


def contexts(answer: Any) -> list[list[str]]:
    """Versions of each segment's context, in order."""
    return [[span["version"] for span in segment["context"]] for segment in answer["meta_info"]["kv_provenance"]]


def reset(api: Api, paths: dict[str, str]) -> None:
    """An idle engine at v0 with an empty cache."""
    api.call("/abort_request", {"abort_all": True})  # what a test that failed has left
    api.until(lambda report: report.kv.running == report.kv.waiting == report.kv.requests_holding_kv == 0, "idle")
    assert api.flush() == 200
    api.load(paths["v0"])
    api.label("v0")


def decoding(api: Api, ids: list[int]) -> Endless:
    """A request that has started to decode, and goes on until it is ended."""
    return Endless(api, ids).started()


def paused_in_mid_prefill(api: Api) -> tuple[list[int], Background]:
    """A request of many chunks, some of which are computed, paused in place. A longer one is sent where the pause came
    too late."""
    for length in (4000, 8000, 12000):
        ids = prompt(length)
        call = Background(api.generate, ids, 12)
        api.until(lambda report: report.kv.chunked == 1 or call.done(), "a chunked prefill")  # noqa: B023
        if api.pause("in_place").kv.chunked:
            return ids, call
        api.resume()
        call.result()
    raise AssertionError("no pause met a chunked prefill")
