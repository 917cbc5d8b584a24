"""The answers of a streamed /generate call, out of its server-sent events.

Stream        lines, all that have come since the last look
_EventReader  the data of each event, up to [DONE]
fold          answers: SGLang repeats all tokens so far in each event, and then the last one is enough
AnswerStream  all of it, with pauses between two looks
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from slime_backend.engine_client.errors import EngineProtocolError, one_line, refused
from slime_backend.engine_client.http import Stream
from slime_backend.engine_client.json_text import loads

CALL = "POST /generate"
DONE = b"[DONE]"  # the data of SGLang's last event
LEFTOVER_S = 1.0  # for the end of the HTTP answer behind the last event; without it the connection isn't used again


class AnswerStream:
    """The answers of one streamed /generate call. `close`, from anywhere, ends the reading with EngineUnreachable."""

    def __init__(self, engine: str, stream: Stream) -> None:
        self._engine, self._stream = engine, stream

    def close(self) -> None:
        self._stream.close()

    async def answers(self, pace: Callable[[], float] = lambda: 0.0) -> AsyncIterator[list[dict[str, Any]]]:
        """Yield the answers that have come since the last time, at least one. SGLang repeats all tokens so far in each,
        unless it was started with --incremental-streaming-output; where it does, only the last is given. `pace`: for
        how many seconds the stream is then left alone, so that more comes together; its end ends that.

        Raises EngineRefused, EngineProtocolError, ConnectionError, TimeoutError.
        """
        reader = _EventReader(self._stream)
        async for events in reader.events():
            yield fold(events, self._parse)
            if not reader.done and (seconds := pace()):
                await self._stream.rest(seconds)

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            answer = loads(data)
        except ValueError as error:
            text = one_line(data.decode("utf-8", "replace"))
            raise EngineProtocolError(self._engine, CALL, f"not JSON: {text}") from error
        if isinstance(answer, dict) and "error" in answer:
            fault = answer["error"]
            code = fault.get("code", 400) if isinstance(fault, dict) else 400
            code = code if isinstance(code, int) else 400  # OpenAI's form has words here
            raise refused(self._engine, CALL, code, str(fault))
        if not _is_answer(answer):
            raise EngineProtocolError(self._engine, CALL, f"no output_ids or meta_info in {one_line(str(answer))}")
        return answer  # type: ignore[no-any-return]


class _EventReader:
    """Yields the data of the events of a stream; `done` once the last one has come."""

    def __init__(self, stream: Stream) -> None:
        self.done = False
        self._stream = stream

    async def events(self) -> AsyncIterator[list[bytes]]:
        """Yield the events that have come since the last time, at least one, without [DONE].

        Raises ConnectionError, TimeoutError, as Stream.lines does, and where the stream ends without [DONE].
        """
        async for lines in self._stream.lines():
            events = [line[5:].strip() for line in lines if line.startswith(b"data:")]
            if DONE in events:
                self.done, events = True, events[: events.index(DONE)]
            if events:
                yield events
            if self.done:
                await self._stream.rest(LEFTOVER_S)
                return
        raise ConnectionError("the stream ended before it was done")


def fold(events: Sequence[bytes], parse: Callable[[bytes], dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the answers in `events`, or the last one alone where it repeats the others' tokens; then only that one is
    parsed, which is most of the work."""
    last = parse(events[-1])
    repeats = len(last["output_ids"]) >= last["meta_info"].get("completion_tokens", 0)
    return [last] if repeats else [*map(parse, events[:-1]), last]


def _is_answer(answer: Any) -> bool:
    return (
        isinstance(answer, dict)
        and isinstance(answer.get("output_ids"), list)
        and isinstance(answer.get("meta_info"), dict)
        and isinstance(answer["meta_info"].get("completion_tokens", 0), int)
    )
