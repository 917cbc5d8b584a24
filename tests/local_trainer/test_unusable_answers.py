"""An engine whose weights have NaN answers with log-probs that are null: recorded, left out, and a clean end where no
answer of a step can be used."""

from __future__ import annotations

import asyncio

import pytest

from slime_backend.local_trainer import loop, rollouts
from slime_backend.provenance.errors import RecordError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.run_files.jsonl import read_jsonl
from tests.local_trainer.fake_runs import config_of, fake_fleet


def break_answers(monkeypatch, which):
    original, count = rollouts.generate, [0]

    async def generate(*args, **kwargs):
        answer = await original(*args, **kwargs)
        count[0] += 1
        if which(count[0]):
            answer.body["meta_info"]["output_token_logprobs"][1][0] = None
        return answer

    monkeypatch.setattr(rollouts, "generate", generate)
    monkeypatch.setattr(loop, "running_fleet", fake_fleet)


def train(config):
    log_lines = []
    work = loop.train(config, config.run_dir, resume=False, reporter=loop.Reporter(log=log_lines.append))
    try:
        return asyncio.run(asyncio.wait_for(work, 60)), log_lines
    except RecordError as error:
        return error, log_lines


def test_a_few_unusable_answers_are_left_out_and_recorded(tmp_path, tiny_directory, monkeypatch):
    break_answers(monkeypatch, lambda number: number == 3)
    config = config_of(tmp_path, tiny_directory, tracker="none")
    summary, log_lines = train(config)
    assert summary["completed"]
    assert (summary["rollouts_unusable"], summary["rollouts_lost"]) == (1, 0)
    (row,) = read_jsonl(config.run_dir / "unusable.jsonl")
    assert row["why"].startswith(f"engine0: rollout {row['receipt']}: the log-prob of output token 1 is null")
    assert row["answer"]["output_ids"]
    assert sum("an answer can't be used" in line for line in log_lines) == 1


def test_a_run_without_a_usable_answer_ends_with_the_reason(tmp_path, tiny_directory, monkeypatch):
    break_answers(monkeypatch, lambda number: True)
    error, _ = train(config_of(tmp_path, tiny_directory, tracker="none"))
    assert isinstance(error, RecordError)
    assert "no answer of 2 groups can be used" in str(error)
    assert "are there NaN in the weights of v0?" in str(error)


META = {
    "weight_versions": [{"version": "v3", "start": 0, "end": 2}],
    "kv_provenance": [],
    "prefills": [],
    "output_token_logprobs": [[-1.0, 5, None], [-2.0, 6, None]],
}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({}, "the answer has no meta_info"),
        ({"meta_info": None, "output_ids": []}, "the answer has no meta_info"),
        ({"meta_info": META}, "output_ids are null"),
        ({"meta_info": META, "output_ids": [5, "6"]}, "output token 1 is '6', not a token id"),
        ({"meta_info": META, "output_ids": [5, 6, 7]}, "2 log-probs for 3 tokens"),
        ({"meta_info": {**META, "output_token_logprobs": None}, "output_ids": [5]}, "0 log-probs for 1 tokens"),
        ({"meta_info": {**META, "output_token_logprobs": 3}, "output_ids": [5]}, "is 3, not a list"),
        (
            {"meta_info": {**META, "output_token_logprobs": [[-1.0], [None]]}, "output_ids": [5, 6]},
            "output token 1 is null (NaN or an infinity: are there NaN in the weights of v3?)",
        ),
        ({"meta_info": {**META, "output_token_logprobs": [[-1.0], []]}, "output_ids": [5, 6]}, "output token 1 is []"),
        (
            {"meta_info": {**META, "output_token_logprobs": [[float("nan")], [-1.0]]}, "output_ids": [5, 6]},
            "output token 0 is nan",
        ),
        ({"meta_info": {**META, "weight_versions": [{"version": "v3"}]}, "output_ids": [5, 6]}, "no usable provenance"),
        ({"meta_info": {**META, "prefills": None}, "output_ids": [5, 6]}, "no usable provenance"),
    ],
)
def test_an_answer_that_is_no_rollout_is_a_record_error(answer, message):
    with pytest.raises(RecordError) as caught:
        RolloutRecord.from_answer(
            answer,
            receipt="r1",
            group="g",
            engine="engine0",
            question="",
            prompt_ids=[1],
            temperature=1.0,
            reward=0.0,
            submitted_at=0.0,
        )
    assert message in str(caught.value)
    assert "engine0" in str(caught.value)
