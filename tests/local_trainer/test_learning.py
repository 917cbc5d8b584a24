"""A few steps on answers that the model itself samples make it better at the real task.

No engine and a short prompt: sampling is on-policy, by this file. What staleness does is measured in the demo.
"""

from __future__ import annotations

import random
from typing import Any

import torch

from slime_backend.local_trainer.grpo import GrpoConfig, Sample, grpo_step, make_optimizer
from slime_backend.local_trainer.task import CharacterKinds
from slime_backend.simulation.models import byte_tokenizer


@torch.no_grad()
def sample_answers(model: Any, prompt: list[int], count: int, length: int) -> tuple[list[list[int]], list[list[float]]]:
    ids = model.generate(
        torch.tensor([prompt] * count), max_new_tokens=length, min_new_tokens=length, do_sample=True, top_k=0, top_p=1.0
    )
    logprobs = model(ids).logits[:, len(prompt) - 1 : -1].log_softmax(-1)
    answers = ids[:, len(prompt) :]
    return answers.tolist(), logprobs.gather(2, answers.unsqueeze(2)).squeeze(2).tolist()


def test_reward_rises(tiny: Any) -> None:
    task, tokenizer = CharacterKinds(), byte_tokenizer()
    questions = task.questions(random.Random(0))
    config = GrpoConfig(learning_rate=2e-2)
    optimizer = make_optimizer(tiny, config)
    torch.manual_seed(0)
    rewards = []
    for _ in range(7):
        groups = []
        for number in range(3):
            question = next(questions)
            prompt = tokenizer.encode(question.text)
            outputs, logprobs = sample_answers(tiny, prompt, count=16, length=16)
            scores = [task.reward(question, tokenizer.decode(o)) for o in outputs]
            groups.append(
                [Sample(prompt, o, lp, r, number) for o, lp, r in zip(outputs, logprobs, scores, strict=True)]
            )
        rewards.append(grpo_step(tiny, optimizer, groups, config).reward_mean)
    assert sum(rewards[-2:]) / 2 > sum(rewards[:2]) / 2 + 0.1, rewards
