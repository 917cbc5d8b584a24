"""`reef-slime plan`: from flags, from a run, from a bench's file; its table, its JSON, its page, its errors."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from slime_backend.cli import app as cli
from slime_backend.planner import from_ledger, measured, page
from slime_backend.planner.measured import EngineSpeeds, Shape, Slice
from slime_backend.planner.plan import Given, make_plan
from slime_backend.planner.traffic import PlanError
from slime_backend.planner.work import MODES
from slime_backend.policy import Policy, decide
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.wire import KvSegment, Prefill, Span

TRAFFIC = ["--prompt-tokens", "4000", "--answer-tokens", "500", "--in-flight", "64", "--publications-per-hour", "60"]
SPEEDS = ["--prefill-speed", "20000", "--decode-speed", "5000", "--standstill", "2"]


def test_every_setting_of_a_plan_is_a_flag_of_the_command():
    """The flags are made of Given, in its order; what it lacks is how the plan is shown."""
    commands: Any = typer.main.get_command(cli.app)
    command = commands.commands["plan"]
    fields = [field.name for field in dataclasses.fields(Given)]
    assert [param.name for param in command.params if param.name != "help"] == [*fields, "page", "as_json"]
    defaults = {param.name: param.default for param in command.params}
    assert all(defaults[field.name] == field.default for field in dataclasses.fields(Given))
    flags = {param.name: param.opts for param in command.params}
    assert (flags["prompt"], flags["gb_s"], flags["bench"]) == (["--prompt-tokens"], ["--bandwidth-gb-s"], ["--bench"])


def plan(*args: str, code: int = 0) -> str:
    done = CliRunner().invoke(cli.app, ["plan", *args])
    assert done.exit_code == code, done.output
    return done.stdout


def test_the_table_recommends_and_names_the_crossovers():
    text = " ".join(plan(*TRAFFIC, *SPEEDS, "--group-size", "8").split())
    assert "recommended: scoped" in text
    assert "on retract instead of scoped" in text
    assert "requests of each prompt on scoped instead of off" in text
    for mode in ("drop", "requeue", "retract", "off", "scoped"):
        assert f"│ {mode} " in text


def test_the_json_is_one_line_and_whole():
    text = plan(*TRAFFIC, *SPEEDS, "--group-size", "8", "--json")
    assert len(text.splitlines()) == 1
    data = json.loads(text)
    assert data["recommended"] == "scoped"
    assert data["traffic"]["period_s"] == 60
    assert data["speeds"] == {"prefill": 20000.0, "decode": 5000.0, "standstill_s": 2.0, "admission_s": 0.0}
    assert [p["mode"] for p in data["predictions"]] == ["drop", "requeue", "retract", "off", "scoped"]
    assert set(data["crossovers"]) == {"period_s", "group"}


def test_what_is_infinite_is_null_in_the_json():
    """Publications so often that slime's sequence keeps the engine paused all the time."""
    often = ["--publications-per-hour", "1300"]
    data = json.loads(plan(*TRAFFIC, *SPEEDS, *often, "--json"))
    requeue = next(p for p in data["predictions"] if p["mode"] == "requeue")
    assert requeue["tokens_per_s"] == 0
    assert requeue["prefilled_per_token"] is None
    assert data["recommended"] == "off"


def test_the_page_is_one_file_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(page, "plotly_source", lambda: "/* plotly */")
    path = tmp_path / "plan.html"
    plan(*TRAFFIC, *SPEEDS, "--group-size", "8", "--page", str(path))
    text = path.read_text()
    assert "Content-Security-Policy" in text
    assert "http://" not in text
    assert "https://" not in text
    figures = json.loads(text.partition('id="figures">')[2].partition("</script>")[0])
    assert set(figures) == {"chart-throughput", "chart-prefilled", "chart-group"}
    throughput = figures["chart-throughput"]
    assert [curve["name"] for curve in throughput["data"]] == ["drop", "requeue", "retract", "off", "scoped"]
    found = make_plan(Given(prompt=4000, answer=500, in_flight=64, per_hour=60, group=8, prefill=2e4, decode=5e3))
    assert len(throughput["layout"]["shapes"]) == len(found.by_period) > 0


@pytest.mark.parametrize(
    ("args", "seen"),
    [
        ([], "give --prompt-tokens, --answer-tokens, --in-flight, --publications-per-hour; or a RUN_DIR"),
        (TRAFFIC, "the engine's speed isn't known"),
        ([*TRAFFIC, "--prefill-speed", "9"], "give --prefill-speed and --decode-speed, or neither"),
        ([*TRAFFIC, *SPEEDS, "--publications-per-hour", "0"], "give more than 0"),
        ([*TRAFFIC, *SPEEDS, "--publications-per-hour", "3600"], "no mode finishes anything; publish less often"),
        ([*TRAFFIC, *SPEEDS, "--shared-tokens", "5000"], "5000 shared tokens are more than the prompt's 4000"),
        ([*TRAFFIC, *SPEEDS, "--answer-tokens", "nan"], "answers of nan tokens"),
        ([*TRAFFIC, "--model-billions", "0"], "must be more than 0"),
        ([*TRAFFIC, *SPEEDS, "--page", "no/such/plan.html"], "no/such/plan.html can't be written (No such file"),
        (["no/such/run"], "no run directory no/such/run"),
        (["configs"], "0 rollouts and 0 publications are too few to plan with"),
        (["configs", "--bench", "x.json"], "give RUN_DIR or --bench, not both"),
    ],
)
def test_wrong_use_is_one_line_and_two(args, seen, monkeypatch, capfd):
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    monkeypatch.setattr("sys.argv", ["reef-slime", "plan", *args])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    err = capfd.readouterr().err
    assert seen in err
    assert len(err.splitlines()) == 1


def test_the_measurements_of_a_bench_are_shown_with_their_predictions(tmp_path: Path):
    shape = Shape(prompt=100, group=4, answers=(50,), in_flight=8, chunk=1000)
    slices = [Slice(mode, 100.0, 0, 100.0, 1, 10, 8000, 0, 9000, 0.05, 0.05, 1000.0) for mode in MODES]
    results = measured.ModeResults(shape, {}, [EngineSpeeds(1000, 100, 0)], slices)
    path = tmp_path / "modes.json"
    path.write_text(json.dumps({"runs": [{"details": results.to_json()}]}))
    data = json.loads(plan("--bench", str(path), "--json"))
    assert data["traffic"] == {
        "prompt": 100, "shared": 0, "group": 4, "answers": [50.0], "in_flight": 8, "period_s": 100.0, "chunk": 1000,
        "together": False,
    }  # fmt: skip
    assert data["speeds"] == {"prefill": 1000, "decode": 100, "standstill_s": 1.0, "admission_s": 0.0}
    assert len(data["compared"]) == len(MODES) * 3
    off = next(c for c in data["compared"] if (c["mode"], c["figure"]) == ("off", "tokens_per_s"))
    assert off["measured"] == 80
    assert off["predicted"] == pytest.approx(99 / 0.59 * 50 / 100)
    assert off["off_by"] == pytest.approx(abs(off["predicted"] - 80) / 80)
    assert "predictions are within 20%" in " ".join(plan("--bench", str(path)).split())
    other = json.loads(plan("--bench", str(path), "--json", "--publications-per-hour", "360", "--standstill", "0.5"))
    assert (other["traffic"]["period_s"], other["speeds"]["standstill_s"]) == (10, 0.5)


# ---- a recorded run -------------------------------------------------------------------------------------------------

TOKEN_S, PROMPT, ANSWER, GROUPS = 0.01, 100, 40, 30


def record(number: int, group: int, at: float, engine: str, prefills: tuple[Prefill, ...]) -> RolloutRecord:
    return RolloutRecord(
        receipt=f"{number:032x}",
        group=f"g{group}",
        engine=engine,
        question="",
        prompt_ids=(*range(60), *([group] * (PROMPT - 60))),
        output_ids=(7,) * ANSWER,
        logprobs=(-1.0,) * ANSWER,
        temperature=1.0,
        reward=0.0,
        finish_reason="length",
        spans=(Span("v0", 0, ANSWER),),
        segments=(KvSegment(0, ANSWER, "v0", (Span("v0", 0, PROMPT + ANSWER - 1),)),),
        prefills=prefills,
        submitted_at=at,
        finished_at=at + ANSWER * TOKEN_S,
    )


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Two engines, one group of eight after the other, half of it on each; every four groups a publication."""
    rollouts, publications = JsonlWriter(tmp_path / "rollouts.jsonl"), JsonlWriter(tmp_path / "publications.jsonl")
    for group in range(GROUPS):
        at = 1000 + group * ANSWER * TOKEN_S
        for member in range(8):
            cached = 0 if member < 2 else PROMPT - 1
            prefill = Prefill(0, member, "v0", cached, PROMPT)
            rollouts.append(record(8 * group + member, group, at, f"engine{member % 2}", (prefill,)).to_json())
        if group % 4 == 3:
            publications.append(
                {
                    "state": "resumed",
                    "started_at": at,
                    "wall_ms": 20.0,
                    "policy": "disjoint, prefix sharing scoped: pause in_place, radix cache on, then sweep",
                }
            )
    rollouts.close()
    publications.close()
    return tmp_path


def test_the_traffic_of_a_run_is_read_from_its_ledger(run_dir: Path):
    found = from_ledger.read_recorded(run_dir, 2048)
    assert found.mode == "scoped"
    assert found.traffic.prompt == PROMPT
    assert found.traffic.shared == 60
    assert found.traffic.group == 4  # of eight, on one of two engines
    assert set(found.traffic.answers) == {ANSWER}
    assert found.traffic.in_flight == pytest.approx(4)
    assert found.traffic.period_s == pytest.approx(4 * ANSWER * TOKEN_S)
    assert found.traffic.together
    assert found.standstill_s == pytest.approx(0.02)
    assert found.tokens_per_s == pytest.approx(8 * ANSWER / (ANSWER * TOKEN_S) / 2)
    assert found.prefilled_per_token == pytest.approx((2 * PROMPT + 6) / (8 * ANSWER))


def test_the_night_in_which_a_run_stood_still_is_not_its_own(run_dir: Path):
    """Interrupted after half of the groups, and resumed the next morning."""
    before = from_ledger.read_recorded(run_dir, 2048)
    rows = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    for row in rows[len(rows) // 2 :]:
        row["submitted_at"] += 30_000
        row["finished_at"] += 30_000
    (run_dir / "rollouts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    after = from_ledger.read_recorded(run_dir, 2048)
    assert after.tokens_per_s == pytest.approx(before.tokens_per_s)
    assert after.traffic.in_flight == pytest.approx(before.traffic.in_flight)


def test_a_run_is_predicted_at_its_own_throughput(run_dir: Path):
    data = json.loads(plan(str(run_dir), "--json"))
    mine = next(p for p in data["predictions"] if p["mode"] == "scoped")
    assert mine["tokens_per_s"] == pytest.approx(data["recorded"]["tokens_per_s"], rel=1e-3)
    assert data["speeds"]["prefill"] == pytest.approx(4 * data["speeds"]["decode"])
    assert "the run itself (scoped)" in " ".join(plan(str(run_dir)).split())
    given = json.loads(plan(str(run_dir), "--json", "--in-flight", "99", "--prefill-speed", "9", "--decode-speed", "3"))
    assert given["traffic"]["in_flight"] == 99
    assert given["speeds"] == {"prefill": 9.0, "decode": 3.0, "standstill_s": 0.02, "admission_s": 0.0}


def test_an_assumed_prefill_step_is_said(run_dir: Path):
    text = "prefill steps of 8192 tokens assumed"
    assert any(text in note for note in json.loads(plan(str(run_dir), "--json"))["notes"])
    assert not any(text in note for note in json.loads(plan(str(run_dir), "--json", "--chunk", "2048"))["notes"])


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (decide("disjoint", "off"), "off"),
        (decide("disjoint", "retract"), "retract"),
        (decide("disjoint", "scoped"), "scoped"),
        (decide("colocated", "scoped"), "retract"),  # colocated engines retract and flush, whatever the mode
    ],
    ids=str,
)
def test_a_run_s_mode_is_its_policy_s_fields_and_not_its_sentence(run_dir: Path, policy: Policy, mode: str):
    path = run_dir / "publications.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        row |= {"policy": "prefix sharing retract: reworded", "policy_fields": asdict(policy)}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert from_ledger.read_recorded(run_dir, 2048).mode == mode


def test_a_run_of_the_negative_control_has_no_formula(run_dir: Path):
    path = run_dir / "publications.jsonl"
    path.write_text(path.read_text().replace("sharing scoped", "sharing unsafe"))
    with pytest.raises(PlanError, match="which the planner has no formula for"):
        from_ledger.read_recorded(run_dir, 2048)
