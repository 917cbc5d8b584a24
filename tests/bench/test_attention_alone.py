"""The passes of `bench attention --part alone`: both backends compute the same over the same keys."""

from __future__ import annotations

import pytest

from slime_backend.bench import attention_alone
from slime_backend.bench.attention_alone import SMOLLM2, TINY, Heads, Pass, alone_rows

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")

PASSES = (
    Pass("decode", requests=3, cached=40, new=1, at_least=2),
    Pass("hit", requests=1, cached=300, new=7, at_least=20),
    Pass("prefill", requests=2, cached=0, new=30, at_least=1),
)


@pytest.mark.parametrize("heads", [TINY, SMOLLM2], ids=lambda heads: heads.name)
@pytest.mark.parametrize("one", PASSES, ids=lambda one: one.name)
def test_both_sides_attend_to_the_same(heads: Heads, one: Pass) -> None:
    runs = attention_alone._runs(heads, one)
    peer, ours = runs["peer"](), runs["ours"]()
    assert len(peer) == heads.layers
    for theirs, mine in zip(peer, ours, strict=True):
        assert theirs.shape == (one.requests * one.new, heads.query * heads.dim)
        assert (theirs - mine).abs().max() < 1e-5
    if one.cached:  # of these each layer has its own
        assert (peer[0] - peer[1]).abs().max() > 1e-2


def test_rows_and_threads() -> None:
    threads = torch.get_num_threads()
    rows = alone_rows(TINY, PASSES, rounds=2)
    assert [row.goal for row in rows] == ["at least 2 times", "at least 20 times", "at least 1 times"]
    assert rows[0].case == "attention alone, decode, tiny model, ms"
    assert all(row.ours > 0 for row in rows)
    assert torch.get_num_threads() == threads
