"""`serve`, `export` and `up` with a gateway: wrong use exits with 2, failures with 1, each with one clear line."""

from __future__ import annotations

import pytest

from reef_service.store import open_store
from tests.command_line import run
from tests.reef_service.examples import turn

CONFIG = "configs/gateway_cpu.yaml"


@pytest.mark.parametrize(
    ("args", "code", "expected"),
    [
        (["up", CONFIG, "--set", "gateway.prot=1"], 2, "unknown key 'prot'; did you mean 'port'?"),
        (["up", CONFIG, "--set", "gateway.engines=[x]"], 2, "`up` starts its own: use `serve`"),
        (["serve", CONFIG, "--set", "gateway.host=0.0.0.0"], 2, "give agent_token_file and admin_token_file"),
        (["serve", CONFIG, "--set", "gateway=3", "--set", "gateway.port=1"], 2, "gateway isn't a section"),
        (["serve", CONFIG], 2, "gateway.engines is empty"),
        (["serve", CONFIG, "--set", "gateway.engines=[http://127.0.0.1:9]"], 1, "no connection"),
        (["export", "configs"], 2, "configs has no gateway.sqlite"),
    ],
)
def test_what_is_wrong_is_one_line(args, code, expected):
    done = run(*args)
    assert done.returncode == code, done.stderr
    assert expected in done.stderr
    assert done.stderr.strip().count("\n") == 0, done.stderr


def test_turns_become_a_ledger(tmp_path, run_async):
    with open_store(f"sqlite:///{tmp_path}/gateway.sqlite") as store:
        for i in range(3):
            run_async(store.add_turn(turn(f"r{i}", session=f"s{i}")))
        run_async(store.add_turn(turn("left", session="s9", state="disconnected")))
    assert "3 turns added to the 0" in run("export", str(tmp_path)).stdout
    assert "0 turns added to the 3" in run("export", str(tmp_path)).stdout
    listed = run("rollouts", str(tmp_path), "--session", "s1")
    assert "r1" in listed.stdout, listed.stderr


def test_a_live_gateway_is_exported_and_audited(tmp_path, run_async):
    """The store is open for writing, as a gateway has it; `audit` takes what is new by itself."""
    with open_store(f"sqlite:///{tmp_path}/gateway.sqlite") as store:
        run_async(store.add_turn(turn("a")))
        assert "1 turns added to the 0" in run("export", str(tmp_path)).stdout
        run_async(store.add_turn(turn("b", session="t")))
        done = run("audit", str(tmp_path), "--plan")
        assert "1 turns added to the 1" in done.stderr
        assert done.returncode == 0, done.stderr
        run_async(store.add_turn(turn("c", session="u")))  # and it writes on
    assert "1 turns added to the 2" in run("export", str(tmp_path)).stdout
