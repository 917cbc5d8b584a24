"""`expected_traffic` estimates a run's traffic on one engine from its configuration alone."""

from __future__ import annotations

import itertools
import random
import statistics

from slime_backend.config import EnginesConfig, ModelConfig, TaskConfig
from slime_backend.local_trainer.task import make_task
from slime_backend.planner.traffic import Traffic

QUESTIONS = 24  # a sample of the task's
CHARACTERS_PER_TOKEN = 4  # in English text; the tiny models have a token for each byte


def expected_traffic(settings: TaskConfig, engines: EnginesConfig, model: ModelConfig) -> Traffic:
    """Return the task's own prompts and answers; the publication interval isn't known and is set to one second."""
    task = make_task(settings.name)
    questions = list(itertools.islice(task.questions(random.Random(model.seed)), QUESTIONS))
    characters = 1 if model.name.startswith("tiny") else CHARACTERS_PER_TOKEN
    shared = len(task.system_prompt) / characters
    per_engine = settings.samples_per_group / engines.count  # the dispatcher spreads a group over the engines
    return Traffic(
        prompt=shared + statistics.fmean(len(q.text) for q in questions) / characters,
        shared=shared,
        group=max(1.0, per_engine),
        answers=tuple(float(q.max_tokens) for q in questions),
        in_flight=(settings.groups_per_step + settings.groups_ahead) * per_engine,
        period_s=1.0,
        chunk=engines.chunked_prefill_size,
    )
