"""A trainer's side of the gateway: samples under a lease, acknowledged once they are trained on and saved.

    client = BatchClient("http://127.0.0.1:8700", token)
    batch = client.next("run7-step12", limit=64)     # asking again with the same name gives the same samples
    ... train, save ...
    client.ack(batch.lease)

A job that may be killed at any moment keeps nothing in mind: it names its steps, and reports what its checkpoint holds.

    batch = client.wait_for_step("run7", 12, limit=64, deadline_s=3600)
    ... train, save ...
    client.saved("run7", 12)                         # the first call after a restart, too: its checkpoint's step

Blocking, the standard library and pure functions of ours only: it runs inside trainers.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from slime_backend.errors import ReefError
from slime_backend.provenance.sampling_params import not_trainable

TRIES, WAIT_S, MAX_WAIT_S = 8, 0.5, 10.0
LEASE_GONE = 409


class GatewayError(ReefError, RuntimeError):
    """The gateway refused, or can't be reached; the message is one line."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def away(self) -> bool:
        """Return whether asking again may help: there was no answer, or one of a gateway in trouble."""
        return self.status is None or self.status >= 500


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory; per-token lists are over `response_ids`, in api/batches.py's words."""

    session: str
    trajectory: int
    group: str
    score: float
    rollout_class: str
    lag: int | None
    prompt_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    spans: list[dict[str, Any]]
    receipts: list[str]
    finish_reason: str
    # Each turn's receipt, start and end over `response_ids`, temperature, and the sampling parameters that change the
    # distribution; empty from a gateway that doesn't give them.
    turns: list[dict[str, Any]] = field(default_factory=list)

    @property
    def not_trainable(self) -> dict[str, int]:
        """Count the tokens that have no importance weight, by reason (greedy, penalties, ...)."""
        found: Counter[str] = Counter()
        for turn in self.turns:
            reason = not_trainable(turn["temperature"], turn["sampling"])
            if reason:
                found[reason] += turn["end"] - turn["start"]
        return dict(found)

    @property
    def trainable_mask(self) -> list[int]:
        """`loss_mask` without the tokens that are `not_trainable`."""
        mask = list(self.loss_mask)
        for turn in self.turns:
            if not_trainable(turn["temperature"], turn["sampling"]):
                mask[turn["start"] : turn["end"]] = [0] * (turn["end"] - turn["start"])
        return mask

    @property
    def temperatures(self) -> list[float]:
        """Return the temperature of each response token; 1 where none is recorded or the token wasn't sampled."""
        found = [1.0] * len(self.response_ids)
        for turn in self.turns:
            found[turn["start"] : turn["end"]] = [float(turn["temperature"])] * (turn["end"] - turn["start"])
        return found

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Sample:
        return cls(rollout_class=data["class"], **{k: v for k, v in data.items() if k != "class"})


@dataclass(frozen=True, slots=True)
class Batch:
    lease: str | None  # None where there was nothing to give
    ends_at: float
    version: str
    samples: list[Sample]


class BatchClient:
    """The client repeats a call while the gateway is away; every call but `publish` is safe to repeat."""

    def __init__(self, url: str, token: str | None = None, *, timeout_s: float = 60.0) -> None:
        self.url, self._token, self.timeout_s = url.rstrip("/"), token, timeout_s

    def next(
        self,
        lease: str | None,
        *,
        limit: int,
        lease_s: float | None = None,
        group_size: int = 0,
        max_version_lag: int | None = None,
        min_score: float | None = None,
        max_score: float | None = None,
        classes: Sequence[str] = (),
        at_least: int = 0,
        job: str | None = None,
        step: int | None = None,
    ) -> Batch:
        """Lease the samples that there are now, at most `limit`; none where there are fewer than `at_least`.

        A lease with `job` is that job's alone; `step` names it in place of `lease`, which is None then. Raises
        GatewayError.
        """
        asked = {
            "lease": lease,
            "limit": limit,
            "lease_s": lease_s,
            "group_size": group_size or None,
            "max_version_lag": max_version_lag,
            "min_score": min_score,
            "max_score": max_score,
            "rollout_class": list(classes),
            "at_least": at_least or None,
            "job": job,
            "step": step,
        }
        data = self._call("POST", "/reef/batches", {name: value for name, value in asked.items() if value is not None})
        samples = [Sample.from_json(sample) for sample in data["samples"]]
        return Batch(data["lease"], data["ends_at"], data["version"], samples)

    def wait(self, lease: str, enough: Callable[[Batch], bool], *, deadline_s: float, **wish: Any) -> Batch:
        """Call `next` until `enough`; a batch that isn't enough is released before the next call.

        A gateway that is away, or not up yet, is waited for as well. Raises GatewayError at the deadline.
        """
        until, wait = time.monotonic() + deadline_s, WAIT_S
        attempt = 0  # the name of a released lease can't be used again, so each try has its own
        while True:
            try:
                batch = self.next(f"{lease}.{attempt}" if attempt else lease, **wish)
            except GatewayError as error:
                if error.status == LEASE_GONE:
                    attempt += 1
                elif not error.away or time.monotonic() > until:
                    raise
                continue
            if enough(batch):
                return batch
            attempt += 1
            if batch.lease is not None:
                self.release(batch.lease)
            if time.monotonic() + wait > until:
                break
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT_S)
        raise self._too_few(deadline_s)

    def wait_for_step(self, job: str, step: int, *, deadline_s: float, **wish: Any) -> Batch:
        """Lease a step's samples once there are `limit` (of groups, where `group_size` is given).

        Asked again, also by another process and after a crash, a step gets what it had, as long as that is its own.
        Raises GatewayError at the deadline.
        """
        until, wait = time.monotonic() + deadline_s, WAIT_S
        while True:
            try:
                batch = self.next(None, job=job, step=step, at_least=wish["limit"], **wish)
                if batch.samples:
                    return batch
            except GatewayError as error:
                if not error.away or time.monotonic() > until:
                    raise
                continue  # _call has waited
            if time.monotonic() + wait > until:
                raise self._too_few(deadline_s)
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT_S)

    def ack(self, lease: str) -> int:
        """Mark the lease's samples as trained on and return how many there are. Raises GatewayError, status 409 where
        the lease ran out and another lease has them."""
        return int(self._call("POST", f"/reef/batches/{urllib.parse.quote(lease)}/ack")["trained"])

    def release(self, lease: str) -> int:
        return int(self._call("POST", f"/reef/batches/{urllib.parse.quote(lease)}/release")["released"])

    def saved(self, job: str, step: int, lease_s: float | None = None) -> dict[str, Any]:
        """Acknowledge a job's leases up to `step`, which its checkpoint holds, and keep the later ones for `lease_s`.

        Returns what store/jobs.py describes. Raises GatewayError.
        """
        body = {"step": step, "lease_s": lease_s}
        return self._call(
            "POST", f"/reef/jobs/{urllib.parse.quote(job)}/saved", {k: v for k, v in body.items() if v is not None}
        )

    def publish(self, checkpoint: str, version: str, *, timeout_s: float = 900.0) -> dict[str, Any]:
        """Publish a checkpoint through the gateway. Not repeated. Raises GatewayError."""
        return self._once("POST", "/reef/publications", {"checkpoint": checkpoint, "version": version}, timeout_s)

    def _too_few(self, deadline_s: float) -> GatewayError:
        return GatewayError(
            f"{self.url}: not enough scored samples within {deadline_s:g} s; are agents reporting scores? "
            "Groups that wait for sessions: GET /reef/groups"
        )

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        wait = WAIT_S
        for attempt in range(1, TRIES + 1):
            try:
                return self._once(method, path, body, self.timeout_s)
            except GatewayError as error:
                if attempt == TRIES or not error.away:
                    raise
            time.sleep(wait)
            wait = min(2 * wait, MAX_WAIT_S)
        raise AssertionError("the last try raises or returns")

    def _once(self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float) -> dict[str, Any]:
        content = b"" if method == "POST" and body is None else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=content, method=method)
        request.add_header("content-type", "application/json")
        if self._token:
            request.add_header("authorization", f"Bearer {self._token}")
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except urllib.error.HTTPError as error:
            raise GatewayError(f"{self.url}{path.split('?')[0]}: {_describe(error)}", error.code) from error
        except OSError as error:
            raise GatewayError(f"{self.url}{path.split('?')[0]}: {error}") from error


def _describe(error: urllib.error.HTTPError) -> str:
    try:
        return f"HTTP {error.code}: {json.load(error)['error']['message']}"
    except (ValueError, KeyError, TypeError, OSError):
        return f"HTTP {error.code}"
