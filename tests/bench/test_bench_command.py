"""What `reef-slime bench NAME` prints and writes and when it fails, with the measurement replaced: it takes minutes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from slime_backend.bench.catalog import BENCHES, Bench
from slime_backend.bench.rows import Row
from slime_backend.cli import app as cli
from slime_backend.engine_process import EngineStartError

ROW = {"case": "first", "peer": 0.0, "ours": 0.99, "ratio": 103.4, "goal": "at least 0.99", "holds": True}


@pytest.fixture(params=BENCHES, ids=lambda entry: entry.name)
def bench(request: pytest.FixtureRequest) -> Bench:
    entry: Bench = request.param
    return entry


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def with_rows(bench: Bench, *rows: dict[str, Any], error: BaseException | None = None) -> None:
        async def measured(say: Any, found: list[Row], parts: Any = None) -> None:
            say("starting two engines")
            found.extend(Row(**row) for row in rows)
            if error is not None:
                raise error

        monkeypatch.setattr(bench.module, f"bench_{bench.name}", measured)

    return with_rows


@pytest.mark.parametrize("holds", [True, False])
def test_the_json_is_the_contract_and_a_missed_goal_fails(bench: Bench, replace: Any, holds: bool) -> None:
    replace(bench, {**ROW, "holds": holds})
    done = CliRunner().invoke(cli.app, ["bench", bench.name, "--json"])
    assert done.exit_code == (0 if holds else 1)
    assert json.loads(done.stdout) == {"bench": bench.name, "rows": [{**ROW, "holds": holds}]}
    table = CliRunner().invoke(cli.app, ["bench", bench.name])
    assert "first" in table.stdout
    assert ("NO" in table.stdout) != holds


@pytest.mark.parametrize("arguments", [["--json"], []])
def test_a_bench_that_ends_early_prints_what_it_had_and_why_and_writes_nothing(
    bench: Bench, replace: Any, arguments: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    """As when the engines of a late pair don't start."""
    replace(bench, ROW, error=EngineStartError("roomy-ours: the engine ended while starting: killed"))
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", bench.name, "--write", str(tmp_path), *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert err.splitlines()[-2:] == [
        f"bench {bench.name} ended early, with 1 rows measured",
        "reef-slime: roomy-ours: the engine ended while starting: killed",
    ]
    if arguments:
        why = "roomy-ours: the engine ended while starting: killed"
        assert json.loads(out) == {"bench": bench.name, "rows": [ROW], "error": why}
    else:
        assert "first" in out
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_interrupted_too(bench: Bench, replace: Any) -> None:
    replace(bench, ROW, error=KeyboardInterrupt())
    done = CliRunner().invoke(cli.app, ["bench", bench.name, "--json"])
    assert done.exit_code != 0
    assert json.loads(done.stdout) == {"bench": bench.name, "rows": [ROW], "error": "interrupted"}


def test_a_page_is_written_also_where_a_goal_is_missed(bench: Bench, replace: Any, tmp_path: Path) -> None:
    replace(bench, {**ROW, "holds": False})
    done = CliRunner().invoke(cli.app, ["bench", bench.name, "--write", str(tmp_path / "pages")])
    assert done.exit_code == 1
    page = (tmp_path / "pages" / f"{bench.name}.md").read_text()
    assert "| first | 0 | 0.99 | 103.4 | at least 0.99 | NO |" in page
    assert f"`reef-slime bench {bench.name}`" in page


def test_a_folder_that_cannot_be_made_is_refused_before_anything_is_measured(
    bench: Bench, replace: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    replace(bench, ROW)
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", bench.name, "--write", "/proc/nowhere"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    said = capsys.readouterr().err
    assert "/proc/nowhere can't be written to" in said
    assert "starting" not in said


def test_a_folder_that_holds_something_else_is_refused_before_anything_is_measured(
    bench: Bench, replace: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    replace(bench, ROW)
    file = tmp_path / f"{bench.name}.json"
    file.write_text("[1, 2]")
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", bench.name, "--write", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    assert "not what `reef-slime bench" in capsys.readouterr().err
    assert file.read_text() == "[1, 2]"


def test_an_unknown_part_is_refused(bench: Bench, replace: Any) -> None:
    replace(bench, ROW)
    done = CliRunner().invoke(cli.app, ["bench", bench.name, "--part", "nothing"])
    assert done.exit_code == 2
    assert "is not a part" in done.stderr
    for part in bench.parts:
        assert CliRunner().invoke(cli.app, ["bench", bench.name, "--part", part]).exit_code == 0


def test_all_runs_each_and_fails_if_one_does(replace: Any, tmp_path: Path) -> None:
    for entry in BENCHES:
        replace(entry, ROW)
    done = CliRunner().invoke(cli.app, ["bench", "all", "--json", "--write", str(tmp_path)])
    assert done.exit_code == 0, done.stderr
    assert [json.loads(line)["bench"] for line in done.stdout.splitlines()] == [entry.name for entry in BENCHES]
    index = (tmp_path / "README.md").read_text()
    assert all(f"[{entry.name}]({entry.name}.md)" in index for entry in BENCHES)

    replace(BENCHES[0], ROW, error=EngineStartError("no memory"))
    done = CliRunner().invoke(cli.app, ["bench", "all", "--json"])
    assert done.exit_code == 1
    assert [json.loads(line).get("error") for line in done.stdout.splitlines()] == [
        "no memory",
        *[None] * (len(BENCHES) - 1),
    ]
    assert "reef-slime: no memory" in done.stderr
