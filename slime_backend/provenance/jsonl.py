"""Append-only files of one JSON object per line, readable after a kill at any moment."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends records; each is handed to the operating system before `append` returns, so a kill of this process loses
    at most the one being written. A power cut can lose what the system had not put on the disk yet.

    Opening a file whose last line was cut by a kill drops that half line, and says so: what follows must not be glued
    to it. `dropped` has its bytes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.dropped = _drop_torn_tail(path)
        self._file = path.open("ab", buffering=0)
        self.size = self._file.seek(0, 2)  # bytes

    def append(self, record: Mapping[str, Any]) -> int:
        """Write one record and return the offset of its line. Raises OSError (a full disk, say); the records before it
        stay readable and nothing of it is left to be glued to the next one.
        """
        start, line = self.size, json.dumps(record, separators=(",", ":")).encode() + b"\n"
        written = 0
        try:
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            if written:
                self._file.truncate(start)
            raise
        self.size += len(line)
        return start

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete record. A missing file has none; a torn last line is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for record, _ in read_lines(file, path):
            yield record


def read_lines(file: BinaryIO, path: Path, before: int = 0) -> Iterator[tuple[dict[str, Any], int]]:
    """Every complete record of an open file from where it stands, with the length of its line in bytes; `path` is what
    the file is called in a warning, `before` how many lines lie before.
    """
    for number, line in enumerate(file, before + 1):
        if not line.endswith(b"\n"):
            log.warning("%s: line %d was cut off and is left out", path, number)
            return
        yield json.loads(line), len(line)


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
