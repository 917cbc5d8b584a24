"""Values that tensor ranks leave for the one that answers, over torch's own in-process store."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from slime_backend.engine_plugin import loads
from slime_backend.engine_plugin.loads import LoadCounts
from slime_backend.engine_plugin.tensor_ranks import Place, TensorRanks


def ranks_of(store: Any, size: int, absent: tuple[int, ...] = ()) -> list[TensorRanks]:
    ranks = [TensorRanks() for _ in range(size)]
    for number, rank in enumerate(ranks):
        if number not in absent:
            rank.announce(Place("0.0", number, size), store)
        else:
            rank.place = Place("0.0", number, size)
    return ranks


def test_the_first_rank_gets_what_the_others_leave() -> None:
    first, *others = ranks_of(dist.HashStore(), 3)
    for n in range(5):  # whoever comes first
        for number, rank in enumerate(others, 1):
            assert rank.share("report", {"rank": number, "n": n}, 1.0) == {}
        assert first.share("report", {}, 1.0) == {1: {"rank": 1, "n": n}, 2: {"rank": 2, "n": n}}


def test_the_first_rank_waits_for_a_slow_one() -> None:
    first, second = ranks_of(dist.HashStore(), 2)
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(first.share("load", {}, 20.0)))
    waiting.start()
    second.share("load", {"success": False}, 1.0)
    waiting.join(20)
    assert found == [{1: {"success": False}}]


def test_a_rank_that_is_not_there_is_not_waited_for() -> None:
    first, *_ = ranks_of(dist.HashStore(), 3, absent=(2,))
    found = first.share("report", {}, 0.05)
    assert "deadline" in found[1]  # it announced itself and left nothing
    assert "isn't loaded" in found[2]


def test_one_rank_needs_no_store() -> None:
    alone = TensorRanks()
    alone.announce(Place("0.0", 0, 1), None)
    assert alone.share("report", {}, 1.0) == {}


def test_without_a_store_every_other_rank_is_missing_with_the_reason() -> None:
    first = TensorRanks()
    first.announce(Place("0.0", 0, 2), None)
    assert first.share("report", {}, 1.0) == {1: "torch's process group has no store"}


def test_a_store_that_fails_never_raises_into_the_scheduler() -> None:
    class Broken:
        def set(self, key: str, value: str) -> None:
            if "announced" not in key:
                raise RuntimeError("connection reset")

    first = TensorRanks()
    first.announce(Place("0.0", 0, 2), Broken())
    assert first.share("report", {}, 1.0) == {1: "RuntimeError: connection reset"}


def test_what_was_read_is_deleted() -> None:
    store = dist.HashStore()
    first, second = ranks_of(store, 2)
    for n in range(50):
        second.share("report", {"n": n}, 1.0)
        first.share("report", {"n": n}, 1.0)
    assert store.num_keys() < 10


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> TensorRanks:
    """The first of two ranks is this process; the other one is returned."""
    first, second = ranks_of(dist.HashStore(), 2)
    monkeypatch.setattr(loads, "RANKS", first)
    return second


@pytest.mark.parametrize(("mine", "other"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_load_is_a_success_only_where_both_ranks_had_it(two: TensorRanks, mine: bool, other: bool) -> None:
    counts = LoadCounts()
    two.share("load", {"success": other, "message": "theirs"}, 1.0)
    result = loads._around(counts.note)(lambda updater: SimpleNamespace(success=mine, message="mine"), None)
    assert result.success is (mine and other)
    assert ("mine" in result.message) is (not mine or other)
    assert ("tensor rank 1: theirs" in result.message) is not other
    # The rank that answers counts what it answered; the other one's own outcome stands in its own report.
    assert (counts.done, counts.failed, counts.last_failed) == (
        int(mine and other),
        int(not (mine and other)),
        not (mine and other),
    )


def test_a_load_that_raises_is_counted_and_goes_on_raising(two: TensorRanks) -> None:
    counts = LoadCounts()
    two.share("load", {"success": True, "message": ""}, 1.0)

    def fails(updater: Any) -> Any:
        raise ValueError("bad header")

    with pytest.raises(ValueError, match="bad header"):
        loads._around(counts.note)(fails, None)
    assert (counts.failed, counts.last_failure) == (1, "ValueError: bad header")
