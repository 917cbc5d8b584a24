"""Verifiable tasks: a long system prompt that all questions share, questions, and a reward computed from the text.

A task needs no model and no labels made by one, so that every reward in a run's ledger can be checked by hand.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Callable, Iterator
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
    "figures and signs": string.digits + string.punctuation,
    "capitals": string.ascii_uppercase,
    "small letters": string.ascii_lowercase,
}
WRONG_KIND_WORTH = 0.5


class CharacterKinds:
    """Answer with characters of one kind only; the reward is the mean worth of the answer's characters.

    A character of the asked kind is worth 1, a printable one of another kind one half, anything else nothing. A model
    with random weights is paid about 0.3. It can learn up to 2/3 from the wage alone (print what is printable); what
    is above that must come from reading the question, since each kind is asked for equally often. The half worth is
    what makes the first steps reliable: a byte-level model has 264 choices for each token and a step brings only some
    64 rewards, too few to tell 264 tokens apart, yet enough to tell printable from not.
    """

    name = "character_kinds"
    stop_at_end = False
    lengths = (48, 64, 80)
    examples = 16  # characters of the asked kind that a question shows
    system_prompt = (
        "You are the type-setter of a small printing house at the sea. In front of you stands a case of metal type, "
        "and every drawer of the case holds characters of one kind. There are three kinds. The figures and signs are "
        "the ten digits, the marks of punctuation, the brackets, the dashes, the currency signs and what else stands "
        "between the words. The capitals are the twenty-six big letters of the Latin alphabet. The small letters are "
        "the twenty-six little ones.\n\n"
        "Each order that comes in names one kind and shows a few pieces of it, so that no mistake is possible. Fill "
        "the line with characters of that kind and with nothing else: no blanks, no line breaks, no words of "
        "courtesy, no characters of another kind, no accents and no foreign scripts. The order of the characters is "
        "free and each one may be used as often as you like. Do not stop before the line is full.\n\n"
        "The proof-reader counts the characters of your line. A character of the kind that was asked for is worth "
        "one, a clean character of another kind is worth one half, and a blank, an accent or a smudge is worth "
        "nothing. The wage for the line is the mean worth of all its characters."
    )

    def questions(self, rng: random.Random) -> Iterator[Question]:
        """Every kind once in each round of three, in random order: a batch's mean is not the luck of the draw."""
        while True:
            for kind in rng.sample(sorted(KINDS), len(KINDS)):
                shown = "".join(rng.choices(KINDS[kind], k=self.examples))
                yield Question(f"{kind}: {shown}", kind, rng.choice(self.lengths))

    def reward(self, question: Question, response: str) -> float:
        if not response:
            return 0.0
        asked, printable = frozenset(KINDS[question.key]), frozenset("".join(KINDS.values()))
        worth = sum(1.0 if c in asked else WRONG_KIND_WORTH if c in printable else 0.0 for c in response)
        return worth / len(response)


class BareSums:
    """Small sums, to be answered with the number alone: half the reward for the right number, half for brevity.

    For an instruction-tuned model (SmolLM2-135M), which answers with a sentence that is right now and then: both
    halves vary inside a group from the first step on. Brevity counts only where the answer holds a number at all.
    """

    name = "bare_sums"
    stop_at_end = True
    length = 32  # tokens; a sentence with the sum fits, an explanation does not
    generous = 32  # characters beyond the number after which brevity is worth nothing
    system_prompt = (
        "You are the cash desk of a village shop, and you answer the way a cash desk does: with a number on the "
        "display and nothing else. The customer asks for a small sum. Work it out and show the result in plain "
        "digits. Do not repeat the question, do not explain, do not greet, do not add a unit, a full stop or any "
        "other word. If the customer asks what two and three make, the display shows 5. If the customer asks what "
        "ten less four makes, the display shows 6. The customer pays only for a right number, and pays more for a "
        "short answer than for a long one."
    )

    def questions(self, rng: random.Random) -> Iterator[Question]:
        while True:
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            if rng.random() < 0.5:
                yield Question(f"What is {a} + {b}?", str(a + b), self.length)
            else:
                yield Question(f"What is {a + b} - {a}?", str(b), self.length)

    def reward(self, question: Question, response: str) -> float:
        """Judges the last number of the answer, so that repeating the question first is no mistake but long."""
        text = _SPECIAL_TOKEN.sub("", response).strip()
        numbers = _NUMBER.findall(text)
        if not numbers:
            return 0.0
        spare = max(0, len(text) - len(question.key))
        brevity = max(0.0, 1.0 - spare / self.generous)
        return 0.5 * (numbers[-1] == question.key) + 0.5 * brevity


_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_NUMBER = re.compile(r"\d+")

TASKS: dict[str, Callable[[], Task]] = {CharacterKinds.name: CharacterKinds, BareSums.name: BareSums}


def make_task(name: str) -> Task:
    """The task of that name; ValueError names the choices."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choose one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()
