"""Stamps on KV slots, without an engine: what is written, what is read, and that writing never waits for the device."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slime_backend.engine_plugin import kv_spans, kv_stamps
from slime_backend.engine_plugin.epoch import WeightEpoch
from slime_backend.engine_plugin.kv_stamps import SlotStamps, runs
from slime_backend.engine_plugin.trace import UNWRITTEN, Admission, EpochSpan, RequestTrace
from slime_backend.wire import KvSegment, Span

WAITS = {"tolist", "item", "cpu", "numpy", "nonzero", "unique", "unique_consecutive", "__bool__", "__int__", "equal"}


class OnDevice(torch.Tensor):
    """A tensor as one on a GPU would be: whatever needs its values on the CPU raises."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.__name__ in WAITS or (function.__name__ == "to" and "cpu" in map(str, args[1:])):
            raise AssertionError(f"{function.__name__} waits for the device")
        return super().__torch_function__(function, types, args, kwargs or {})


def _on_device(tensor: Any) -> Any:
    return tensor.as_subclass(OnDevice)


@pytest.mark.parametrize("windowed", [False, True])
def test_a_pass_is_stamped_without_waiting_for_the_device(windowed: bool) -> None:
    mapping = _on_device(torch.arange(64) // 2) if windowed else None
    stamps = SlotStamps(64, "cpu", mapping, window_slots=32)
    stamps.full = _on_device(stamps.full)
    if windowed:
        stamps.window = _on_device(stamps.window)
    slots = _on_device(torch.tensor([3, 9, 10]))
    stamps.write(slots, 7)
    with pytest.raises(AssertionError, match="waits for the device"):  # the control: reading does
        slots.tolist()
    written = stamps.full.as_subclass(torch.Tensor)
    assert (written == 7).nonzero().flatten().tolist() == [3, 9, 10]


def test_what_lies_outside_of_the_pool_ends_nobody() -> None:
    stamps = SlotStamps(8, "cpu")
    stamps.write(torch.tensor([2, 900]), 1)
    assert (stamps.full == 1).nonzero().flatten().tolist() == [2, 8]


def test_each_row_gets_its_own_stamps() -> None:
    stamps = SlotStamps(16, "cpu")
    stamps.write(torch.tensor([1, 2, 3]), 4)
    stamps.write(torch.tensor([3, 5]), 6)
    first, second = stamps.read([torch.tensor([1, 2, 3, 5]), torch.tensor([7], dtype=torch.int32)])
    assert (first.tolist(), second.tolist()) == ([4, 4, 6, 6], [UNWRITTEN])


def test_the_older_stamp_of_two_pools_counts_and_what_left_the_window_does_not() -> None:
    mapping = torch.tensor([0, 1, 2, 0, 3])
    stamps = SlotStamps(5, "cpu", mapping, window_slots=4)
    stamps.write(torch.tensor([1, 2, 3, 4]), 5)
    stamps.window[2] = 1  # slot 2's window part is of another epoch
    stamps.window[0] = 0  # slot 3 has none any more
    assert stamps.read([torch.tensor([1, 2, 3, 4])])[0].tolist() == [5, 1, 5, 5]


@pytest.mark.parametrize(
    ("epochs", "expected"),
    [
        ([], []),
        ([2], [(2, 0, 1)]),
        ([2, 2, 3, 3, 3, 2], [(2, 0, 2), (3, 2, 5), (2, 5, 6)]),
    ],
)
def test_equal_neighbours_are_one_run(epochs: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert runs(torch.tensor(epochs, dtype=torch.int32)) == tuple(EpochSpan(*span) for span in expected)


# ---- what the record makes of them ----------------------------------------------------------------------------------

PROMPT = 10


def label(epoch: int) -> str:
    return f"v{epoch}"


def traced(epoch: int, cached: int = 0) -> RequestTrace:
    trace = RequestTrace(prompt_length=PROMPT)
    trace.admit(Admission(epoch, 0, cached, PROMPT), sampled=0)
    return trace


def test_stamps_that_agree_are_a_measured_segment() -> None:
    trace = traced(1)
    trace.measure(0, (EpochSpan(1, 0, PROMPT + 3),))
    assert trace.kv_segments(1, 4, label) == [KvSegment(0, 4, "v1", (Span("v1", 0, PROMPT + 3),), measured=True)]


def test_a_stale_prefix_contradicts_the_claim() -> None:
    trace = traced(1, cached=6)
    trace.measure(0, (EpochSpan(0, 0, 6), EpochSpan(1, 6, PROMPT + 3)))
    (segment,) = trace.kv_segments(1, 4, label)
    assert segment.contradicted
    assert segment.measured_context == (Span("v0", 0, 6), Span("v1", 6, PROMPT + 3))
    assert KvSegment.from_json(segment.to_json()) == segment


def test_two_epochs_of_one_name_are_no_contradiction() -> None:
    trace = traced(3)
    trace.measure(0, (EpochSpan(2, 0, 4), EpochSpan(3, 4, PROMPT + 3)))
    (segment,) = trace.kv_segments(3, 4, lambda epoch: "same")
    assert (segment.measured, segment.contradicted) == (True, False)


def test_a_retract_leaves_each_part_with_the_stamps_of_its_own_kv() -> None:
    trace = traced(0)
    trace.measure(0, (EpochSpan(0, 0, PROMPT + 3),))
    trace.publish(0, committed=None, sampled=4)
    trace.admit(Admission(1, 0, 0, PROMPT + 4), sampled=4)
    trace.measure(1, (EpochSpan(0, 0, 5), EpochSpan(1, 5, PROMPT + 8)))  # five positions were kept
    first, second = trace.kv_segments(1, 9, label)
    assert (first.measured, first.contradicted) == (True, False)
    assert second.measured_context == (Span("v0", 0, 5), Span("v1", 5, PROMPT + 8))


@pytest.mark.parametrize("found", [(), (EpochSpan(1, 0, PROMPT),)])
def test_kv_that_was_read_in_part_is_not_measured(found: tuple[EpochSpan, ...]) -> None:
    trace = traced(1)
    if found:
        trace.measure(0, found)
    (segment,) = trace.kv_segments(1, 4, label)
    assert (segment.measured, "measured" in segment.to_json()) == (False, False)


def test_old_and_missing_names_are_no_current_version() -> None:
    epoch = WeightEpoch(lambda: "now")
    epoch.number, epoch._names = 9, {8: "before"}
    assert [epoch.name_if_known(n) for n in (9, 8, 3, UNWRITTEN)] == ["now", "before", "epoch 3", "unwritten"]


# ---- the hook -------------------------------------------------------------------------------------------------------


class Request:
    def __init__(self, row: int, committed: int) -> None:
        self.req_pool_idx, self.kv_committed_len = row, committed


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pool of 32 slots and two rows of requests."""
    slots = SimpleNamespace(size=31, page_size=1, device="cpu")
    table = torch.tensor([[4, 5, 6, 7], [8, 9, 0, 0]], dtype=torch.int32)
    params = SimpleNamespace(token_to_kv_pool_allocator=slots, req_to_token_pool=SimpleNamespace(req_to_token=table))
    for name in ("_stamps", "_rows"):
        monkeypatch.setattr(kv_stamps, name, None)
    monkeypatch.setattr(kv_stamps, "_pending", [])
    kv_stamps._after_tree("tree", SimpleNamespace(params=params))
    yield table
    kv_spans._traces.clear()


def forward(slots: list[int], draft: bool = False) -> None:
    runner = SimpleNamespace(is_draft_worker=draft)
    kv_stamps._before_forward(runner, SimpleNamespace(out_cache_loc=torch.tensor(slots)))


def test_what_was_given_back_is_read_before_it_can_be_written_over(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    epoch = WeightEpoch(lambda: "now")
    monkeypatch.setattr(kv_stamps, "EPOCH", epoch)
    forward([4, 5, 6, 7])
    req = Request(0, 3)
    trace = kv_spans._traces[req] = traced(0)
    kv_stamps._before_release(req, None)
    pool[0] = 0  # the row is another request's now
    epoch.number = 1
    forward([4, 5, 6, 7], draft=True)
    assert trace._found == {}  # a draft model has a pool of its own
    forward([4, 5, 6, 7])
    assert trace._found == {0: (EpochSpan(0, 0, 3),)}
    kv_stamps.settle()
    assert kv_stamps._stamps is not None
    assert kv_stamps._stamps.full[[4, 7]].tolist() == [1, 1]


def test_a_request_that_nobody_asks_about_is_not_read(pool: Any) -> None:
    kv_stamps._before_release(Request(0, 3), None)
    assert kv_stamps._pending == []
