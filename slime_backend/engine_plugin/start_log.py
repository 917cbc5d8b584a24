"""One line instead of three tracebacks where SGLang asks its own server for something before it listens.

With `--skip-server-warmup` (slime sets it) SGLang posts /freeze_gc to itself too early, logs the refused connection
with its whole traceback, and goes on. The start succeeds.
"""

from __future__ import annotations

import logging

LOGGER = "sglang.srt.entrypoints.http_server"
MESSAGE = "post-warmup freeze_gc failed"


def install() -> None:
    """Shorten that one record of this process. May be called again."""
    logging.getLogger(LOGGER).addFilter(shorten)


def shorten(record: logging.LogRecord) -> bool:
    """Drop the traceback of a refused connection; any other failure keeps its own."""
    if record.msg == MESSAGE and record.exc_info and isinstance(record.exc_info[1], OSError):
        error = str(record.exc_info[1])
        if "Connection refused" in error:
            record.msg = f"{MESSAGE}: the server isn't listening yet (harmless)"
            record.exc_info = record.exc_text = None
    return True
