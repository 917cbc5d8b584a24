"""The few calls that these tests make to a real engine."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from slime_backend.wire import REPORT_KEY, SchedulerReport


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

    def stream(self, ids: Sequence[int], tokens: int) -> list[Any]:
        body = {
            "input_ids": list(ids),
            "return_logprob": True,
            "stream": True,
            "sampling_params": {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True},
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
        self.load(path)
        self.label(version)
        self.resume()

    def publish_without_flush(self, path: str, version: str) -> None:
        """Retract, and trust something else than a flush to keep the old entries away."""
        self.pause("retract")
        self.load(path)
        self.label(version)
        self.resume()

    def until(self, holds: Callable[[SchedulerReport], bool], what: str, seconds: float = 30.0) -> SchedulerReport:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            report = self.report()
            if holds(report):
                return report
            time.sleep(0.02)
        raise TimeoutError(f"engine never reached: {what}; last report {report}")


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

    def result(self) -> Any:
        self._thread.join(120)
        assert self._answer, "the call did not return"
        if isinstance(self._answer[0], BaseException):
            raise self._answer[0]
        return self._answer[0]


# The `serve` fixture: serve(model, **EngineSettings fields) -> context of a running engine.
Serve = Callable[..., AbstractContextManager[Api]]
