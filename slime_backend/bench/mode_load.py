"""`ModeLoad` is the traffic of every mode of `bench modes`: groups that share a prompt, answers of mixed lengths.

A seed fixes prompts and lengths, so each mode answers the same requests in the same order. A request's place is taken
by the next one as soon as it ends: what is in flight stays constant, as in an asynchronous run whose trainer keeps up.

The engine's work is known from its answers alone, for each version: the one that sampled each token, and the one
under which each admission to prefill took place.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from slime_backend.bench.rows import BenchError
from slime_backend.engine_client import EngineClient
from slime_backend.planner.measured import Shape
from slime_backend.wire import PREFILLS_KEY, SAMPLED_SPANS_KEY, Prefill, Span

SETTLED_S = 30.0
Counts = tuple[tuple[int, int], ...]  # (publications before it, tokens)


@dataclass(slots=True)
class Request:
    prompt: list[int]
    answer: int
    output: list[int] = field(default_factory=list)
    sampled: Counts = ()  # over all its tries


@dataclass(frozen=True, slots=True)
class Try:
    """A try is one answer of the engine: a request was finished, or an abort ended it."""

    finished: bool
    sampled: Counts
    prefilled: Counts  # the admissions' tokens less those found in the cache
    request_sampled: Counts = ()  # what all tries of a finished request sampled


def requests(shape: Shape, seed: int) -> Iterator[Request]:
    """Yield requests without end.

    Prompts have nothing in common but by chance; lengths are drawn without replacement, so that a slice has its share
    of each.
    """
    rng = random.Random(seed)
    lengths_left: list[int] = []
    while True:
        prompt = [rng.randrange(256) for _ in range(shape.prompt)]
        for _ in range(shape.group):
            lengths_left = lengths_left or rng.sample(shape.answers, len(shape.answers))
            yield Request(prompt, lengths_left.pop())


def number_of(version: str) -> int:
    """Return how many publications came before a version: its name is "<slice>.<number>"."""
    return int(version.rpartition(".")[2])


@dataclass(slots=True)
class ModeLoad:
    """The load keeps `shape.in_flight` requests in flight on one engine while the block runs.

    At its end those that are left are aborted and their answers counted. `keep_tokens`: an aborted request is sent
    again with the tokens that it has; else they are thrown away and the next request takes its place.
    """

    client: EngineClient
    shape: Shape
    seed: int
    keep_tokens: bool
    tries: list[Try] = field(default_factory=list)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _ending: bool = False

    async def __aenter__(self) -> ModeLoad:
        source = requests(self.shape, self.seed)
        self._tasks = [asyncio.create_task(self._keep(source)) for _ in range(self.shape.in_flight)]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._ending = True
        try:
            if exc[0] is None:  # else the engine may be gone, and that error must be raised
                await settle(self.client)
                async with asyncio.timeout(SETTLED_S):
                    await asyncio.gather(*self._tasks)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def check(self) -> None:
        """Raise what a request raised, if one did."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def _keep(self, source: Iterator[Request]) -> None:
        for request in source:
            while not self._ending and not await self._try(request):
                pass
            if self._ending:
                return

    async def _try(self, request: Request) -> bool:
        """Send the request; return whether its place is free for the next one."""
        body = {
            "input_ids": request.prompt + request.output,
            "sampling_params": {"max_new_tokens": request.answer - len(request.output), "ignore_eos": True},
        }
        answer = await self.client.generate(body)
        meta = answer["meta_info"]
        sampled = tuple(
            (number_of(span.version), span.end - span.start)
            for span in map(Span.from_json, meta.get(SAMPLED_SPANS_KEY) or ())
        )
        admissions = map(Prefill.from_json, meta.get(PREFILLS_KEY) or ())
        prefilled = tuple((number_of(p.version), p.total - p.cached) for p in admissions)
        self._check_counts(len(answer["output_ids"]), sampled, prefilled)
        request.output += answer["output_ids"]
        request.sampled += sampled
        if meta["finish_reason"]["type"] == "abort":
            self.tries.append(Try(False, sampled, prefilled))
            return not self.keep_tokens
        if len(request.output) != request.answer:
            raise BenchError(f"{self.client.name}: {len(request.output)} tokens instead of {request.answer}")
        self.tries.append(Try(True, sampled, prefilled, request.sampled))
        return True

    def _check_counts(self, tokens: int, sampled: Counts, prefilled: Counts) -> None:
        """Raise BenchError where the answer doesn't name the version of every token, or has no prefill."""
        attributed = sum(count for _, count in sampled)
        if attributed != tokens or (tokens and not prefilled):
            raise BenchError(
                f"{self.client.name}: an answer of {tokens} tokens names the version of {attributed} of them, and has "
                f"{len(prefilled)} prefills; is the hook kv_spans active?"
            )


async def all_admitted(client: EngineClient) -> None:
    """Return once every request is admitted: one that is aborted before has no record of its earlier work."""
    until = time.monotonic() + SETTLED_S
    while True:
        reports: list[Any] = await client.reports()
        if not any(r.kv.waiting for r in reports) and any(r.kv.running for r in reports):
            return
        if time.monotonic() > until:
            raise BenchError(f"{client.name} still has requests waiting after {SETTLED_S:g} s")
        await asyncio.sleep(0.02)


async def settle(client: EngineClient) -> None:
    """Abort everything and return once the engine holds no request. Raises BenchError where it still holds some."""
    until = time.monotonic() + SETTLED_S
    while True:
        await client.abort_all()
        reports: list[Any] = await client.reports()
        if not any(r.kv.running or r.kv.waiting or r.kv.requests_holding_kv for r in reports):
            return
        if time.monotonic() > until:
            raise BenchError(f"{client.name} still holds requests {SETTLED_S:g} s after they were aborted")
        await asyncio.sleep(0.05)
