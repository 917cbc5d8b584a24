"""The anchors that the rollout worker sends an engine with its prompts."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import random
from typing import Any

import pytest
import torch

from slime_backend.config import TaskConfig
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, admit
from slime_backend.local_trainer.rollouts import RolloutWorker
from slime_backend.local_trainer.task import TASKS, make_task, prompt_ids, shared_prompt_length
from slime_backend.policy import decide
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.models import byte_tokenizer


def test_no_gpu_is_visible() -> None:
    assert not torch.cuda.is_available()


@pytest.mark.parametrize("name", list(TASKS))
def test_the_shared_length_is_where_prompts_diverge(name: str) -> None:
    task, tokenizer = make_task(name), byte_tokenizer()
    shared = shared_prompt_length(tokenizer, task)
    questions = task.questions(random.Random(1))
    prompts = [prompt_ids(tokenizer, task, next(questions)) for _ in range(20)]
    assert len({tuple(ids[:shared]) for ids in prompts}) == 1
    assert shared > len(task.system_prompt)
    assert tokenizer.decode(prompts[0][:shared]).endswith("<|user|>")


@pytest.mark.parametrize(
    ("hooks", "hinted"),
    [(("kv_evidence", "kv_spans", "swa_anchors"), True), (("kv_evidence", "kv_spans"), False)],
)
def test_a_hint_goes_to_engines_that_keep_windows(hooks: tuple[str, ...], hinted: bool, run_async: Any, tmp_path: Any):
    async def scenario() -> tuple[dict[str, Any], int]:
        fleet = Fleet(decide("disjoint", "retract"), "v0")
        task, tokenizer = make_task("character_kinds"), byte_tokenizer()
        async with FakeEngine(hooks=hooks) as engine, EngineClient(engine.url) as client:
            worker = RolloutWorker(fleet, TaskConfig(), 0, task, tokenizer, tmp_path)
            assert worker._anchors() == {}  # nobody has joined yet
            await admit(fleet, client)
            return worker._anchors(), shared_prompt_length(tokenizer, task)

    found, shared = run_async(scenario())
    assert found == ({"custom_params": {"kv_anchors": [shared]}} if hinted else {})
