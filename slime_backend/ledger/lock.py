"""The lock of a run's ledger: one process writes it at a time.

flock where the file system has it: the kernel ends it with its holder. Where it has none (Lustre without -o flock, NFS
without lockd, some FUSE file systems) a file that only one process can create names its holder, and is taken over when
that process is gone. A holder on another machine can't be looked at: its file must be removed by hand once that
machine's process is known to have ended.
"""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
import uuid
from pathlib import Path
from typing import Any, TextIO

from slime_backend.ledger.files import FOLDER

log = logging.getLogger(__name__)

PAUSE_S = 0.05
LOCK, HOLDER = "_lock", "_lock_holder.json"
RUN_LOCK, RUN_HOLDER = "_run_lock", "_run_lock_holder.json"
NO_FLOCK = frozenset((errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL))

_INSTANCE = uuid.uuid4().hex  # of this process: a number of one that ended may be given again
_held: set[Path] = set()


class LedgerLock:
    """A lock that is held; `close` ends it. A context manager."""

    def __init__(self, file: TextIO | None, holder: Path | None = None) -> None:
        self._file, self._holder = file, holder

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._holder is not None:
            _held.discard(self._holder)
            self._holder.unlink(missing_ok=True)
            self._holder = None

    def __enter__(self) -> LedgerLock:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def lock_ledger(run_dir: Path, wait_s: float) -> LedgerLock | None:
    """The lock of a run's ledger, or None if somebody holds it for longer than `wait_s`."""
    return _lock(run_dir, LOCK, HOLDER, wait_s)


def lock_run(run_dir: Path) -> LedgerLock | None:
    """The lock of a whole run, from before its first file is read until its last one is written; None if another
    process holds it."""
    return _lock(run_dir, RUN_LOCK, RUN_HOLDER, 0.0)


def _lock(run_dir: Path, lock: str, holder: str, wait_s: float) -> LedgerLock | None:
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / lock).open("a")
    until = time.monotonic() + wait_s
    try:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return LedgerLock(file)
            except BlockingIOError:
                if time.monotonic() >= until:
                    file.close()
                    return None
                time.sleep(PAUSE_S)
    except OSError as error:
        file.close()
        if error.errno not in NO_FLOCK:
            raise
        return _lock_by_file(folder / holder, until, error)


def is_written(run_dir: Path) -> bool:
    """Whether somebody holds the lock of the run's ledger: its writer or, for a moment, a reader that mends the index.

    A shared lock is tried for, so two who ask don't see each other; a writer that comes in this moment tries again.
    """
    try:
        with (run_dir / FOLDER / LOCK).open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        holder = _read_holder(run_dir / FOLDER / HOLDER)
        return holder is not None and not _is_gone(run_dir / FOLDER / HOLDER, holder)
    return False


def describe_holder(run_dir: Path, holder_file: str = HOLDER) -> str:
    """Who holds the lock, where a file says so, and what to do if that process is gone; else nothing."""
    path = run_dir / FOLDER / holder_file
    holder = _read_holder(path)
    if holder is None:
        return ""
    return f" (process {holder.get('pid')} on {holder.get('host')}; if it has ended, remove {path})"


def _lock_by_file(path: Path, until: float, why: OSError) -> LedgerLock | None:
    log.warning("%s: no flock here (%s); %s keeps a second writer out", path.parent, why.strerror, path)
    while True:
        if _create(path):
            _held.add(path)
            return LedgerLock(None, path)
        holder = _read_holder(path)
        if holder is not None and _is_gone(path, holder):
            _take_away(path, holder)
        elif time.monotonic() >= until:
            return None
        else:
            time.sleep(PAUSE_S)


def _create(path: Path) -> bool:
    """Create the holder's file with its contents, or return False where it is there. A link is made or not, also on
    NFS, and never shows a half-written file."""
    mine = path.with_name(f"{path.name}.{_INSTANCE}")
    me = {"pid": os.getpid(), "host": socket.gethostname(), "started": _started(os.getpid()), "instance": _INSTANCE}
    mine.write_text(json.dumps(me))
    try:
        os.link(mine, path)
    except FileExistsError:
        return False
    except OSError:  # no hard links here either
        try:
            with path.open("x") as file:
                file.write(json.dumps(me))
        except FileExistsError:
            return False
    finally:
        mine.unlink(missing_ok=True)
    return True


def _take_away(path: Path, holder: dict[str, Any]) -> None:
    """Remove the file of a holder that is gone. Renamed first: of two who do it one gets the file, and puts it back
    where it has become another holder's meanwhile."""
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        path.rename(aside)
    except FileNotFoundError:
        return
    if _read_holder(aside) != holder and not path.exists():
        aside.rename(path)
    else:
        aside.unlink(missing_ok=True)


def _read_holder(path: Path) -> dict[str, Any] | None:
    """None where there is no file; an empty object where it can't be read."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_gone(path: Path, holder: dict[str, Any]) -> bool:
    """Whether the holder has ended for sure. One on another machine, or that can't be read, counts as alive."""
    pid = holder.get("pid")
    if holder.get("host") != socket.gethostname() or not isinstance(pid, int):
        return False
    if holder.get("instance") == _INSTANCE and pid == os.getpid():
        return path not in _held
    started = _started(pid)
    return started is None or started != holder.get("started")


def _started(pid: int) -> str | None:
    """When a process of this machine started, in clock ticks since its boot; None where there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
