"""A conversation's next prompt, built on the tokens of the turn before instead of on its text.

    [prompt of the last turn][what the engine sampled][the end of that turn, and what came since]
     \\__________ as they are, token by token ________/ \\_____ rendered and tokenised: this file ____/

A text that is tokenised again need not give the tokens that were sampled, and a template may leave out what was written
(reasoning, mostly). Then prefixes don't match in the cache, and what is trained on isn't what was sampled.

The rest is found by rendering the conversation with a mark in place of the answer's content, and cutting after the
token that ended the answer. Where a template shows no such place, there is no rest, and the turn begins again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reef_service.text.tokenizer import ModelTokenizer

MARK = "\u2060reef\u2060mark\u2060"  # word joiners: no conversation has it, and no template changes it


def next_tokens(
    tokenizer: ModelTokenizer,
    messages: Sequence[Mapping[str, Any]],
    answered: int,
    last_token: int,
    *,
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> list[int] | None:
    """What follows the turn whose answer is messages[answered - 1] and whose last token is `last_token`; None where it
    can't be found."""
    if tokenizer.template is None:
        return None
    answer = {k: v for k, v in messages[answered - 1].items() if k != "reasoning_content"}
    marked = [*messages[: answered - 1], {**answer, "content": MARK}, *messages[answered:]]
    text = tokenizer.template.render(marked, tools=tools, options=options)
    _, mark, after = text.rpartition(MARK)
    if not mark:
        return None
    ends = [tokenizer.text_of(i) for i in tokenizer.end_ids]
    places = [(after.find(end), end) for end in ends if end and end in after]
    if not places:
        return None
    place, end = min(places)
    # An answer that was cut off (length, a stop text) has no end of its own yet.
    ended = last_token in tokenizer.end_ids
    rest = after[place + len(end) :] if ended else after[place:]
    return tokenizer.encode(rest)
