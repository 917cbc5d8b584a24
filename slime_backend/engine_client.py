"""One SGLang engine over HTTP: every call has a deadline, every failure is one of four typed errors.

Endpoints as SGLang 0.5.23 serves them (srt/entrypoints/http_server.py); where an older one lacks a name, its answer 404
is what tells.
"""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

from slime_backend.engine_keys import EngineKeys
from slime_backend.errors import EngineFault
from slime_backend.http_channel import HttpChannel, Stream
from slime_backend.local_errors import LocalResourceError, NoConnection
from slime_backend.policy import PauseMode
from slime_backend.wire import REPORT_KEY, REPORTS_PATH, SchedulerReport, WireError

try:  # SGLang and the gateway bring it: answers are parsed in a fifth of the time
    from orjson import loads as fast_loads
except ImportError:
    fast_loads = json.loads  # type: ignore[assignment]

log = logging.getLogger(__name__)
SERVER_PATHS = frozenset({"/model_info", "/get_model_info"})  # answered without the schedulers
END_SESSION = "/end_weight_update"
BUSY_STATUSES = frozenset({408, 425, 429})  # request timeout, too early, too many requests: nobody's fault


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that each kind of call may take."""

    pause: float = 15.0  # an abort pause polls once a second until the running requests are gone
    flush: float = 30.0  # includes the retries while an overlapped batch drains
    load: float = 600.0  # also the begin and the end of a weight session, which may process all weights
    control: float = 10.0  # label, resume, evidence
    generate: float = 3600.0


class EngineError(EngineFault, RuntimeError):
    """A call to an engine failed. `took_effect` is False, or None when that can't be known."""

    took_effect: bool | None = None

    def __init__(self, engine: str, call: str, seen: str, *, status: int | None = None) -> None:
        super().__init__(engine, seen, status, doing=call)
        self.call = call


class EngineUnreachable(EngineError):
    """No connection, or it broke. A request that was already sent may have taken effect.

    `reached`: whether it may have been; False where there was no connection to send it on.
    """

    reached = True


class EngineTimeout(EngineError):
    """No answer within the deadline. The request may have taken effect, or may yet."""


class EngineUncalled(EngineError):
    """This process has no descriptor, memory or port left for a connection: the engine was not asked, and nothing is
    known of it."""

    took_effect = False


class EngineRefused(EngineError):
    """The engine answered and said no.

    `status` is the HTTP status, None for a refusal inside an answer 200. `retry_after_s` is what the header Retry-After
    asks for, where it is given in seconds.
    """

    took_effect = False

    def __init__(
        self, engine: str, call: str, seen: str, *, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(engine, call, seen, status=status)
        self.retry_after_s = retry_after_s

    @property
    def for_now(self) -> bool:
        """Whether the engine refuses at this moment (overloaded, starting, stopping), not this request."""
        return self.status is not None and (self.status >= 500 or self.status in BUSY_STATUSES)

    @property
    def own_fault(self) -> bool:
        """Whether the request itself is wrong, so that no engine would take it."""
        return self.status is not None and 400 <= self.status < 500 and self.status not in BUSY_STATUSES


class EngineProtocolError(EngineError):
    """The engine answered something that isn't the wire contract."""


class EngineClient:
    """Control and data calls to one engine at `url`; safe for concurrent use inside one event loop.

    client = EngineClient("http://127.0.0.1:30000")
    await client.pause("retract")
    await client.flush()
    reports = await client.reports()        # one per data-parallel rank
    await client.load_from_disk("runs/x/weights/v1")
    await client.label("v1")
    await client.resume()
    await client.close()
    """

    def __init__(
        self,
        url: str,
        *,
        name: str | None = None,
        deadlines: Deadlines | None = None,
        keys: EngineKeys | None = None,
    ) -> None:
        """`keys`: what an engine with --api-key or --admin-api-key wants with each call."""
        self.url = url.rstrip("/")
        self.name = name or self.url
        self.deadlines = deadlines or Deadlines()
        self._keys = keys or EngineKeys()
        self._channel = HttpChannel(self.url, self._keys.header)
        self._serves_reports = True  # until it says that it has no such route
        self.instances: frozenset[str] = frozenset()  # the scheduler processes that reported last
        self.silent_since: float | None = None  # liveness.py: schedulers didn't answer since; time.monotonic()

    async def close(self) -> None:
        self._channel.close()

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def call(
        self,
        method: str,
        path: str,
        *,
        body: Mapping[str, Any] | None = None,
        deadline: float | None = None,
        repeatable: bool = False,
    ) -> Any:
        """One HTTP call. Returns the parsed JSON, or the text where the engine answers text. `repeatable`: as in
        HttpChannel.request.

        Raises EngineUnreachable, EngineTimeout, EngineRefused (status >= 400, or `"success": false`).
        """
        seconds = self.deadlines.control if deadline is None else deadline
        what = f"{method} {path}"
        content = None if body is None else json.dumps(body, separators=(",", ":")).encode()
        try:
            status, raw, retry_after = await self._channel.request(
                method, path, content, seconds, repeatable=repeatable
            )
        except TimeoutError as error:
            raise EngineTimeout(self.name, what, f"no answer within {seconds:g} s") from error
        except ConnectionError as error:
            raise _no_answer(self.name, what, error) from error
        raw = self._keys.explained(status, path, raw)
        if status >= 400:
            raise _refused(self.name, what, status, raw, retry_after)
        if path not in SERVER_PATHS:
            self.silent_since = None
        try:
            parsed = fast_loads(raw)
        except ValueError:
            return raw.decode("utf-8", "replace")
        if isinstance(parsed, dict) and parsed.get("success") is False:
            raise EngineRefused(self.name, what, _one_line(str(parsed.get("message", parsed))))
        return parsed

    # ---- what the engine is -------------------------------------------------------------------------------------

    async def server_info(self) -> dict[str, Any]:
        info = await self._get_either("/server_info", "/get_server_info")
        if not isinstance(info, dict):
            raise EngineProtocolError(self.name, "GET /server_info", "not a JSON object; is this an SGLang server?")
        return info

    async def weight_version(self) -> str | None:
        """The label of the weights now. /server_info's own `weight_version` is the one from the start (0.5.23)."""
        info = await self._get_either("/model_info", "/get_model_info")
        return info.get("weight_version") if isinstance(info, dict) else None

    async def _get_either(self, path: str, older: str) -> Any:
        """GET `path`, or the name that it had before (both are served for a while, then only the new one)."""
        try:
            return await self._read(path)
        except EngineRefused as error:
            if not _is_absent(error):
                raise
        return await self._read(older)

    async def _read(self, path: str, deadline: float | None = None) -> Any:
        """GET `path`, which changes nothing, so that it can be asked for once more where its answer is lost, or isn't
        there after half of the deadline."""
        return await self._asked_again("GET", path, deadline=deadline)

    async def _asked_again(
        self, method: str, path: str, *, body: Mapping[str, Any] | None = None, deadline: float | None = None
    ) -> Any:
        seconds = self.deadlines.control if deadline is None else deadline
        try:
            return await self.call(method, path, body=body, deadline=seconds / 2, repeatable=True)
        except (EngineUnreachable, EngineTimeout):
            return await self.call(method, path, body=body, deadline=seconds, repeatable=True)

    async def healthy(self, deadline: float = 2.0) -> bool:
        """Whether SGLang's /health answers 200. A paused or loading engine's doesn't: see liveness.py."""
        try:
            await self.call("GET", "/health", deadline=deadline)
        except EngineError:
            return False
        return True

    async def reports(
        self, info: Mapping[str, Any] | None = None, *, deadline: float | None = None
    ) -> list[SchedulerReport]:
        """Each data-parallel rank's own report, read out of `info` where that is given.

        Raises EngineProtocolError where the plugin isn't loaded.
        """
        if info is None and self._serves_reports:
            try:
                return self._parsed(await self._read(REPORTS_PATH, deadline), f"GET {REPORTS_PATH}")
            except EngineRefused as error:
                if not _is_absent(error):
                    raise
                self._serves_reports = False  # an older plugin: its reports are in /server_info
        info = await self.server_info() if info is None else info
        states = info.get("internal_states")
        if not isinstance(states, list) or not states:
            raise EngineProtocolError(self.name, "GET /server_info", "no internal_states")
        try:
            found = [state[REPORT_KEY] for state in states]
        except (KeyError, TypeError) as error:
            raise EngineProtocolError(
                self.name,
                "GET /server_info",
                f"no {REPORT_KEY!r} report: start the engine with reef-slime installed and REEF_SLIME_HOOKS set",
            ) from error
        return self._parsed(found, "GET /server_info")

    def _parsed(self, reports: Any, call: str) -> list[SchedulerReport]:
        if not isinstance(reports, list) or not reports:
            raise EngineProtocolError(self.name, call, "no reports")
        try:
            parsed = [SchedulerReport.from_json(report) for report in reports]
        except WireError as error:
            raise EngineProtocolError(self.name, call, str(error)) from error
        self.instances = frozenset(r.instance_id for r in parsed)
        return parsed

    # ---- publication --------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        await self.call("POST", "/pause_generation", body={"mode": mode}, deadline=self.deadlines.pause)

    async def resume(self) -> None:
        await self.call("POST", "/continue_generation", body={})

    async def flush(self, deadline: float | None = None) -> None:
        """One flush attempt, without the engine-side `timeout` (0.5.23 refuses that form on a paused engine)."""
        await self.call("POST", "/flush_cache", deadline=self.deadlines.control if deadline is None else deadline)

    async def label(self, version: str) -> None:
        """Name the weights that are loaded now, keeping the requests in flight.

        The same name twice is the same name, so it is sent again where the answer is lost, as a GET is.
        """
        body = {"new_version": version, "abort_all_requests": False}
        await self._asked_again("POST", "/update_weight_version", body=body)

    async def abort_all(self) -> None:
        await self.call("POST", "/abort_request", body={"abort_all": True})

    async def abort(self, rid: str) -> None:
        """End one request, known by the `rid` that it was sent with."""
        await self.call("POST", "/abort_request", body={"rid": rid})

    async def load_from_disk(self, path: str, load_format: str | None = None) -> None:
        """Load the Hugging Face checkpoint in `path`, visible to the engine; no flush, no label. `load_format`: where
        it isn't the one that the engine was started with."""
        body: dict[str, Any] = {"model_path": path, "flush_cache": False, "abort_all_requests": False}
        if load_format is not None:
            body["load_format"] = load_format
        await self.call("POST", "/update_weights_from_disk", body=body, deadline=self.deadlines.load)

    @asynccontextmanager
    async def weight_session(self) -> AsyncIterator[None]:
        """The session that 0.5.23 demands around distributed and tensor updates; nothing on an engine that has no such
        endpoint (0.5.15.post1), where none is needed.

        Begin and end have a load's deadline, since the engine may have to process the weights. After an error in the
        block the engine is given up: its end may hang then, what it answers changes nothing, and the error goes on.
        """
        if not await _begin_weight_session(self):
            yield
            return
        try:
            yield
        except BaseException:
            await _give_up_weight_session(self)
            raise
        await self.call("POST", END_SESSION, body={}, deadline=self.deadlines.load)

    async def join_weight_group(
        self, *, address: str, port: int, rank_offset: int, world_size: int, group: str, backend: str
    ) -> None:
        await self.call(
            "POST",
            "/init_weights_update_group",
            body={
                "master_address": address,
                "master_port": port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group,
                "backend": backend,
            },
            deadline=self.deadlines.load,
        )

    async def leave_weight_group(self, group: str) -> None:
        await self.call("POST", "/destroy_weights_update_group", body={"group_name": group})

    async def receive_tensors(
        self,
        *,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group: str,
        load_format: str | None = None,
    ) -> None:
        """Make the engine receive these tensors by broadcast in `group`; returns once it has loaded them."""
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(s) for s in shapes],
            "group_name": group,
            "flush_cache": False,
        }
        if load_format is not None:
            body["load_format"] = load_format
        await self.call("POST", "/update_weights_from_distributed", body=body, deadline=self.deadlines.load)

    async def take_tensors(self, serialized: Sequence[str], load_format: str | None = None) -> None:
        """Make the engine load tensors that lie in memory it shares with the sender; one string per tensor rank."""
        body = {"serialized_named_tensors": list(serialized), "load_format": load_format, "flush_cache": False}
        await self.call("POST", "/update_weights_from_tensor", body=body, deadline=self.deadlines.load)

    # ---- data ---------------------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One /generate call, not streamed. Token ids in, token ids and log-probs out."""
        answer = await self.call("POST", "/generate", body=body, deadline=self.deadlines.generate, repeatable=True)
        if not isinstance(answer, dict) or "meta_info" not in answer:
            raise EngineProtocolError(self.name, "POST /generate", f"no meta_info in {_one_line(str(answer))}")
        return answer

    @asynccontextmanager
    async def generate_stream(self, body: Mapping[str, Any]) -> AsyncIterator[AnswerStream]:
        """One /generate call whose answers come as they are sampled. Raises as `call` does, while reading too."""
        content = json.dumps({**body, "stream": True}, separators=(",", ":")).encode()
        what = "POST /generate"
        try:
            async with self._channel.stream("/generate", content, self.deadlines.generate) as stream:
                if stream.status >= 400:
                    answered = b"\n".join([line async for lines in stream.lines() for line in lines])
                    text = self._keys.explained(stream.status, "/generate", answered)
                    raise _refused(self.name, what, stream.status, text, stream.retry_after)
                yield AnswerStream(self.name, stream)
        except TimeoutError as error:
            raise EngineTimeout(self.name, what, f"nothing within {self.deadlines.generate:g} s") from error
        except ConnectionError as error:
            raise _no_answer(self.name, what, error) from error


def _no_answer(engine: str, call: str, error: ConnectionError) -> EngineUncalled | EngineUnreachable:
    if isinstance(error, LocalResourceError):
        return EngineUncalled(engine, call, str(error))
    unreachable = EngineUnreachable(engine, call, str(error))
    unreachable.reached = not isinstance(error, NoConnection)
    return unreachable


async def _begin_weight_session(client: EngineClient) -> bool:
    """Whether a session is open now; False where this SGLang has none.

    A session outlives the publisher that opened it and refuses every later one (0.5.23,
    scheduler_components/weight_updater.py:311): one that is found open is ended, and so is one of which it isn't
    known whether it was opened.
    """
    try:
        await _begin_once(client)
    except EngineRefused as error:
        if _is_absent(error):
            return False
        if "already open" not in error.seen:
            raise
        log.warning("%s: a weight session of an earlier publisher is open; it is ended", client.name)
        await client.call("POST", END_SESSION, body={}, deadline=client.deadlines.load)
        await _begin_once(client)
    return True


async def _begin_once(client: EngineClient) -> None:
    try:
        await client.call("POST", "/begin_weight_update", body={"selector": "all"}, deadline=client.deadlines.load)
    except EngineRefused:
        raise
    except BaseException:  # its outcome is unknown, also after a cancellation
        await _give_up_weight_session(client)
        raise


async def _give_up_weight_session(client: EngineClient) -> None:
    with suppress(EngineError):
        await client.call("POST", END_SESSION, body={}, deadline=client.deadlines.control)


class AnswerStream:
    """The answers of one streamed /generate call. `close`, from anywhere, ends the reading with EngineUnreachable."""

    def __init__(self, engine: str, stream: Stream) -> None:
        self._engine, self._stream = engine, stream

    def close(self) -> None:
        self._stream.close()

    async def answers(self, pace: Callable[[], float] = lambda: 0.0) -> AsyncIterator[list[dict[str, Any]]]:
        """The server-sent events that have come since the last time, at least one, as JSON. SGLang repeats all tokens
        so far in each, unless it was started with --incremental-streaming-output; where it does, the last is enough.
        `pace`: for how many seconds the stream is then left alone, so that more comes together; its end ends that.

        Raises EngineRefused, EngineProtocolError, ConnectionError, TimeoutError.
        """
        said = False  # all of it; what comes then is read so that the connection can be used again
        try:
            async for lines in self._stream.lines():
                events = [] if said else [line[5:].strip() for line in lines if line.startswith(b"data:")]
                if b"[DONE]" in events:
                    said, events = True, events[: events.index(b"[DONE]")]
                if not events:
                    continue
                last = self._parse(events[-1])
                if len(last["output_ids"]) < last["meta_info"].get("completion_tokens", 0):
                    yield [*(self._parse(event) for event in events[:-1]), last]
                else:
                    yield [last]
                if not said and (seconds := pace()):
                    await self._stream.rest(seconds)
        except OSError:
            if not said:
                raise
        if not said:
            raise ConnectionError("the stream ended before it was done")

    def _parse(self, data: bytes) -> dict[str, Any]:
        what = "POST /generate"
        try:
            answer = _loads(data)
        except ValueError as error:
            told = _one_line(data.decode("utf-8", "replace"))
            raise EngineProtocolError(self._engine, what, f"not JSON: {told}") from error
        if "error" in answer:
            fault = answer["error"]
            code = fault.get("code", 400) if isinstance(fault, dict) else 400
            code = code if isinstance(code, int) else 400  # OpenAI's form has words here
            raise _refused(self._engine, what, code, str(fault))
        if "meta_info" not in answer or "output_ids" not in answer:
            raise EngineProtocolError(self._engine, what, f"no output_ids or meta_info in {_one_line(str(answer))}")
        return answer  # type: ignore[no-any-return]


def _loads(data: bytes) -> Any:
    with suppress(ValueError):
        return fast_loads(data)
    return json.loads(data)  # also takes NaN and the infinities, which aren't JSON


def _is_absent(error: EngineRefused) -> bool:
    """Whether the engine has no such endpoint."""
    return error.status == 404


def _refused(engine: str, call: str, status: int, content: bytes | str, retry_after: str = "") -> EngineRefused:
    text = content.decode("utf-8", "replace") if isinstance(content, bytes) else content
    seconds = float(retry_after) if retry_after.strip().isdecimal() else None  # a date is of no use without its clock
    return EngineRefused(engine, call, f"HTTP {status}: {_one_line(text)}", status=status, retry_after_s=seconds)


def _one_line(text: str, limit: int = 300) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else line[: limit - 1] + "…"
