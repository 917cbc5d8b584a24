"""`FakeEngine` answers the calls of a publication as SGLang 0.5.23 with our plugin does, and can misbehave.

The relevant states are modelled: each rank is paused, a flush is refused while a request holds KV, updates over a group
need an open session, a label may change alone, a retracted request prefills again, a request in flight doesn't advance
while paused, cache entries are scoped by epoch and swept where the hook `scope` is active, a load keeps the schedulers
from everything else, and /health fails unless a scheduler answers something. Weights are just the name that was loaded
last. tests/test_fake_against_engine.py compares it with a real engine, route by route.

    async with FakeEngine(latency_s=0.02) as engine:
        engine.faults["/flush_cache"] = ["refuse", "refuse"]      # the next two calls
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from slime_backend.simulation.fake_scheduler import FakeRank, FakeRequest, spans
from slime_backend.simulation.http_server import HttpServer, Reply
from slime_backend.weight_sources.checkpoint_check import read_checkpoint
from slime_backend.weight_sources.digests import of_checkpoint
from slime_backend.wire import ACTIVE, REPORT_KEY, REPORTS_PATH

Fault = Literal[
    "refuse",  # HTTP 400, no effect
    "lie",  # HTTP 200, no effect
    "drop_before",  # the connection breaks, no effect
    "drop_after",  # the connection breaks after the effect
    "hang_before",  # no answer, no effect
    "hang_after",  # no answer after the effect
    "none",  # no fault, before one of a later call
    "die",  # the process ends: no effect, and no answer to anything from now on
]
HANG_S = 3600.0
# SGLang's server itself refuses any other value of these fields, before a scheduler receives the call.
FIELDS: dict[str, dict[str, Callable[[Any], bool]]] = {
    "/pause_generation": {"mode": lambda v: v in (None, "abort", "in_place", "retract")},
    "/update_weight_version": {"new_version": lambda v: isinstance(v, str)},
    "/update_weights_from_disk": {"model_path": lambda v: isinstance(v, str)},
    "/abort_request": {"rid": lambda v: v is None or isinstance(v, str)},
    "/begin_weight_update": {"selector": lambda v: v is None or isinstance(v, str)},
}
TOKEN = 7  # sampled unless a test gives other answers
TOKEN_S = 0.002  # a decode step
HEALTH_S = 0.5  # SGLang waits for 20 s (SGLANG_HEALTH_CHECK_TIMEOUT)
UPDATES = tuple(f"/update_weights_from_{source}" for source in ("disk", "distributed", "tensor"))
# The schedulers answer these, one after the other; the HTTP process answers the rest.
SCHEDULED = frozenset(
    {
        *UPDATES,
        REPORTS_PATH,
        "/server_info",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
        "/begin_weight_update",
        "/end_weight_update",
        "/destroy_weights_update_group",
        "/update_weight_version",
        "/weights_checker",
    }
)
TENSORS = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "lm_head.weight")


class FakeEngine:
    """This is one fake engine on a loopback port. Use it as an async context manager."""

    def __init__(
        self,
        *,
        version: str = "v0",
        ranks: int = 1,
        tensor_ranks: int = 1,
        latency_s: float = 0.0,
        radix_cache: bool = True,
        hooks: tuple[str, ...] = ("kv_evidence", "kv_spans", "scope"),
        token_s: float = TOKEN_S,
        answer: Callable[[Sequence[int]], Sequence[int]] | None = None,
        incremental: bool = False,
        load_s: float = 0.0,
        grammar_s: float = 0.0,
        health_s: float = HEALTH_S,
    ) -> None:
        """Configure the engine.

        `answer`: what a prompt's ids are answered with, up to `max_new_tokens`; without, TOKEN repeatedly.
        `incremental`: as with --incremental-streaming-output, an event has the new tokens only. `load_s`: how long an
        update of weights takes. `grammar_s`: how long the grammar of a request with a schema or a regex is compiled.
        `health_s`: how long /health waits for a scheduler's answer."""
        self.label = version
        self.loaded = version  # the weights that really are in memory
        self.loaded_from: Path | None = None  # the checkpoint on disk
        self.kept: dict[str, str] = {}  # tensors that a load leaves alone -> the weights that they are of
        self.info: dict[str, Any] = {}  # further fields of /server_info
        self.latency_s = latency_s
        self.radix_cache = radix_cache
        self.hooks = dict.fromkeys(hooks, ACTIVE)
        self.token_s = token_s
        self.answer = answer
        self.incremental = incremental
        self.load_s, self.grammar_s, self.health_s = load_s, grammar_s, health_s
        self.bodies: list[dict[str, Any]] = []  # bodies of /generate
        self.ranks = [
            FakeRank(radix_cache, "scope" in hooks, grammar_flush="grammar_flush" in hooks, tensor_size=tensor_ranks)
            for _ in range(ranks)
        ]
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.calls: list[str] = []
        self.session_open = False
        self.dead = False
        self.answered = 0  # by the schedulers: control calls and tokens
        self.port = 0
        self._schedulers = asyncio.Lock()  # they do one thing at a time
        self._server = HttpServer(self._handle)
        self._decoder: asyncio.Task[None] | None = None
        self._next_rank = 0

    # ---- life ---------------------------------------------------------------------------------------------------

    async def __aenter__(self) -> FakeEngine:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self.port = await self._server.start(port)
        self._decoder = asyncio.create_task(self._decode())

    async def stop(self) -> None:
        if self._decoder is not None:
            self._decoder.cancel()
        await self._server.stop()

    async def restart(self, version: str) -> None:
        """Restart as after a crash: the same address, and the weights of its start."""
        port = self.port
        await self.stop()
        self.__init__(  # type: ignore[misc]
            version=version,
            ranks=len(self.ranks),
            tensor_ranks=self.ranks[0].tensor_size,
            latency_s=self.latency_s,
            radix_cache=self.radix_cache,
            hooks=tuple(self.hooks),
            token_s=self.token_s,
            answer=self.answer,
            incremental=self.incremental,
            load_s=self.load_s,
            grammar_s=self.grammar_s,
            health_s=self.health_s,
        )
        await self.start(port)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def paused(self) -> bool:
        return any(rank.pause_mode for rank in self.ranks)

    # ---- HTTP ---------------------------------------------------------------------------------------------------

    async def _handle(self, path: str, body: dict[str, Any]) -> Reply | None:
        self.calls.append(path)
        if self.latency_s:
            await asyncio.sleep(self.latency_s)
        if self.dead:
            return None
        fault = self.faults[path].pop(0) if self.faults[path] else None
        if fault == "die":
            self.dead = True
            return None
        if fault == "refuse":
            return _refused(f"{path} refused")
        if fault == "lie":
            return Reply({"success": True, "message": ""})
        if fault == "drop_before":
            return None
        if fault == "hang_before":
            await asyncio.sleep(HANG_S)
        handler = getattr(self, "on_" + path.strip("/").replace("/", "_"), None)
        if handler is None:
            return Reply({"detail": "Not Found"}, 404)
        wrong = [f for f, allowed in FIELDS.get(path, {}).items() if not allowed(body.get(f))]
        if wrong:
            return _malformed(wrong[0])
        reply: Reply = await self._scheduled(handler, path, body) if path in SCHEDULED else await handler(body)
        if fault == "drop_after" or self.dead:
            return None
        if fault == "hang_after":
            await asyncio.sleep(HANG_S)
        return reply

    async def _scheduled(
        self, handler: Callable[[dict[str, Any]], Awaitable[Reply]], path: str, body: dict[str, Any]
    ) -> Reply:
        async with self._schedulers:
            if path in UPDATES and self.load_s:
                await asyncio.sleep(self.load_s)
            reply = await handler(body)
        self.answered += 1
        return reply

    async def on_health(self, body: dict[str, Any]) -> Reply:
        """Wait for a token; whatever the schedulers answer meanwhile counts as well."""
        before, until = self.answered, time.monotonic() + self.health_s
        while self.answered == before and (self.paused or self._schedulers.locked()):
            if time.monotonic() > until:
                return Reply(status=503)
            await asyncio.sleep(self.token_s)
        return Reply()

    async def on_model_info(self, body: dict[str, Any]) -> Reply:
        return Reply({"weight_version": self.label, "model_path": self.loaded})

    async def on_server_info(self, body: dict[str, Any]) -> Reply:
        states = [{REPORT_KEY: rank.report(self.hooks)} for rank in self.ranks]
        own = {"disable_radix_cache": not self.radix_cache, "dtype": "float32", "tp_size": self.ranks[0].tensor_size}
        return Reply({**own, "internal_states": states, **self.info})

    async def on_reef_slime_reports(self, body: dict[str, Any]) -> Reply:
        return Reply([rank.report(self.hooks) for rank in self.ranks])

    async def on_pause_generation(self, body: dict[str, Any]) -> Reply:
        for rank in self.ranks:
            rank.pause(body.get("mode", "abort"))
        return Reply({"message": "Generation paused successfully.", "status": "ok"})

    async def on_continue_generation(self, body: dict[str, Any]) -> Reply:
        for rank in self.ranks:
            rank.pause_mode = None
        return Reply({"message": "Generation continued successfully.", "status": "ok"})

    async def on_flush_cache(self, body: dict[str, Any]) -> Reply:
        accepted = [rank.flush() for rank in self.ranks]
        # SGLang answers with rank 0's result alone.
        return Reply("Cache flushed.\n", 200 if accepted[0] else 400)

    async def on_update_weights_from_disk(self, body: dict[str, Any]) -> Reply:
        """Load weights. A relative path is only a name; an absolute one must exist."""
        path = Path(body["model_path"])
        if path.is_absolute() and not path.exists():
            self._load(success=False)
            return Reply({"success": False, "message": f"no model at {path}", "num_paused_requests": 0}, 400)
        self.loaded, self.loaded_from = path.name, path if path.is_absolute() else None
        self._load()
        return Reply({"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0})

    async def on_update_weights_from_distributed(self, body: dict[str, Any]) -> Reply:
        return self._take(body["names"][0])

    async def on_update_weights_from_tensor(self, body: dict[str, Any]) -> Reply:
        return self._take(body["serialized_named_tensors"][0])

    def _take(self, weights: str) -> Reply:
        if not self.session_open:
            return _refused("must run between begin_weight_update() and end_weight_update()")
        self.loaded = weights
        self._load()
        return Reply({"success": True, "message": "Success"})

    async def on_destroy_weights_update_group(self, body: dict[str, Any]) -> Reply:
        return Reply({"success": True, "message": "Succeeded to destroy custom process group."})

    async def on_begin_weight_update(self, body: dict[str, Any]) -> Reply:
        if self.session_open:
            return _refused("a session is already open")
        self.session_open = True
        return Reply({"success": True, "message": "Success"})

    async def on_end_weight_update(self, body: dict[str, Any]) -> Reply:
        if not self.session_open:
            return _refused("no session is open")
        self.session_open = False
        return Reply({"success": True, "message": "Success"})

    async def on_update_weight_version(self, body: dict[str, Any]) -> Reply:
        self.label = body["new_version"]
        self._end_epoch()
        return Reply({"success": True, "message": "Weight version updated.", "new_version": self.label})

    async def on_weights_checker(self, body: dict[str, Any]) -> Reply:
        skipped = body.get("skip_tensor_list") or ()
        found = await asyncio.to_thread(self._digests)
        checksums = {name: digest for name, digest in found.items() if not any(part in name for part in skipped)}
        size = self.ranks[0].tensor_size
        ranks = [
            {
                "checksums": checksums,
                "parallelism_info": [{"tp_rank": rank, "tp_size": size, "pp_rank": 0, "pp_size": 1, "role": "target"}],
            }
            for _ in self.ranks
            for rank in range(size)
        ]
        return Reply({"success": True, "message": "Success.", "ranks": ranks})

    def _digests(self) -> dict[str, str]:
        """Of the checkpoint that was loaded last; of three made-up tensors where weights were just a name."""
        if self.loaded_from is not None and any(self.loaded_from.glob("*.safetensors")):
            return {name: forms[0] for name, forms in of_checkpoint(read_checkpoint(self.loaded_from)).items()}
        return {name: digest_of(self.kept.get(name, self.loaded), name) for name in TENSORS}

    async def on_abort_request(self, body: dict[str, Any]) -> Reply:
        if body.get("abort_all") or body.get("rid"):
            for rank in self.ranks:
                rank.abort(None if body.get("abort_all") else body["rid"])
        return Reply()

    async def on_generate(self, body: dict[str, Any]) -> Reply:
        ids = body["input_ids"]
        sampling = body.get("sampling_params", {})
        wanted = int(sampling.get("max_new_tokens", 16))
        if not ids or wanted < 1:
            return Reply({"error": {"message": "empty request"}}, 400)
        self.bodies.append(body)
        planned = list(self.answer(ids) if self.answer else [TOKEN] * wanted)
        rank = self.ranks[self._next_rank]
        self._next_rank = (self._next_rank + 1) % len(self.ranks)
        request = FakeRequest(len(ids), min(wanted, len(planned)), body.get("rid") or "")
        end = "stop" if self.answer and len(planned) <= wanted else "length"
        if any(sampling.get(kind) for kind in ("json_schema", "regex", "ebnf", "structural_tag")):
            request.grammar = True
            asyncio.get_running_loop().call_later(self.grammar_s, setattr, request, "compiled", True)
        rank.requests.append(request)
        if body.get("stream"):
            return Reply(events=self._events(rank, request, planned, end))
        await request.done.wait()
        return Reply(self._answer(request, planned, end))

    async def _events(
        self, rank: FakeRank, request: FakeRequest, planned: list[int], end: str
    ) -> AsyncGenerator[str, None]:
        """Stream as SGLang does: an event repeats all tokens so far, or has the new ones; the last has our spans."""
        sent = 0
        try:
            while not request.done.is_set():
                await request.progress.wait()
                request.progress.clear()
                if self.dead:
                    raise ConnectionResetError("the engine died")
                if request.sampled or request.done.is_set():
                    answer = self._answer(request, planned, end, sent)
                    sent = len(request.sampled) if self.incremental else 0
                    yield f"data: {json.dumps(answer)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            if not request.done.is_set() and request in rank.requests:  # the client has gone
                rank.requests.remove(request)

    def _answer(self, request: FakeRequest, planned: list[int], end: str, sent: int = 0) -> dict[str, Any]:
        """Return the answer so far, without the first `sent` tokens."""
        count = len(request.sampled)
        done = request.done.is_set()
        meta = {
            "finish_reason": {"type": "abort" if request.aborted else end} if done else None,
            "prompt_tokens": request.prompt,
            "completion_tokens": count,
            "cached_tokens": request.prefills[0]["cached"] if request.prefills else 0,
            "weight_version": self.label,
            "output_token_logprobs": [[-1.0 - i / 1000, planned[i], None] for i in range(sent, count)],
            "truth": spans(request.truth),
        }
        if done:  # only the last answer has SGLang's weight_versions and our hook's fields
            meta |= {
                "weight_versions": spans(request.sampled),
                "kv_provenance": request.segments,
                "prefills": request.prefills,
            }
        return {"output_ids": planned[sent:count], "meta_info": meta}

    # ---- the schedulers -----------------------------------------------------------------------------------------

    def _load(self, success: bool = True) -> None:
        for rank in self.ranks:
            rank.load(success)

    def _end_epoch(self) -> None:
        for rank in self.ranks:
            rank.end_epoch()

    async def _decode(self) -> None:
        while True:
            await asyncio.sleep(self.token_s)
            if self.load_s and self._schedulers.locked():
                continue
            for rank in self.ranks:
                if rank.pause_mode is None or rank.ignores_pause:
                    self.answered += bool(rank.requests)
                    rank.step(self.label, self.loaded)


def digest_of(weights: str, tensor: str) -> str:
    """The digest of one tensor of the weights that have this name."""
    return hashlib.sha256(f"{weights}/{tensor}".encode()).digest()[:8].hex()


def _malformed(field: str) -> Reply:
    error = {"object": "error", "message": f"Request validation failed: {field}", "type": "Bad Request", "param": None}
    return Reply({**error, "code": 400}, 400)


def _refused(message: str) -> Reply:
    return Reply({"success": False, "message": message}, 400)
