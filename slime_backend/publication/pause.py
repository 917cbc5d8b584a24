"""Engines brought to the state in which their weights may change: paused, flushed where the policy says so, and proven
so by each scheduler's own counts.

    try:
        paused = await pause_generation_for_update(clients, policy)
        ...                                  # change the weights of paused.ready, and of no other
    finally:
        ...                                  # resume every one of `clients`: one that failed may be paused too

`Publication` (transaction.py) does all of this; here is what it shares with a program that updates its engines itself.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from slime_backend.engine_client import EngineClient, EngineError
from slime_backend.evidence import why_not_flushed, why_not_paused, why_not_running
from slime_backend.policy import Policy
from slime_backend.publication.report import EngineOutcome, NotConfirmed, Step
from slime_backend.publication.targets import Target, on_all
from slime_backend.wire import SchedulerReport

FLUSH_RETRY_S = 0.01  # an overlapped batch drains in milliseconds; the deadline bounds the number of tries
MAX_FLUSH_RETRY_S = 0.5
GRAMMAR_MOMENTS, GRAMMAR_MOMENT_S = 5, 1.0  # resumed so often, for at most so long each, until grammars are compiled


@dataclass(frozen=True, slots=True)
class PausedEngines:
    """What `pause_generation_for_update` achieved. `outcomes`: every engine's, by its name, with each rank's report
    after the pause (`evidence`), and where it failed `failed_step` and `reason`."""

    ready: tuple[EngineClient, ...]
    outcomes: Mapping[str, EngineOutcome]

    @property
    def refused(self) -> dict[str, str]:
        """The engines that may not be loaded, and why: the step and what was seen."""
        return {name: f"{e.failed_step}: {e.reason}" for name, e in self.outcomes.items() if e.failed_step}


async def pause_generation_for_update(clients: Sequence[EngineClient], policy: Policy) -> PausedEngines:
    """Pause every engine; then, after a retracting pause, flush every engine; verify each rank's evidence.

    The barrier between the two steps is what makes a refusal cheap: no engine has lost its cache while another still
    refuses to pause. Raises nothing for an engine that fails. Resuming is the caller's, in any case.
    """
    targets = [Target(client, EngineOutcome(client.name)) for client in clients]
    looked = await on_all(targets, "look", look)
    paused = await on_all(looked, "pause", partial(send_pause, policy=policy))
    ready = await on_all(paused, verifying_step(policy), partial(verify_pause, policy=policy))
    return PausedEngines(tuple(t.client for t in ready), {t.name: t.outcome for t in targets})


def verifying_step(policy: Policy) -> Step:
    """The step that follows the pause: a flush with its evidence, or the evidence of the pause alone."""
    return "flush" if policy.after_pause == "flush" else "verify"


async def look(target: Target) -> None:
    """Read what each scheduler counted before the pause, to compare with."""
    target.before = await target.client.reports()


async def send_pause(target: Target, policy: Policy) -> None:
    await target.client.pause(policy.pause_mode)


async def verify_pause(target: Target, policy: Policy) -> None:
    """Flush where the policy says so, and wait until every rank's report proves the pause, and the flush.

    A pause is dispatched without an acknowledgement (SGLang 0.5.23, tokenizer_manager.py): the schedulers' own counts,
    read behind it on the same queue, are the acknowledgement.

    Raises NotConfirmed, or EngineError where the engine doesn't answer.
    """
    if policy.after_pause == "flush":
        after = await _flush_until_empty(target, policy)
        target.outcome.flush_verified = True
    else:
        after = await _until_paused(target, policy)
    target.at_pause = target.outcome.evidence = after
    target.outcome.in_flight = sum(r.kv.in_flight_at_pause for r in after)
    target.outcome.requests_retracted = sum(r.kv.retracted_at_pause for r in after)
    target.outcome.tokens_to_prefill_again = sum(r.kv.tokens_at_pause for r in after)


async def _until_paused(target: Target, policy: Policy) -> list[SchedulerReport]:
    until = time.monotonic() + target.client.deadlines.pause
    while True:
        after = await target.client.reports()
        reasons = why_not_paused(target.before, after, policy)
        if not reasons:
            return after
        if time.monotonic() > until:
            raise NotConfirmed(target.name, "; ".join(reasons))
        await asyncio.sleep(FLUSH_RETRY_S)


async def _flush_until_empty(target: Target, policy: Policy) -> list[SchedulerReport]:
    """Flush until the evidence says empty, or the deadline. The HTTP answer alone decides nothing."""
    until = time.monotonic() + target.client.deadlines.flush
    wait = FLUSH_RETRY_S
    moments = 0
    while True:
        answer = "the engine answered success"
        try:
            await target.client.flush()
        except EngineError as error:  # refused, or its outcome is unknown: the evidence decides
            answer = error.seen
        after = await target.client.reports()
        reasons = why_not_flushed(target.before, after, policy)
        if not reasons:
            return after
        if time.monotonic() > until:
            raise NotConfirmed(target.name, f"flush not verified ({answer}): {'; '.join(reasons)}")
        if _only_grammars_refuse(target.before, after):
            if moments == GRAMMAR_MOMENTS:
                raise NotConfirmed(
                    target.name,
                    f"requests wait for their grammars, and no flush passes meanwhile ({answer}): "
                    f"{'; '.join(reasons)}; start the engine with the hook grammar_flush",
                )
            moments += 1
            await _let_grammars_in(target, policy)
            continue
        await asyncio.sleep(wait)
        wait = min(2 * wait, MAX_FLUSH_RETRY_S)


def _only_grammars_refuse(before: Sequence[SchedulerReport], after: Sequence[SchedulerReport]) -> bool:
    return any(
        new.kv.only_grammars_wait and new.kv.flush_epoch <= old.kv.flush_epoch and new.missing_hooks(("grammar_flush",))
        for old, new in zip(before, after, strict=False)
    )


async def _let_grammars_in(target: Target, policy: Policy) -> None:
    """Resume an engine whose flush is refused only because requests wait for their grammars, and pause it again.

    A paused scheduler doesn't look whether a grammar is ready (0.5.23, managers/scheduler.py:2034). What it generates
    in between is of the old weights, as before the first pause; the evidence is counted from the second.
    """
    await target.client.resume()
    until = time.monotonic() + GRAMMAR_MOMENT_S
    while any(r.kv.grammar_queue for r in await target.client.reports()) and time.monotonic() < until:
        await asyncio.sleep(FLUSH_RETRY_S)
    before = await target.client.reports()
    if reasons := why_not_running(target.before, before):
        raise NotConfirmed(target.name, "; ".join(reasons))
    target.before = before
    await target.client.pause(policy.pause_mode)
