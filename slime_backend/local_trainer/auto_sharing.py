"""`disjoint_prefix_sharing: auto` of a config, turned into one of the policy's words before anything is started."""

from __future__ import annotations

import itertools
import random
import statistics

from slime_backend.config import RunConfig, make_config
from slime_backend.local_trainer.task import make_task
from slime_backend.planner.at_start import AUTO, Choice, StartFacts, choose, info_of_flags, installed_sglang
from slime_backend.planner.traffic import Traffic

QUESTIONS = 24  # of the task, that stand for all
CHARACTERS_PER_TOKEN = 4  # of English text; the tiny models have a token for each byte


def resolve(config: RunConfig, *, trains: bool) -> tuple[RunConfig, Choice | None]:
    """(the config with a word of the policy, how it was chosen); the config as it is where it says one already.

    `trains`: the engines serve the config's task; else what will be asked of them is unknown. Raises ConfigError where
    the other settings contradict the choice.
    """
    if config.disjoint_prefix_sharing != AUTO:
        return config, None
    choice = choose(start_facts(config, trains=trains))
    data = {**config.model_dump(), "disjoint_prefix_sharing": choice.sharing}
    return make_config(data, f"disjoint_prefix_sharing=auto, resolved to {choice.sharing}"), choice


def start_facts(config: RunConfig, *, trains: bool) -> StartFacts:
    per_engine = config.samples_per_group / config.engines
    return StartFacts(
        layout=config.layout,
        traffic=_traffic(config) if trains else None,
        requests=config.groups_per_step * per_engine,
        sglang=installed_sglang(),
        engine_info=info_of_flags(config.engine_flags),
        radix_cache_off=bool(config.disable_radix_cache),
    )


def _traffic(config: RunConfig) -> Traffic:
    task = make_task(config.task)
    questions = list(itertools.islice(task.questions(random.Random(config.seed)), QUESTIONS))
    characters = 1 if config.model.startswith("tiny") else CHARACTERS_PER_TOKEN
    shared = len(task.system_prompt) / characters
    return Traffic(
        prompt=shared + statistics.fmean(len(q.text) for q in questions) / characters,
        shared=shared,
        group=max(1.0, config.samples_per_group / config.engines),  # the dispatcher spreads a group over the engines
        answers=tuple(float(q.max_tokens) for q in questions),
        in_flight=(config.groups_per_step + config.groups_ahead) * config.samples_per_group / config.engines,
        period_s=1.0,
        chunk=config.chunked_prefill_size,
    )
