"""The functions behind slime's flags, with stand-ins for slime's Sample, rollout function and logger: what reaches the
ledger, the samples and the log. Real slime: tests/slime/."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_backend.arguments import add_reef_arguments
from slime_backend.ledger.index import Query
from slime_backend.ledger.reader import open_reader
from slime_backend.policy import PolicyError
from slime_backend.provenance.errors import StalenessError
from slime_backend.report.run_data import read_run
from slime_backend.run_files.jsonl import read_jsonl
from slime_backend.slime_hooks.rollouts import functions as rollouts
from slime_backend.slime_hooks.rollouts.flags import CORRECT, set_rollout_functions
from slime_backend.slime_hooks.rollouts.generate_calls import METADATA_KEY, note_call
from tests.slime_hooks.samples import FakeSample, answer

PROMPT = 6
SLIME_FLAGS = {
    "rollout_function_path": "tests.slime_hooks.test_rollouts.slime_generates",
    "rollout_sample_hook_path": None,
    "custom_rollout_log_function_path": None,
    "custom_tis_function_path": None,
    "use_rollout_logprobs": False,
    "use_tis": False,
    "save": None,
    "reward_key": None,
    "rollout_temperature": 1.0,
    "sglang_router_ip": "127.0.0.1",
    "sglang_router_port": 3000,
    "use_wandb": False,
}


def parse(tmp_path, *flags, asynchronous=False, **slime):
    args = add_reef_arguments(argparse.ArgumentParser()).parse_args(["--reef-run-dir", str(tmp_path / "run"), *flags])
    vars(args).update({**SLIME_FLAGS, **slime})
    set_rollout_functions(args, asynchronous=asynchronous)
    return args


@pytest.fixture(autouse=True)
def run(monkeypatch):
    """A process that has seen no rollout yet."""
    state = rollouts._Run()
    monkeypatch.setattr(rollouts, "_run", state)
    yield state
    if state.ledger is not None:
        state.ledger.close()


def sample(version, group=0, index=0, status="completed"):
    made = FakeSample(group_index=group, index=index, tokens=list(range(PROMPT)), reward=float(index), status=status)
    made.append_response_tokens(tokens=[7] * 4, log_probs=[-0.5] * 4)
    note_call(made, answer(PROMPT, 4, [version]), 4)
    return made


def slime_generates(args, rollout_id, data_source, evaluation=False):
    return data_source(rollout_id)


def generate(args, rollout_id, groups, **more):
    return rollouts.generate_rollout(args, rollout_id, lambda _: groups, **more)


def stored(args):
    with open_reader(Path(args.reef_run_dir)) as reader:
        return list(reader.find(Query()))


@pytest.mark.usefixtures("fake_slime")
def test_what_slime_trains_on_is_in_the_ledger_once(tmp_path):
    args = parse(tmp_path)
    groups = [[sample("1"), sample("1", index=1)]]
    output = generate(args, 0, groups)
    assert output is groups
    generate(args, 1, groups)  # the same samples again: from a buffer, say
    records = stored(args)
    assert [(r.group, r.reward, r.versions, r.engine) for r in records] == [
        ("g00000", 0.0, ("1",), "router 127.0.0.1:3000"),
        ("g00000", 1.0, ("1",), "router 127.0.0.1:3000"),
    ]


@pytest.mark.usefixtures("fake_slime")
def test_an_aborted_sample_is_written_when_it_is_finished_with_its_reward(tmp_path):
    args = parse(tmp_path)
    aborted = sample("1", index=1, status="aborted")
    generate(args, 0, [[sample("1")], [aborted]])
    assert len(stored(args)) == 1
    aborted.status, aborted.reward = "completed", 5.0
    note_call(aborted, answer(PROMPT + 1, 3, ["2"]), 3)
    generate(args, 1, [[aborted]])
    assert [(r.versions, r.reward) for r in stored(args)[1:]] == [(("1",), 5.0), (("2",), 5.0)]


@pytest.mark.usefixtures("fake_slime")
def test_copies_of_a_sample_are_one_record_and_what_cannot_be_placed_is_counted(tmp_path, run):
    args = parse(tmp_path)
    one = sample("1")
    copy = FakeSample(**{**vars(one), "metadata": json.loads(json.dumps(one.metadata))})
    elsewhere = FakeSample(index=2, tokens=[0] * PROMPT)
    elsewhere.append_response_tokens(tokens=[1, 1])
    note_call(elsewhere, answer(PROMPT + 3, 2, ["1"]), 2)
    generate(args, 0, [[[one, copy], [elsewhere]]])
    assert len(stored(args)) == 1
    assert (run.ledger.counts.written, run.ledger.counts.without_record) == (1, 1)


@pytest.mark.usefixtures("fake_slime")
def test_evaluation_passes_through(tmp_path, run):
    args = parse(tmp_path, "--max-version-lag", "0", "--staleness", "drop")
    assert generate(args, 3, {"aime": 1}, evaluation=True) == {"aime": 1}
    assert run.ledger is None


@pytest.mark.usefixtures("fake_slime")
def test_a_stale_sample_is_dropped_and_its_decision_is_on_disk(tmp_path):
    args = parse(tmp_path, "--max-version-lag", "1", "--staleness", "drop", asynchronous=True)
    generate(args, 0, [[sample("1"), sample("1", index=1)]])
    stale = sample("1", index=4)
    generate(args, 2, SimpleNamespace(samples=[[stale, sample("2", index=5), sample("3", index=6)]]))
    assert stale.remove_sample
    (line,) = read_jsonl(tmp_path / "run" / "staleness.jsonl")
    assert (line["step"], line["receipt"], line["reason"], line["lag_max"]) == (3, "g00000/4", "lag_over_bound", 2)


def test_metrics_go_into_slime_s_run_and_slime_s_own_are_logged_too(tmp_path, fake_slime):
    args = parse(tmp_path, "--max-version-lag", "0", "--staleness", "mask_tokens")
    first, second = sample("1"), sample("1", index=1)
    generate(args, 0, [[first, second]])
    assert rollouts.log_rollouts(0, args, [first, second], {}, 1.0) is False
    late, fresh = sample("1", index=2), sample("2", index=3)
    generate(args, 1, [[late, fresh]])
    rollouts.log_rollouts(1, args, [late, fresh], {}, 1.0)
    rows = fake_slime
    assert rows[0]["rollout/step"] == 0
    assert rows[0]["reef/version_lag_max"] == 0
    assert (rows[1]["reef/version_lag_mean"], rows[1]["reef/version_lag_max"]) == (0.5, 1)
    assert (rows[1]["reef/class_pure"], rows[1]["reef/stale_mask_lag_over_bound"]) == (2, 1)
    assert (rows[1]["reef/stale_tokens_masked"], rows[1]["reef/audit_contradictions"]) == (4, 0)
    steps = list(read_jsonl(tmp_path / "run" / "steps.jsonl"))
    assert [(s["step"], s["reward_mean"], s["lag_max"]) for s in steps] == [(1, 0.5, 0), (2, 2.5, 1)]


def test_a_record_that_contradicts_itself_is_counted(tmp_path, fake_slime):
    args = parse(tmp_path)
    broken = sample("1")
    broken.metadata[METADATA_KEY]["calls"][0]["segments"][0]["version"] = "2"  # sampled by 1, says the other half
    generate(args, 0, [[broken]])
    rollouts.log_rollouts(0, args, [broken], {}, 1.0)
    assert fake_slime[0]["reef/audit_contradictions"] == 1


def own_log(rollout_id, args, samples, metrics, seconds):
    return "logged elsewhere"


@pytest.mark.usefixtures("fake_slime")
def test_the_run_s_own_functions_are_called_by_ours(tmp_path):
    own = "tests.slime_hooks.test_rollouts.own_log"
    args = parse(tmp_path, custom_rollout_log_function_path=own, rollout_sample_hook_path=["mine.hook"])
    assert args.rollout_sample_hook_path == ["mine.hook", "slime_backend.slime_hooks.rollouts.note_rollout"]
    assert rollouts.log_rollouts(0, args, [], {}, 1.0) is True


@pytest.mark.usefixtures("fake_slime")
def test_the_filter_alone_judges_by_the_rollout_that_the_hook_noted(tmp_path, run):
    args = parse(tmp_path, "--max-version-lag", "0", "--staleness", "drop")
    old, fresh, other = sample("1"), sample("2", index=1), sample("2", index=2)
    run.first_rollout = 0
    with pytest.raises(StalenessError, match="add --rollout-sample-hook-path"):
        rollouts.filter_stale(args, [[old, fresh]])
    for one in (old, fresh, other):
        rollouts.note_rollout(args, one, rollout_id=1)
    rollouts.filter_stale(args, [[old, fresh, other]])
    assert [s.remove_sample for s in (old, fresh, other)] == [True, False, False]


def test_each_finished_group_is_written_at_once(tmp_path, run, run_async):
    args = parse(tmp_path)

    async def generate_and_rm_group(args, group, sampling_params, evaluation=False):
        return group

    module = SimpleNamespace(generate_and_rm_group=generate_and_rm_group)
    rollouts.record_groups(module)
    run_async(module.generate_and_rm_group(args, [sample("1")], {}))
    run_async(module.generate_and_rm_group(args, [sample("1", index=1)], {}, evaluation=True))
    assert run.ledger.counts.written == 1


@pytest.mark.usefixtures("fake_slime")
def test_a_slime_run_can_be_looked_at_like_any_other(tmp_path):
    args = parse(tmp_path)
    groups = [[sample("1"), sample("1", index=1)]]
    generate(args, 0, groups)
    rollouts.log_rollouts(0, args, groups[0], {}, 1.0)
    run = read_run(tmp_path / "run")
    assert (len(run.samples), len(run.steps), run.summary["rollout_classes"]["pure"]) == (1, 1, 2)


def test_a_directory_that_holds_a_run_is_left_alone(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "rollouts.jsonl").touch()
    assert parse(tmp_path).reef_run_dir == str(tmp_path / "run-2")


def test_the_run_directory_is_under_save(tmp_path):
    args = add_reef_arguments(argparse.ArgumentParser()).parse_args([])
    vars(args).update({**SLIME_FLAGS, "save": str(tmp_path)})
    set_rollout_functions(args, asynchronous=False)
    assert args.reef_run_dir == str(tmp_path / "reef")


def test_correct_sets_slime_s_importance_sampling(tmp_path):
    args = parse(tmp_path, "--max-version-lag", "2")
    assert (args.use_tis, args.custom_tis_function_path) == (True, CORRECT)
    assert parse(tmp_path).use_tis is False  # nothing is stale without a bound


@pytest.mark.parametrize(
    ("flags", "slime", "expected"),
    [
        (["--staleness", "drop"], {}, "does nothing without a bound; give --max-version-lag as well"),
        (["--max-version-lag", "1"], {"use_rollout_logprobs": True}, "Ways out: remove --use-rollout-logprobs"),
        (["--max-version-lag", "1"], {"custom_tis_function_path": "mine.tis"}, "mine.tis both set the importance"),
    ],
)
def test_contradictions_are_one_line(tmp_path, flags, slime, expected):
    with pytest.raises(PolicyError, match=expected) as refused:
        parse(tmp_path, *flags, **slime)
    assert "\n" not in str(refused.value)


def test_a_worker_that_is_not_prepared_yet_imports_neither_slime_nor_torch():
    code = "import sys; from slime_backend.slime_hooks import patches; print({'torch', 'slime'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_negative_bound_is_refused(capsys):
    with pytest.raises(SystemExit):
        add_reef_arguments(argparse.ArgumentParser()).parse_args(["--max-version-lag", "-1"])
    assert "-1 is negative" in capsys.readouterr().err


def test_the_documented_metrics_are_those_that_are_logged(tmp_path, fake_slime):
    args = parse(tmp_path)
    groups = [[sample("1"), sample("1", index=1)]]
    generate(args, 0, groups)
    rollouts.log_rollouts(0, args, groups[0], {}, 1.0)
    page = (Path(__file__).resolve().parents[2] / "docs" / "slime" / "use.md").read_text()
    table = page.partition("## Metrics")[2].partition("## Sliding")[0]
    documented = set(re.findall(r"`(reef/\w+)`", table.partition("With `correct`")[0]))
    assert documented == {name for name in fake_slime[0] if name.startswith("reef/")}
