"""An HTTP server that answers the calls of a publication as SGLang 0.5.23 with our plugin does, and can misbehave.

The states that matter are modelled: a pause is taken by each rank, a flush is refused while a request holds KV,
updates over a group need an open session, a label may change alone, a retracted request prefills again, a request in
flight stands still while paused, cache entries are scoped by epoch and swept where the hook `scope` is active. Weights
are just the name that was loaded last.

    async with FakeEngine(latency_s=0.02) as engine:
        engine.faults["/flush_cache"] = ["refuse", "refuse"]      # the next two calls
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import PurePath
from typing import Any, Literal

from aiohttp import web

from slime_backend.simulation.fake_scheduler import FakeRank, FakeRequest, spans
from slime_backend.wire import ACTIVE, REPORT_KEY

Fault = Literal[
    "refuse",  # HTTP 400, no effect
    "lie",  # HTTP 200, no effect
    "drop_before",  # the connection breaks, no effect
    "drop_after",  # the connection breaks after the effect
    "hang_before",  # no answer, no effect
    "hang_after",  # no answer after the effect
    "die",  # the process ends: no effect, and no answer to anything from now on
]
HANG_S = 3600.0
TOKEN_S = 0.002  # a decode step


class FakeEngine:
    """One fake engine on a loopback port. Use as an async context manager."""

    def __init__(
        self,
        *,
        version: str = "v0",
        ranks: int = 1,
        latency_s: float = 0.0,
        radix_cache: bool = True,
        hooks: tuple[str, ...] = ("kv_evidence", "kv_spans", "scope"),
        token_s: float = TOKEN_S,
    ) -> None:
        self.label = version
        self.loaded = version  # the weights that really are in memory
        self.latency_s = latency_s
        self.radix_cache = radix_cache
        self.hooks = dict.fromkeys(hooks, ACTIVE)
        self.token_s = token_s
        self.ranks = [FakeRank(radix_cache, "scope" in hooks) for _ in range(ranks)]
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.calls: list[str] = []
        self.session_open = False
        self.dead = False
        self.port = 0
        self._runner: web.AppRunner | None = None
        self._decoder: asyncio.Task[None] | None = None
        self._next_rank = 0

    # ---- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        app = web.Application()
        app.router.add_route("*", "/{tail:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        sockets = site._server.sockets  # type: ignore[union-attr]
        self.port = sockets[0].getsockname()[1]
        self._decoder = asyncio.create_task(self._decode())

    async def stop(self) -> None:
        if self._decoder is not None:
            self._decoder.cancel()
        if self._runner is not None:
            await self._runner.cleanup()

    async def restart(self, version: str) -> None:
        """As after a crash: the same address, a new process with the weights that it was started with."""
        port = self.port
        await self.stop()
        self.__init__(  # type: ignore[misc]
            version=version,
            ranks=len(self.ranks),
            latency_s=self.latency_s,
            radix_cache=self.radix_cache,
            hooks=tuple(self.hooks),
            token_s=self.token_s,
        )
        await self.start(port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paused(self) -> bool:
        return any(rank.pause_mode for rank in self.ranks)

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        path = request.path
        self.calls.append(path)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.dead:
            return _drop(request)
        body = json.loads(await request.read() or b"{}")
        fault = self.faults[path].pop(0) if self.faults[path] else None
        if fault == "die":
            self.dead = True
            return _drop(request)
        if fault == "refuse":
            return web.json_response({"success": False, "message": f"{path} refused"}, status=400)
        if fault == "lie":
            return web.json_response({"success": True, "message": ""})
        if fault == "drop_before":
            return _drop(request)
        if fault == "hang_before":
            await asyncio.sleep(HANG_S)
        handler = getattr(self, "on_" + path.strip("/").replace("/", "_"), None)
        if handler is None:
            return web.json_response({"detail": "Not Found"}, status=404)
        response: web.StreamResponse = await handler(body)
        if fault == "drop_after" or self.dead:
            return _drop(request)
        if fault == "hang_after":
            await asyncio.sleep(HANG_S)
        return response

    async def on_health(self, body: dict[str, Any]) -> web.Response:
        return web.Response()

    async def on_model_info(self, body: dict[str, Any]) -> web.Response:
        return web.json_response({"weight_version": self.label, "model_path": self.loaded})

    async def on_server_info(self, body: dict[str, Any]) -> web.Response:
        states = [{REPORT_KEY: rank.report(self.hooks)} for rank in self.ranks]
        return web.json_response({"disable_radix_cache": not self.radix_cache, "internal_states": states})

    async def on_pause_generation(self, body: dict[str, Any]) -> web.Response:
        for rank in self.ranks:
            rank.pause(body.get("mode", "abort"))
        return web.json_response({"message": "Generation paused successfully."})

    async def on_continue_generation(self, body: dict[str, Any]) -> web.Response:
        for rank in self.ranks:
            rank.pause_mode = None
        return web.json_response({"message": "Generation continued successfully."})

    async def on_flush_cache(self, body: dict[str, Any]) -> web.Response:
        accepted = [rank.flush() for rank in self.ranks]
        # SGLang answers with rank 0's result alone.
        return web.Response(text="Cache flushed.\n", status=200 if accepted[0] else 400)

    async def on_update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        self.loaded = PurePath(body["model_path"]).name
        self._end_epoch()
        return web.json_response({"success": True, "message": "Succeeded to update model weights."})

    async def on_begin_weight_update(self, body: dict[str, Any]) -> web.Response:
        if self.session_open:
            return web.json_response({"success": False, "message": "a session is already open"}, status=400)
        self.session_open = True
        return web.json_response({"success": True, "message": "Success"})

    async def on_end_weight_update(self, body: dict[str, Any]) -> web.Response:
        if not self.session_open:
            return web.json_response({"success": False, "message": "no session is open"}, status=400)
        self.session_open = False
        return web.json_response({"success": True, "message": "Success"})

    async def on_update_weight_version(self, body: dict[str, Any]) -> web.Response:
        self.label = body["new_version"]
        self._end_epoch()
        return web.json_response({"success": True, "new_version": self.label})

    async def on_abort_request(self, body: dict[str, Any]) -> web.Response:
        for rank in self.ranks:
            rank.abort_all()
        return web.Response()

    async def on_generate(self, body: dict[str, Any]) -> web.Response:
        ids = body["input_ids"]
        wanted = int(body.get("sampling_params", {}).get("max_new_tokens", 16))
        if not ids or wanted < 1:
            return web.json_response({"error": {"message": "empty request"}}, status=400)
        rank = self.ranks[self._next_rank]
        self._next_rank = (self._next_rank + 1) % len(self.ranks)
        mine = FakeRequest(len(ids), wanted)
        rank.requests.append(mine)
        await mine.done.wait()
        count = len(mine.sampled)
        meta = {
            "finish_reason": {"type": "abort" if mine.aborted else "length"},
            "prompt_tokens": mine.prompt,
            "completion_tokens": count,
            "cached_tokens": mine.prefills[0]["cached"] if mine.prefills else 0,
            "weight_version": self.label,
            "output_token_logprobs": [[-1.0, 7, None] for _ in range(count)],
            "weight_versions": spans(mine.sampled),
            "truth": spans(mine.truth),
            "kv_provenance": mine.segments,
            "prefills": mine.prefills,
        }
        return web.json_response({"output_ids": [7] * count, "text": "", "meta_info": meta})

    # ---- the schedulers -----------------------------------------------------------------------------------------

    def _end_epoch(self) -> None:
        for rank in self.ranks:
            rank.end_epoch()

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(self.token_s)
            for rank in self.ranks:
                if rank.pause_mode is None:
                    rank.step(self.label, self.loaded)


def _drop(request: web.Request) -> web.StreamResponse:
    """Break the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
