"""From messages, a text or token ids to a TokenRequest: the prompt in tokens, built on the session's earlier turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from reef_service.data_plane import engine_values
from reef_service.data_plane.answers import Answer, TokenRequest
from reef_service.data_plane.plane import DataPlane
from reef_service.data_plane.sessions import Parent, digest_of_ids, digest_of_text
from reef_service.data_plane.workers import LARGE
from reef_service.errors import bad_request
from reef_service.store.turns import History
from reef_service.text import messages as m
from reef_service.text.answer_parser import CALL, END_CALL, THINK, AnswerParser
from reef_service.text.stitching import next_tokens
from reef_service.text.tokenizer import TooManyTokens

T = TypeVar("T")
Check = Callable[[], None]  # raises where nobody waits any more


@dataclass(frozen=True, slots=True)
class Asked:
    """The fields hold what every API asks for in addition to the prompt.

    An empty `session` means that the request belongs to no conversation and gets a session of its own.
    """

    api: str
    session: str
    label: str
    sampling: Mapping[str, Any]  # as it was sent, without max_new_tokens
    max_tokens: Any  # as it was sent
    stop: tuple[str, ...]
    stream: bool
    size: int = 0  # bytes of the body that it came in
    one_call: bool = False  # the answer ends with its first tool call


async def from_messages(
    plane: DataPlane,
    asked: Asked,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    options: Mapping[str, Any] | None = None,
) -> TokenRequest:
    """A chat. `options` are the template's own (`enable_thinking`, ...). Raises ApiError 400."""
    asked = _checked(plane, asked)
    template = plane.tokenizer.template
    if template is None:
        raise bad_request("the model has no chat template; use /v1/completions or /generate")
    if len(messages) > plane.limits.messages:
        raise bad_request(f"{len(messages)} messages; at most {plane.limits.messages} are taken", "messages")
    tools, options = tools or None, dict(options or {})
    head = [tools, options]

    def render(check: Check) -> tuple[str, list[str]]:
        plane.limits.check_characters(sum(len(message["content"] or "") for message in messages))
        check()
        text = template.render(messages, tools=tools, options=options)
        plane.limits.check_characters(len(text))
        check()
        return text, m.digests(messages, head)

    text, digests = await _run(plane, asked.size, render)

    def digest(length: int) -> str | None:
        return digests[length] if 0 < length < len(messages) else None

    prompt: list[int] | None = None
    parent = await plane.sessions.parent(asked.session, "chat", digest) if asked.session else None
    if parent is not None:
        answered, last = parent.history.length, parent.tokens[-1]

        def stitch(check: Check) -> list[int] | None:
            check()
            return next_tokens(plane.tokenizer, messages, answered, last, tools=tools, options=options)

        rest = await _run(plane, asked.size, stitch)
        prompt = None if rest is None else [*parent.tokens, *rest]
    if prompt is None:
        parent, prompt = None, await _encode(plane, text)

    def history(answer: Answer, tokens: list[int]) -> History:
        reply = {"role": "assistant", "content": answer.content}
        if answer.calls:
            reply["tool_calls"] = m.normalise(
                [{"role": "assistant", "tool_calls": [c.to_json() for c in answer.calls]}]
            )[0]["tool_calls"]
        conversation = [*messages, reply]
        return History("chat", len(conversation), m.digests(conversation, head)[-1])

    parser = AnswerParser(
        reasoning=THINK in template.source,
        tools=bool(tools) and CALL in template.source,
        thinking_already=text.rstrip().endswith(THINK),
    )
    return _request(plane, asked, prompt, parent, history, parser)


async def from_text(plane: DataPlane, asked: Asked, text: str) -> TokenRequest:
    """A text to be gone on with. Raises ApiError 400."""
    asked = _checked(plane, asked)

    plane.limits.check_characters(len(text))

    def digest(length: int) -> str | None:
        return digest_of_text(text[:length]) if length <= len(text) else None

    parent = await plane.sessions.parent(asked.session, "text", digest) if asked.session else None
    if parent is None:
        prompt = await _encode(plane, text, special=True)
    else:
        prompt = [*parent.tokens, *await _encode(plane, text[parent.history.length :])]

    def history(answer: Answer, tokens: list[int]) -> History:
        full_text = text + answer.raw
        return History("text", len(full_text), digest_of_text(full_text))

    return _request(plane, asked, prompt, parent, history, None)


async def from_ids(plane: DataPlane, asked: Asked, ids: Sequence[int]) -> TokenRequest:
    """Token ids, which are sent as they are. Raises ApiError 400."""
    asked = _checked(plane, asked)
    size = plane.tokenizer.size
    if ids and not (min(ids) >= 0 and max(ids) < size):
        bad = next(i for i in ids if not 0 <= i < size)
        raise bad_request(f"the prompt has {bad}, which is no token id; they are 0 to {size - 1}")
    prompt = list(ids)

    def digest(length: int) -> str | None:
        return digest_of_ids(prompt[:length]) if length <= len(prompt) else None

    parent = await plane.sessions.parent(asked.session, "ids", digest) if asked.session else None

    def history(answer: Answer, tokens: list[int]) -> History:
        return History("ids", len(tokens), digest_of_ids(tokens))

    return _request(plane, asked, prompt, parent, history, None)


async def _run(plane: DataPlane, size: int, work: Callable[[Check], T]) -> T:
    """`work` here where the request is small, else elsewhere."""
    return work(lambda: None) if size < LARGE else await plane.workers.run(work)


async def _encode(plane: DataPlane, text: str, *, special: bool = False) -> list[int]:
    """The tokens of a text. Raises ApiError 400 for more than may be."""
    tokenizer, most = plane.tokenizer, plane.limits.most
    if len(text) < LARGE:
        return tokenizer.encode(text, special=special)
    try:
        return await plane.workers.run(lambda check: tokenizer.encode_large(text, most, check, special=special))
    except TooManyTokens as error:
        if error.count is None:
            raise plane.limits.too_long(f"more than {most}") from error
        plane.limits.output_for(error.count, None)  # has the words for it
        raise


def _checked(plane: DataPlane, asked: Asked) -> Asked:
    """Return the request, checked against what engines can store and our own bounds. Raises ApiError 400."""
    if len(asked.stop) > plane.limits.stops:
        raise bad_request(f"{len(asked.stop)} stop texts; at most {plane.limits.stops} are taken", "stop")
    long = next((text for text in asked.stop if len(text) > plane.limits.stop_length), None)
    if long is not None:
        most = plane.limits.stop_length
        raise bad_request(f"a stop text has {len(long)} characters; at most {most} are taken", "stop")
    size = plane.tokenizer.size
    sampling = engine_values.checked(asked.api, asked.sampling, size)
    most_tokens = asked.max_tokens
    if most_tokens is not None:
        most_tokens = engine_values.check(asked.api, "max_new_tokens", most_tokens, size)
    return replace(asked, sampling=sampling, max_tokens=most_tokens)


def _request(
    plane: DataPlane, asked: Asked, prompt: list[int], parent: Parent | None, history: Any, parser: AnswerParser | None
) -> TokenRequest:
    sampling = {**asked.sampling, "max_new_tokens": plane.limits.output_for(len(prompt), asked.max_tokens)}
    least, most = sampling.get("min_new_tokens", 0), sampling["max_new_tokens"]
    if least > most:
        name = engine_values.field(asked.api, "min_new_tokens")
        raise bad_request(f"{name}={least} is more than the {most} tokens that may be sampled here", name)
    one_call = asked.one_call and parser is not None and parser.tools
    return TokenRequest(
        api=asked.api,
        session=asked.session,
        label=asked.label,
        prompt_ids=prompt,
        parent=parent.receipt if parent is not None else None,
        sampling=sampling,
        stream=asked.stream,
        history=history,
        stop=(*asked.stop, END_CALL) if one_call else asked.stop,
        parser=parser,
        closing=END_CALL if one_call else "",
    )
