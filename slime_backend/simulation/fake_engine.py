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
import uuid
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any, Literal

from aiohttp import web

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
CAPACITY = 100_000
ROWS = 1024


@dataclass(slots=True)
class FakeRequest:
    prompt: int
    wanted: int
    sampled: list[str] = field(default_factory=list)  # the version of each token
    truth: list[str] = field(default_factory=list)  # the weights that were really in memory, for each token
    context: list[str] = field(default_factory=list)  # the version that computed each position's KV
    segments: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)
    holds_kv: bool = False
    epoch: int = 0  # of its admission to prefill
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def kv_tokens(self) -> int:
        return self.prompt + len(self.sampled) if self.holds_kv else 0


@dataclass(slots=True)
class FakeRank:
    """One scheduler."""

    instance_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    flush_epoch: int = 0
    flush_refused: int = 0
    last_refusal: dict[str, Any] | None = None
    pause_mode: str | None = None
    pauses: int = 0
    in_flight_at_pause: int = 0
    retracted_at_pause: int = 0
    tokens_at_pause: int = 0
    epoch: int = 0
    order: int = 0
    # Radix cache entries nobody uses, in tokens, by the epoch in their key; by 0 in an engine that doesn't scope.
    tree: dict[int, int] = field(default_factory=dict)
    swept_epoch: int | None = None
    swept_tokens: int = 0
    skip_sweep: bool = False  # an epoch ends and the older entries stay
    requests: list[FakeRequest] = field(default_factory=list)
    refuse_flush: bool = False  # this rank alone refuses: its answer is lost behind rank 0's (DP > 1)


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
        self.ranks = [FakeRank() for _ in range(ranks)]
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
        states = [{REPORT_KEY: self._report(rank)} for rank in self.ranks]
        return web.json_response({"disable_radix_cache": not self.radix_cache, "internal_states": states})

    async def on_pause_generation(self, body: dict[str, Any]) -> web.Response:
        mode = body.get("mode", "abort")
        for rank in self.ranks:
            rank.pauses += 1
            rank.pause_mode = mode
            held = [r for r in rank.requests if r.holds_kv]
            rank.in_flight_at_pause = len(rank.requests)
            rank.retracted_at_pause = rank.tokens_at_pause = 0
            if mode == "retract":
                rank.retracted_at_pause = len(held)
                rank.tokens_at_pause = sum(r.kv_tokens for r in held)
                for r in held:
                    r.holds_kv = False
                    self._store(rank, r)
            elif mode == "abort":
                self._abort(rank)
        return web.json_response({"message": "Generation paused successfully."})

    async def on_continue_generation(self, body: dict[str, Any]) -> web.Response:
        for rank in self.ranks:
            rank.pause_mode = None
        return web.json_response({"message": "Generation continued successfully."})

    async def on_flush_cache(self, body: dict[str, Any]) -> web.Response:
        accepted = []
        for rank in self.ranks:
            holding = sum(r.holds_kv for r in rank.requests)
            queued = 0 if rank.pause_mode else len(rank.requests)
            if holding or queued or rank.refuse_flush:
                rank.flush_refused += 1
                rank.last_refusal = {"requests_holding_kv": holding, "waiting": queued}
                accepted.append(False)
            else:
                rank.flush_epoch += 1
                rank.tree.clear()
                accepted.append(True)
        # SGLang answers with rank 0's result alone.
        return web.Response(text="Cache flushed.\n", status=200 if accepted[0] else 400)

    async def on_update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        self._new_weights(PurePath(body["model_path"]).name)
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
        for rank in self.ranks:
            self._new_epoch(rank)
        return web.json_response({"success": True, "new_version": self.label})

    async def on_abort_request(self, body: dict[str, Any]) -> web.Response:
        for rank in self.ranks:
            self._abort(rank)
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
            "weight_versions": _spans(mine.sampled),
            "truth": _spans(mine.truth),
            "kv_provenance": mine.segments,
            "prefills": mine.prefills,
        }
        return web.json_response({"output_ids": [7] * count, "text": "", "meta_info": meta})

    # ---- the scheduler ------------------------------------------------------------------------------------------

    def _new_weights(self, name: str) -> None:
        self.loaded = name
        for rank in self.ranks:
            self._new_epoch(rank)

    @property
    def scoped(self) -> bool:
        return self.hooks.get("scope") == ACTIVE

    def _new_epoch(self, rank: FakeRank) -> None:
        rank.epoch += 1
        rank.order = 0
        if self.scoped and not rank.skip_sweep:
            rank.swept_epoch = rank.epoch
            rank.swept_tokens += sum(rank.tree.values())
            rank.tree.clear()

    def _scope(self, rank: FakeRank) -> int:
        return rank.epoch if self.scoped else 0

    def _store(self, rank: FakeRank, request: FakeRequest) -> None:
        """A request's prompt goes into the tree, unless it is of an older epoch."""
        if self.radix_cache and (not self.scoped or request.epoch == rank.epoch):
            scope = self._scope(rank)
            rank.tree[scope] = max(rank.tree.get(scope, 0), request.prompt)

    def _abort(self, rank: FakeRank) -> None:
        for request in rank.requests:
            request.aborted, request.holds_kv = True, False
            request.done.set()
        rank.requests.clear()

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(self.token_s)
            for rank in self.ranks:
                if rank.pause_mode is None:
                    self._step(rank)

    def _step(self, rank: FakeRank) -> None:
        for request in list(rank.requests):
            if not request.holds_kv:
                length = request.prompt + len(request.sampled)
                cached = min(rank.tree.get(self._scope(rank), 0), length - 1) if self.radix_cache else 0
                request.epoch = rank.epoch
                request.prefills.append(
                    {"epoch": rank.epoch, "order": rank.order, "version": self.label, "cached": cached, "total": length}
                )
                rank.order += 1
                request.holds_kv = True
                request.context = [self.label] * length
                _new_segment(request)
            else:
                request.context.append(self.label)
                if request.segments[-1]["version"] != self.label:
                    _new_segment(request)
            request.sampled.append(self.label)
            request.truth.append(self.loaded)
            request.segments[-1]["end"] = len(request.sampled)
            request.segments[-1]["version"] = self.label
            request.segments[-1]["context"] = _spans(request.context)
            if len(request.sampled) >= request.wanted:
                request.holds_kv = False
                rank.requests.remove(request)
                self._store(rank, request)
                request.done.set()

    def _report(self, rank: FakeRank) -> dict[str, Any]:
        holding = [r for r in rank.requests if r.holds_kv]
        used = sum(r.kv_tokens for r in holding)
        return {
            "instance_id": rank.instance_id,
            "hooks": self.hooks,
            "epoch": rank.epoch,
            "kv": {
                "flush_epoch": rank.flush_epoch,
                "flush_refused": rank.flush_refused,
                "last_refusal": rank.last_refusal,
                "paused": rank.pause_mode is not None,
                "pauses": rank.pauses,
                "pause_mode": rank.pause_mode,
                "in_flight_at_pause": rank.in_flight_at_pause,
                "retracted_at_pause": rank.retracted_at_pause,
                "tokens_at_pause": rank.tokens_at_pause,
                "swept_epoch": rank.swept_epoch,
                "swept_tokens": rank.swept_tokens,
                "tree_full_evictable": sum(rank.tree.values()),
                "tree_full_protected": 0,
                "tree_swa_evictable": 0,
                "tree_swa_protected": 0,
                "full_free": CAPACITY - used - sum(rank.tree.values()),
                "full_capacity": CAPACITY,
                "swa_free": 0,
                "swa_capacity": 0,
                "request_rows_free": ROWS - len(holding),
                "request_rows_capacity": ROWS,
                "requests_holding_kv": len(holding),
                "waiting": len(rank.requests) - len(holding),
                "running": 0 if rank.pause_mode == "retract" else len(holding),
                "chunked": 0,
                "result_queue": 0,
            },
        }


def _spans(versions: list[str]) -> list[dict[str, Any]]:
    spans: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if spans and spans[-1]["version"] == version:
            spans[-1]["end"] = position + 1
        else:
            spans.append({"version": version, "start": position, "end": position + 1})
    return spans


def _new_segment(request: FakeRequest) -> None:
    start = len(request.sampled)
    request.segments.append({"start": start, "end": start, "version": "", "context": []})


def _drop(request: web.Request) -> web.StreamResponse:
    """Break the connection without an answer."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response()
