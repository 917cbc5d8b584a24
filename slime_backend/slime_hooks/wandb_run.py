"""One W&B run with one writer: slime's driver. Whatever other processes log reaches it through a Ray actor.

slime opens the run again in its trainer and its rollout manager. Offline that makes one directory per process, each
with a `_step` of its own, and what a killed trainer has not yet written is lost. Here `wandb.log` and
`wandb.define_metric` of those processes hand each row to the mailbox, which holds it before the call returns, and the
driver writes the rows in the order in which they came.

    driver                            init_wandb_primary opens the run, then `_Writer` takes rows out of the mailbox
    trainer, rollout manager, engines init_wandb_secondary opens nothing; wandb.log goes to the mailbox
    end of the job                    finish_tracking, and `finish` after a failed one, take the rest and close the run
"""

from __future__ import annotations

import functools
import logging
import secrets
import string
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from slime_backend.import_hooks import ModuleFunction

log = logging.getLogger(__name__)

STEP = "rollout/step"
TAKE_EVERY_S = 1.0
CALL_S = 60.0
ID_LENGTH = 8
ID_LETTERS = string.digits + string.ascii_lowercase

Item = tuple[str, tuple[Any, ...], dict[str, Any]]  # a function of wandb's by name, and what it is called with


class Mailbox:
    """The rows that the driver has not written yet. It lives in a Ray actor, one per run."""

    def __init__(self) -> None:
        self._items: list[Item] = []

    def put(self, item: Item) -> None:
        self._items.append(item)

    def take(self) -> list[Item]:
        items, self._items = self._items, []
        return items


def mailbox_name(run_id: str) -> str:
    return f"reef-slime-wandb-{run_id}"


class _Writer:
    """This thread of the driver writes what comes into the mailbox."""

    def __init__(self, wandb: Any, take: Callable[[], list[Item]]) -> None:
        self._wandb, self._take = wandb, take
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reef-slime-wandb", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(TAKE_EVERY_S):
            self._write()

    def _write(self) -> None:
        try:
            items = self._take()
        except Exception as error:  # Ray's; a later try may go better, and metrics end no job
            log.warning("W&B: the rows of other processes can't be read: %s: %s", type(error).__name__, error)
            return
        for name, args, kwargs in items:
            try:
                getattr(self._wandb, name)(*args, **kwargs)
            except Exception as error:  # a value that W&B refuses: the other rows still count
                log.error("W&B refused a row: %s: %s", type(error).__name__, error)

    def close(self) -> None:
        """Write the rest."""
        self._over.set()
        self._thread.join(CALL_S)
        self._write()


_writer: _Writer | None = None
_directory: Path | None = None


def give_generate_id(wandb: Any) -> None:
    """Put `wandb.util.generate_id` back, which slime calls and W&B 0.28.2 removed."""
    if hasattr(wandb.util, "generate_id"):
        return

    def generate_id(length: int = ID_LENGTH) -> str:
        return "".join(secrets.choice(ID_LETTERS) for _ in range(length))

    wandb.util.generate_id = generate_id


def define_ours(wandb: Any) -> None:
    """Our metrics have the same axis as slime's."""
    wandb.define_metric("reef/*", step_metric=STEP)


def send_to_driver(wandb: Any, put: Callable[[Item], None]) -> None:
    """Let this process's `wandb.log` and `wandb.define_metric` hand over to `put`."""
    failed = threading.Event()

    def handed_over(name: str, keep: tuple[str, ...]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            try:
                put((name, args, {key: value for key, value in kwargs.items() if key in keep}))
            except Exception as error:  # Ray's, or a value that can't be pickled
                if not failed.is_set():  # one line, not one a row
                    failed.set()
                    log.error("W&B: rows don't reach the driver: %s: %s", type(error).__name__, error)

        return call

    def log_row(data: dict[str, Any], *others: Any, **kwargs: Any) -> None:
        rows(dict(data))  # `step` and `commit` are of a run that this process would have alone

    rows = handed_over("log", ())
    wandb.log = log_row
    wandb.define_metric = handed_over("define_metric", ("step_metric", "step_sync", "hidden", "summary", "goal"))


def one_writer(module: Any) -> None:
    """slime.observability.wandb_utils: the primary writes for everybody."""
    wandb, primary = module.wandb, module.init_wandb_primary
    give_generate_id(wandb)

    @functools.wraps(primary)
    def init_wandb_primary(args: Any, **kwargs: Any) -> None:
        global _writer, _directory
        primary(args, **kwargs)
        if not args.use_wandb or wandb.run is None:
            return
        import ray

        _directory = Path(wandb.run.dir).parent
        define_ours(wandb)
        mailbox = ray.remote(Mailbox).options(name=mailbox_name(args.wandb_run_id), num_cpus=0).remote()
        ray.get(mailbox.take.remote(), timeout=CALL_S)  # it runs, so that every process finds it
        _writer = _Writer(wandb, lambda: list(ray.get(mailbox.take.remote(), timeout=CALL_S)))

    def init_wandb_secondary(args: Any, role: str | None = None) -> None:
        if getattr(args, "wandb_run_id", None) is None:
            return
        import ray

        mailbox = ray.get_actor(mailbox_name(args.wandb_run_id))
        send_to_driver(wandb, lambda item: ray.get(mailbox.put.remote(item), timeout=CALL_S))
        module._init_wandb_common()
        define_ours(wandb)

    module.init_wandb_primary = init_wandb_primary
    module.init_wandb_secondary = init_wandb_secondary


def write_the_rest(module: Any) -> None:
    """slime.observability.logging_utils: the last rows are written before the run is closed."""
    finish_run = module.finish_tracking

    @functools.wraps(finish_run)
    def finish_tracking(args: Any) -> None:
        close()
        finish_run(args)

    module.finish_tracking = finish_tracking


def close() -> None:
    """Write what has come, in the driver; nothing elsewhere, and nothing twice."""
    global _writer
    writer, _writer = _writer, None
    if writer is not None:
        writer.close()


def directory() -> Path | None:
    """Return where this process's run lies, also after its end; None where W&B is off or writes nothing."""
    return _directory if _directory is not None and _directory.is_dir() else None


def finish(args: Any) -> None:
    """Close the run of a job that ended early, while Ray still runs. Raises nothing."""
    if not getattr(args, "use_wandb", False):
        return
    close()
    try:
        import wandb

        if wandb.run is not None:
            wandb.finish(exit_code=1)
    except Exception as error:  # the job's own error is the one to read
        log.error("W&B: the run could not be closed: %s: %s", type(error).__name__, error)


PATCHES: tuple[tuple[str, ModuleFunction], ...] = (
    ("slime.observability.wandb_utils", one_writer),
    ("slime.observability.logging_utils", write_the_rest),
)
