"""What holds on a running SGLang server, found by trying it: pause, flush, scope, label, spans.

Works on any server, with or without our plugin, since each check watches behaviour from outside: whether a streamed
request gets tokens while paused, what `cached_tokens` says of the same prompt before and after. It pauses the server
for moments, flushes its cache, and puts its label back; weights are not touched. Don't run it on a server that others
measure.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from slime_backend.engine_client import EngineClient, EngineError, EngineProtocolError, EngineRefused
from slime_backend.fleet.kv_holders import unhandled
from slime_backend.policy import Policy
from slime_backend.wire import SAMPLED_SPANS_KEY

Verdict = Literal["holds", "does not hold", "not applicable", "unknown"]

PROMPT = 256  # tokens of a probe; long enough for any page size
LONG = 2000  # tokens of a request that must still be running when it is paused
ENDS_S = 120.0  # for the rest of a long request, after the resume
STILL_S = 0.5  # how long a paused request must get no token, at least
STILL_GAPS = 5  # and how many times the longest gap between two of its events while it ran
EVENTS = 4  # of a stream, before its gaps are known
SETTLES_S = 10.0  # tokens that were sampled before the pause have arrived by then
TOKEN_IDS = range(5, 200)  # ids that every vocabulary has


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    seen: str
    meaning: str  # for training


@dataclass(slots=True)
class Diagnosis:
    engine: str
    findings: list[Finding]

    def holds(self, check: str) -> bool:
        return any(f.check == check and f.verdict == "holds" for f in self.findings)

    def unsafe_for(self, policy: Policy) -> list[str]:
        """The findings that make `policy` unsafe on this engine; empty if it is safe."""
        after_pause = {
            "flush": ("retract pause", "flush after a retract", "kv evidence"),
            "sweep": ("in-place pause", "scope", "kv evidence"),
            "nothing": ("in-place pause", "radix cache off", "kv evidence"),
        }[policy.after_pause]
        needed = ("label", "no other KV holder", *after_pause)
        return [f"{f.check}: {f.seen}" for f in self.findings if f.check in needed and f.verdict != "holds"]


async def diagnose(client: EngineClient, allow: frozenset[str] = frozenset()) -> Diagnosis:
    """Run every check. Raises EngineError only where the server can't be asked at all."""
    info = await client.server_info()
    findings = [_settings(info), _holders(info, allow), await _plugin(client, info)]
    radix_on = not info.get("disable_radix_cache", False)
    original = await client.weight_version()
    checks: list[tuple[str, str, Callable[[EngineClient], Awaitable[tuple[bool, str]]]]] = [
        ("retract pause", "requests in flight survive a publication and are prefilled again", _retract_pause),
        ("in-place pause", "requests in flight keep their KV across a publication", _in_place_pause),
        ("label", "rollouts can be told apart by version", _label),
        ("weight digests", "an engine that kept old tensors is found before it resumes", _digests),
        ("sampled spans", "a rollout that crosses a publication says which tokens are whose", _spans),
    ]
    if radix_on:
        checks += [
            ("prefix sharing", "a shared prompt is computed once", _sharing),
            ("flush after a retract", "no prefix of older weights is served as new", _flush),
            ("scope", "a new version finds no entry of an older one, without a flush", _scope),
        ]
    try:
        for name, meaning, check in checks:
            findings.append(await _try(client, name, meaning, check))
    finally:
        with suppress(EngineError):  # whatever happened, the server must not stay paused or renamed
            await client.resume()
        if original is not None:
            with suppress(EngineError):
                await client.label(original)
    return Diagnosis(client.name, findings)


async def _try(
    client: EngineClient, name: str, meaning: str, check: Callable[[EngineClient], Awaitable[tuple[bool, str]]]
) -> Finding:
    try:
        ok, seen = await check(client)
    except EngineError as error:
        with suppress(EngineError):
            await client.resume()
        return Finding(name, "does not hold" if isinstance(error, EngineRefused) else "unknown", error.seen, meaning)
    except TimeoutError:
        with suppress(EngineError):
            await client.resume()
        seen = f"a request of {LONG} tokens didn't end within {ENDS_S:g} s; ask while the engine has less to do"
        return Finding(name, "unknown", seen, meaning)
    return Finding(name, "holds" if ok else "does not hold", seen, meaning)


def _settings(info: dict[str, Any]) -> Finding:
    off = bool(info.get("disable_radix_cache", False))
    seen = f"SGLang {info.get('version', '?')}, radix cache {'off' if off else 'on'}, dp {info.get('dp_size', 1)}"
    return Finding(
        "radix cache off", "holds" if off else "does not hold", seen, "only then may in-flight KV be kept unscoped"
    )


def _holders(info: dict[str, Any], allow: frozenset[str]) -> Finding:
    found = unhandled(info, allow)
    seen = "; ".join(f"{h.name}: {h.why}" for h in found) or "none"
    return Finding(
        "no other KV holder", "does not hold" if found else "holds", seen, "else old KV survives beside the radix cache"
    )


async def _plugin(client: EngineClient, info: dict[str, Any]) -> Finding:
    meaning = "a flush can be verified, not only believed; an audit needs kv_spans"
    try:
        reports = await client.reports(info)
    except EngineProtocolError as error:
        return Finding("kv evidence", "does not hold", error.seen, meaning)
    missing = [rank for rank, report in enumerate(reports) if report.missing_hooks(("kv_evidence",))]
    hooks = ", ".join(f"{name} {state}" for name, state in reports[0].hooks.items())
    return Finding("kv evidence", "does not hold" if missing else "holds", f"{len(reports)} ranks; {hooks}", meaning)


def _prompt() -> list[int]:
    return random.choices(TOKEN_IDS, k=PROMPT)


async def _ask(client: EngineClient, ids: list[int], tokens: int = 1, rid: str | None = None) -> dict[str, Any]:
    sampling = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": ids, "sampling_params": sampling, **({"rid": rid} if rid else {})}
    answer = await client.generate(body)
    meta: dict[str, Any] = answer["meta_info"]
    return meta


@dataclass(slots=True)
class Flight:
    """A streamed request: how many tokens have come, and when each event came."""

    tokens: int = 0
    events: list[float] = field(default_factory=list)  # monotonic seconds

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in zip(self.events, self.events[1:], strict=False)), default=0.0)

    async def follow(self, client: EngineClient, ids: list[int], rid: str) -> dict[str, Any]:
        """Send the request and count what comes. Returns the last event's meta_info."""
        sampling = {"max_new_tokens": LONG, "temperature": 0.0, "ignore_eos": True}
        meta: dict[str, Any] = {}
        async with client.generate_stream({"input_ids": ids, "sampling_params": sampling, "rid": rid}) as stream:
            async for answers in stream.answers():
                meta = answers[-1]["meta_info"]
                self.tokens = int(meta["completion_tokens"])
                self.events.append(time.monotonic())
        return meta


@asynccontextmanager
async def _flying(client: EngineClient) -> AsyncIterator[tuple[asyncio.Task[dict[str, Any]], Flight]]:
    """One long request that gets tokens, unless its task is done; ended, it alone, when the block is left."""
    rid = uuid.uuid4().hex
    flight = Flight()
    task = asyncio.create_task(flight.follow(client, _prompt(), rid))
    try:
        async with asyncio.timeout(ENDS_S):
            while len(flight.events) < EVENTS and not task.done():
                await asyncio.sleep(0.005)
        yield task, flight
    finally:
        if not task.done():
            task.cancel()
            with suppress(EngineError):
                await client.abort(rid)
        await asyncio.gather(task, return_exceptions=True)


async def _cached(client: EngineClient, ids: list[int]) -> int:
    return int((await _ask(client, ids))["cached_tokens"])


async def _pause_stands_still(client: EngineClient, mode: Literal["retract", "in_place"]) -> tuple[bool, str]:
    """A long request is streamed and paused: no token may come then, and all of them after the resume."""
    async with _flying(client) as (flying, flight):
        if flying.done():
            flying.result()  # it was refused: that is the finding
            return False, f"the probe of {LONG} tokens ended before it could be paused"
        await client.pause(mode)
        at_pause = flight.tokens
        still = await _falls_silent(flying, flight)
        during, ended = flight.tokens - at_pause, flying.done()
        await client.resume()
        if ended:
            return False, f"the request ended while paused: {flying.result().get('finish_reason')}"
        if not still:
            return False, f"the request went on while paused: {during} tokens in {SETTLES_S:g} s"
        meta = await asyncio.wait_for(flying, ENDS_S)
        complete = meta["completion_tokens"] == LONG
        return complete, f"no token while paused, then {meta['completion_tokens']} of {LONG} tokens"


async def _falls_silent(flying: asyncio.Task[dict[str, Any]], flight: Flight) -> bool:
    """Whether, before SETTLES_S have passed, no event comes for so long that a running request would have had several.

    Tokens that were sampled before the pause reached the scheduler may still arrive at first.
    """
    silence = max(STILL_S, STILL_GAPS * flight.longest_gap)
    until = time.monotonic() + max(SETTLES_S, 2 * silence)
    seen, since = len(flight.events), time.monotonic()
    while time.monotonic() < until and not flying.done():
        if len(flight.events) != seen:
            seen, since = len(flight.events), time.monotonic()
        if time.monotonic() - since > silence:
            return True
        await asyncio.sleep(0.01)
    return False


async def _retract_pause(client: EngineClient) -> tuple[bool, str]:
    return await _pause_stands_still(client, "retract")


async def _in_place_pause(client: EngineClient) -> tuple[bool, str]:
    return await _pause_stands_still(client, "in_place")


async def _sharing(client: EngineClient) -> tuple[bool, str]:
    ids = _prompt()
    first, second = await _cached(client, ids), await _cached(client, ids)
    return first == 0 and second > 0, f"the same prompt twice: {first}, then {second} of {PROMPT} tokens cached"


async def _flush(client: EngineClient) -> tuple[bool, str]:
    """With a request in flight, as at a publication."""
    ids = _prompt()
    await _cached(client, ids)
    async with _flying(client):
        await client.pause("retract")
        refusal = ""
        try:
            await client.flush()
        except EngineRefused as error:
            refusal = f"refused ({error.seen}); "
        finally:
            await client.resume()
        left = await _cached(client, ids)
    return not refusal and left == 0, f"{refusal}the same prompt afterwards: {left} of {PROMPT} tokens cached"


async def _label(client: EngineClient) -> tuple[bool, str]:
    name = f"doctor-{uuid.uuid4().hex[:8]}"
    await client.label(name)
    found = await client.weight_version()
    answered = (await _ask(client, _prompt())).get("weight_version")
    return found == name == answered, f"renamed to {name}; reads {found}, answers say {answered}"


async def _spans(client: EngineClient) -> tuple[bool, str]:
    names = [f"doctor-{uuid.uuid4().hex[:8]}" for _ in range(2)]
    await client.label(names[0])
    async with _flying(client) as (flying, _):
        await client.label(names[1])
        meta = await asyncio.wait_for(flying, ENDS_S)
    spans = meta.get(SAMPLED_SPANS_KEY)
    if not spans:
        return False, f"no {SAMPLED_SPANS_KEY}; the answer claims {meta.get('weight_version')} throughout"
    return [s["version"] for s in spans] == names, f"{len(spans)} spans over {spans[-1]['end']} tokens"


async def _digests(client: EngineClient) -> tuple[bool, str]:
    """Twice over the same weights, as before and after a load that changes nothing."""
    first, started = await client.weight_digests(), time.monotonic()
    second, seconds = await client.weight_digests(), time.monotonic() - started
    tensors = sum(len(rank.digests) for rank in first)
    same = sum(a.digests == b.digests for a, b in zip(first, second, strict=True))
    seen = f"{tensors} tensors in {seconds * 1000:.0f} ms; {same} of {len(first)} ranks the same twice"
    return same == len(first), seen


async def _scope(client: EngineClient) -> tuple[bool, str]:
    """A bare rename is the smallest publication: entries of before must not match after it."""
    ids = _prompt()
    await client.label(f"doctor-{uuid.uuid4().hex[:8]}")
    await _cached(client, ids)
    await client.label(f"doctor-{uuid.uuid4().hex[:8]}")
    first, second = await _cached(client, ids), await _cached(client, ids)
    return first == 0 and second > 0, f"after a rename: {first}, then {second} of {PROMPT} tokens cached"
