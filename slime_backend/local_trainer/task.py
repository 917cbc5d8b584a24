"""Verifiable tasks have a shared long system prompt, questions, and a reward computed from the text.

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
    """A question is one prompt of a task; the reward needs `key`: the kind asked for, or the right answer."""

    text: str
    key: str
    max_tokens: int  # length of the answer; differs by question so that rollouts do not all end at the same moment


class Task(Protocol):
    """The training loop needs this of a task."""

    name: str
    system_prompt: str
    stop_at_end: bool  # False: the engine ignores the end token and every answer has exactly `max_tokens` tokens

    def questions(self, rng: random.Random) -> Iterator[Question]:
        """Yield questions without end; equal seeds give equal questions."""
        ...

    def reward(self, question: Question, response: str) -> float:
        """Return the reward, 0..1. `response` is decoded with special tokens kept, which can be counted as wrong."""
        ...


def prompt_ids(tokenizer: Any, task: Task, question: Question) -> list[int]:
    """Return the token ids of system prompt and question in the model's chat template, ready for the answer."""
    messages = [{"role": "system", "content": task.system_prompt}, {"role": "user", "content": question.text}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return [int(token) for token in ids]


def shared_prompt_length(tokenizer: Any, task: Task) -> int:
    """Count the tokens that every prompt of `task` begins with: where its prompts diverge.

    It renders questions that begin with characters of different kinds, in case the tokenizer merges the first of them
    with the text before.
    """
    prompts = [prompt_ids(tokenizer, task, Question(text, "", 1)) for text in ("0", "a", "Z", "\n", "(", "é")]
    first, last = min(prompts), max(prompts)  # what these two share, all between share
    return next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), min(map(len, prompts)))


KINDS: dict[str, str] = {
    "figures and signs": string.digits + string.punctuation,
    "capitals": string.ascii_uppercase,
    "small letters": string.ascii_lowercase,
}
WRONG_KIND_WORTH = 0.5


class CharacterKinds:
    """The model answers with characters of one kind only; the reward is the mean worth of the answer's characters.

    A character of the asked kind is worth 1, a printable one of another kind one half, anything else nothing. A model
    with random weights is paid about 0.3. It can learn up to 2/3 from the wage alone (print what is printable) and does
    so in some 12 steps; what is above that must come from reading the question, since each kind is asked for equally
    often, and a simulation of 48 steps did not get there. The half worth is
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
        """Ask for every kind once in each round of three, in random order, which keeps a batch's mean stable."""
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
    """The model answers small sums with the number alone.

    The reward is 0.2 for any number, 0.4 more if the last number is the right one, and up to 0.4 for brevity. Made for
    SmolLM2-135M-Instruct, which at temperature 1 often rambles: each of the three parts varies inside a group from the
    first step on, while a reward for the right answer alone would be 0 for all of most groups.
    """

    name = "bare_sums"
    stop_at_end = True
    length = 32  # tokens; a sentence with the sum fits, an explanation does not
    generous = 120  # characters beyond the number after which brevity is worth nothing; 32 tokens are about that many
    system_prompt = (
        "You are a calculator. You answer every sum with one number. Write only the number, in digits, and nothing "
        "else. Do not write a sentence. Do not repeat the sum. Do not explain how the number was found. Do not greet "
        "and do not thank. Do not add a unit, a full stop or any other sign. There is always exactly one right "
        "number, and it is never below zero.\n\n"
        "Here are some examples of sums and of the right answers to them.\n"
        "What is 2 + 3? 5\n"
        "What is 10 - 4? 6\n"
        "What is 8 + 8? 16\n"
        "What is 12 - 9? 3\n"
        "What is 1 + 1? 2\n"
        "What is 15 - 8? 7\n"
        "What is 9 + 4? 13\n"
        "What is 6 - 5? 1\n\n"
        "Your answers are checked by a machine that reads numbers only. An answer without any number is worth "
        "nothing. An answer whose last number is the right one is worth most. Every character that is not needed "
        "makes an answer worth a little less, so the best answer of all is the right number standing alone. A long "
        "answer is cut off before its end, and then the number may be missing."
    )

    def questions(self, rng: random.Random) -> Iterator[Question]:
        while True:
            a, b = rng.randint(1, 9), rng.randint(1, 9)
            if rng.random() < 0.5:
                yield Question(f"What is {a} + {b}?", str(a + b), self.length)
            else:
                yield Question(f"What is {a + b} - {a}?", str(b), self.length)

    def reward(self, question: Question, response: str) -> float:
        """Score the last number of the answer, so that repeating the sum first is no mistake, only long."""
        text = _SPECIAL_TOKEN.sub("", response).strip()
        if not text:
            return 0.0
        numbers = _NUMBER.findall(text)
        spare = max(0, len(text) - len(question.key))
        right = bool(numbers) and numbers[-1] == question.key
        return 0.2 * bool(numbers) + 0.4 * right + 0.4 * max(0.0, 1.0 - spare / self.generous)


_SPECIAL_TOKEN = re.compile(r"<\|[^|<>]*\|>")
_NUMBER = re.compile(r"\d+")

TASKS: dict[str, Callable[[], Task]] = {CharacterKinds.name: CharacterKinds, BareSums.name: BareSums}


def make_task(name: str) -> Task:
    """Return the task of that name; ValueError names the choices."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}; choose one of: {', '.join(sorted(TASKS))}")
    return TASKS[name]()
