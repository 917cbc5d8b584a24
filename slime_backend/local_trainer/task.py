"""Verifiable tasks: a long system prompt that all questions share, questions, and a reward computed from the text.

A task needs no model and no labels made by one, so that every reward in a run's ledger can be checked by hand.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt of a task. `key` is what the reward needs to know: the kind asked for, or the right answer."""

    text: str
    key: str
    max_tokens: int  # length of the answer; differs by question so that rollouts do not all end at the same moment


class Task(Protocol):
    """What the training loop needs to know of a task."""

    name: str
    system_prompt: str
    stop_at_end: bool  # False: the engine ignores the end token and every answer has exactly `max_tokens` tokens

    def questions(self, rng: random.Random) -> Iterator[Question]:
        """Questions without end; equal seeds give equal questions."""
        ...

    def reward(self, question: Question, response: str) -> float:
        """In 0..1. `response` is decoded with special tokens kept, so that they can be counted as wrong."""
        ...


def prompt_ids(tokenizer: Any, task: Task, question: Question) -> list[int]:
    """The token ids of system prompt and question in the model's chat template, ready for the answer."""
    messages = [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": question.text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(token) for token in ids]


KINDS: dict[str, str] = {
    "digits": string.digits,
    "capitals": string.ascii_uppercase,
    "small letters": string.ascii_lowercase,
    "signs": string.punctuation,
}


class CharacterKinds:
    """Answer with characters of one kind only; the reward is their share of the answer.

    Dense enough to be learnt from random weights, where a whole right answer never occurs, and not a bandit: an answer
    that is best for one kind is worth nothing for the others, so beyond one share in four the question must be read.
    """

    name = "character_kinds"
    stop_at_end = False
    lengths = (48, 64, 80)
    system_prompt = (
        "You are the type-setter of a small printing house at the sea. In front of you stands a case of metal type, "
        "and every drawer of the case holds characters of one kind. There are four kinds. The digits are the ten "
        "figures from nought to nine. The capitals are the twenty-six big letters of the Latin alphabet. The small "
        "letters are the twenty-six little ones. The signs are the marks of punctuation, the brackets, the dashes, "
        "the currency signs and what else stands between the words.\n\n"
        "Each order that comes in names one kind and shows a few pieces of it, so that no mistake is possible. Fill "
        "the line with characters of that kind and with nothing else: no blanks, no line breaks, no words of "
        "courtesy, no characters of another kind, no accents and no foreign scripts. The order of the characters is "
        "free and each one may be used as often as you like. Do not stop before the line is full.\n\n"
        "The proof-reader counts the characters of your line. The wage for the line is the number of characters of "
        "the kind that was asked for, divided by the number of all characters in the line. A line that is right from "
        "end to end earns one, a line that is wrong from end to end earns nothing."
    )

    def questions(self, rng: random.Random) -> Iterator[Question]:
        """Every kind once in each round of four, in random order: a batch's mean reward is not luck of the draw."""
        while True:
            for kind in rng.sample(sorted(KINDS), len(KINDS)):
                shown = "".join(rng.choices(KINDS[kind], k=EX))
                yield Question(f"{kind}: {shown}", kind, rng.choice(self.lengths))

    def reward(self, question: Question, response: str) -> float:
        if not response:
            return 0.0
        allowed = frozenset(KINDS[question.key])
        return sum(character in allowed for character in response) / len(response)
EX=16
