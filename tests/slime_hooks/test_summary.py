"""The last lines of a slime job, and the prefix of our lines before them."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_backend.engine_plugin import start_log
from slime_backend.run_files import RunDir
from slime_backend.slime_hooks import entry, log_prefix, summary


def report(version, *confirmed, state="resumed"):
    return {"version": version, "state": state, "engines": [{"confirmed": c} for c in confirmed]}


@pytest.fixture
def args(tmp_path):
    (tmp_path / "reef").mkdir()
    return SimpleNamespace(reef_run_dir=str(tmp_path / "reef"), reef_save_weights=True, use_wandb=False)


def record(args, *reports):
    lines = "".join(json.dumps(row) + "\n" for row in reports)
    RunDir(Path(args.reef_run_dir)).publications.write_text(lines)


def test_what_a_complete_job_says(args, tmp_path):
    record(args, report("1", True, True), report("2", True, True))
    wandb = tmp_path / "offline-run-1"
    lines = list(summary.summary(args, wandb))
    assert lines[0] == "the job is complete"
    assert lines[1] == "2 publications, 2 verified on every engine"
    assert lines[2] == f"run directory {args.reef_run_dir}"
    assert lines[3].endswith(f" audit {args.reef_run_dir}")
    assert lines[4] == f"W&B in {wandb}"
    assert lines[5] == f"upload it: {sys.executable} -m wandb sync {wandb}"


@pytest.mark.parametrize(
    ("bad", "named"),
    [(report("2", True, False), "2"), (report("2", False, state="failed"), "2"), (report("2"), "2")],
)
def test_a_publication_that_was_not_verified_everywhere_is_named(bad, named):
    line = summary.published([report("1", True, True), bad])
    assert line.startswith(f"2 publications, 1 verified on every engine; not so: version {named} ")


def test_without_saved_weights_no_audit_is_promised(args):
    args.reef_save_weights = False
    assert not any(line.startswith("audit it") for line in summary.summary(args, None))


def test_a_failed_job_says_how_far_it_came_after_its_traceback(args, capfd):
    record(args, report("1", True))

    def train(_):
        raise RuntimeError("Ray's long text\nthe last line says it")

    with pytest.raises(SystemExit) as ended:
        entry.train_to_the_end(train, args)
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert "Traceback" in err
    lines = out.splitlines()
    assert lines[0] == "reef-slime: the job ended early: RuntimeError: the last line says it"
    assert lines[1] == "reef-slime: 1 publications, 1 verified on every engine"
    assert all(line.startswith("reef-slime: ") for line in lines)


def test_a_job_that_failed_before_its_run_directory_has_a_summary_too(args, capfd):
    args.reef_run_dir += "/never"
    with pytest.raises(KeyboardInterrupt):
        entry.train_to_the_end(lambda _: (_ for _ in ()).throw(KeyboardInterrupt()), args)
    assert "reef-slime: 0 publications\n" in capfd.readouterr().out


def test_damaged_files_don_t_take_the_job_s_outcome(args, capfd):
    record(args, {"version": "1"})
    entry.train_to_the_end(lambda _: None, args)
    assert "reef-slime: no summary: KeyError" in capfd.readouterr().out


def test_every_log_line_of_ours_has_the_prefix_and_no_other(tmp_path):
    script = (
        "import logging\n"
        "from slime_backend.slime_hooks import log_prefix\n"
        "logging.basicConfig(format='[slime] %(message)s', level=logging.INFO)\n"
        "log_prefix.install(); log_prefix.install()\n"
        "logging.getLogger('slime_backend.publication.publish').info('sent %d%%', 5)\n"
        "logging.getLogger('reef_service.x').error('reef-slime: once')\n"
        "logging.getLogger('slime.ray').info('theirs')\n"
        "logging.getLogger('slime_backend_other').info('not ours')\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr.splitlines() == [
        "[slime] reef-slime: sent 5%",
        "[slime] reef-slime: once",
        "[slime] theirs",
        "[slime] not ours",
    ]
    assert not isinstance(logging.getLogRecordFactory(), log_prefix._Prefixed)


def shortened(error):
    record = logging.LogRecord("x", logging.WARNING, "f", 1, start_log.MESSAGE, (), (type(error), error, None))
    assert start_log.shorten(record)
    return record


def test_a_refused_connection_at_the_start_loses_its_traceback_and_nothing_else_does():
    assert shortened(ConnectionError("[Errno 111] Connection refused")).exc_info is None
    assert shortened(TimeoutError("timed out")).exc_info is not None
    assert shortened(ValueError("Connection refused")).exc_info is not None
