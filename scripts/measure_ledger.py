"""Measure the ledger: `python scripts/measure_ledger.py [RECORDS] [TOKENS]`.

Appends RECORDS (100,000) made rollouts of TOKENS (0) output and ten times as many prompt tokens, each acknowledged by
itself, then opens the ledger again and looks 300 of them up by receipt. Prints rates and medians; nothing is kept.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.ledger.writer import Ledger
from slime_backend.simulation.made_rollouts import made, receipt

LOOKS = 300


def main() -> None:
    records = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as directory:
        run_dir = Path(directory)
        appending, longest = 0.0, 0.0
        with Ledger(run_dir) as ledger:
            for number in range(records):
                record = made(number, tokens)
                before = time.perf_counter()
                ledger.append(record)
                taken = time.perf_counter() - before
                appending, longest = appending + taken, max(longest, taken)
        data = sum(p.stat().st_size for p in run_dir.rglob("*") if p.suffix in (".parquet", ".jsonl"))
        index = sum(p.stat().st_size for p in run_dir.rglob("_index*"))
        before = time.perf_counter()
        reader = open_reader(run_dir)
        opening = time.perf_counter() - before
        looks = []
        with reader:
            for number in random.Random(0).choices(range(records), k=LOOKS):
                before = time.perf_counter()
                found = list(reader.find(Query(receipt=receipt(number))))
                looks.append(1e3 * (time.perf_counter() - before))
                assert found == [made(number, tokens)]
    print(f"{records} records, {tokens} output and {10 * tokens} prompt tokens each")
    print(f"append: {records / appending:.0f} records/s, longest {1e3 * longest:.0f} ms (a rotation)")
    print(f"on disk: {data / records:.0f} B a record, index {index / records:.0f} B a record")
    print(
        f"open: {1e3 * opening:.1f} ms; by receipt, {LOOKS} looks: median {statistics.median(looks):.2f} ms, "
        f"99th of 100 {sorted(looks)[LOOKS * 99 // 100]:.2f} ms"
    )


if __name__ == "__main__":
    main()
