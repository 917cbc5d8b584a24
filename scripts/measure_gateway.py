"""What the gateway adds to a direct call, and what idle sessions cost: `python scripts/measure_gateway.py [ROUNDS]`.

Two fake engines and the gateway (`reef-slime serve`) live in processes of their own; this one asks, CONCURRENT at a
time, in turn directly and through the gateway, whole answers and streams, by token ids. Prints medians over all
requests of all rounds in milliseconds, their differences, the gateway's CPU time for an answer (which other work on
the machine changes least), and its memory after SESSIONS sessions. The fake engines take some of the machine too, so on
few cores the times are upper bounds.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection
from pathlib import Path

from slime_backend import event_loop
from slime_backend.http_channel import HttpChannel
from slime_backend.local_trainer.models import make_tiny_model
from slime_backend.simulation.fake_engine import FakeEngine

CONCURRENT, TOKENS, TOKEN_S, SESSIONS = 64, 32, 0.02, 1000


def serve(ready: Connection) -> None:
    """Two fake engines until this process is ended."""

    async def run() -> None:
        engines = [FakeEngine(token_s=TOKEN_S) for _ in range(2)]
        for engine in engines:
            await engine.start()
        ready.send([engine.url for engine in engines])
        await asyncio.Event().wait()

    event_loop.run(run())


def body(number: int, stream: bool) -> bytes:
    ids = [1 + number % 200] * 200
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    return json.dumps(asked).encode()


async def whole(channel: HttpChannel, number: int) -> float:
    started = time.perf_counter()
    status, _ = await channel.request("POST", "/generate", body(number, False), 120.0)
    assert status == 200
    return 1000 * (time.perf_counter() - started)


async def first_token(channel: HttpChannel, number: int) -> float:
    started, first = time.perf_counter(), 0.0
    async with channel.stream("/generate", body(number, True), 120.0) as stream:
        assert stream.status == 200
        async for line in stream.lines():
            if line.startswith(b"data:") and not first:
                first = 1000 * (time.perf_counter() - started)
    return first


async def together(ask: Callable[[HttpChannel, int], Awaitable[float]], channels: list[HttpChannel]) -> list[float]:
    """CONCURRENT clients, each with two requests one after the other, begun evenly over the time of one answer."""

    async def client(number: int) -> list[float]:
        await asyncio.sleep(TOKENS * TOKEN_S * number / CONCURRENT)
        return [await ask(channels[number % len(channels)], number) for _ in range(2)]

    return [ms for times in await asyncio.gather(*(client(i) for i in range(CONCURRENT))) for ms in times]


async def measure(engines: list[str], gateway: str, pid: int, rounds: int) -> None:
    ways = {"direct": [HttpChannel(url) for url in engines], "gateway": [HttpChannel(gateway)]}
    kinds = {"whole answer": whole, "first token of a stream": first_token}
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    spent: defaultdict[str, float] = defaultdict(float)
    for round_ in range(rounds + 1):  # the first warms up
        for kind, ask in kinds.items():
            for way, channels in ways.items():
                before = cpu_s(pid)
                found = await together(ask, channels)
                if round_:
                    times[kind, way] += found
                    spent[kind] += cpu_s(pid) - before if way == "gateway" else 0.0
    answers = rounds * CONCURRENT * 2
    print(f"{CONCURRENT} concurrent, {TOKENS} tokens, {rounds} rounds")
    for kind in kinds:
        direct, ours = (statistics.median(times[kind, way]) for way in ways)
        print(f"{kind}: direct {direct:.1f} ms, gateway {ours:.1f} ms, {ours - direct:+.1f} ms")
    for kind, seconds in spent.items():
        print(f"{kind}: {1000 * seconds / answers:.1f} ms of the gateway's CPU for an answer of {TOKENS} tokens")
    memory = rss_mib(pid)
    await asyncio.gather(*(asyncio.to_thread(in_session, gateway, i) for i in range(SESSIONS)))
    print(f"memory: {memory:.0f} MiB before, {rss_mib(pid):.0f} MiB with {SESSIONS} idle sessions")


def in_session(gateway: str, number: int) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8})
    headers = {"x-reef-session": f"s{number}", "content-type": "application/json"}
    request = urllib.request.Request(gateway + "/v1/chat/completions", chat.encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["x-reef-session"] == f"s{number}"


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    here, there = multiprocessing.Pipe()
    engines = multiprocessing.Process(target=serve, args=(there,), daemon=True)
    engines.start()
    urls = here.recv()
    with tempfile.TemporaryDirectory() as place:
        model = make_tiny_model(Path(place) / "model")
        config = Path(place) / "c.yaml"
        settings = {"engines": urls, "port": 0}
        config.write_text(
            json.dumps(
                {"disjoint_prefix_sharing": "retract", "model": str(model), "runs_dir": place, "gateway": settings}
            )
        )
        command = [sys.executable, "-m", "slime_backend.cli", "serve", str(config), "--json"]
        gateway = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert gateway.stdout is not None
            url = json.loads(gateway.stdout.readline())["gateway"]
            event_loop.run(measure(urls, url, gateway.pid, rounds))
        finally:
            gateway.terminate()
            gateway.wait()
    engines.terminate()


if __name__ == "__main__":
    main()
