"""kill -9 at any moment loses nothing that was acknowledged, and at most the one record under way is lost or extra.

The writer is a process (ledger_writer.py) that prints a record's number after `append` has returned; segments are small
enough that kills hit rotations too. The normal test is short; the soak test writes a million records through a hundred
kills and then asks for some of them.
"""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest

from slime_backend.ledger.files import list_segments, read_rollouts
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.jsonl import read_jsonl
from slime_backend.simulation.made_rollouts import made, receipt

ROOT = Path(__file__).resolve().parents[2]


def write_and_kill(run_dir: Path, first: int, count: int, segment_bytes: int, alive_s: float | None) -> int:
    """Start the writer at record `first`, kill it `alive_s` after its first acknowledgement (None: let it finish).

    Returns the number after the last one acknowledged.
    """
    writer = subprocess.Popen(
        [sys.executable, "-m", "tests.provenance.ledger_writer", *map(str, (run_dir, first, count, segment_bytes))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert writer.stdout is not None
    acknowledged = first
    watchdog = threading.Timer(540, writer.kill)
    watchdog.start()
    killer: threading.Timer | None = None
    try:
        for line in writer.stdout:
            if not line.endswith(b"\n"):
                break
            acknowledged = int(line) + 1
            if killer is None and alive_s is not None:
                killer = threading.Timer(alive_s, writer.send_signal, [signal.SIGKILL])
                killer.start()
        code = writer.wait(60)
    finally:
        watchdog.cancel()
        if killer is not None:
            killer.cancel()
        writer.kill()
        writer.wait(60)
        writer.stdout.close()
    assert code in (0, -signal.SIGKILL), f"the writer failed with {code}"
    return acknowledged


def stored_receipts(run_dir: Path) -> Iterator[str]:
    """As a user would read them, the sealed part with pandas."""
    for segment in list_segments(run_dir):
        if segment.kind == "parquet":
            yield from pd.read_parquet(segment.path, columns=["receipt"])["receipt"]
        else:
            yield from (record["receipt"] for record in read_jsonl(segment.path))


def check_everything(run_dir: Path, acknowledged: int, under_way: Counter[int]) -> None:
    """Every acknowledged record is there, once, and the index says the same as the data.

    `under_way`: number -> kills that hit while it was written. It may have been stored unacknowledged each time, and is
    written again by the next writer.
    """
    seen = Counter(stored_receipts(run_dir))
    numbers = {receipt(n): n for n in range(acknowledged)}
    assert [n for r, n in numbers.items() if r not in seen] == []
    assert [r for r in seen if r not in numbers and r != receipt(acknowledged)] == []
    assert [numbers[r] for r, times in seen.items() if r in numbers and times > 1 + under_way[numbers[r]]] == []
    with open_reader(run_dir) as reader:
        assert reader.count(Query()) == seen.total()
        for number in random.Random(1).sample(range(acknowledged), min(200, acknowledged)):
            assert next(reader.find(Query(receipt=receipt(number)))) == made(number)


def kill_often(run_dir: Path, records: int, kills: int, segment_bytes: int, alive_s: tuple[float, float]) -> int:
    """Write `records` through `kills` kills; returns how many kills cut a record off that the next start dropped."""
    rng = random.Random(0)
    at, torn, under_way = 0, 0, Counter[int]()
    for _ in range(kills):
        at = write_and_kill(run_dir, at, 10 * records, segment_bytes, rng.uniform(*alive_s))
        under_way[at] += 1
        tail = (run_dir / "rollouts.jsonl").read_bytes() if (run_dir / "rollouts.jsonl").exists() else b""
        torn += bool(tail) and not tail.endswith(b"\n")
    with Ledger(run_dir, segment_bytes=segment_bytes) as ledger:
        print(f"\n{at} records after {kills} kills; {torn} torn; the last opening said {ledger.notes}")
    if at < records:
        at = write_and_kill(run_dir, at, records - at, segment_bytes, None)
        assert at == records
    check_everything(run_dir, at, under_way)
    return at


def test_ten_kills(tmp_path):
    assert kill_often(tmp_path, 4000, 10, 200_000, (0.0, 0.15)) >= 4000
    assert [s.kind for s in list_segments(tmp_path)].count("parquet") > 3


def test_the_check_finds_a_lost_record(tmp_path):
    """The negative control: a ledger that acknowledged what it did not keep."""
    with Ledger(tmp_path) as ledger:
        for number in range(20):
            if number != 11:
                ledger.append(made(number))
    with pytest.raises(AssertionError, match=r"\[11\] == \[\]"):
        check_everything(tmp_path, 20, Counter())


# Every state that a kill can leave in the middle of a rotation, made by hand.
def test_a_rotation_cut_at_each_step_is_finished(tmp_path):
    from slime_backend.ledger.parquet import convert

    def sealed(name: str) -> Path:
        run_dir = tmp_path / name
        with Ledger(run_dir) as ledger:
            for number in range(50):
                ledger.append(made(number))
        (run_dir / "rollouts.jsonl").rename(run_dir / "rollouts" / "_000000.jsonl")
        return run_dir

    renamed = sealed("renamed")
    half = sealed("half a Parquet file")
    (half / "rollouts" / "_000000.parquet.partial").write_bytes(b"PAR1 and then the kill")
    both = sealed("both files")
    convert(both / "rollouts" / "_000000.jsonl", both / "rollouts" / "000000.parquet")
    for run_dir in (renamed, half, both):
        assert len(list(read_rollouts(run_dir))) == 50  # a reader that comes before the next writer
        with Ledger(run_dir) as ledger:
            ledger.append(made(50))
        names = sorted(p.name for p in (run_dir / "rollouts").iterdir())
        assert names == ["000000.parquet", "_index.sqlite", "_lock"]
        check_everything(run_dir, 51, Counter())


def test_a_torn_record_is_dropped_and_said(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(made(0))
    with (tmp_path / "rollouts.jsonl").open("ab") as file:
        file.write(b'{"receipt":"cut of')
    with open_reader(tmp_path) as reader:
        assert reader.count(Query()) == 1
    with Ledger(tmp_path) as ledger:
        assert ledger.notes == ["the last record was cut off by a kill (18 bytes) and is dropped"]
        ledger.append(made(1))
    check_everything(tmp_path, 2, Counter())


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_a_million_records_and_a_hundred_kills(tmp_path):
    started = time.monotonic()
    total = kill_often(tmp_path, 1_000_000, 100, 16 * 2**20, (0.0, 1.5))
    print(f"{total} records in {time.monotonic() - started:.0f} s with 100 kills")
    taken = []
    with open_reader(tmp_path) as reader:
        for number in random.Random(2).sample(range(total), 300):
            before = time.perf_counter()
            assert list(reader.find(Query(receipt=receipt(number)))) != []
            taken.append(1e3 * (time.perf_counter() - before))
    print(f"query by receipt: median {statistics.median(taken):.2f} ms, largest {max(taken):.2f} ms")
