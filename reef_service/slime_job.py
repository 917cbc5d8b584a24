"""What a slime job is called at the gateway, and what its checkpoint holds: enough to go on after any crash.

The name lies in the `--save` directory itself (`reef_job.json`), so it survives the process, moves with the
checkpoints, and two directories never share it, whatever they are called. A copy of a directory is another job. Without
`--save` nothing survives the process, and neither does its name.
"""

from __future__ import annotations

import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from slime_backend.errors import ReefError

TRACKER = "latest_checkpointed_iteration.txt"  # Megatron's: the last iteration that is complete on the disk
NAME_FILE = "reef_job.json"


class JobNameError(ReefError, ValueError):
    """The file with a job's name can't be used."""


@dataclass(slots=True)
class Job:
    """One process of a job, between its start and its end."""

    name: str
    save: Path | None
    asynchronous: bool  # slime's train_async.py: a step's samples are asked for before the step before is trained
    found: tuple[str, int] | None  # the tracker as it was at the start: it is of an earlier process

    @classmethod
    def of(cls, args: Any) -> Job:
        save = Path(args.save) if getattr(args, "save", None) else None
        name = name_of(save) if save is not None else _new_name()
        return cls(name, save, bool(getattr(args, "reef_asynchronous", False)), _look(save))

    def safe_step(self, rollout_id: int) -> int:
        """The last step whose training is on the disk, or done where slime saves nothing; -1 for none.

        `rollout_id`: the step whose samples are asked for now.
        """
        if self.save is None:
            return max(-1, rollout_id - (2 if self.asynchronous else 1))
        tracker = _look(self.save)
        return -1 if tracker == self.found else min(_number(tracker), rollout_id - 1)

    def saved_step(self) -> int:
        """The last step that this process saved; -1 for none."""
        tracker = _look(self.save)
        return -1 if tracker == self.found else _number(tracker)


def loaded(args: Any, first: int) -> tuple[str, int] | None:
    """(job, step) of the checkpoint that a process went on from whose first step is `first`; None without one.

    A process that begins with step N has loaded the checkpoint of step N - 1, which may be that of an earlier step than
    the last one saved (`--ckpt-step`), or of another job (`--load`).
    """
    directory = getattr(args, "load", None) or getattr(args, "save", None)
    if not directory or first == 0 or not (Path(directory) / NAME_FILE).is_file():
        return None
    if _number(_look(Path(directory))) < first - 1:
        return None  # it was not loaded from here
    return name_of(Path(directory)), first - 1


def name_of(directory: Path) -> str:
    """The name of the job that saves into `directory`, made at its first use."""
    directory.mkdir(parents=True, exist_ok=True)
    file, here = directory / NAME_FILE, str(directory.resolve())
    known = _read(file)
    if known is None:
        _write(file, {"job": _new_name(), "directory": here}, first=True)
    elif known["directory"] != here:
        copied = _is_of(Path(known["directory"]), known["job"])  # else it was moved
        _write(file, {"job": _new_name() if copied else known["job"], "directory": here})
    known = _read(file)
    if known is None:
        raise JobNameError(f"{file}: can't be read back; is {directory} writable?")
    return known["job"]


def _new_name() -> str:
    return f"slime-{uuid.uuid4().hex}"


def _is_of(directory: Path, job: str) -> bool:
    known = _read(directory / NAME_FILE)
    return known is not None and known["job"] == job


def _read(file: Path) -> dict[str, str] | None:
    if not file.is_file():
        return None
    try:
        known = json.loads(file.read_text())
        return {"job": str(known["job"]), "directory": str(known["directory"])}
    except (ValueError, KeyError, TypeError) as error:
        raise JobNameError(f"{file} is no job's name ({error}); remove it if no lease of that job is left") from error


def _write(file: Path, value: dict[str, str], *, first: bool = False) -> None:
    """Write the file, complete or not at all. `first`: unless another process has."""
    draft = file.with_name(f".{file.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("w") as stream:
            json.dump(value, stream)
            stream.flush()
            os.fsync(stream.fileno())
        if not first:
            draft.replace(file)
            return
        try:
            os.link(draft, file)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            draft.replace(file)
    finally:
        draft.unlink(missing_ok=True)


def _look(directory: Path | None) -> tuple[str, int] | None:
    """(contents, time) of the tracker; None where there is none."""
    if directory is None:
        return None
    try:
        file = directory / TRACKER
        return file.read_text().strip(), file.stat().st_mtime_ns
    except FileNotFoundError:
        return None


def _number(tracker: tuple[str, int] | None) -> int:
    return int(tracker[0]) if tracker is not None and tracker[0].isdigit() else -1
