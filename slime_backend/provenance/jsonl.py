"""Append-only files of one JSON object per line, readable after a kill at any moment."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


class JsonlWriter:
    """Appends records; each is handed to the operating system before `append` returns.

    Opening a file whose last line was cut by a kill drops that half line, and says so: what follows must not be glued
    to it. Raises OSError (a full disk, say) from `append`; the records before it stay readable.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _drop_torn_tail(path)
        self._file = path.open("ab")

    def append(self, record: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(record, separators=(",", ":")).encode() + b"\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Every complete record. A missing file has none; a torn last line is left out."""
    if not path.is_file():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                log.warning("%s: line %d was cut off and is left out", path, number)
                return
            yield json.loads(line)


def _drop_torn_tail(path: Path) -> None:
    if not path.is_file() or path.stat().st_size == 0:
        return
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
