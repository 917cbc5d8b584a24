"""A ledger on a disk that refuses: no space in a rotation, no flock, no write-ahead log, a torn write that stays."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from slime_backend.ledger.files import FOLDER, list_segments, read_rollouts
from slime_backend.ledger.index import LedgerIndex, Query
from slime_backend.ledger.lock import HOLDER, is_written
from slime_backend.ledger.reader import open_reader
from slime_backend.ledger.writer import Ledger
from slime_backend.provenance.errors import LedgerError
from slime_backend.provenance.jsonl import JsonlWriter, read_jsonl
from slime_backend.simulation.made_rollouts import made, receipt

SMALL = 4000  # bytes of a segment


def receipts(run_dir):
    return [row["receipt"] for row in read_rollouts(run_dir)]


def break_open(monkeypatch, error):
    original = Path.open

    def refuse(self, mode="r", *args, **kwargs):
        if self.name == "_next.jsonl" and "a" in mode:
            raise OSError(error, os.strerror(error))
        return original(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refuse)


def break_rename(monkeypatch, error, source):
    original = Path.rename

    def refuse(self, target):
        if self.name == source:
            raise OSError(error, os.strerror(error))
        return original(self, target)

    monkeypatch.setattr(Path, "rename", refuse)


BREAK = {
    "opening the next file": break_open,
    "renaming the active file": lambda patch, error: break_rename(patch, error, "rollouts.jsonl"),
    "renaming the next file": lambda patch, error: break_rename(patch, error, "_next.jsonl"),
}


@pytest.mark.parametrize("step", BREAK)
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EMFILE, errno.EIO])
def test_a_rotation_that_the_disk_refuses_is_put_off(tmp_path, monkeypatch, step, error):
    with Ledger(tmp_path, segment_bytes=SMALL) as ledger:
        number = 0
        while ledger._writer.size < SMALL:
            ledger.append(made(number))
            number += 1
        with monkeypatch.context() as patch:
            BREAK[step](patch, error)
            for _ in range(5):
                ledger.append(made(number))
                number += 1
            assert receipts(tmp_path) == [receipt(n) for n in range(number)]
        refused = [note for note in ledger.notes if "can't be sealed now" in note]
        assert len(refused) == 1
        assert os.strerror(error) in refused[0]
        for _ in range(5):
            ledger.append(made(number))
            number += 1
        assert len(list_segments(tmp_path)) > 1  # there is room again
    assert receipts(tmp_path) == [receipt(n) for n in range(number)]
    with open_reader(tmp_path) as reader:
        assert reader.count(Query()) == number
        assert [r.receipt for r in reader.find(Query())] == [receipt(n) for n in range(number)]
    assert not (tmp_path / FOLDER / "_next.jsonl").exists()


def no_flock(error):
    def flock(file, operation):
        raise OSError(error, os.strerror(error))

    return flock


@pytest.mark.parametrize("error", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_without_flock_one_writer_at_a_time(tmp_path, monkeypatch, error):
    monkeypatch.setattr(fcntl, "flock", no_flock(error))
    monkeypatch.setattr("slime_backend.ledger.writer.LOCK_S", 0.0)
    with Ledger(tmp_path) as ledger:
        ledger.append(made(0))
        assert is_written(tmp_path)
        with pytest.raises(
            LedgerError, match=rf"process {os.getpid()} on {socket.gethostname()}; if it has ended, remove"
        ):
            Ledger(tmp_path)
        with open_reader(tmp_path) as reader:  # beside the writer
            assert reader.count(Query()) == 1
    assert not is_written(tmp_path)
    assert not (tmp_path / FOLDER / HOLDER).exists()
    with Ledger(tmp_path) as ledger:
        ledger.append(made(1))
    assert receipts(tmp_path) == [receipt(0), receipt(1)]


def test_without_flock_a_killed_writer_is_taken_over_and_one_elsewhere_is_not(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", no_flock(errno.ENOSYS))
    monkeypatch.setattr("slime_backend.ledger.writer.LOCK_S", 0.0)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(60)
    (tmp_path / FOLDER).mkdir()
    holder = tmp_path / FOLDER / HOLDER
    mine = {"pid": ended.pid, "host": socket.gethostname(), "started": "1", "instance": "x"}
    holder.write_text(json.dumps(mine))
    assert not is_written(tmp_path)
    Ledger(tmp_path).close()
    holder.write_text(json.dumps({**mine, "host": "another-machine"}))
    assert is_written(tmp_path)
    with pytest.raises(LedgerError, match=f"another-machine; if it has ended, remove {holder}"):
        Ledger(tmp_path)


def test_where_no_write_ahead_log_can_be_kept_the_index_has_a_plain_journal(tmp_path, monkeypatch):
    import sqlite3

    original = sqlite3.connect

    class NoSharedMemory:
        def __init__(self, db):
            self._db = db

        def execute(self, sql, *args):
            if "WAL" in sql:
                raise sqlite3.OperationalError("locking protocol")
            return self._db.execute(sql, *args)

        def __getattr__(self, name):
            return getattr(self._db, name)

    monkeypatch.setattr(sqlite3, "connect", lambda *a, **k: NoSharedMemory(original(*a, **k)))
    with Ledger(tmp_path) as ledger:
        ledger.append(made(0))
        assert ledger.notes == []
        assert ledger._index._db.execute("PRAGMA journal_mode").fetchone()[0] == "delete"
    with open_reader(tmp_path) as reader:
        assert reader.count(Query()) == 1


def test_where_no_index_can_be_kept_at_all_rollouts_are_found_in_memory(tmp_path, monkeypatch):
    import sqlite3

    original = LedgerIndex._prepare

    def refuse(self, read_only):
        if self._db.execute("PRAGMA database_list").fetchone()[2]:  # on disk
            raise sqlite3.OperationalError("disk I/O error")
        original(self, read_only)

    monkeypatch.setattr(LedgerIndex, "_prepare", refuse)
    with Ledger(tmp_path) as ledger:
        ledger.append(made(0))
        assert "without an index" in ledger.notes[0]
    with open_reader(tmp_path) as reader:
        assert next(reader.find(Query(receipt=receipt(0)))) == made(0)


class FullDisk:
    """A file that takes a part of the next line, then has no space, and can't be cut either."""

    def __init__(self, file, room):
        self._file, self.room = file, room

    def write(self, data):
        if self.room is None:
            return self._file.write(data)
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self._file.write(data[: self.room])
        self.room = 0
        return taken

    def truncate(self, size):
        raise OSError(errno.EIO, "Input/output error")

    def __getattr__(self, name):
        return getattr(self._file, name)


@pytest.mark.parametrize("room", [1, 6])
def test_a_torn_write_that_cannot_be_cut_off_damages_itself_only(tmp_path, room):
    writer = JsonlWriter(tmp_path / "x.jsonl")
    writer.append({"n": 1})
    disk = writer._file = FullDisk(writer._file, room)
    with pytest.raises(OSError, match="No space left"):
        writer.append({"n": 2})
    disk.room = None
    offset = writer.append({"n": 3})
    writer.append({"n": 4})
    writer.close()
    assert [row["n"] for row in read_jsonl(tmp_path / "x.jsonl")] == [1, 3, 4]
    assert json.loads((tmp_path / "x.jsonl").read_bytes()[offset:].split(b"\n")[0]) == {"n": 3}


def test_the_ledger_finds_what_stands_behind_a_torn_write(tmp_path):
    with Ledger(tmp_path) as ledger:
        ledger.append(made(0))
        disk = ledger._writer._file = FullDisk(ledger._writer._file, 20)
        with pytest.raises(OSError, match="No space left"):
            ledger.append(made(1))
        disk.room = None
        ledger.append(made(2))
        with open_reader(tmp_path) as reader:
            assert next(reader.find(Query(receipt=receipt(2)))) == made(2)
    assert receipts(tmp_path) == [receipt(0), receipt(2)]
    with open_reader(tmp_path) as reader:
        assert reader.notes == []
        assert reader.count(Query()) == 2
