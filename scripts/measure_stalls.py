"""Measure how long all other requests wait while one large request is taken or refused.

    python scripts/measure_stalls.py [--only NAME]

A gateway in a process of its own in front of a fake engine; during each request, /healthz is asked on one connection
without a pause. Prints, for each request: its status, how long it took, the longest answer of /healthz meanwhile, and
the gateway's memory then; the line "nothing" is what this machine does without any.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

from measure_gateway import gateway, rss_mib

from slime_backend.engine_client.http import HttpChannel
from slime_backend.simulation.fleet_process import fake_engines
from slime_backend.simulation.models import make_tiny_model

MIB = 2**20
CHAT, MESSAGES, GENERATE = "/v1/chat/completions", "/v1/messages", "/generate"


def requests() -> dict[str, tuple[str, bytes]]:
    words = "the sea is calm tonight, the tide is full; " * (15 * MIB // 43)

    def chat_of(size: int) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": words[:size]}], "max_tokens": 4}).encode()

    def asked(**more: object) -> bytes:
        return json.dumps({"messages": [small], "max_tokens": 4, **more}).encode()

    tool = {"type": "function", "function": {"name": "f", "description": "x" * 25_000, "parameters": {}}}
    anthropic = {"name": "f", "description": "x" * 25_000, "input_schema": {}}
    small = {"role": "user", "content": "hi"}
    nested = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 5 * MIB}}]}
    return {
        "a message of 15 MB": (CHAT, chat_of(15 * MIB)),
        "a message of 1 MB": (CHAT, chat_of(MIB)),
        "a message of 100 kB": (CHAT, chat_of(100_000)),
        "count_tokens of 15 MB": ("/v1/messages/count_tokens", chat_of(15 * MIB)),
        "a text of 15 MB": (GENERATE, json.dumps({"text": words}).encode()),
        "a text of 15 MB of escapes": (GENERATE, b'{"text":"' + b"\\n\\u0041" * (15 * MIB // 8) + b'"}'),
        "seven million ids": (GENERATE, b'{"input_ids":[' + b"1," * 7_000_000 + b"1]}"),
        "five million lists": (CHAT, b'{"x":[' + b"[]," * 5_000_000 + b"1]}"),
        "three million texts": (CHAT, b'{"x":[' + b'"a",' * 3_000_000 + b"1]}"),
        "512 tools of 25 kB": (CHAT, asked(tools=[tool] * 512)),
        "512 tools of 25 kB, Anthropic": (MESSAGES, asked(tools=[anthropic] * 512)),
        "arguments 5 million deep": (CHAT, asked(messages=[small, nested, small])),
        "a report of 15 MB": ("/reef/report", b'{"id":"a","receipts":[' + b'"a",' * 3_500_000 + b'"a"]}'),
    }


async def measure(url: str, pid: int, only: str) -> None:
    pulse, channel = HttpChannel(url), HttpChannel(url)
    print(f"{'request':32} status  took s  longest /healthz ms  memory MiB")
    for name, (path, body) in {"nothing": ("", b""), **requests()}.items():
        if only and only not in name:
            continue
        longest, over = 0.0, asyncio.Event()

        async def beat() -> None:
            nonlocal longest
            while not over.is_set():  # noqa: B023
                started = time.perf_counter()
                await pulse.request("GET", "/healthz", None, 120.0)
                longest = max(longest, 1000 * (time.perf_counter() - started))

        beating = asyncio.create_task(beat())
        await asyncio.sleep(0.5)
        longest, started, status = 0.0, time.perf_counter(), 0
        if path:
            status = (await channel.request("POST", path, body, 120.0)).status
        took = time.perf_counter() - started
        await asyncio.sleep(0.5)
        over.set()
        await beating
        print(f"{name:32} {status:6}  {took:6.2f}  {longest:19.1f}  {rss_mib(pid):10.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default="")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        place = Path(directory)
        model = make_tiny_model(place / "model", max_positions=131072)
        with fake_engines(1, token_s=0.01) as urls:
            config = {
                "disjoint_prefix_sharing": "retract",
                "model": str(model),
                "runs_dir": str(place),
                "gateway": {"engines": urls, "port": 0},
            }
            (place / "c.yaml").write_text(json.dumps(config))
            with gateway(place / "c.yaml") as (url, pid):
                asyncio.run(measure(url, pid, chosen.only))


if __name__ == "__main__":
    main()
