"""What kv_spans does at each step's end, without an engine: nothing, unless a request has finished.

Not tested here: what a real engine answers (test_hybrid_engine.py, test_scope_engine.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from slime_backend.engine_plugin import kv_spans
from slime_backend.engine_plugin.epoch import WeightEpoch
from slime_backend.engine_plugin.trace import Admission, RequestTrace


class Request:
    """The part of SGLang's `Req` that is looked at."""

    def __init__(self, tokens: int, finished: bool) -> None:
        self.output_ids_through_stop = [1] * tokens
        self._finished = finished

    def finished(self) -> bool:
        return self._finished


class Waiting:
    """A request in flight that holds no KV and has sampled nothing."""

    kv = None
    req_pool_idx = None
    output_ids: tuple[int, ...] = ()


@pytest.fixture
def admit(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(kv_spans.EPOCH, "version", lambda epoch: f"v{epoch}")

    def admitted(tokens: int, finished: bool) -> Request:
        req = Request(tokens, finished)
        trace = kv_spans._traces[req] = RequestTrace(prompt_length=10)
        trace.admit(Admission(0, 0, 4, 10), sampled=0)
        return req

    yield admitted
    kv_spans._traces.clear()


def test_a_step_at_whose_end_nobody_finished_sends_nothing(admit: Any) -> None:
    running = [admit(5, finished=False) for _ in range(3)]
    assert kv_spans._report(running) == kv_spans._report([]) == {}
    assert len(kv_spans._traces) == 3


def test_one_row_a_request_in_their_order_and_each_record_once(admit: Any) -> None:
    running, ended, unknown = admit(5, finished=False), admit(7, finished=True), Request(0, finished=True)
    columns = kv_spans._report([running, ended, unknown])
    context = [{"version": "v0", "start": 0, "end": 16}]
    segment = {"start": 0, "end": 7, "version": "v0", "context": context}
    prefill = {"epoch": 0, "order": 0, "version": "v0", "cached": 4, "total": 10}
    assert columns == {"kv_provenance": [[], [segment], []], "prefills": [[], [prefill], []]}
    assert kv_spans._report([ended]) == {"kv_provenance": [[]], "prefills": [[]]}


def test_names_of_epochs_are_kept_as_long_as_a_request_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    served = ["v0"]
    weights = WeightEpoch(lambda: served[0])
    monkeypatch.setattr(kv_spans, "EPOCH", weights)
    weights.on_end(kv_spans._on_epoch_end)

    def publish(count: int) -> None:
        for _ in range(count):
            weights.advance(None)
            served[0] = f"v{weights.number}"

    kept = kv_spans.KEPT_NAMES + 2
    try:
        publish(500)
        assert len(weights._names) <= kept  # nobody is in flight
        req = Waiting()
        trace = kv_spans._traces[req] = RequestTrace(prompt_length=10)
        trace.admit(Admission(weights.number, 0, 4, 10), sampled=0)
        publish(40)
        assert [weights.version(number) for number in (500, 539)] == ["v500", "v539"]
        kv_spans._traces.clear()
        publish(1)
        assert len(weights._names) <= kept
    finally:
        kv_spans._traces.clear()
