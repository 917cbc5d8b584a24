"""`FakeRank` is a fake engine's scheduler: requests hold KV, a tree keeps prompts, an epoch ends, a pause retracts.

One FakeRank is one data-parallel rank. No clock and no network: `step` is one decode step. Weights are just a name.
"""

from __future__ import annotations

import asyncio
import uuid
from dataclasses import dataclass, field
from typing import Any

CAPACITY = 100_000  # KV slots of a rank
ROWS = 1024  # request rows of a rank


@dataclass(slots=True)
class FakeRequest:
    prompt: int
    wanted: int
    rid: str = ""
    sampled: list[str] = field(default_factory=list)  # the version of each token
    truth: list[str] = field(default_factory=list)  # the weights that were really in memory, for each token
    context: list[str] = field(default_factory=list)  # the version that computed each position's KV
    segments: list[dict[str, Any]] = field(default_factory=list)
    prefills: list[dict[str, Any]] = field(default_factory=list)
    holds_kv: bool = False
    grammar: bool = False  # it waits in the grammar queue
    compiled: bool = False  # its grammar is ready; only a running scheduler notices
    epoch: int = 0  # at its admission to prefill
    aborted: bool = False
    done: asyncio.Event = field(default_factory=asyncio.Event)
    progress: asyncio.Event = field(default_factory=asyncio.Event)  # one more token, or done; cleared by the waiter

    @property
    def kv_tokens(self) -> int:
        return self.prompt + len(self.sampled) if self.holds_kv else 0

    def begin_segment(self, version: str) -> None:
        self.end_segment()
        start = len(self.sampled)
        self.segments.append({"start": start, "end": start, "version": version, "context": []})

    def end_segment(self) -> None:
        """Record the segment once; at every token this would cost more than all else that a fake engine does."""
        if self.segments and self.segments[-1]["end"] < len(self.sampled):
            self.segments[-1].update(end=len(self.sampled), context=spans(self.context))


@dataclass(slots=True)
class FakeRank:
    """A rank is one scheduler."""

    radix_cache: bool
    scoped: bool
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
    # Unused radix cache entries, in tokens, by the epoch in their key; by 0 in an engine that doesn't scope.
    tree: dict[int, int] = field(default_factory=dict)
    swept_epoch: int | None = None
    swept_tokens: int = 0
    requests: list[FakeRequest] = field(default_factory=list)
    forward_passes: int = 0
    device_waits: int = 0
    image_features: int = 0
    grammar_queue: int = 0  # requests that a test adds to those that have a grammar
    tree_name: str = "UnifiedRadixCache"
    skip_sweep: bool = False  # a fault: an epoch ends and the older entries stay
    ignores_pause: bool = False  # a fault: the flag is set and generation goes on, as with pipeline parallelism
    skip_device_wait: bool = False  # a fault: an update begins while a batch may still be on the device
    skip_feature_clear: bool = False  # a fault: an epoch ends and image features of the old tower stay
    loads_done: int = 0
    loads_failed: int = 0
    last_load_failed: bool = False
    tensor_size: int = 1
    # How single tensor ranks differ from tensor rank 0: rank -> fields of its report, or why it has none.
    tensor_faults: dict[int, dict[str, Any] | str] = field(default_factory=dict)
    grammar_flush: bool = False  # the hook of that name
    refuse_flush: bool = False  # a fault: this rank alone refuses, and rank 0's answer hides it (DP > 1)

    def pause(self, mode: str) -> None:
        self.pauses += 1
        self.pause_mode = mode
        held = [r for r in self.requests if r.holds_kv]
        self.in_flight_at_pause = len(self.requests)
        self.retracted_at_pause = self.tokens_at_pause = 0
        if mode == "retract":
            self.retracted_at_pause = len(held)
            self.tokens_at_pause = sum(r.kv_tokens for r in held)
            for request in held:
                request.holds_kv = False
                self._store(request)
        elif mode == "abort":
            self.abort(None)

    def flush(self) -> bool:
        """Empty the tree. Refuse with False while a request holds KV, waits for its grammar, or waits unpaused."""
        holding = sum(r.holds_kv for r in self.requests)
        queued = 0 if self.pause_mode else len(self.requests)
        counts_grammars = not (self.grammar_flush and self.pause_mode == "retract")
        if holding or queued or self.refuse_flush or (counts_grammars and self._grammars):
            self.flush_refused += 1
            self.last_refusal = {
                "paused": self.pause_mode is not None,
                "pause_mode": self.pause_mode,
                "requests_holding_kv": holding,
                "waiting": self._waiting,
                "running": 0 if self.pause_mode == "retract" else holding,
                "chunked": 0,
                "result_queue": 0,
                "last_batch": 0 if self.pause_mode == "retract" else holding,
                "grammar_queue": self._grammars,
            }
            return False
        self.flush_epoch += 1
        self.tree.clear()
        return True

    def end_epoch(self) -> None:
        self.epoch += 1
        self.order = 0
        self.device_waits += not self.skip_device_wait
        if not self.skip_feature_clear:
            self.image_features = 0
        if self.scoped and not self.skip_sweep:
            self.swept_epoch = self.epoch
            self.swept_tokens += sum(self.tree.values())
            self.tree.clear()

    def load(self, success: bool) -> None:
        self.loads_done += success
        self.loads_failed += not success
        self.last_load_failed = not success
        self.end_epoch()

    def abort(self, rid: str | None) -> None:
        """End the requests whose id begins with `rid`, as SGLang matches it; all of them for None."""
        for request in [r for r in self.requests if rid is None or r.rid.startswith(rid)]:
            request.aborted, request.holds_kv = True, False
            request.end_segment()
            self.requests.remove(request)
            request.done.set()
            request.progress.set()

    def step(self, label: str, loaded: str) -> None:
        """Sample one token for each request, under the label `label`, by the weights `loaded`."""
        self.forward_passes += bool(self.requests)
        for request in list(self.requests):
            request.grammar = request.grammar and not request.compiled
            if request.grammar:
                continue
            if not request.holds_kv:
                self._admit(request, label)
            else:
                if request.segments[-1]["version"] != label:
                    request.begin_segment(label)
                request.context.append(label)
            request.sampled.append(label)
            request.truth.append(loaded)
            if len(request.sampled) >= request.wanted:
                request.holds_kv = False
                self.requests.remove(request)
                self._store(request)
                request.end_segment()
                request.done.set()
            request.progress.set()

    def _admit(self, request: FakeRequest, label: str) -> None:
        length = request.prompt + len(request.sampled)
        cached = min(self.tree.get(self._scope, 0), length - 1) if self.radix_cache else 0
        request.prefills.append(
            {"epoch": self.epoch, "order": self.order, "version": label, "cached": cached, "total": length}
        )
        self.order += 1
        request.holds_kv, request.epoch = True, self.epoch
        request.begin_segment(label)
        request.context = [label] * length

    @property
    def _grammars(self) -> int:
        return sum(r.grammar for r in self.requests)

    @property
    def _waiting(self) -> int:
        return sum(not (r.holds_kv or r.grammar) for r in self.requests)

    @property
    def _scope(self) -> int:
        return self.epoch if self.scoped else 0

    def _store(self, request: FakeRequest) -> None:
        """Store a request's prompt in the tree, unless it is from an older epoch."""
        if self.radix_cache and (not self.scoped or request.epoch == self.epoch):
            self.tree[self._scope] = max(self.tree.get(self._scope, 0), request.prompt)

    def report(self, hooks: dict[str, str]) -> dict[str, Any]:
        """Return wire.SchedulerReport as JSON, with those of the other tensor ranks."""
        own = self._own_report(hooks)
        others: dict[int, dict[str, Any] | str] = {
            rank: fault if isinstance(fault := self.tensor_faults.get(rank, {}), str) else self._peer(own, rank, fault)
            for rank in range(1, self.tensor_size)
        }
        own["tensor_ranks"] = [other for other in others.values() if not isinstance(other, str)]
        own["missing_ranks"] = {str(rank): other for rank, other in others.items() if isinstance(other, str)}
        return own

    def _peer(self, own: dict[str, Any], rank: int, fault: dict[str, Any]) -> dict[str, Any]:
        kv = {**own["kv"], **fault.get("kv", {})}
        return {**own, "instance_id": f"{self.instance_id}-{rank}", "tensor_rank": rank, **fault, "kv": kv}

    def _own_report(self, hooks: dict[str, str]) -> dict[str, Any]:
        holding = [r for r in self.requests if r.holds_kv]
        used = sum(r.kv_tokens for r in holding)
        return {
            "instance_id": self.instance_id,
            "hooks": hooks,
            "epoch": self.epoch,
            "loads": {
                "done": self.loads_done,
                "failed": self.loads_failed,
                "last_failure": "no such model" if self.loads_failed else None,
                "last_failed": self.last_load_failed,
            },
            "tensor_rank": 0,
            "tensor_size": self.tensor_size,
            "tensor_ranks": [],
            "missing_ranks": {},
            "kv": {
                "flush_epoch": self.flush_epoch,
                "flush_refused": self.flush_refused,
                "last_refusal": self.last_refusal,
                "paused": self.pause_mode is not None,
                "pauses": self.pauses,
                "pause_mode": self.pause_mode,
                "in_flight_at_pause": self.in_flight_at_pause,
                "retracted_at_pause": self.retracted_at_pause,
                "tokens_at_pause": self.tokens_at_pause,
                "swept_epoch": self.swept_epoch,
                "swept_tokens": self.swept_tokens,
                "tree_full_evictable": sum(self.tree.values()),
                "tree_full_protected": 0,
                "tree_swa_evictable": 0,
                "tree_swa_protected": 0,
                "full_free": CAPACITY - used - sum(self.tree.values()),
                "full_capacity": CAPACITY,
                "swa_free": 0,
                "swa_capacity": 0,
                "request_rows_free": ROWS - len(holding),
                "request_rows_capacity": ROWS,
                "requests_holding_kv": len(holding),
                "waiting": self._waiting,
                "running": 0 if self.pause_mode == "retract" else len(holding),
                "chunked": 0,
                "result_queue": 0,
                "forward_passes": self.forward_passes,
                "device_waits": self.device_waits,
                "device_waits_failed": 0,
                "image_features": self.image_features,
                "grammar_queue": self.grammar_queue + self._grammars,
                "tree": self.tree_name,
                "tree_mamba_evictable": 0,
                "tree_mamba_protected": 0,
                "mamba_free": 0,
                "mamba_capacity": 0,
            },
        }


def spans(versions: list[str]) -> list[dict[str, Any]]:
    """Return the runs of one version, as wire.Span JSON."""
    runs: list[dict[str, Any]] = []
    for position, version in enumerate(versions):
        if runs and runs[-1]["version"] == version:
            runs[-1]["end"] = position + 1
        else:
            runs.append({"version": version, "start": position, "end": position + 1})
    return runs
