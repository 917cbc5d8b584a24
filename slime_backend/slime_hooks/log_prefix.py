"""Every log line of ours in slime's processes begins with one word, so that `grep reef-slime:` finds them all."""

from __future__ import annotations

import logging
from typing import Any

PREFIX = "reef-slime: "
OURS = ("slime_backend", "reef_service")


def install() -> None:
    """Have the records of our loggers made with the prefix. May be called again."""
    make = logging.getLogRecordFactory()
    if isinstance(make, _Prefixed):
        return
    logging.setLogRecordFactory(_Prefixed(make))


class _Prefixed:
    def __init__(self, make: Any) -> None:
        self._make = make

    def __call__(self, name: str, *args: Any, **kwargs: Any) -> logging.LogRecord:
        record: logging.LogRecord = self._make(name, *args, **kwargs)
        if name.partition(".")[0] in OURS and not str(record.msg).startswith(PREFIX):
            record.msg = f"{PREFIX}{record.msg}"
        return record
