"""Every way in which slime publishes, on the real slime: the versions in each Sample, the engines' own evidence in
publications.jsonl, and log-probs that show that the weights behind a version are the trainer's.

What slime does without us is the control beside it: the same job with REEF_SLIME_PUBLICATIONS=off.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from slime_backend.run_files.jsonl import read_jsonl
from tests.slime.wandb_checks import only_wandb_file
from tests.wandb_files import has_ended, history

pytestmark = [pytest.mark.slime, pytest.mark.slow, pytest.mark.soak, pytest.mark.timeout(1200)]

SAME_WEIGHTS = 1e-3  # an engine one version behind is off by 0.04 and more
FAULTS = Path(__file__).parent / "faults"
ROOT = Path(__file__).resolve().parents[2]
WITHOUT_US = {"REEF_SLIME_PUBLICATIONS": "off"}
RUN_DIR = ("--reef-run-dir", "{dir}/reef")
TWO_ENGINES = ("--rollout-num-gpus", "2", "--num-gpus-per-node", "3")


def publications(run):
    return list(read_jsonl(run.directory / "reef" / "publications.jsonl"))


def assert_published(run, versions, *, rollouts=2, engines=1, transport=None):
    """The job ended well: one publication for each of `versions`, to every engine, and samples of the versions."""
    assert run.returncode == 0, run.tail()
    reports = publications(run)
    assert [r["version"] for r in reports] == versions
    for report in reports:
        assert report["state"] == "resumed"
        assert [e["confirmed"] for e in report["engines"]] == [True] * engines
        assert transport is None or report["transport"] == transport
    assert len(run.logprob_diffs) == rollouts
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def versions_of(run, rollouts):
    return [run.versions(rollout_id) for rollout_id in range(rollouts)]


def test_distributed_from_two_tensor_parallel_ranks(slime_run):
    run = slime_run(
        *RUN_DIR, "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--num-gpus-per-node", "3"
    )
    assert_published(run, ["1", "2", "3"], transport="distributed")
    assert versions_of(run, 2) == [[["1"]] * 8, [["2"]] * 8]


def test_distributed_from_two_data_parallel_ranks(slime_run):
    run = slime_run(*RUN_DIR, "--actor-num-gpus-per-node", "2", "--num-gpus-per-node", "3")
    assert_published(run, ["1", "2", "3"], transport="distributed")


def test_tensor(slime_run):
    run = slime_run(*RUN_DIR, "--colocate")
    assert_published(run, ["1", "2", "3"], transport="tensor")
    assert versions_of(run, 2) == [[["1"]] * 8, [["2"]] * 8]
    assert all(e["flush_verified"] for report in publications(run) for e in report["engines"])


def test_tensor_with_an_engine_beside_the_colocated_one(slime_run):
    """slime sends to both, and pauses and flushes only the colocated one."""
    run = slime_run(*RUN_DIR, "--colocate", *TWO_ENGINES)
    assert_published(run, ["1", "2", "3"], engines=2, transport="tensor")
    for report in publications(run):
        assert [e["flush_verified"] for e in report["engines"]] == [True, True]
        assert all(e["paused_ms"] > 0 for e in report["engines"])


def test_full_disk(slime_run):
    run = slime_run(*RUN_DIR, "--update-weight-transport", "disk", "--update-weight-disk-dir", "{dir}/weights")
    assert_published(run, ["1", "2", "3"], transport="disk")
    assert versions_of(run, 2) == [[["1"]] * 8, [["2"]] * 8]
    assert list((run.directory / "weights").glob("weight_v*")) == []  # cleaned up, as slime does


DELTA = (
    *("--update-weight-mode", "delta", "--update-weight-transport", "disk"),
    *("--update-weight-disk-dir", "{dir}/weights", "--update-weight-local-checkpoint-dir", "{dir}/local"),
)


def test_delta_disk(slime_run):
    run = slime_run(*RUN_DIR, *DELTA)
    assert_published(run, ["1", "2"], transport="local disk")
    assert versions_of(run, 2) == [[["default"]] * 8, [["1"]] * 8]


FULLY_ASYNC = (
    *("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"),
    *("--num-rollout", "4", "--rollout-max-response-len", "192", *TWO_ENGINES),
)


def test_fully_asynchronous_aborts_nothing_and_slime_alone_does(slime_run):
    """The same flags twice: publications by us, and slime's own (radix cache on, pause by abort, flush)."""
    ours = slime_run(*RUN_DIR, *FULLY_ASYNC, "--disjoint-prefix-sharing=scoped", loop="train_async")
    alone = slime_run(
        *RUN_DIR, *FULLY_ASYNC, "--disjoint-prefix-sharing=retract", loop="train_async", environment=WITHOUT_US
    )
    for name, run in (("reef-slime, scoped", ours), ("slime alone", alone)):
        assert run.returncode == 0, run.tail()
        samples = [s for rollout_id in range(4) for s in run.samples(rollout_id)]
        print(
            f"{name}: {sum(was_aborted(s) for s in samples)} of {len(samples)} samples aborted at a publication and "
            f"sent again, {generated_per_s(run, 4):.1f} tokens/s generated, from first to last rollout"
        )
    ours_samples, alone_samples = ([s for i in range(4) for s in run.samples(i)] for run in (ours, alone))
    assert all(s["status"] in ("completed", "truncated") for s in ours_samples)
    assert not any(was_aborted(s) for s in ours_samples)
    assert any(was_aborted(s) for s in alone_samples)
    assert sum(e["in_flight"] for report in publications(ours) for e in report["engines"]) > 0
    assert all(e["sweep_verified"] for report in publications(ours) for e in report["engines"])


def was_aborted(sample):
    """slime notes a version per call, and calls again for what an abort put back."""
    return len(sample["weight_versions"]) > 1


def generated_per_s(run, rollouts):
    """Response tokens of all rollouts but the first, over the time from the first being saved to the last."""
    saved = [(run.directory / f"rollout_{i}.pt").stat().st_mtime for i in (0, rollouts - 1)]
    tokens = sum(s["response_length"] for i in range(1, rollouts) for s in run.samples(i))
    return tokens / (saved[1] - saved[0])


def test_the_second_request_of_a_group_finds_its_prompt_and_the_audit_finds_nothing(slime_run, tmp_path):
    """Prompts of 400 tokens, four groups of four. What SGLang admits in one prefill batch can't share, and slime sends
    a group at once: so one request a batch."""
    from slime_backend.audit.audit import audit_run
    from slime_backend.simulation.models import load_model

    prompts = tmp_path / "long.jsonl"
    rules = "Answer with one number and nothing else. " * 9
    rows = [
        {"prompt": f"{i:02d} {rules}What is {i} plus {i + 1}? Answer: ", "label": str(2 * i + 1)} for i in range(64)
    ]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ("--prompt-data", str(prompts), "--n-samples-per-prompt", "4", "--global-batch-size", "16")
    run = slime_run(
        *RUN_DIR, *flags, *("--disjoint-prefix-sharing", "--reef-save-weights", "--sglang-prefill-max-requests", "1")
    )
    assert_published(run, ["1", "2", "3"], transport="distributed")
    later = []
    for rollout_id in range(2):
        groups = {}
        for sample in run.samples(rollout_id):
            (call,) = sample["metadata"]["reef_slime"]["calls"]
            groups.setdefault(sample["group_index"], []).append(call["prefills"][0])
        for first, *others in (sorted(prefills, key=lambda p: p["cached"]) for prefills in groups.values()):
            assert first["cached"] < 16  # nothing of an older version, nothing of another prompt
            later += [p["cached"] / p["total"] for p in others]
    print(f"prefix hit rate of the later requests of a group: {min(later):.3f} at least, {len(later)} requests")
    assert min(later) > 0.9
    result = audit_run(run.directory / "reef", load_model)
    assert (result.rollouts, result.violations) == (32, [])


def test_an_engine_that_rejects_the_update_is_an_error_in_the_trainer(slime_run, tmp_path):
    """slime waits for ever in the broadcast that the engine never joins."""
    wandb = ("--use-wandb", "--wandb-mode", "offline", "--wandb-project", "p", "--wandb-group", "g")
    run = slime_run(
        *RUN_DIR,
        *("--reef-load-timeout", "60", *wandb, "--wandb-dir", "{dir}/wandb"),
        environment={**fault(tmp_path)},
    )
    assert (tmp_path / "rejecting").exists()
    assert run.returncode not in (0, 124), run.tail()
    assert "EngineRejectedUpdate" in run.log
    assert "a fault that the test put in" in run.log
    (first, second) = publications(run)
    assert (first["state"], second["state"]) == ("resumed", "failed")
    # What the job logged before is in its closed W&B run, and the summary stands after the traceback.
    file = only_wandb_file(run.directory)
    rows = history(file)
    assert [row["reef/publication/version"] for row in rows if "reef/publication/version" in row] == [1]
    assert [row["train/step"] for row in rows if "train/step" in row] == [0]
    assert has_ended(file)
    last = run.log[run.log.rindex("Traceback") :]
    assert "reef-slime: the job ended early: EngineRejectedUpdate: " in last
    assert "reef-slime: 2 publications, 1 verified on every engine; not so: version 2 " in last


def test_without_us_the_rejection_hangs_the_trainer(slime_run, tmp_path):
    run = slime_run(environment={**fault(tmp_path), **WITHOUT_US}, deadline_s=240)
    assert (tmp_path / "rejecting").exists()
    assert run.returncode == 124  # ended by the deadline


def fault(directory):
    return {"REEF_FAULT_REJECT": str(directory), "PYTHONPATH": f"{FAULTS}:{ROOT}"}


TOLERANT = (
    *TWO_ENGINES,
    # slime looks at its engines only while rollouts are generated, which may take less than a second.
    *("--num-rollout", "4", "--use-fault-tolerance", "--rollout-health-check-interval", "0.1"),
    *("--rollout-health-check-first-wait", "0", "--rollout-health-check-timeout", "5"),
)


def test_fault_tolerance_with_an_engine_killed_in_rollout_2(slime_run, tmp_path):
    """Its requests are answered by the other engine, and its successor is routed with the trainer's weights."""
    environment = {"REEF_FAULT_KILL": str(tmp_path), "PYTHONPATH": f"{FAULTS}:{ROOT}"}
    run = slime_run(*RUN_DIR, *TOLERANT, environment=environment)
    assert (tmp_path / "killed").exists()
    assert run.returncode == 0, run.tail()
    reports = publications(run)
    assert [e["confirmed"] for e in reports[1]["engines"]] == [True, True]  # killed after this one
    assert [e["confirmed"] for e in reports[-1]["engines"]] == [True, True]
    for rollout_id in range(4):
        assert run.versions(rollout_id) == [[str(rollout_id + 1)]] * 8
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def test_fault_tolerance_replaces_an_engine_and_routes_it_with_its_weights(slime_run, tmp_path):
    """One of two engines rejects publication 2: the run goes on with the other, and slime starts a successor."""
    run = slime_run(
        *RUN_DIR,
        *TOLERANT,
        environment=fault(tmp_path),
    )
    assert run.returncode == 0, run.tail()
    reports = publications(run)
    assert [sum(e["confirmed"] for e in report["engines"]) for report in reports[:2]] == [2, 1]
    assert [e["confirmed"] for e in reports[-1]["engines"]] == [True, True]
    for rollout_id in range(4):
        assert run.versions(rollout_id) == [[str(rollout_id + 1)]] * 8
    assert max(run.logprob_diffs) < SAME_WEIGHTS


def test_an_external_engine(slime_run, tiny_flags, tmp_path):
    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines

    model = tiny_flags[tiny_flags.index("--hf-checkpoint") + 1]
    settings = EngineSettings(model=model, hooks=RUN_HOOKS, skip_tokenizer=False, radix_cache=False)
    engine = LocalEngine(settings, log_path=tmp_path / "engine.log")
    with running_engines([engine]):
        run = slime_run(*RUN_DIR, "--rollout-external-engine-addrs", engine.url.partition("://")[2])
    assert_published(run, ["1", "2", "3"], transport="distributed")
    assert versions_of(run, 2) == [[["1"]] * 8, [["2"]] * 8]


TWO_MODELS = """
sglang:
  - name: actor
    update_weights: true
    server_groups: [{worker_type: regular, num_gpus: 1}]
  - name: frozen
    update_weights: false
    server_groups: [{worker_type: regular, num_gpus: 1}]
"""


def engine_ports(run):
    return [int(port) for port in re.findall(r"Ports for engine \d+: .*?'port': (\d+)", run.log)]


def test_two_models_have_ports_of_their_own_and_the_frozen_one_is_left_alone(slime_run, tmp_path):
    config = tmp_path / "two.yaml"
    config.write_text(TWO_MODELS)
    run = slime_run(*RUN_DIR, "--sglang-config", str(config), *TWO_ENGINES)
    assert_published(run, ["1", "2", "3"], engines=1)
    assert len(set(engine_ports(run))) == 2


TWO_GROUPS = """
sglang:
  - name: actor
    update_weights: true
    server_groups:
      - {worker_type: regular, num_gpus: 1}
      - {worker_type: regular, num_gpus: 1, overrides: {chunked_prefill_size: 64}}
"""


def test_every_server_group_takes_part(slime_run, tmp_path):
    config = tmp_path / "groups.yaml"
    config.write_text(TWO_GROUPS)
    run = slime_run(*RUN_DIR, "--sglang-config", str(config), *TWO_ENGINES)
    assert_published(run, ["1", "2", "3"], engines=2, transport="distributed")
    assert versions_of(run, 2) == [[["1"]] * 8, [["2"]] * 8]
