"""The parts that amend the older generation, without an engine; what they do inside one is tested beside this file."""

from __future__ import annotations

import copy
import pickle
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from slime_backend import wire
from slime_backend.engine_plugin import egress, generation, kv_spans, label_relay, retract_flush, sampled_spans
from slime_backend.engine_plugin.epoch import EPOCH, WeightEpoch


def report(**hooks: str) -> wire.SchedulerReport:
    return wire.SchedulerReport("id", hooks, 0, None)


def test_a_hook_that_is_not_needed_is_not_missing() -> None:
    found = report(a=wire.ACTIVE, b=wire.NOT_NEEDED, c="this SGLang has no c")
    assert found.missing_hooks(["a", "b"]) == {}
    assert found.missing_hooks(["a", "b", "c", "d"]) == {"c": "this SGLang has no c", "d": "not loaded"}


# ---- one name for both forms of a request ---------------------------------------------------------------------------


def test_a_request_of_either_form_says_what_kv_it_holds() -> None:
    newer = SimpleNamespace(kv=SimpleNamespace(holds_kv=True, kv_committed_len=7), prefix_len=3)
    older = SimpleNamespace(req_pool_idx=1, kv_committed_len=7, prefix_indices=[4, 5, 6])
    for req in (newer, older):
        assert (generation.holds_kv(req), generation.committed_length(req), generation.prefix_length(req)) == (
            True,
            7,
            3,
        )
    between = SimpleNamespace(  # 0.5.16 to 0.5.18: a record that doesn't say whether it holds KV
        kv=SimpleNamespace(kv_allocated_len=8, swa_evicted_seqlen=0),
        req_pool_idx=1,
        kv_committed_len=7,
        prefix_indices=[4, 5, 6],
    )
    assert (generation.holds_kv(between), generation.committed_length(between)) == (True, 7)
    between.kv, between.req_pool_idx = None, None
    assert not generation.holds_kv(between)
    batches = SimpleNamespace(running_batch=SimpleNamespace(reqs=[between]), last_batch=None)  # no cur_batch
    assert generation.batched_requests(batches) == [between]
    assert not generation.holds_kv(SimpleNamespace(req_pool_idx=None))
    assert generation.holds_kv(SimpleNamespace(req_pool_idx=0))  # row 0 is a row


# ---- retract_flush ----------------------------------------------------------------------------------------------


class Scheduler:
    def __init__(self, waiting: list[Any], paused: bool = True, busy: bool = False) -> None:
        self.waiting_queue, self._engine_paused, self.busy = waiting, paused, busy

    def is_fully_idle(self, for_health_check: bool = False) -> bool:
        return not self.waiting_queue and not self.busy


FREE, HOLDING = SimpleNamespace(req_pool_idx=None), SimpleNamespace(req_pool_idx=3)


@pytest.mark.parametrize(
    ("mode", "scheduler", "health", "idle"),
    [
        ("retract", Scheduler([FREE, FREE]), False, True),
        ("retract", Scheduler([FREE, FREE]), True, False),
        ("retract", Scheduler([FREE, HOLDING]), False, False),
        ("retract", Scheduler([FREE], busy=True), False, False),
        ("retract", Scheduler([FREE], paused=False), False, False),
        ("in_place", Scheduler([FREE]), False, False),
        (None, Scheduler([FREE]), False, False),
        (None, Scheduler([]), False, True),
    ],
)
def test_idle_only_while_paused_by_a_retract_over_requests_without_kv(
    mode, scheduler, health, idle, monkeypatch
) -> None:
    monkeypatch.setattr(retract_flush, "_pause_mode", mode)
    queue = scheduler.waiting_queue
    assert retract_flush._around_idle(Scheduler.is_fully_idle, scheduler, health) is idle
    assert scheduler.waiting_queue is queue


def test_the_queue_comes_back_when_the_test_raises(monkeypatch) -> None:
    def broken(scheduler: Any, for_health_check: bool) -> bool:
        raise RuntimeError("broken")

    monkeypatch.setattr(retract_flush, "_pause_mode", "retract")
    scheduler = Scheduler([FREE])
    with pytest.raises(RuntimeError, match="broken"):
        retract_flush._around_idle(broken, scheduler)
    assert scheduler.waiting_queue == [FREE]


def test_a_resume_ends_the_exception(monkeypatch) -> None:
    monkeypatch.setattr(retract_flush, "_pause_mode", None)
    scheduler = Scheduler([FREE])
    retract_flush._before_pause(scheduler, SimpleNamespace(mode="retract"))
    assert retract_flush._around_idle(Scheduler.is_fully_idle, scheduler)
    retract_flush._before_continue(scheduler)
    assert not retract_flush._around_idle(Scheduler.is_fully_idle, scheduler)


# ---- label_relay ------------------------------------------------------------------------------------------------


@dataclass
class Arguments:
    model: str = "m"
    weight_version: str = "default"


def test_an_announced_field_behaves_as_the_field_did(monkeypatch) -> None:
    said: list[tuple[Any, str]] = []
    before = Arguments()
    field_ = label_relay.AnnouncedField("default", lambda arguments, value: said.append((arguments, value)))
    monkeypatch.setattr(Arguments, "weight_version", field_)
    assert Arguments.weight_version == "default"
    assert before.weight_version == "default"
    before.weight_version = "v1"
    assert (before.weight_version, vars(before)["weight_version"]) == ("v1", "v1")
    assert said == [(before, "v1")]
    assert asdict(before) == {"model": "m", "weight_version": "v1"}
    assert copy.copy(before).weight_version == pickle.loads(pickle.dumps(before)).weight_version == "v1"
    assert Arguments().weight_version == "default"


def test_only_our_message_is_taken_out_of_the_aborts() -> None:
    aborted: list[str] = []
    receive = label_relay.around_message(lambda scheduler: pytest.fail("not a label"))
    receive(lambda scheduler, message: aborted.append(message.rid), None, SimpleNamespace(rid="request 1"))
    receive(lambda scheduler, message: aborted.append(message.rid), None, SimpleNamespace(rid=""))
    assert aborted == ["request 1", ""]


# ---- sampled_spans and egress -----------------------------------------------------------------------------------


@pytest.fixture
def epoch(monkeypatch: pytest.MonkeyPatch) -> WeightEpoch:
    """Epochs 0 and 1 are of v0 (weights, then their label), 2 of v1."""
    fresh = WeightEpoch(lambda: "v1")
    fresh.number, fresh._names = 2, {0: "v0", 1: "v0"}
    for module in (sampled_spans, kv_spans):
        monkeypatch.setattr(module, "EPOCH", fresh)
    assert EPOCH is not fresh
    return fresh


@pytest.mark.parametrize(
    ("marks", "sampled", "expected"),
    [
        ([], 5, [("v1", 0, 5)]),
        ([(0, 3), (1, 3)], 5, [("v0", 0, 3), ("v1", 3, 5)]),
        ([(0, 0), (1, 0)], 5, [("v1", 0, 5)]),
        ([(0, 2), (1, 4)], 5, [("v0", 0, 4), ("v1", 4, 5)]),
        ([(0, 5), (1, 5)], 5, [("v0", 0, 5)]),
        ([(0, 7)], 5, [("v0", 0, 5)]),  # two tokens behind a stop string are not in the answer
        ([], 0, []),
    ],
)
def test_spans_tile_the_output(epoch, marks, sampled, expected) -> None:
    assert [(s.version, s.start, s.end) for s in sampled_spans.spans(marks, sampled)] == expected


@dataclass
class Rows:
    """What SGLang's accumulator does with values per token: rows that a request lacks are filled with None."""

    rids: list[str] = field(default_factory=list)
    customized_info: dict[str, list[Any]] = field(default_factory=dict)

    def accept(self, *, req: Any) -> None:
        if not req.sent:
            return
        self.rids.append(req.rid)
        for column in self.customized_info.values():
            if len(column) < len(self.rids):
                column.append([None] * 3)


def test_each_row_gets_one_value_and_only_the_last_of_a_request_has_it(monkeypatch) -> None:
    monkeypatch.setattr(egress, "_providers", [(("spans",), lambda req: {"spans": [{"of": req.rid}]})])
    rows = Rows()
    for rid, sent, finished in (("a", True, False), ("b", False, False), ("c", True, True), ("d", True, False)):
        req = SimpleNamespace(rid=rid, sent=sent, finished=lambda finished=finished: finished)
        egress._around_accept(Rows.accept, rows, req=req)
    assert rows.rids == ["a", "c", "d"]
    assert rows.customized_info == {"spans": [[], [{"of": "c"}], []]}


def test_a_chunk_of_increments_keeps_its_lists_whole() -> None:
    def stock(meta: dict[str, Any], offset: int, keys: Any) -> None:
        for key in keys:
            meta[key] = meta[key][offset:]

    growing = [{"start": 0}]
    meta = {"spans": growing, "other": [1, 2, 3]}
    egress.around_slice(lambda: frozenset({"spans"}))(stock, meta, 2, ["spans", "other"])
    assert meta == {"spans": [{"start": 0}], "other": [3]}
    assert meta["spans"] is not growing
