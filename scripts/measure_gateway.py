"""Measure what the gateway adds to a direct call, and what idle sessions cost.

    python scripts/measure_gateway.py [--engines real] [--rounds 5] [--concurrent 64]

    fake    two fake engines in a process of their own: an answer takes a time that is set
    real    one SGLang engine with a tiny model, which takes all of a small machine that it can get

CONCURRENT clients ask by token ids, in turn directly and through the gateway, complete answers and streams. A round's
direct requests and those through the gateway are paired, client by client; which comes first changes from round to
round. Prints medians in milliseconds, the median of the paired differences with its quartiles, the gateway's CPU time
for an answer (which other work on the machine changes least), how busy the gateway's process and the machine were, and
the gateway's memory after SESSIONS sessions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from slime_backend import event_loop
from slime_backend.engine_client.http import HttpChannel
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.simulation.fleet_process import fake_engines

TOKENS, TOKEN_S, SESSIONS = 32, 0.02, 1000
Ask = Callable[[HttpChannel, int], Awaitable[float]]


def body(number: int, stream: bool) -> bytes:
    ids = [1 + number % 200] * 200
    sampling = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    asked = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "stream": stream}
    return json.dumps(asked).encode()


async def complete_answer(channel: HttpChannel, number: int) -> float:
    started = time.perf_counter()
    status, answer, _ = await channel.request("POST", "/generate", body(number, False), 300.0)
    assert status == 200, answer[:300]
    return 1000 * (time.perf_counter() - started)


async def first_token(channel: HttpChannel, number: int) -> float:
    started, first = time.perf_counter(), 0.0
    async with channel.stream("/generate", body(number, True), 300.0) as stream:
        assert stream.status == 200
        async for lines in stream.lines():
            if not first and any(line.startswith(b"data:") for line in lines):
                first = 1000 * (time.perf_counter() - started)
    return first


async def together(ask: Ask, channels: list[HttpChannel], concurrent: int, spread_s: float) -> list[float]:
    """Each client asks twice, one after the other; they begin evenly over `spread_s`."""

    async def client(number: int) -> list[float]:
        await asyncio.sleep(spread_s * number / concurrent)
        return [await ask(channels[number % len(channels)], number) for _ in range(2)]

    return [ms for times in await asyncio.gather(*(client(i) for i in range(concurrent))) for ms in times]


async def measure(engines: list[str], url: str, pid: int, rounds: int, concurrent: int) -> None:
    ways = {"direct": [HttpChannel(url) for url in engines], "gateway": [HttpChannel(url)]}
    kinds: dict[str, Ask] = {"whole answer": complete_answer, "first token of a stream": first_token}
    times: defaultdict[tuple[str, str], list[float]] = defaultdict(list)
    spent: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])  # gateway's CPU, wall, machine's CPU
    spread_s = TOKENS * TOKEN_S
    for round_ in range(rounds + 1):  # the first warms up, and shows how long an answer takes here
        for kind, ask in kinds.items():
            for way in list(ways) if round_ % 2 else list(ways)[::-1]:
                before = cpu_s(pid), time.perf_counter(), machine_s()
                found = await together(ask, ways[way], concurrent, spread_s)
                after = cpu_s(pid), time.perf_counter(), machine_s()
                if round_:
                    times[kind, way] += found
                    if way == "gateway":
                        spent[kind] = [s + b - a for s, a, b in zip(spent[kind], before, after, strict=True)]
                elif kind == "whole answer":
                    spread_s = max(TOKENS * TOKEN_S, statistics.median(found) / 1000)
    print(f"{concurrent} concurrent, {TOKENS} tokens, {rounds} rounds, {len(engines)} engines")
    for kind in kinds:
        direct, ours = times[kind, "direct"], times[kind, "gateway"]
        low, middle, high = statistics.quantiles([b - a for a, b in zip(direct, ours, strict=True)], n=4)
        print(
            f"{kind}: direct {statistics.median(direct):.1f} ms, gateway {statistics.median(ours):.1f} ms; of pairs "
            f"{middle:+.1f} ms ({low:+.1f} to {high:+.1f})"
        )
    cores = os.cpu_count() or 1
    for kind, (cpu, wall, machine) in spent.items():
        answers = rounds * concurrent * 2
        print(
            f"{kind}: {1000 * cpu / answers:.2f} ms of the gateway's CPU for an answer; {answers / wall:.0f} answers a "
            f"second, gateway {100 * cpu / wall:.0f} % of a core, machine {100 * machine / wall / cores:.0f} % busy"
        )
    memory = rss_mib(pid)
    await asyncio.gather(*(asyncio.to_thread(in_session, url, i) for i in range(SESSIONS)))
    print(f"memory: {memory:.0f} MiB before, {rss_mib(pid):.0f} MiB with {SESSIONS} idle sessions")


def in_session(url: str, number: int) -> None:
    chat = json.dumps({"messages": [{"role": "user", "content": f"question {number}"}], "max_tokens": 8})
    headers = {"x-reef-session": f"s{number}", "content-type": "application/json"}
    request = urllib.request.Request(url + "/v1/chat/completions", chat.encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        assert answer.headers["x-reef-session"] == f"s{number}"


def cpu_s(pid: int) -> float:
    """User and system time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def machine_s() -> float:
    """Time that all cores were busy so far."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split()[1:8])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def rss_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024


@contextmanager
def gateway(config: Path) -> Iterator[tuple[str, int]]:
    """`reef-slime serve`: its address and its process."""
    command = [sys.executable, "-m", "slime_backend.cli", "serve", str(config), "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())["gateway"], process.pid
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    from slime_backend.simulation.models import make_tiny_model  # torch: not in the fake engines' process too

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--engines", choices=("fake", "real"), default="fake")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--concurrent", type=int, default=64)
    chosen = parser.parse_args()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_model(place / "model")
        if chosen.engines == "real":
            flags = ("--incremental-streaming-output", "--max-running-requests", str(chosen.concurrent))
            settings = EngineSettings(model=str(model), hooks=RUN_HOOKS, extra=flags)
            engine = LocalEngine(settings, log_path=place / "engine.log")
            stack.enter_context(running_engines([engine]))
            urls = [engine.url]
        else:
            urls = stack.enter_context(fake_engines(2, token_s=TOKEN_S, incremental=True))
        config = {
            "disjoint_prefix_sharing": "retract",
            "model": str(model),
            "runs_dir": str(place),
            "gateway": {"engines": urls, "port": 0},
        }
        (place / "c.yaml").write_text(json.dumps(config))
        url, pid = stack.enter_context(gateway(place / "c.yaml"))
        event_loop.run(measure(urls, url, pid, chosen.rounds, chosen.concurrent))


if __name__ == "__main__":
    main()
