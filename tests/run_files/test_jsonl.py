"""Append-only files survive a kill in the middle of a line."""

from __future__ import annotations

import logging

import pytest

from slime_backend.run_files.jsonl import JsonlWriter, read_jsonl


def test_what_was_appended_is_read_back(tmp_path):
    writer = JsonlWriter(tmp_path / "a" / "x.jsonl")
    writer.append({"n": 1})
    assert list(read_jsonl(tmp_path / "a" / "x.jsonl")) == [{"n": 1}]  # before it is closed
    writer.append({"n": 2})
    writer.close()
    assert [r["n"] for r in read_jsonl(tmp_path / "a" / "x.jsonl")] == [1, 2]


@pytest.mark.parametrize("torn", [b"{", b'{"n": 3', b'{"n": 3}', b"x" * 200_000])
def test_a_torn_last_record_is_dropped_and_said(tmp_path, caplog, torn):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2}\n' + torn)
    with caplog.at_level(logging.WARNING):
        assert [r["n"] for r in read_jsonl(path)] == [1, 2]
    assert "line 3 was cut off" in caplog.text
    caplog.clear()
    writer = JsonlWriter(path)
    assert "cut off" in caplog.text
    writer.append({"n": 4})
    writer.close()
    assert [r["n"] for r in read_jsonl(path)] == [1, 2, 4]


def test_only_a_torn_record(tmp_path):
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"n"')
    writer = JsonlWriter(path)
    writer.append({"n": 1})
    assert list(read_jsonl(path)) == [{"n": 1}]


def test_a_missing_file_has_no_records(tmp_path):
    assert list(read_jsonl(tmp_path / "none")) == []


def test_a_full_disk_is_an_error_and_keeps_what_was_written(tmp_path):
    """/dev/full answers every write with ENOSPC."""
    writer = JsonlWriter(tmp_path / "x.jsonl")
    writer.append({"n": 1})
    writer._file.close()
    writer._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match="No space left"):
        writer.append({"n": 2})
    assert list(read_jsonl(tmp_path / "x.jsonl")) == [{"n": 1}]
