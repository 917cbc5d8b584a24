"""Files and directories that are complete or absent: written under another name in the same directory, and renamed.

    replace_file(run.summary, text)                   the old contents or the new ones, never a part
    with new_directory(target) as partial: ...        fill `partial`; it becomes `target` at the end
    replace_directory(partial, target)                the same where several processes fill it; `target` may be there

Each writer has a name of its own, so that two that write the same file can't mix their contents: the last one wins.
What a killed one leaves stays until `remove_partials`.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

PARTIAL = ".partial"  # how the name of what isn't complete yet ends; it begins with a dot


def replace_file(path: Path, content: str | bytes | Callable[[BinaryIO], object], *, durable: bool = False) -> Path:
    """Write `content`, or what the given function writes to the open file, as the file `path`; return `path`.

    `durable`: the new contents and their name would survive a power cut when this returns. Raises OSError, or what the
    function raises; `path` is as it was then.
    """
    partial = partial_name(path)
    try:
        with partial.open("wb") as file:
            if callable(content):
                content(file)
            else:
                file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    if durable:
        _sync_names(path.parent)
    return path


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `path` at the end, or is removed where anything is raised.

    Raises OSError where `path` is there by then and isn't an empty directory: what exists stays as it is.
    """
    partial = partial_name(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def replace_directory(partial: Path, path: Path) -> None:
    """Make the complete directory `partial` the directory `path`. One that is there goes as it came, in one piece; a
    link goes, and what it names stays. A kill in between may leave neither of the two under that name.
    """
    if os.path.lexists(path):
        old = partial_name(path)
        path.rename(old)
        partial.rename(path)
        remove_tree(old)
    else:
        partial.rename(path)


def remove_tree(path: Path) -> None:
    """Remove a directory with all that is in it, or the link or the file of that name, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def partial_name(path: Path, writer: str = "") -> Path:
    """A name next to `path` for what isn't complete yet: of `writer`, or one that nobody else has."""
    return path.with_name(f".{path.name}.{writer or uuid.uuid4().hex}{PARTIAL}")


def remove_partials(directory: Path, name: str = "*") -> None:
    """Remove what killed writers left of the files and directories of this name; for who knows that none is at work."""
    for left in directory.glob(f".{name}.*{PARTIAL}"):
        remove_tree(left)


def _sync_names(directory: Path) -> None:
    """Wait until the names in a directory would survive a power cut."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
