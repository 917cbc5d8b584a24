"""How `reef-slime bench swa` judges what it measures. The measurement itself takes minutes and is not run here."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from slime_backend.bench import swa
from slime_backend.simulation.models import byte_tokenizer


def answer(found: int, total: int) -> swa.TimedAnswer:
    return swa.TimedAnswer(found, total - found, 0.1, [1, 2], [-0.5, -0.25])


@pytest.mark.parametrize(
    ("pairs", "goal", "expected"),  # pairs of tokens found, by the peer and by ours
    [
        ([(0, 1000), (0, 1000)], 0.99, (0.0, 1.0, 11.0, True)),
        ([(0, 1000), (0, 980)], 0.99, (0.0, 0.98, 10.0, False)),  # the worst of both answers counts
        ([(1000, 1000)], None, (1.0, 1.0, 1.0, True)),
        ([(1000, 999)], None, (1.0, 0.999, 0.99, False)),
    ],
)
def test_a_row_of_reuse(pairs: Any, goal: Any, expected: Any) -> None:
    row = swa.reuse_row("case", 1000, [(answer(a, 1100), answer(b, 1100)) for a, b in pairs], goal)
    assert (row.peer, row.ours, row.ratio, row.holds) == expected


def test_the_wall_of_a_fan_out_is_in_its_plot() -> None:
    pairs = [(replace(answer(0, 9), seconds=0.5), replace(answer(9, 9), seconds=0.1)) for _ in range(3)]
    row = swa.wall_row(512, pairs, 5)
    assert (row.peer, row.ours, row.ratio, row.holds) == (500, 100, 5, True)
    assert re.fullmatch(swa.PLOTS[0].cases, row.case)["x"] == "512"
    assert not swa.wall_row(512, pairs, 5.1).holds


def test_the_prompts_are_those_of_the_chat_template() -> None:
    prompts, tokenizer = swa.Prompts(), byte_tokenizer()
    head, turn = prompts.head(40), prompts.turn(10)
    assert len(head) == 40
    system, rest = tokenizer.decode(head[1:-2]), tokenizer.decode(turn[:10])
    messages = [{"role": "system", "content": system}, {"role": "user", "content": rest}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode([*head, *turn]) == text
