"""A run whose files were damaged: each undamaged record is read, the others are named and counted."""

from __future__ import annotations

import json
import logging
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slime_backend.cli.rollouts import show_rollouts
from slime_backend.ledger.files import Tail, list_segments, read_records, read_rollouts
from slime_backend.ledger.index import Query, index_path
from slime_backend.ledger.reader import open_reader
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.errors import LedgerError, RecordError
from slime_backend.provenance.jsonl import parse_line, read_jsonl
from slime_backend.provenance.records import RolloutRecord
from slime_backend.report.summary import summarise, write_summary
from slime_backend.run_files.damage import Damage
from slime_backend.simulation.made_rollouts import made, receipt

RECORDS = 8
DAMAGED = {
    "NULs": lambda line: b"\0" * (len(line) - 1) + b"\n",
    "invalid UTF-8": lambda line: line.replace(b'"group":"', b'"group":"\xff\xfe', 1),
    "cut in the middle": lambda line: line[: len(line) // 2] + b"\n",
    "not an object": lambda line: b"[1, 2]\n",
    "a number": lambda line: b"7\n",
    "missing keys": lambda line: b'{"receipt":"x"}\n',
    "a wrong type": lambda line: _with(line, logprobs="none"),
    "null in a list": lambda line: _with(line, logprobs=[None]),
    "a span without an end": lambda line: _with(line, spans=[{"version": "v0", "start": 0}]),
    "keeps what isn't there": lambda line: _with(
        line, segments=[{"version": "v0", "start": 0, "end": 1, "context": [], "keep": 9}]
    ),
    "half a surrogate pair": lambda line: _with(line, receipt="\ud800"),
    "brackets without end": lambda line: b"[" * 100_000 + b"\n",
}


def _with(line: bytes, **changes) -> bytes:
    return json.dumps({**json.loads(line), **changes}).encode() + b"\n"


def fill(run_dir: Path, count: int = RECORDS, **options) -> None:
    with Ledger(run_dir, **options) as ledger:
        for number in range(count):
            ledger.append(made(number))
    lines = [json.dumps({"receipt": receipt(n), "group": "g", "at": 0.0}) for n in range(count)]
    (run_dir / "submitted.jsonl").write_text("\n".join(lines) + "\n")


def damage_line(path: Path, number: int, how) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    lines[number] = how(lines[number])
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_damaged_line_costs_that_line(tmp_path, capsys, caplog, kind):
    fill(tmp_path)
    damage_line(tmp_path / "rollouts.jsonl", 3, DAMAGED[kind])
    good = [receipt(n) for n in range(RECORDS) if n != 3]
    damage = Damage()
    with caplog.at_level(logging.WARNING):
        assert [r.receipt for r in read_records(tmp_path, damage)] == good
    assert (damage.lines, damage.segments) == (1, 0)
    assert damage.places[0].startswith("rollouts.jsonl, line 4: ")
    assert "rollouts.jsonl, line 4" in caplog.text
    with open_reader(tmp_path) as reader:
        assert [r.receipt for r in reader.find(Query())] == good
        assert reader.damage.lines == 1
        assert list(reader.find(Query(receipt=receipt(3)))) == []
    assert show_rollouts(tmp_path, Query(), None, False) == RECORDS - 1
    assert "1 damaged line left out (rollouts.jsonl, line 4" in capsys.readouterr().out
    summary = write_summary(tmp_path, {})
    assert (summary["rollouts_completed"], summary["rollouts_lost"], summary["rollouts_damaged"]) == (RECORDS - 1, 0, 1)
    assert summary["damaged_lines"] == 1
    with Ledger(tmp_path) as ledger:  # a resume
        assert ledger.damage.lines == 1
        ledger.append(made(RECORDS))
    assert [r["receipt"] for r in read_rollouts(tmp_path)] == [*good, receipt(RECORDS)]
    with open_reader(tmp_path) as reader:
        assert next(reader.find(Query(receipt=receipt(RECORDS)))) == made(RECORDS)


@pytest.mark.parametrize("name", ["submitted.jsonl", "steps.jsonl", "publications.jsonl"])
@pytest.mark.parametrize("line", [b"\0\0\0\n", b"\xff\n", b"{\n", b"[]\n", b"{}\n"])
def test_every_other_file_is_read_around_its_damage(tmp_path, name, line):
    fill(tmp_path)
    (tmp_path / name).open("ab").write(line)
    summary = summarise(tmp_path)
    assert summary["damaged_lines"] == 1
    assert summary["damaged_places"][0].startswith(name)
    assert summary["rollouts_lost"] == 0


def test_a_line_damaged_under_an_open_reader_is_named(tmp_path):
    fill(tmp_path)
    with open_reader(tmp_path) as reader:
        damage_line(tmp_path / "rollouts.jsonl", 5, lambda line: b"\0" * (len(line) - 1) + b"\n")
        assert len(list(reader.find(Query()))) == RECORDS - 1
        assert reader.damage.places[0].startswith("rollouts.jsonl, line 6: not JSON")


def sealed(run_dir: Path) -> list[Path]:
    fill(run_dir, 60, segment_bytes=8000)
    found = [s.path for s in list_segments(run_dir) if s.kind == "parquet"]
    assert len(found) >= 3
    return found


@pytest.mark.parametrize("how", ["cut off", "zeroed", "empty", "gone"])
@pytest.mark.parametrize("index", ["kept", "removed"])
def test_a_damaged_or_missing_segment_costs_that_segment(tmp_path, how, index):
    path = sealed(tmp_path)[1]
    rows = len(list(read_records(tmp_path)))
    assert rows == 60
    data = path.read_bytes()
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes({"cut off": data[: len(data) // 2], "zeroed": b"\0" * len(data), "empty": b""}[how])
    if index == "removed":
        index_path(tmp_path).unlink()
    damage = Damage()
    left = [r.receipt for r in read_records(tmp_path, damage)]
    assert 60 - len(left) > 0
    assert damage.segments == 1
    assert path.name in damage.places[0]
    with open_reader(tmp_path) as reader:
        assert [r.receipt for r in reader.find(Query())] == left
        assert reader.damage
    with Ledger(tmp_path, segment_bytes=8000) as ledger:
        ledger.append(made(60))
    assert [r.receipt for r in read_records(tmp_path)] == [*left, receipt(60)]


def test_a_segment_with_a_damaged_line_stays_lines(tmp_path):
    """Turned into Parquet the line would be lost for good, and the rows behind it would move."""
    fill(tmp_path, 4)
    damage_line(tmp_path / "rollouts.jsonl", 1, DAMAGED["missing keys"])
    with Ledger(tmp_path, segment_bytes=1) as ledger:
        ledger.append(made(4))
        ledger.settle()
        assert any("segment 0 stays JSON lines" in note and "line 2 is damaged" in note for note in ledger.notes)
    assert len(list(read_records(tmp_path))) == 4


@pytest.mark.parametrize("damage", [b"\0", b"\n", b"\xff", b'"', b"{"])
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_damaged_bytes_cost_their_lines_only(data, damage):
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder)
        fill(run_dir)
        path = run_dir / "rollouts.jsonl"
        whole = path.read_bytes()
        at = data.draw(st.integers(0, len(whole) - 2))
        length = data.draw(st.integers(1, 300))
        bytes_ = bytearray(whole)
        stop = min(at + length, len(bytes_) - 1)  # the last newline stays: without it the line is torn, not damaged
        bytes_[at:stop] = damage * (stop - at)
        path.write_bytes(bytes_)
        good = []
        for line in bytes(bytes_).splitlines(keepends=True):
            record, _ = parse_line(line)
            try:
                good.append(RolloutRecord.from_json(record).receipt)
            except RecordError:
                continue
        touched = whole[at:stop].count(b"\n") + 1
        assert len(good) >= RECORDS - touched
        assert [r.receipt for r in read_records(run_dir)] == good
        with open_reader(run_dir) as reader:
            assert [r.receipt for r in reader.find(Query())] == good
        summary = summarise(run_dir)
        lost = len({receipt(n) for n in range(RECORDS)} - set(good))
        assert summary["rollouts_lost"] + summary["rollouts_damaged"] == lost
        with Ledger(run_dir) as ledger:
            ledger.append(made(99))
        assert [r.receipt for r in Tail(run_dir).new_records()] == [*good, receipt(99)]


def test_a_bad_block_is_passed_over(tmp_path, monkeypatch):
    """A file whose second block can't be read: what lies before and behind it is."""
    import errno
    import io

    from slime_backend.provenance import jsonl

    path = tmp_path / "x.jsonl"
    path.write_bytes(b"".join(b'{"n":%d,"x":"%s"}\n' % (n, b"x" * 500) for n in range(40)))

    class BadBlock(io.BytesIO):
        def readline(self, *args):
            start = self.tell()
            line = super().readline(*args)
            if start < 8192 and self.tell() > 4096:
                self.seek(start)
                raise OSError(errno.EIO, "Input/output error")
            return line

        def fileno(self):
            return opened.fileno()

    with path.open("rb") as opened:
        lines = list(jsonl.scan_lines(BadBlock(path.read_bytes()), path))
    damaged = [line for line in lines if line.damaged]
    assert len(damaged) == 1
    assert "Input/output error" in damaged[0].damaged
    assert [line.record["n"] for line in lines if line.record] == [*range(7), *range(16, 40)]


def test_without_any_readable_rollout_the_error_is_one_line(tmp_path):
    from slime_backend.audit.audit import audit_run
    from slime_backend.provenance.errors import AuditError

    (tmp_path / "rollouts.jsonl").write_bytes(b"\0\0\0\n")
    with pytest.raises(AuditError, match=r"no rollout that can be read: 1 damaged line .*line 1"):
        audit_run(tmp_path, lambda directory: None)
    with pytest.raises(LedgerError, match=r"has no rollouts\.jsonl"):
        open_reader(tmp_path / "none")
    assert list(read_jsonl(tmp_path / "rollouts.jsonl")) == []


def test_figures_that_are_no_numbers_leave_a_summary_that_is_strict_json(tmp_path):
    fill(tmp_path)
    row = {"step": 1, "reward_mean": float("nan"), "lag_mean": 0.0, "lag_max": 0}
    (tmp_path / "steps.jsonl").write_text(json.dumps(row) + "\n")
    write_summary(tmp_path, {"extra": float("inf")})

    def refuse(name):
        raise AssertionError(name)

    found = json.loads((tmp_path / "summary.json").read_text(), parse_constant=refuse)
    assert found["steps"] == 1
    assert found["reward_first3"] is None
