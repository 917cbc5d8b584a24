"""The ledger in one process: what is appended is found, through rotation, a lost index and a refused disk.

Kills are in test_ledger_kills.py.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import shutil
import sqlite3
import subprocess
import sys
import threading

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slime_backend.ledger.files import list_segments, read_rollouts
from slime_backend.ledger.index import Query, index_path
from slime_backend.ledger.parquet import SCHEMA, convert, read_rows
from slime_backend.ledger.reader import open_reader
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.errors import LedgerError
from slime_backend.provenance.kv_contexts import restore
from slime_backend.provenance.records import RolloutRecord
from slime_backend.simulation.made_rollouts import made, receipt

from .examples import SEGMENTS, example

SMALL = 40_000  # bytes: some 50 records a segment


def fill(run_dir, first, count, segment_bytes=SMALL, tokens=0):
    with Ledger(run_dir, segment_bytes=segment_bytes) as ledger:
        for number in range(first, first + count):
            ledger.append(made(number, tokens))
        return ledger.notes


def found(run_dir, **query):
    with open_reader(run_dir) as reader:
        records = list(reader.find(Query(**query)))
        assert len(records) == reader.count(Query(**query))
        return records, reader.notes


def kinds(run_dir):
    return [s.kind for s in list_segments(run_dir)]


def test_a_small_run_is_one_file_of_json_lines(tmp_path):
    assert fill(tmp_path, 0, 20, segment_bytes=10**9) == []
    assert kinds(tmp_path) == ["jsonl"]
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").open()]
    assert [RolloutRecord.from_json(line) for line in lines] == [made(i) for i in range(20)]


@pytest.mark.parametrize("tokens", [0, 30])
def test_records_survive_rotation_unchanged_and_in_order(tmp_path, tokens):
    fill(tmp_path, 0, 300, tokens=tokens)
    assert kinds(tmp_path)[:-1] == ["parquet"] * (len(kinds(tmp_path)) - 1)
    assert len(kinds(tmp_path)) > 4
    assert [RolloutRecord.from_json(r) for r in read_rollouts(tmp_path)] == [made(i, tokens) for i in range(300)]
    for number in (0, 49, 50, 51, 150, 299):
        assert found(tmp_path, receipt=receipt(number)) == ([made(number, tokens)], [])


def test_every_query_agrees_with_reading_everything(tmp_path):
    fill(tmp_path, 400, 300)
    records = [made(i) for i in range(400, 700)]
    assert found(tmp_path)[0] == records
    assert found(tmp_path, session="g000061")[0] == [r for r in records if r.session == "g000061"] != []
    assert found(tmp_path, version="v1")[0] == [r for r in records if "v1" in r.versions] != []
    assert found(tmp_path, rollout_class="mixed")[0] == [r for r in records if r.rollout_class == "mixed"] != []
    both = [r for r in records if "v0" in r.versions and r.rollout_class == "mixed"]
    assert found(tmp_path, version="v0", rollout_class="mixed")[0] == both != []
    start = receipt(444)[:6]
    assert found(tmp_path, receipt=start)[0] == [r for r in records if r.receipt.startswith(start)] != []
    assert found(tmp_path, receipt="no such")[0] == []
    with open_reader(tmp_path) as reader:
        assert [r.receipt for r in reader.find(Query(), limit=3)] == [receipt(i) for i in (400, 401, 402)]


def test_a_writer_goes_on_where_the_last_one_stopped(tmp_path):
    for first in range(0, 200, 40):
        assert fill(tmp_path, first, 40) == []
    assert [r["receipt"] for r in read_rollouts(tmp_path)] == [receipt(i) for i in range(200)]
    assert len(found(tmp_path)[0]) == 200


def test_a_reader_beside_the_writer_sees_what_is_acknowledged(tmp_path):
    with Ledger(tmp_path, segment_bytes=SMALL) as ledger:
        for number in range(120):
            ledger.append(made(number))
            if number % 17 == 0:
                with open_reader(tmp_path) as reader:
                    assert reader.notes == []
                    assert reader.count(Query()) == number + 1
                    assert list(reader.find(Query(receipt=receipt(number)))) == [made(number)]


def test_two_writers_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("slime_backend.ledger.writer.LOCK_S", 0.1)
    with Ledger(tmp_path), pytest.raises(LedgerError, match="another process writes rollouts to"):
        Ledger(tmp_path)
    Ledger(tmp_path).close()  # once the first is closed, the next may


def test_a_segment_that_is_sealed_under_a_reader_is_still_found(tmp_path):
    with Ledger(tmp_path, segment_bytes=10**9) as ledger:
        for number in range(30):
            ledger.append(made(number))
        with open_reader(tmp_path) as reader:
            ledger.segment_bytes = 1
            for number in range(30, 33):  # each seals what came before it
                ledger.append(made(number))
            ledger.settle()
            assert kinds(tmp_path) == ["parquet"] * 3 + ["jsonl"]
            assert list(reader.find(Query(receipt=receipt(7)))) == [made(7)]
            assert list(reader.find(Query()))[:30] == [made(i) for i in range(30)]


def test_appending_goes_on_while_a_segment_is_turned_over(tmp_path, monkeypatch):
    """And whoever reads meanwhile finds everything; closing waits for it."""
    from slime_backend.ledger import parquet

    convert, may_go_on, on = parquet.convert, threading.Event(), []

    def slow(lines, path):
        on.append(threading.current_thread())
        assert may_go_on.wait(60)
        return convert(lines, path)

    monkeypatch.setattr(parquet, "convert", slow)
    with Ledger(tmp_path, segment_bytes=10**9) as ledger:
        for number in range(60):
            ledger.append(made(number))
            ledger.segment_bytes = 1 if number in (19, 39) else 10**9
        assert kinds(tmp_path) == ["jsonl"] * 3
        assert [r["receipt"] for r in read_rollouts(tmp_path)] == [receipt(i) for i in range(60)]
        assert found(tmp_path, receipt=receipt(30)) == ([made(30)], [])
        closing = threading.Thread(target=ledger.close)
        closing.start()
        closing.join(0.2)
        assert closing.is_alive()
        may_go_on.set()
        closing.join(60)
    assert kinds(tmp_path) == ["parquet", "parquet", "jsonl"]
    assert threading.main_thread() not in on
    assert found(tmp_path) == ([made(i) for i in range(60)], [])


def test_a_fault_of_turning_over_is_not_swallowed(tmp_path, monkeypatch):
    """One that isn't of the data: those leave lines and a note. What was appended is there all the same."""
    from slime_backend.ledger import parquet

    def fault(lines, path):
        raise AssertionError("a fault of ours")

    monkeypatch.setattr(parquet, "convert", fault)
    ledger = Ledger(tmp_path, segment_bytes=1)
    ledger.append(made(0))
    ledger.append(made(1))
    with pytest.raises(AssertionError, match="a fault of ours"):
        ledger.close()
    monkeypatch.undo()
    fill(tmp_path, 2, 1)  # the lock was given back, and the next writer turns it over
    assert kinds(tmp_path)[0] == "parquet"
    assert [r["receipt"] for r in read_rollouts(tmp_path)] == [receipt(i) for i in range(3)]


def test_reading_everything_while_segments_are_sealed_leaves_no_gap(tmp_path):
    with Ledger(tmp_path, segment_bytes=8_000) as ledger:
        reading, seen = None, []
        for number in range(150):
            ledger.append(made(number))
            if number == 20:
                reading = read_rollouts(tmp_path)
            if reading is not None and number % 2:
                seen.append(next(reading)["receipt"])
        seen += [r["receipt"] for r in reading]
    assert seen == [receipt(i) for i in range(len(seen))]
    assert len(seen) >= 140


def test_reading_finds_a_segment_that_was_sealed_as_it_was_about_to_be_opened(tmp_path, monkeypatch):
    """Each kind of segment is replaced by the next one between the look and the opening."""
    from slime_backend.ledger import files as segments

    ledger = Ledger(tmp_path, segment_bytes=10**9)
    for number in range(20):
        ledger.append(made(number))
    listing, looks = segments.list_segments, []

    def list_then_rotate(run_dir):
        found = listing(run_dir)
        looks.append(found)
        if len(looks) == 1:
            ledger.segment_bytes = 1
            ledger.append(made(20))
            ledger.settle()
        return found

    monkeypatch.setattr(segments, "list_segments", list_then_rotate)
    assert [r["receipt"] for r in segments.read_rollouts(tmp_path)] == [receipt(i) for i in range(21)]
    ledger.close()


# Each takes the index away or makes it lie; the data stay.
DAMAGE = {
    "missing": lambda path: path.unlink(),
    "not a database": lambda path: path.write_bytes(b"x" * 5000),
    "empty": lambda path: path.write_bytes(b""),
    "another layout": lambda path: sqlite3.connect(path).execute("PRAGMA user_version = 7").connection.close(),
    "half of it zeroed": lambda path: path.write_bytes(path.read_bytes()[:8192] + b"\0" * 40000),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("who", ["reader", "writer"])
def test_a_lost_index_is_rebuilt_and_that_is_said(tmp_path, kind, who):
    fill(tmp_path, 0, 200)
    DAMAGE[kind](index_path(tmp_path))
    if who == "writer":
        notes = fill(tmp_path, 200, 1)
        assert found(tmp_path, receipt=receipt(200))[0] == [made(200)]
    else:
        _, notes = found(tmp_path, receipt=receipt(3))
    text = " ".join(notes)
    again, later = found(tmp_path)
    assert [r.receipt for r in again][:200] == [receipt(i) for i in range(200)]
    if text:
        assert "200 rollouts" in text
        assert "rebuilt" in text or "caught up" in text
        assert later == []
    else:  # damage in pages that opening didn't touch shows when they are asked
        assert kind == "half of it zeroed"
        assert "damaged" in " ".join(later)
    assert found(tmp_path)[1] == []  # whoever found the damage mended it


def test_an_index_that_is_behind_catches_up(tmp_path):
    fill(tmp_path, 0, 100, segment_bytes=10**9)
    shutil.copy(index_path(tmp_path), tmp_path / "old.sqlite")
    fill(tmp_path, 100, 50, segment_bytes=10**9)
    shutil.copy(tmp_path / "old.sqlite", index_path(tmp_path))
    records, notes = found(tmp_path)
    assert len(records) == 150
    assert notes == ["the index was behind and has caught up with 50 rollouts"]


def test_an_index_of_other_data_is_not_believed(tmp_path):
    """The same number of bytes and rows, other receipts: as after a run directory was put together by hand."""
    fill(tmp_path / "a", 0, 30, segment_bytes=10**9)
    fill(tmp_path / "b", 1000, 30, segment_bytes=10**9)
    shutil.copy(index_path(tmp_path / "a"), index_path(tmp_path / "b"))
    records, notes = found(tmp_path / "b")
    assert [r.receipt for r in records] == [receipt(i) for i in range(1000, 1030)]
    assert "isn't the file that was indexed" in notes[0]
    fill(tmp_path / "c", 0, 200)
    (tmp_path / "c" / "rollouts" / "000001.parquet").unlink()
    records, notes = found(tmp_path / "c")
    assert len(records) < 200
    assert "segment 1 is no longer there" in notes[0]


def test_a_run_from_before_the_ledger_is_indexed(tmp_path):
    old = [{k: v for k, v in example(n).to_json().items() if k not in ("class", "session")} for n in SEGMENTS]
    (tmp_path / "rollouts.jsonl").write_text("".join(json.dumps(r) + "\n" for r in old))
    records, notes = found(tmp_path, rollout_class="carried")
    assert [r.receipt for r in records] == ["carried-0001", "carried-unmixed-0001"]
    assert notes == [f"the index was missing and is rebuilt from {len(SEGMENTS)} rollouts"]
    assert len(found(tmp_path, session="g00001")[0]) == len(SEGMENTS)


def test_a_run_without_rollouts_is_one_line(tmp_path):
    with pytest.raises(LedgerError, match=r"has no rollouts\.jsonl"):
        open_reader(tmp_path)


def test_a_directory_that_cannot_be_written_is_read_all_the_same(tmp_path, monkeypatch):
    fill(tmp_path, 0, 60)

    def refuse(run_dir, wait_s):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("slime_backend.ledger.reader.lock_ledger", refuse)
    records, notes = found(tmp_path, receipt=receipt(5))
    assert records == [made(5)]
    assert "60 rollouts were indexed in memory" in " ".join(notes)


def test_parquet_is_what_pandas_reads(tmp_path):
    fill(tmp_path, 0, 300)
    frame = pd.read_parquet(tmp_path / "rollouts")
    sealed = [r for s in list_segments(tmp_path) if s.kind == "parquet" for r in read_rows(s.path)]
    assert list(frame["receipt"]) == [r["receipt"] for r in sealed]
    assert set(frame["class"]) == {"pure", "mixed"}
    crossing = frame[frame["class"] == "mixed"].iloc[0]
    assert list(crossing["versions"]) == ["v0", "v1"]
    assert crossing["segments"][1]["context"][0]["version"] == "v1"


def test_the_schema_has_every_field_of_a_record():
    assert set(SCHEMA.names) == {*made(0).to_json(), "versions", "extra"}


VALUES = st.none() | st.booleans() | st.integers(-5, 5) | st.text(max_size=5)
FLOATS = st.floats(allow_infinity=False)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.lists(FLOATS, max_size=4), st.text(max_size=20), FLOATS), min_size=1, max_size=5),
    st.dictionaries(st.sampled_from(["versions", "extra", "note", "élan"]), VALUES),
)
def test_turning_lines_into_parquet_changes_nothing(tmp_path, rows, unknown):
    """Whatever the numbers and the text, NaN and fields of a later version too."""
    records = []
    for logprobs, text, reward in rows:
        base = dataclasses.replace(
            example("carried"), question=text, reward=reward, logprobs=tuple(logprobs), output_ids=(1,) * len(logprobs)
        )
        records.append({**base.to_json(), **unknown})
    assert "keep" in records[0]["segments"][1]  # a row has the context whole
    lines = "".join(json.dumps(r) + "\n" for r in records)
    (tmp_path / "a.jsonl").write_text(lines)
    assert convert(tmp_path / "a.jsonl", tmp_path / "a.parquet") == len(records)
    again = [json.dumps(r, sort_keys=True) for r in read_rows(tmp_path / "a.parquet")]
    as_read = [json.loads(line) for line in lines.splitlines()] if "\u2028" not in lines else records
    whole = [{**r, "segments": restore(r["segments"])} for r in as_read]
    assert again == [json.dumps(r, sort_keys=True) for r in whole]


def test_lines_that_cannot_be_turned_over_stay_and_are_found(tmp_path):
    """A token id beyond 32 bits does not fit its column."""
    with Ledger(tmp_path, segment_bytes=1) as ledger:
        ledger.append(dataclasses.replace(made(0), prompt_ids=(2**40,)))
        ledger.append(made(1))
        ledger.append(made(2))
        ledger.settle()
        assert any("segment 0 stays JSON lines" in note for note in ledger.notes)
    assert kinds(tmp_path) == ["jsonl", "parquet", "jsonl"]
    assert [r.receipt for r in found(tmp_path)[0]] == [receipt(i) for i in range(3)]
    assert not list((tmp_path / "rollouts").glob("*.partial"))


def test_without_pyarrow_segments_stay_lines_and_parquet_is_one_clear_error(tmp_path, monkeypatch):
    fill(tmp_path / "old", 0, 60, segment_bytes=20_000)
    name = "slime_backend.ledger.parquet"
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, name)
    notes = fill(tmp_path / "new", 0, 60, segment_bytes=20_000)
    assert any("stays JSON lines" in note and "pyarrow is not installed" in note for note in notes)
    assert found(tmp_path / "new", receipt=receipt(1))[0] == [made(1)]
    with pytest.raises(LedgerError, match="pyarrow is not installed"):
        list(read_rollouts(tmp_path / "old"))


def test_a_failing_index_does_not_stop_the_recording(tmp_path):
    with Ledger(tmp_path, segment_bytes=SMALL) as ledger:
        ledger.append(made(0))
        assert ledger._index is not None
        ledger._index._db.execute("DROP TABLE versions")
        for number in range(1, 120):
            ledger.append(made(number))
        assert sum("the index failed" in note for note in ledger.notes) == 1
        with open_reader(tmp_path) as reader:  # beside a writer whose index is behind
            assert reader.count(Query()) == 120
            assert "120 rollouts were indexed in memory" in reader.notes[-1]
    assert len(found(tmp_path)[0]) == 120


def test_a_full_disk_is_an_error_and_leaves_no_half_record(tmp_path):
    """A limit on the size of files stands for a full disk: the record that hits it is written in part."""
    script = f"""
import resource, signal, sys
from pathlib import Path
from slime_backend.provenance.jsonl import JsonlWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = JsonlWriter(Path({str(tmp_path)!r}) / "x.jsonl")
writer.append({{"n": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (50, {resource.getrlimit(resource.RLIMIT_FSIZE)[1]}))
try:
    writer.append({{"n": "x" * 100}})
except OSError as error:
    print("refused")
writer.append({{"n": 2}})
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "refused\n", done.stderr
    assert (tmp_path / "x.jsonl").read_text() == '{"n":1}\n{"n":2}\n'
