"""Questions and rewards, judged by hand."""

from __future__ import annotations

import itertools
import random

import pytest

from slime_backend.local_trainer.task import KINDS, TASKS, BareSums, CharacterKinds, Question, make_task, prompt_ids
from slime_backend.simulation.models import byte_tokenizer


@pytest.mark.parametrize(
    ("kind", "response", "expected"),
    [
        ("capitals", "ABC", 1.0),
        ("capitals", "AbC ", (1 + 0.5 + 1 + 0) / 4),
        ("small letters", "ABC", 0.5),
        ("figures and signs", "1!~x", (3 + 0.5) / 4),
        ("figures and signs", "\u00e9\n \ufffd", 0.0),
        ("figures and signs", "<|end|>", (4 + 3 * 0.5) / 7),  # special tokens are kept, so they are only characters
        ("capitals", "", 0.0),
    ],
)
def test_character_kinds_reward(kind: str, response: str, expected: float) -> None:
    assert CharacterKinds().reward(Question("", kind, 8), response) == pytest.approx(expected)


def test_no_answer_is_best_for_two_kinds() -> None:
    assert all(not set(a) & set(b) for a, b in itertools.combinations(KINDS.values(), 2))
    assert len("".join(KINDS.values())) == 94  # printable ASCII without the blank


def test_every_round_asks_for_every_kind() -> None:
    questions = list(itertools.islice(CharacterKinds().questions(random.Random(3)), 12))
    for start in range(0, 12, 3):
        assert {q.key for q in questions[start : start + 3]} == set(KINDS)
    for question in questions:
        assert question.text.startswith(question.key)
        assert set(question.text.removeprefix(f"{question.key}: ")) <= set(KINDS[question.key])
        assert question.max_tokens in CharacterKinds.lengths


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        ("7", 1.0),
        (" 7<|im_end|>", 1.0),
        ("8", 0.6),  # short, but wrong
        ("seven", 0.4 * (1 - 4 / 120)),
        ("", 0.0),
        ("<|im_end|>", 0.0),
        ("3 + 4 = 7", 0.6 + 0.4 * (1 - 8 / 120)),
        ("7 is 3 + 4", 0.2 + 0.4 * (1 - 9 / 120)),  # the last number counts
        ("Let us see " * 12 + "7", 0.6),
    ],
)
def test_bare_sums_reward(response: str, expected: float) -> None:
    assert BareSums().reward(Question("What is 3 + 4?", "7", 32), response) == pytest.approx(expected)


def test_bare_sums_are_right() -> None:
    for question in itertools.islice(BareSums().questions(random.Random(0)), 50):
        assert eval(question.text.removeprefix("What is ").removesuffix("?")) == int(question.key)


@pytest.mark.parametrize("name", sorted(TASKS))
def test_equal_seeds_give_equal_questions(name: str) -> None:
    first, second = (list(itertools.islice(make_task(name).questions(random.Random(5)), 9)) for _ in range(2))
    assert first == second


def test_prompts_share_the_long_system_prompt() -> None:
    task, tokenizer = CharacterKinds(), byte_tokenizer()
    ids = [prompt_ids(tokenizer, task, q) for q in itertools.islice(task.questions(random.Random(0)), 3)]
    head = len(task.system_prompt.encode()) + 3  # <|system|> ... <|end|> <|user|>
    assert 1000 <= head <= 1500
    assert len({tuple(i[:head]) for i in ids}) == 1
    assert tokenizer.decode(ids[0]).endswith("<|end|><|assistant|>")


def test_an_unknown_task_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match="unknown task 'chess'; choose one of: bare_sums, character_kinds"):
        make_task("chess")
