"""What `reef-slime bench NAME` prints and writes and when it fails, with the measurement replaced: it takes minutes.

All benches go through the same command, so one stands for all where the catalogue makes no difference.
"""

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
BENCH = BENCHES[0]


@pytest.fixture
def replace(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def with_rows(bench: Bench, *rows: dict[str, Any], error: BaseException | None = None) -> None:
        async def measured(log: Any, found: list[Row], parts: Any = None) -> None:
            log("starting two engines")
            found.extend(Row(**row) for row in rows)
            if error is not None:
                raise error

        monkeypatch.setattr(bench.module, f"bench_{bench.name}", measured)

    return with_rows


@pytest.mark.parametrize("holds", [True, False])
def test_the_json_is_the_contract_and_a_missed_goal_fails_and_is_written(
    replace: Any, tmp_path: Path, holds: bool
) -> None:
    replace(BENCH, {**ROW, "holds": holds})
    done = CliRunner().invoke(cli.app, ["bench", BENCH.name, "--json"])
    assert done.exit_code == (0 if holds else 1)
    assert json.loads(done.stdout) == {"bench": BENCH.name, "rows": [{**ROW, "holds": holds}]}
    table = CliRunner().invoke(cli.app, ["bench", BENCH.name, "--write", str(tmp_path / "pages")])
    assert "first" in table.stdout
    assert ("NO" in table.stdout) != holds
    page = (tmp_path / "pages" / f"{BENCH.name}.md").read_text()
    assert f"| first | 0 | 0.99 | 103.4 | at least 0.99 | {'yes' if holds else 'NO'} |" in page
    assert f"`reef-slime bench {BENCH.name}`" in page


def test_a_bench_that_ends_early_prints_what_it_had_and_why_and_writes_nothing(
    replace: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: Any
) -> None:
    """As when the engines of a late pair don't start."""
    why = "roomy-ours: the engine ended while starting: killed"
    replace(BENCH, ROW, error=EngineStartError(why))
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", BENCH.name, "--write", str(tmp_path), "--json"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    out, err = capfd.readouterr()
    assert err.splitlines()[-2:] == [
        f"bench {BENCH.name} ended early, with 1 rows measured",
        f"reef-slime: {why}",
    ]
    assert json.loads(out) == {"bench": BENCH.name, "rows": [ROW], "error": why}
    assert list(tmp_path.iterdir()) == []


def test_one_that_is_interrupted_too(replace: Any) -> None:
    replace(BENCH, ROW, error=KeyboardInterrupt())
    done = CliRunner().invoke(cli.app, ["bench", BENCH.name, "--json"])
    assert done.exit_code != 0
    assert json.loads(done.stdout) == {"bench": BENCH.name, "rows": [ROW], "error": "interrupted"}


@pytest.mark.parametrize("case", ["no folder", "of something else"])
def test_a_folder_that_cannot_be_written_to_is_refused_before_anything_is_measured(
    replace: Any, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    replace(BENCH, ROW)
    file = tmp_path / f"{BENCH.name}.json"
    file.write_text("[1, 2]")
    folder, seen = {
        "no folder": ("/proc/nowhere", "/proc/nowhere can't be written to"),
        "of something else": (str(tmp_path), "not what `reef-slime bench"),
    }[case]
    monkeypatch.setattr("sys.argv", ["reef-slime", "bench", BENCH.name, "--write", folder])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 1
    err = capsys.readouterr().err
    assert seen in err
    assert "starting" not in err
    assert file.read_text() == "[1, 2]"


@pytest.mark.parametrize("bench", BENCHES, ids=lambda entry: entry.name)
def test_each_part_is_known_and_another_is_refused(bench: Bench, replace: Any) -> None:
    replace(bench, ROW)
    done = CliRunner().invoke(cli.app, ["bench", bench.name, "--part", "nothing"])
    assert done.exit_code == 2
    assert "is not a part" in done.stderr
    for part in bench.parts:
        assert CliRunner().invoke(cli.app, ["bench", bench.name, "--part", part]).exit_code == 0


def test_all_runs_each_and_fails_if_one_does(replace: Any, tmp_path: Path) -> None:
    for entry in BENCHES:
        replace(entry, ROW)
    replace(BENCHES[0], ROW, error=EngineStartError("no memory"))
    done = CliRunner().invoke(cli.app, ["bench", "all", "--json", "--write", str(tmp_path)])
    assert done.exit_code == 1
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["bench"] for line in lines] == [entry.name for entry in BENCHES]
    assert [line.get("error") for line in lines] == ["no memory", *[None] * (len(BENCHES) - 1)]
    assert "reef-slime: no memory" in done.stderr
    index = (tmp_path / "README.md").read_text()
    assert all(f"[{entry.name}]({entry.name}.md)" in index for entry in BENCHES[1:])
