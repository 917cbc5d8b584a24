"""The command line: wrong use exits with 2, failures with 1, each with one clear line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from slime_backend.cli import app as cli
from slime_backend.fleet.dispatch import RequestLost

ROOT = Path(__file__).resolve().parent.parent


def run(*args: str, cwd: Path = ROOT, timeout: float = 300) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "slime_backend.cli", *args], capture_output=True, text=True, cwd=cwd, timeout=timeout
    )


@pytest.fixture
def call(monkeypatch, capfd):
    """As `run`, in this process, for commands that end before they start anything: a tenth of the time."""

    def called(*args: str) -> subprocess.CompletedProcess[str]:
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr(sys, "argv", ["reef-slime", *args])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capfd.readouterr()
        return subprocess.CompletedProcess(args, ended.value.code, out, err)

    return called


def test_help_names_the_commands():
    done = run("--help")
    assert done.returncode == 0
    for command in ("train", "up", "serve", "export", "audit", "rollouts", "report", "plan", "bench"):
        assert command in done.stdout


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["trian"], "No such command"),
        (["train"], "Missing argument"),
        (["train", "configs/cpu_tiny.yaml", "--nope"], "No such option"),
        (["train", "nowhere.yaml"], "no config file nowhere.yaml; there are configs/"),
        (["train", "configs/cpu_tiny.yaml", "--set", "stesp=3"], "unknown key 'stesp'; did you mean 'steps'?"),
        (["train", "configs/cpu_tiny.yaml", "--set", "layout=colocated"], "the local trainer is disjoint"),
        (["up", "configs/cpu_tiny.yaml", "--set", "ports=[1]"], "ports lists 1 ports for engines=2"),
        (["bench", "nope"], "No such command"),
        (["bench", "swa", "--nope"], "No such option"),
        (
            ["bench", "modes", "--part", "every-3-s"],
            "'every-3-s' is not a part of bench modes; its parts are every-4-s",
        ),
        (["plan", "no/such/run"], "no run directory no/such/run"),
        (["train", "configs/cpu_tiny.yaml", "--staleness", "drop"], "give max_version_lag as well"),
        (["train", "configs/cpu_tiny.yaml", "--max-version-lag", "-1"], "max_version_lag=-1"),
        (["train", "configs/cpu_tiny.yaml", "--max-version-lag", "x"], "valid integer"),
        (["audit", "no/such/run"], "no run directory no/such/run"),
        (["audit", "configs", "--plan", "--probability", "1"], "certainty means checking all"),
        (["audit", "configs", "--one-in", "0"], "Invalid value for '--one-in'"),
        (["rollouts", "no/such/run"], "no run directory no/such/run"),
        (["report", "no/such/run"], "no run directory no/such/run"),
        (["rollouts", "configs", "--class", "clean"], "there are pure, recomputed, mixed, carried"),
        (["rollouts", "configs", "--limit", "0"], "Invalid value for '--limit'"),
    ],
)
def test_wrong_use_exits_with_two(args, expected, call):
    done = call(*args)
    assert done.returncode == 2, done.stderr
    assert expected in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_failures_exit_with_one_and_one_line(tmp_path, call):
    config = str(ROOT / "configs" / "cpu_tiny.yaml")
    places = ["--set", f"runs_dir={tmp_path}", "--set", f"models_dir={tmp_path}/models"]
    cases = {
        "model='no/model' is neither": ["train", config, *places, "--set", "model=no/model"],
        "holds no run to resume": ["train", config, *places, "--resume", str(tmp_path / "none")],
        "has no rollouts;": ["audit", str(tmp_path)],
        "has no rollouts to audit": ["audit", str(tmp_path), "--plan"],
        "has no rollouts.jsonl": ["rollouts", str(tmp_path)],
        "holds no run; give a directory": ["report", str(tmp_path)],
    }
    for expected, args in cases.items():
        done = call(*args)
        assert done.returncode == 1, done.stderr
        assert expected in done.stderr
        assert done.stderr.strip().count("\n") == 0, done.stderr


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RequestLost("no answer after 8 attempts"), "no answer after 8 attempts"),
        (FloatingPointError("gradient norm nan; lower learning_rate"), "gradient norm nan; lower learning_rate"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_what_fails_on_the_way_is_one_line(error, expected, call, monkeypatch):
    monkeypatch.setattr(cli, "app", Mock(side_effect=error))
    done = call("train")
    assert (done.returncode, done.stderr) == (1, f"reef-slime: {expected}\n")


def test_an_occupied_port_is_one_line_and_starts_nothing(tmp_path):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run(
            "train",
            "configs/cpu_tiny.yaml",
            *("--set", f"runs_dir={tmp_path}", "--set", f"models_dir={tmp_path}/models"),
            *("--set", "engines=1", "--set", f"ports=[{port}]", "--set", "wandb=disabled"),
        )
    assert done.returncode == 1
    assert f"port {port} on 127.0.0.1 can't be used" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/engine0.log"))


def test_a_checkpoint_with_other_shapes_is_one_line(tmp_path, tiny_model):
    import json
    import shutil

    other = tmp_path / "other"
    shutil.copytree(tiny_model, other)
    config = json.loads((other / "config.json").read_text())
    config["hidden_size"] *= 2
    (other / "config.json").write_text(json.dumps(config))
    done = run("train", "configs/cpu_tiny.yaml", "--set", f"model={other}", "--set", f"runs_dir={tmp_path}")
    assert done.returncode == 1, done.stderr
    assert "does not load" in done.stderr
    assert "Traceback" not in done.stderr


def test_rollouts_are_looked_up_listed_and_drawn(tmp_path):
    import json

    from slime_backend.ledger.writer import Ledger
    from slime_backend.simulation.made_rollouts import made, receipt

    with Ledger(tmp_path, segment_bytes=40_000) as ledger:
        for number in range(120):
            ledger.append(made(number))
    listed = run("rollouts", str(tmp_path), "--class", "mixed", "--limit", "3")
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:4]] == [receipt(n) for n in (0, 3, 6)]
    assert listed.stdout.splitlines()[-1] == "3 of 40 rollouts; --limit N shows more"
    drawn = run("rollouts", str(tmp_path), "--receipt", receipt(3)[:10])
    assert "class     mixed (also recomputed)" in drawn.stdout
    assert "sampled   " in drawn.stdout
    as_json = run("rollouts", str(tmp_path), "--session", "g000002", "--json")
    assert [json.loads(line)["receipt"] for line in as_json.stdout.splitlines()] == [receipt(n) for n in range(16, 24)]
    none = run("rollouts", str(tmp_path), "--version", "v99")
    assert (none.returncode, none.stdout) == (1, "")
    assert none.stderr.strip() == f"reef-slime: no rollout in {tmp_path} matches"
    plan = run("audit", str(tmp_path), "--plan", "--json")
    assert json.loads(plan.stdout)["plan"][-1] == {"one_in": 120, "rollouts": 120}
