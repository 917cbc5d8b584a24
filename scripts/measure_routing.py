"""Measure how requests are spread over engines, and what of their prompts is computed again.

    python scripts/measure_routing.py [--router PATH/TO/sglang-router]

Fake engines, which answer each request in the same time, behind the gateway and, where its command is named, behind
sglang-router with each of its policies. Each row has, over all requests of a load:

    busiest, least    requests that the engines got
    behind            mean number of requests that the chosen engine had more than the least busy one
    idle              requests that went to a busy engine while another one had none
    computed          of the prompts' tokens those that weren't in the chosen engine's cache, where nothing is evicted
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import string
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from reef_service.data_plane.router import BLOCK, block_hashes
from slime_backend import event_loop
from slime_backend.engine_client.http import HttpChannel
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.simulation.models import make_tiny_model

POLICIES = ("cache_aware", "power_of_two", "round_robin", "random")
ANSWER, TOKEN_S, START_S, CALL_S = 8, 0.05, 60.0, 300.0
LINES = {"conversations": 32, "groups": 64}  # clients


@dataclass
class Seen:
    """What came to the engines."""

    in_flight: Counter[str] = field(default_factory=Counter)
    got: Counter[str] = field(default_factory=Counter)
    behind: list[int] = field(default_factory=list)
    idle: int = 0
    tokens: int = 0
    computed: int = 0


class CountedEngine(FakeEngine):
    """A fake engine that counts, and takes text as sglang-router likes to see it: a character is a token."""

    def __init__(self, seen: Seen, name: str) -> None:
        super().__init__(token_s=TOKEN_S)
        self.seen, self.name = seen, name
        self._blocks: set[int] = set()
        seen.in_flight[name] = seen.got[name] = 0

    async def on_generate(self, body: dict[str, Any]) -> Any:
        ids = body.setdefault("input_ids", list(body.get("text", "").encode()))
        seen, blocks = self.seen, block_hashes(ids)
        least = min(seen.in_flight.values())
        seen.behind.append(seen.in_flight[self.name] - least)
        seen.idle += least == 0 < seen.in_flight[self.name]
        seen.got[self.name] += 1
        seen.tokens += len(ids)
        known = next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))
        seen.computed += len(ids) - known * BLOCK
        self._blocks.update(blocks)
        seen.in_flight[self.name] += 1
        try:
            return await super().on_generate(body)
        finally:
            seen.in_flight[self.name] -= 1


Requests = Sequence[Sequence[tuple[str, str]]]  # of each client: (session, prompt), one after the other


def texts(rng: random.Random) -> Callable[[int], str]:
    return lambda length: "".join(rng.choices(string.ascii_letters, k=length))


def first_turns(count: int) -> Requests:
    """All at once, under one system prompt of 1000 tokens."""
    text = texts(random.Random(1))
    system = text(1000)
    return [[(f"s{i}", system + text(100))] for i in range(count)]


def conversations() -> Requests:
    """Each client has a session of six turns under one system prompt, and each turn adds 300 tokens."""
    text = texts(random.Random(2))
    system, found = text(1000), []
    for i in range(LINES["conversations"]):
        turns = [system]
        for _ in range(6):
            turns.append(turns[-1] + text(300))
        found.append([(f"s{i}", prompt) for prompt in turns[1:]])
    return found


def groups() -> Requests:
    """64 groups of 8 with a prompt of 2000 tokens each, in order, to 64 clients."""
    text = texts(random.Random(3))
    prompts = [(f"s{g}.{i}", prompt) for g, prompt in enumerate(text(2000) for _ in range(64)) for i in range(8)]
    return [prompts[i :: LINES["groups"]] for i in range(LINES["groups"])]


async def measure(name: str, engines: int, requests: Requests, place: Path, model: Path, router: str | None) -> None:
    for way in ("gateway", *(POLICIES if router else ())):
        seen = Seen()
        async with AsyncExitStack() as stack:
            fleet = [await stack.enter_async_context(CountedEngine(seen, str(i))) for i in range(engines)]
            urls = [engine.url for engine in fleet]
            if way == "gateway":
                config = {
                    "disjoint_prefix_sharing": "retract",
                    "model": str(model),
                    "runs_dir": str(place / f"{name}-{engines}".replace(" ", "-")),
                    "gateway": {"engines": urls, "port": 0, "context_length": 32768, "max_concurrent": 1024},
                }
                (place / "c.yaml").write_text(json.dumps(config))
                process = [sys.executable, "-m", "slime_backend.cli", "serve", str(place / "c.yaml"), "--json"]
                url = await asyncio.to_thread(stack.enter_context, _gateway(process))
            else:
                assert router is not None
                url = stack.enter_context(_router(router, way, urls))
                await _all_there(url, seen, engines)
            await asyncio.gather(*(_client(url, turns, way == "gateway") for turns in requests))
        print(
            f"{name:34} {engines:3} engines  {way:12} busiest {max(seen.got.values()):4} least "
            f"{min(seen.got.values()):4}  behind {sum(seen.behind) / len(seen.behind):5.2f}  idle "
            f"{100 * seen.idle / len(seen.behind):4.0f} %  computed {100 * seen.computed / seen.tokens:4.0f} %",
            flush=True,
        )


async def _client(url: str, turns: Sequence[tuple[str, str]], ours: bool) -> None:
    for session, prompt in turns:
        channel = HttpChannel(url, lambda path, line=f"x-reef-session: {session}\r\n" if ours else "": line)
        asked: dict[str, Any] = {"sampling_params": {"max_new_tokens": ANSWER, "temperature": 1.0}}
        asked |= {"input_ids": list(prompt.encode()), "return_logprob": True} if ours else {"text": prompt}
        status, answer, _ = await channel.request("POST", "/generate", json.dumps(asked).encode(), CALL_S)
        channel.close()
        assert status == 200, answer[:300]


async def _all_there(url: str, seen: Seen, engines: int) -> None:
    """Wait until the router knows every engine."""
    channel = HttpChannel(url)
    async with asyncio.timeout(START_S):
        while True:
            try:
                status, answer, _ = await channel.request("GET", "/workers", b"", 5.0)
                healthy = [w for w in json.loads(answer)["workers"] if w.get("is_healthy")] if status == 200 else []
                if len(healthy) == engines:
                    return
            except Exception:  # it doesn't listen yet
                pass
            await asyncio.sleep(0.1)


@contextmanager
def _gateway(command: Sequence[str]) -> Iterator[str]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["gateway"]
    finally:
        _end(process)


@contextmanager
def _router(command: str, policy: str, urls: Sequence[str]) -> Iterator[str]:
    port, figures = _free_port(), _free_port()
    line = [command, "launch", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(figures)]
    line += ["--policy", policy, "--max-concurrent-requests", "1024", "--log-level", "error", "--worker-urls", *urls]
    process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        _end(process)


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--router", help="the command sglang-router")
    router = parser.parse_args().router

    async def work(place: Path) -> None:
        model = make_tiny_model(place / "model")
        await measure("first turns, 32 at once", 8, first_turns(32), place, model, router)
        await measure("first turns, 256 at once", 64, first_turns(256), place, model, router)
        await measure("32 sessions of 6 turns", 8, conversations(), place, model, router)
        await measure("64 groups of 8, 64 at once", 8, groups(), place, model, router)

    with tempfile.TemporaryDirectory() as place:
        event_loop.run(work(Path(place)))


if __name__ == "__main__":
    main()
