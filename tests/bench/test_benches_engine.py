"""Two benches on real engines, cut short: that they measure what they should. The speed is for the benches to show."""

from __future__ import annotations

from typing import Any

import pytest

from slime_backend.bench import attention, publish
from slime_backend.bench.rows import Row

pytestmark = [pytest.mark.engine, pytest.mark.soak]


def test_publish_and_attention_cut_short(run_async: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[Row] = []
    log_lines: list[str] = []
    monkeypatch.setattr(publish, "IN_FLIGHT", (publish.USUAL,))
    monkeypatch.setattr(publish, "ROUNDS", 2)
    run_async(publish.bench_publish(log_lines.append, rows, ("load",)), 300)
    lost = next(row for row in rows if row.case.startswith("requests that a publication aborts"))
    assert lost.peer >= publish.SETTLED * publish.USUAL  # slime's way ends what runs
    assert lost.ours == 0
    assert len(rows) == 4 + 2 + 2 * 4 + 1

    rows.clear()
    for name, value in {"PREFIXES": {512: 2}, "BATCHES": [(2, 128)], "DECODE_ROUNDS": 2, "PROMPTS": {256: 2}}.items():
        monkeypatch.setattr(attention, name, value)
    run_async(attention.bench_attention(log_lines.append, rows), 300)
    assert [row.case.split(",")[0] for row in rows] == ["prefix hit", "decode", "prefill of 256 new tokens"]
