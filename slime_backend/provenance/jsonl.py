"""Append-only files of one JSON object per line, readable after a kill at any moment and with damaged lines in them."""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from slime_backend.run_files.damage import Damage

log = logging.getLogger(__name__)

BLOCK = 4096  # bytes that are passed over at a time where the disk can't read


class JsonlWriter:
    """Appends records; each is handed to the operating system before `append` returns, so a kill of this process loses
    at most the one being written. A power cut can lose what the system had not put on the disk yet, unless the file is
    `durable`: then `append` waits for the disk.

    Opening a file whose last line was cut by a kill drops that half line, and says so: what follows must not be glued
    to it. `dropped` has its bytes.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path, self._durable = path, durable
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dropped = _drop_torn_tail(path)
        self._file = path.open("ab", buffering=0)
        try:
            self.size = self._file.seek(0, 2)  # bytes, up to the end of the last record
        except OSError:
            self._file.close()
            raise
        self.torn = False  # a failed write may have left a part of a line behind `size`

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one record and return the offset of its line. Raises OSError (a full disk, say); the records before it
        stay readable, and nothing of it is glued to the next one: what a failed write leaves is cut off, or, where the
        disk refuses that too, becomes a damaged line of its own.
        """
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        self._end_torn_line()
        start, written = self.size, 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
            if self._durable:
                os.fsync(self._file.fileno())
        except BaseException:
            self.torn = True
            self._cut_off()
            raise
        self.size += len(line)
        return start

    def _cut_off(self) -> None:
        """Remove what a failed write left; where that fails, `torn` stays."""
        try:
            self._file.truncate(self.size)
            self.torn = os.fstat(self._file.fileno()).st_size != self.size
        except (OSError, ValueError):  # ValueError: the file is closed
            self.torn = True

    def _end_torn_line(self) -> None:
        if self.torn:
            self._cut_off()
        if self.torn and self._file.seek(0, 2) > self.size:
            self._file.write(b"\n")
            self.size = self._file.seek(0, 2)
        self.torn = False

    def close(self) -> None:
        self._file.close()


@dataclass(frozen=True, slots=True)
class Line:
    """One line of a file: a record, or why it isn't one. `size`: bytes with its newline. A blank line is neither."""

    number: int  # from 1
    offset: int
    size: int
    record: dict[str, Any] | None
    damaged: str = ""


def read_jsonl(path: Path, damage: Damage | None = None) -> Iterator[dict[str, Any]]:
    """Every complete record. A missing file has none, a torn last line is left out, and a damaged line is skipped and
    counted in `damage`. Raises OSError where the file can't be opened.
    """
    if not path.is_file():
        return
    found = Damage() if damage is None else damage
    with path.open("rb") as file:
        for line in scan_lines(file, path):
            if line.damaged:
                found.add_line(path, line.number, line.damaged)
            elif line.record is not None:
                yield line.record


def scan_lines(file: BinaryIO, path: Path, offset: int = 0, before: int = 0) -> Iterator[Line]:
    """Every complete line of an open file from `offset` on. `path` is what the file is called in a warning, `before`
    how many lines lie before.
    """
    number = before
    file.seek(offset)
    while True:
        number += 1
        try:
            data, why = file.readline(), ""
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            data, why = b"", f"the disk can't read it: {error.strerror}"
        if why:
            end = _after_bad_block(file, offset)
            if end is None:
                yield Line(number, offset, 0, None, why)
                return
            yield Line(number, offset, end - offset, None, why)
            offset = end
            continue
        if not data:
            return
        if not data.endswith(b"\n"):
            log.warning("%s: line %d was cut off and is left out", path, number)
            return
        record, why = parse_line(data)
        yield Line(number, offset, len(data), record, why)
        offset += len(data)


def parse_line(data: bytes) -> tuple[dict[str, Any] | None, str]:
    """(record, "") of a line, (None, why not) of a damaged one, (None, "") of a blank one."""
    if data.isspace():
        return None, ""
    try:
        record = json.loads(data.decode())  # json itself takes NULs for another encoding
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 at byte {error.start}"
    except json.JSONDecodeError as error:
        return None, f"not JSON at character {error.pos}: {error.msg}"
    except (ValueError, RecursionError) as error:  # a number of too many digits, brackets without end
        return None, f"not JSON: {error}"
    if not isinstance(record, dict):
        return None, f"a JSON {type(record).__name__} where an object belongs"
    return record, ""


def _after_bad_block(file: BinaryIO, offset: int) -> int | None:
    """Where the first complete line behind an unreadable block begins; None where there is none."""
    end = os.fstat(file.fileno()).st_size
    position = offset
    while True:
        position = (position // BLOCK + 1) * BLOCK
        if position >= end:
            return None
        file.seek(position)
        try:
            rest = file.readline()
        except OSError:
            continue
        return position + len(rest) if rest.endswith(b"\n") else None


def _drop_torn_tail(path: Path) -> int:
    """Cut off what follows the last newline; its length in bytes."""
    if not path.is_file() or path.stat().st_size == 0:
        return 0
    with path.open("r+b") as file:
        data_end = file.seek(0, 2)
        position = data_end
        while position > 0:
            step = min(65536, position)
            position -= step
            file.seek(position)
            found = file.read(step).rfind(b"\n")
            if found >= 0:
                position += found + 1
                break
        if position != data_end:
            log.warning("%s: the last record was cut off (%d bytes) and is dropped", path, data_end - position)
            file.truncate(position)
    return data_end - position
