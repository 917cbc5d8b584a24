"""Negative controls: what the same checks see on an engine that lacks a correction. One that passes here is void."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine_plugin.checks import audit_difference, decoding, logprobs, plain_difference, prompt
from tests.engine_plugin.engine_api import Serve
from tests.engine_plugin.tiny_models import Reference

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Runs at the start of every Python process of the engine and takes two corrections out.
WITHOUT_CORRECTIONS = """
from slime_backend.engine_plugin import hf_window
hf_window.shorten_windows = lambda instances, model: instances
import os
if os.environ.get("REEF_SLIME_HOOKS"):
    from slime_backend.engine_plugin import kv_spans
    kv_spans._around_relabel = lambda original, scheduler, new_version: original(scheduler, new_version)
"""


@pytest.fixture
def uncorrected(tmp_path: Path) -> dict[str, str]:
    """The environment of an engine that lacks both corrections."""
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_CORRECTIONS)
    return {"PYTHONPATH": str(tmp_path)}


@pytest.mark.soak
def test_without_the_correction_the_window_is_off(
    serve: Serve, hybrid_paths: dict[str, str], hybrid_reference: Reference, uncorrected: dict[str, str]
) -> None:
    with serve(hybrid_paths["v0"], overlap_schedule=True, environment=uncorrected) as api:
        ids = prompt(700)
        assert plain_difference(hybrid_reference, "v0", ids, api.generate(ids, 24)) > 1e-3


@pytest.mark.soak
def test_without_the_correction_the_native_spans_are_off(
    serve: Serve, dense_paths: dict[str, str], dense_reference: Reference, uncorrected: dict[str, str]
) -> None:
    with serve(dense_paths["v0"], overlap_schedule=True, environment=uncorrected) as api:
        ids = prompt(50)
        call = decoding(api, ids)
        paused = api.pause("in_place").kv
        assert paused.result_queue == 1, "no step was in flight"
        api.load_and_resume(dense_paths["v1"], "v1")
        answer = call.result()
        ours, native = answer["meta_info"]["kv_provenance"], answer["meta_info"]["weight_versions"]
        assert ours[0]["end"] == native[0]["end"] + 1
        assert audit_difference(dense_reference, ids, answer) < 1e-5
        # The disputed token was sampled by v0, not by v1 as SGLang says.
        disputed = native[0]["end"]
        by_v1 = dense_reference.plain("v1", ids + answer["output_ids"])[len(ids) - 1 + disputed]
        assert abs(float(by_v1) - logprobs(answer)[disputed]) > 1e-2


@pytest.mark.soak
def test_stock_attention_is_wrong_or_fails_behind_a_sliding_window(
    serve: Serve, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    with serve(hybrid_paths["v0"], hooks=("kv_evidence",)) as api:
        ids = prompt(700)
        worst = 0.0
        try:
            for _ in range(4):
                answer = api.generate(ids, 24)
                worst = max(worst, plain_difference(hybrid_reference, "v0", ids, answer))
        except (AssertionError, OSError):
            return  # the scheduler died of an IndexError
        assert worst > 1e-3
