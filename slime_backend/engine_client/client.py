"""What one SGLang engine can be asked for over HTTP.

Endpoints as SGLang 0.5.23 serves them (srt/entrypoints/http_server.py); where an older one lacks a name, its answer 404
is what tells.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from slime_backend.engine_client.calls import EngineCalls, is_absent
from slime_backend.engine_client.errors import (
    EngineError,
    EngineProtocolError,
    EngineRefused,
    EngineTimeout,
    no_answer,
    one_line,
    refused,
)
from slime_backend.engine_client.stream import AnswerStream
from slime_backend.engine_client.weight_digests import PATH as DIGESTS_PATH
from slime_backend.engine_client.weight_digests import RankDigests, read_digests
from slime_backend.engine_client.weight_session import weight_session
from slime_backend.policy import PauseMode
from slime_backend.wire import REPORT_KEY, REPORTS_PATH, SchedulerReport, WireError


class EngineClient(EngineCalls):
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
                if not is_absent(error):
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

    def weight_session(self) -> AbstractAsyncContextManager[None]:
        """Return the session that 0.5.23 demands around distributed and tensor updates (weight_session.py)."""
        return weight_session(self)

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

    async def weight_digests(self, skip: Sequence[str] = (), *, deadline: float | None = None) -> list[RankDigests]:
        """The engine's own digest of each tensor, by rank, but for those whose names contain a string of `skip`.

        Raises EngineRefused where this SGLang can't make them.
        """
        body: dict[str, Any] = {"action": "checksum"}
        if skip:
            body["skip_tensor_list"] = list(skip)
        seconds = self.deadlines.load if deadline is None else deadline
        answer = await self.call("POST", DIGESTS_PATH, body=body, deadline=seconds, repeatable=True)
        try:
            return read_digests(answer)
        except ValueError as error:
            raise EngineProtocolError(self.name, f"POST {DIGESTS_PATH}", str(error)) from error

    # ---- data ---------------------------------------------------------------------------------------------------

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """One /generate call, not streamed. Token ids in, token ids and log-probs out."""
        answer = await self.call("POST", "/generate", body=body, deadline=self.deadlines.generate, repeatable=True)
        if not isinstance(answer, dict) or not isinstance(answer.get("meta_info"), dict):
            raise EngineProtocolError(self.name, "POST /generate", f"no meta_info in {one_line(str(answer))}")
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
                    raise refused(self.name, what, stream.status, text, stream.retry_after)
                yield AnswerStream(self.name, stream)
        except TimeoutError as error:
            raise EngineTimeout(self.name, what, f"nothing within {self.deadlines.generate:g} s") from error
        except ConnectionError as error:
            raise no_answer(self.name, what, error) from error
