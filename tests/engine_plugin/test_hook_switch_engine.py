"""The hooks of a running engine out and in again: what its answers and its cache say, on a model that has them all."""

from __future__ import annotations

import pytest

from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.wire import ACTIVE, NOT_NEEDED, SWITCH_KEY
from tests.engine_plugin.checks import TOLERANCE, audit_difference, plain_difference, prompt
from tests.engine_plugin.engine_api import Serve
from tests.engine_plugin.tiny_models import Reference

# Runs with the soak tests, beside the bench: a run never asks for this hook.
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]


def test_out_and_in_again(serve: Serve, hybrid_paths: dict[str, str], hybrid_reference: Reference) -> None:
    # One chunk holds a prompt: where a chunk ends SGLang keeps a window by itself.
    with serve(hybrid_paths["v0"], hooks=tuple(HOOK_MODULES), chunked_prefill_size=2048) as api:
        assert set(api.report().hooks.values()) <= {ACTIVE, NOT_NEEDED}

        def switch(on: int) -> None:
            assert api.call("/set_internal_state", {"server_args": {SWITCH_KEY: on}}) == (200, [True])

        def first_fan_out() -> int:
            head = prompt(1500)
            for _ in range(2):
                tail = prompt(40)
                answer = api.generate(head + tail, 8, sampling={"custom_params": {"kv_anchors": [len(head)]}})
                assert plain_difference(hybrid_reference, "v0", head + tail, answer) < TOLERANCE
            return int(answer["meta_info"]["cached_tokens"])

        ids = prompt(200)
        for cached in (0, 199):  # what was computed without the hooks bears no epoch, and is not shared with what does
            switch(0)
            assert first_fan_out() == 0  # as SGLang is
            answer = api.generate(ids, 8)
            assert not {"kv_provenance", "prefills"} & set(answer["meta_info"])
            switch(1)
            assert set(api.report().hooks.values()) <= {ACTIVE, NOT_NEEDED}
            assert first_fan_out() == 1500
            answer = api.generate(ids, 8)
            assert answer["meta_info"]["cached_tokens"] == cached
            assert audit_difference(hybrid_reference, ids, answer) < TOLERANCE
