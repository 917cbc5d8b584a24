"""The few calls that these tests make to a real engine."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from slime_backend.wire import REPORT_KEY, KvEvidence, SchedulerReport
from tests.waiting import DEADLINE_S, DELAY_S, ENDLESS, TOO_FAST, all_decode, have_gone_on, wait_until


class Api:
    def __init__(self, url: str) -> None:
        self.url = url

    def call(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                status, text = answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read().decode()
        try:
            return status, json.loads(text)
        except ValueError:
            return status, text

    def reports(self) -> list[SchedulerReport]:
        _, info = self.call("/server_info")
        return [SchedulerReport.from_json(state[REPORT_KEY]) for state in info["internal_states"]]

    def report(self) -> SchedulerReport:
        (report,) = self.reports()
        return report

    def generate(self, ids: Sequence[int] | list[list[int]], tokens: int, **options: Any) -> Any:
        sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **options.pop("sampling", {})}
        status, answer = self.call(
            "/generate", {"input_ids": list(ids), "return_logprob": True, "sampling_params": sampling, **options}
        )
        assert status == 200, answer
        return answer

    def stream(self, ids: Sequence[int], tokens: int, **sampling: Any) -> list[Any]:
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True, **sampling},
        }
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            lines = [line.decode().removeprefix("data: ").strip() for line in answer]
        return [json.loads(line) for line in lines if line and line != "[DONE]"]

    def pause(self, mode: str) -> SchedulerReport:
        """Pause and wait until the scheduler says so: SGLang answers before the pause arrives there."""
        before = self.report().kv.pauses
        assert self.call("/pause_generation", {"mode": mode})[0] == 200
        return self.until(lambda report: report.kv.pauses > before, "pause")

    def resume(self) -> None:
        assert self.call("/continue_generation", {})[0] == 200
        self.until(lambda report: not report.kv.paused, "resume")

    def flush(self) -> int:
        return self.call("/flush_cache", {})[0]

    def load(self, path: str, version: str | None = None) -> None:
        body = {"model_path": path, "flush_cache": False}
        if version is not None:
            body["weight_version"] = version
        status, answer = self.call("/update_weights_from_disk", body)
        assert (status, answer["success"]) == (200, True), answer

    def label(self, version: str) -> None:
        status, answer = self.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        assert status == 200, answer

    def publish(self, path: str, version: str, mode: str) -> None:
        """The controller's transaction: pause, flush what may be flushed, load without a label, label, resume."""
        self.pause(mode)
        if mode == "retract":
            assert self.flush() == 200
            assert self.report().kv.is_empty, self.report().kv.leftovers()
        self.load_and_resume(path, version)

    def publish_without_flush(self, path: str, version: str) -> None:
        """Retract, and trust something else than a flush to keep the old entries away."""
        self.pause("retract")
        self.load_and_resume(path, version)

    def load_and_resume(self, path: str, version: str) -> None:
        self.load(path)
        self.label(version)
        self.resume()

    def until(
        self, holds: Callable[[SchedulerReport], bool], what: str, seconds: float = DEADLINE_S
    ) -> SchedulerReport:
        def look() -> SchedulerReport | None:
            report = self.report()
            return report if holds(report) else None

        found: SchedulerReport = wait_until(look, f"{what}, by the report of {self.url}", seconds)
        return found


class Background:
    """A call in a thread; `result()` waits for it."""

    def __init__(self, function: Callable[..., Any], *args: Any, **options: Any) -> None:
        self._answer: list[Any] = []

        def run() -> None:
            try:
                self._answer.append(function(*args, **options))
            except BaseException as error:  # handed to the waiting test
                self._answer.append(error)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def done(self) -> bool:
        return not self._thread.is_alive()

    def check(self) -> None:
        """Fail where it is over."""
        if self.done():
            raise AssertionError(TOO_FAST.format(ENDLESS) + f" (it came to {str(self._answer)[:300]})")

    def result(self) -> Any:
        self._thread.join(2 * DEADLINE_S)
        assert self._answer, "the call did not return"
        if isinstance(self._answer[0], BaseException):
            raise self._answer[0]
        return self._answer[0]


class Endless(Background):
    """A request, or a batch of them, that goes on until it is ended."""

    def __init__(self, api: Api, ids: Sequence[int] | list[list[int]], **options: Any) -> None:
        self.api, self.count = api, len(ids) if isinstance(ids[0], list) else 1
        self.before = requests_that_decode(api)
        self.rids = [uuid.uuid4().hex for _ in range(self.count)]
        rid = self.rids if isinstance(ids[0], list) else self.rids[0]
        super().__init__(api.generate, ids, ENDLESS, rid=rid, **options)

    def started(self) -> Endless:
        """Itself, once it decodes. It must be the only one that comes or goes."""
        go_on(self.api, self.before + self.count, [self])
        return self

    def end(self) -> Any:
        """End it; its answer up to here."""
        self.check()
        for rid in self.rids:
            assert self.api.call("/abort_request", {"rid": rid})[0] == 200
        return super().result()

    def result(self) -> Any:
        """Let it go on for some tokens, then end it; its answer."""
        go_on(self.api, self.count, [self])
        return self.end()


def requests_that_decode(api: Api) -> int:
    """How many requests decode, or are held by a pause. A scheduler counts those that have just ended until its next
    turn, so a count stands only where it is 0, or where a step was made with it."""

    def settled() -> tuple[int] | None:
        before, now = ([report.kv for report in api.reports()] for _ in range(2))
        counts = [kv.running for kv in now]
        steps = all(
            new.forward_passes > old.forward_passes for old, new in zip(before, now, strict=True) if new.running
        )
        same = counts == [kv.running for kv in before]
        return (sum(counts),) if not any(counts) or (same and steps) or any(kv.paused for kv in now) else None

    return wait_until(settled, "the engine's requests decode, or have ended")[0]


def go_on(api: Api, requests: int, calls: Sequence[Background] = ()) -> None:
    """Return once so many requests decode, and each has sampled tokens since; those of `calls` are among them."""

    def reports() -> list[KvEvidence]:
        for call in calls:
            call.check()
        return [report.kv for report in api.reports()]

    def all_admitted() -> list[KvEvidence] | None:
        found = reports()
        return found if all_decode(found, requests) else None

    before = wait_until(all_admitted, f"{requests} requests decode")
    wait_until(lambda: have_gone_on(before, reports(), requests), f"{requests} requests go on")
    time.sleep(DELAY_S)


# The `serve` fixture: serve(model, **EngineSettings fields) -> context of a running engine.
Serve = Callable[..., AbstractContextManager[Api]]
