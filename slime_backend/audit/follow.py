"""The audit of a run that still goes on: follows its ledger, and ends with it.

    every POLL_S   new rollouts of the ledger -> those of the sample are checked -> audit.json
    the end        the run's writer is gone and nothing is left to check;
                   or nothing new came for `idle_s`; or `deadline_s` after the writer was gone

It only reads the run, and needs the weights of a version only while a rollout of it is checked, so a run may remove old
ones; a rollout that comes too late for its weights is counted as such. Whoever writes the run holds the lock of its
ledger, also in a run that was killed: that is how the end is known (ledger_lock.py).
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slime_backend.audit.audit import Audit, AuditResult
from slime_backend.ledger.files import Tail
from slime_backend.ledger.lock import is_written
from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files import RunDir, replace_file

log = logging.getLogger(__name__)

POLL_S = 1.0
QUEUE = 256  # rollouts taken in and not checked yet
SAVE_S = 5.0  # between two states of the file


@dataclass(slots=True)
class Ending:
    """Decides when to stop. Pure: it is given what was seen, and when.

    A run has begun once somebody was seen to write it, or left rollouts; it has ended when nobody writes it anymore.
    """

    idle_s: float
    deadline_s: float
    last_news: float
    begun: bool = False
    ended_at: float | None = None

    def is_over(self, now: float, *, written: bool, new: bool, waiting: bool) -> bool:
        """`written`: somebody writes the run; `new`: rollouts came; `waiting`: some are still to be checked."""
        self.begun = self.begun or written or new
        if new:
            self.last_news = now
        if written or not self.begun:
            self.ended_at = None
        elif self.ended_at is None:
            self.ended_at = now
        if self.ended_at is not None:
            return not waiting or now - self.ended_at > self.deadline_s
        return not waiting and now - self.last_news > self.idle_s


def follow(
    run_dir: Path,
    audit: Audit,
    *,
    idle_s: float,
    deadline_s: float,
    progress: Callable[[int, int], None] = lambda done, total: None,
    poll_s: float = POLL_S,
    keep: Callable[[Path, AuditResult], object] | None = None,
) -> AuditResult:
    """Audit a run while it goes on; returns, and leaves in `audit.json`, the result over all that was recorded. `keep`
    writes that file, `save` where it isn't given.

    Raises AuditError where nothing was recorded at all.
    """
    write = keep or save
    tail = Tail(run_dir, audit.damage)
    waiting: deque[RolloutRecord] = deque()
    saved = time.monotonic()
    ending = Ending(idle_s, deadline_s, saved)
    done, over = 0, False
    while not over:
        written = is_written(run_dir)  # asked before the look, so that what was written last is still read
        room = QUEUE - len(waiting)  # what isn't taken in yet waits in the ledger
        news = list(itertools.islice(tail.new_records(), room))
        waiting.extend(record for record in news if audit.offer(record))
        until = time.monotonic() + poll_s
        while waiting and time.monotonic() < until:  # the oldest first: its weights go first
            audit.check(waiting.popleft())
            done += 1
            progress(done, done + len(waiting))
        now = time.monotonic()
        more = bool(waiting) or len(news) == room
        over = ending.is_over(now, written=written, new=bool(news), waiting=more)
        if now - saved > SAVE_S:
            # A full look may have left rollouts unread: at least one is taken to wait.
            write(run_dir, audit.result(finished=False, waiting=max(len(waiting), int(more))))
            saved = now
        if not (over or more):
            time.sleep(poll_s)
    for record in tail.new_records():  # what the deadline leaves unchecked belongs to the run all the same
        audit.offer(record)
    result = audit.result()
    if not result.recorded:
        raise AuditError(f"{run_dir}: no rollout was recorded within {idle_s:g} s")
    write(run_dir, result)
    return result


def save(run_dir: Path, result: AuditResult) -> None:
    replace_file(RunDir(run_dir).audit, json.dumps(result.to_json(), indent=2) + "\n")


def save_fullest(run_dir: Path, result: AuditResult) -> bool:
    """Save unless an audit of more rollouts is there; whether it did."""
    there = load(run_dir)
    if there is not None and there.rollouts > result.rollouts:
        return False
    save(run_dir, result)
    return True


def load(run_dir: Path) -> AuditResult | None:
    """The audit as it stands; None where there is none yet, or the file is damaged."""
    path = RunDir(run_dir).audit
    try:
        return AuditResult.from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged and is left out: %s", path, error)
        return None
