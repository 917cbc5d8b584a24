"""Measure what the page costs a store of many turns, and what counting costs each turn.

    python scripts/measure_store_counts.py [--turns 40000] [--store URL]

Fills a store (SQLite in a temporary directory, or the empty one that is named) with turns of 1,200 tokens and JSON of
provenance, then reads what the page shows: from the counters, and by a scan of the tables, which is what they replace.
Both right after the store is opened, and again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from sqlalchemy import Connection

from reef_service.store.counters import add, of_turn, read_counts, scanned
from reef_service.store.database import Database
from reef_service.store.turns import History, Turn, VersionNumbers, add_turn
from slime_backend.provenance.records import RolloutRecord
from slime_backend.wire import KvSegment, Prefill, Span

PROMPT, OUTPUT, TOGETHER, LOOKS = 1000, 200, 500, 20


def turn(number: int) -> Turn:
    record = RolloutRecord(
        receipt=f"r{number}",
        group="",
        engine="engine0",
        question="",
        prompt_ids=(7,) * PROMPT,
        output_ids=(8,) * OUTPUT,
        logprobs=(-1.5,) * OUTPUT,
        temperature=1.0,
        reward=0.0,
        finish_reason="stop",
        spans=(Span("v0", 0, OUTPUT),),
        segments=(KvSegment(0, OUTPUT, "v0", (Span("v0", 0, PROMPT + OUTPUT - 1),)),),
        prefills=(Prefill(0, 1, "v0", 0, PROMPT),),
        submitted_at=float(number),
        finished_at=number + 0.5,
        session=f"s{number // 4}",
    )
    return Turn(
        record, f"r{number - 1}" if number % 4 else None, "chat", "complete", "", History("chat", 2, str(number))
    )


def timed(database: Database, query: Callable[[Connection], Any]) -> float:
    """Milliseconds on a connection of the pool."""
    started = time.perf_counter()
    with database.reading.connect() as connection:
        query(connection)
    return 1000 * (time.perf_counter() - started)


def fill(database: Database, turns: int) -> None:
    numbers = VersionNumbers()
    for begin in range(0, turns, TOGETHER):
        with database.writing.begin() as connection:
            for number in range(begin, min(turns, begin + TOGETHER)):
                add_turn(connection, turn(number), numbers)


def cost_of_counting(database: Database) -> float:
    """Microseconds of a turn's counters, of a turn that begins a session."""
    changes = {of_turn("complete", "pure"): 1, "bytes": 1, "trajectories": 1, "sessions": 1}
    with database.writing.begin() as connection:
        started = time.perf_counter()
        for _ in range(1000):
            add(connection, changes)
        spent = time.perf_counter() - started
        connection.rollback()
    return 1e6 * spent / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--turns", type=int, default=40_000)
    parser.add_argument("--store")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        url = chosen.store or f"sqlite:///{place}/store.sqlite"
        database = Database(url)
        fill(database, chosen.turns)
        database.close()
        for name, query in {"counters": read_counts, "a scan": scanned}.items():
            database = Database(url, writing=False)
            first = timed(database, query)
            again = statistics.median(timed(database, query) for _ in range(LOOKS))
            database.close()
            print(f"{chosen.turns} turns, {name}: first {first:.1f} ms, then {again:.1f} ms")
        database = Database(url)
        print(f"counting costs {cost_of_counting(database):.0f} us a turn that begins a session")
        database.close()


if __name__ == "__main__":
    main()
