"""What `reef-slime bench NAME` prints and when it fails, with the measurement replaced: it takes minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from slime_backend import cli
from slime_backend.bench import overhead, swa
from slime_backend.bench.rows import Row
from slime_backend.engine_process import EngineStartError

BENCHES = {"swa": (swa, "bench_swa"), "overhead": (overhead, "bench_overhead")}
ROW = {"case": "first", "peer": 0.0, "ours": 0.99, "ratio": 103.4, "goal": "at least 0.99", "holds": True}


@pytest.fixture(params=BENCHES)
def bench(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def replace(bench: str, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def with_rows(*rows: dict[str, Any], error: BaseException | None = None) -> None:
        async def measured(say: Any, found: list[Row]) -> None:
            say("starting two engines")
            found.extend(Row(**row) for row in rows)
            if error is not None:
                raise error

        module, name = BENCHES[bench]
        monkeypatch.setattr(module, name, measured)

    return with_rows


@pytest.mark.parametrize("holds", [True, False])
def test_the_json_is_the_contract_and_a_missed_goal_fails(bench: str, replace: Any, holds: bool) -> None:
    replace({**ROW, "holds": holds})
    done = CliRunner().invoke(cli.app, ["bench", bench, "--json"])
    assert done.exit_code == (0 if holds else 1)
    assert json.loads(done.stdout) == {"bench": bench, "rows": [{**ROW, "holds": holds}]}
    table = CliRunner().invoke(cli.app, ["bench", bench])
    assert "first" in table.stdout
    assert ("NO" in table.stdout) != holds


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_a_bench_that_ends_early_prints_what_it_had_and_why(
    bench: str, replace: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    """As when the engines of a late pair don't start."""
    replace(ROW, error=EngineStartError("roomy-ours: the engine ended while starting: killed"))
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", bench, *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert err.splitlines()[-2:] == [
        f"bench {bench} ended early, with 1 rows measured",
        "reef-slime: roomy-ours: the engine ended while starting: killed",
    ]
    if arguments:
        why = "roomy-ours: the engine ended while starting: killed"
        assert json.loads(out) == {"bench": bench, "rows": [ROW], "error": why}
    else:
        assert "first" in out


def test_one_that_is_interrupted_too(bench: str, replace: Any) -> None:
    replace(ROW, error=KeyboardInterrupt())
    done = CliRunner().invoke(cli.app, ["bench", bench, "--json"])
    assert done.exit_code != 0
    assert json.loads(done.stdout) == {"bench": bench, "rows": [ROW], "error": "interrupted"}
