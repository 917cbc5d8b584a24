"""A hook whose code raises never ends a real engine: it goes on serving what SGLang alone would, and reports the fault.

Every function that hooks attach and that this load reaches is made to raise in turn, at each of its places
(broken_hooks.py), while the engine generates, is paused, flushed, loaded and resumed. The answers must be those of the
weights that are loaded, and the scheduler's report must name the hook, which is what a controller retires an engine by.
"""

from __future__ import annotations

import json
import threading
import urllib.request
import uuid
from functools import partial
from pathlib import Path

import pytest

from slime_backend.engine_process import RUN_HOOKS
from slime_backend.wire import FAILED, WireError
from tests.engine_plugin import broken_hooks
from tests.engine_plugin.broken_hooks import Fault, arm
from tests.engine_plugin.checks import TOLERANCE, plain_difference, prompt
from tests.engine_plugin.engine_api import Api, Background, Serve
from tests.engine_plugin.tiny_models import Reference
from tests.waiting import DEADLINE_S, ENDLESS, wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]

PLACES = {"before": ("first", "last"), "after": ("first", "last"), "around": ("first", "between", "last")}
ROUNDS = 2  # of all faults
LOADED_ALWAYS = {"kv_evidence", "kv_spans", "scope", "swa_anchors", "retract_frees"}  # hooks that every load reaches
CONTROL = "slime_backend.engine_plugin.epoch._before_update"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults")


class Flight:
    """A streamed request that decodes until it is ended. Waits for its first tokens, not for a report's counts: a hook
    that has failed may count nothing any more."""

    def __init__(self, api: Api) -> None:
        self._api, self._rid, self._decodes = api, uuid.uuid4().hex, threading.Event()
        self._call = Background(self._run, prompt(40))
        assert self._decodes.wait(DEADLINE_S), "no token came"

    def _run(self, ids: list[int]) -> str:
        sampling = {"max_new_tokens": ENDLESS, "ignore_eos": True}
        body = {"rid": self._rid, "input_ids": ids, "stream": True, "sampling_params": sampling}
        request = urllib.request.Request(
            self._api.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        last = ""
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as answer:
            for line in answer:
                self._decodes.set()
                last = line.decode().strip() or last
        return last

    def end(self) -> None:
        assert self._api.call("/abort_request", {"rid": self._rid})[0] == 200
        assert self._call.result().endswith("[DONE]")


def load_of_a_run(api: Api, paths: dict[str, str], reference: Reference | None, version: str, step: int) -> None:
    """Prompts of several chunks, a fan-out, a request in flight, one publication of `version`, and what comes after.
    `reference`: what the answers afterwards are compared with."""
    head = prompt(700)
    api.generate([head + prompt(5) for _ in range(2)], 4, sampling={"custom_params": {"kv_anchors": [len(head)]}})
    flight = Flight(api)
    assert api.call("/pause_generation", {"mode": "retract"})[0] == 200
    wait_until(lambda: api.flush() == 200, "a flush")
    api.load(paths[version])
    api.label(f"{version}-{step}")
    assert api.call("/continue_generation", {})[0] == 200
    for ids in (head, head + prompt(3)):
        answer = api.generate(ids, 4)
        assert reference is None or plain_difference(reference, version, ids, answer) < TOLERANCE
    flight.end()


def test_the_engine_goes_on_whatever_a_hook_raises(
    folder: Path, serve: Serve, hybrid_paths: dict[str, str], hybrid_reference: Reference
) -> None:
    start = partial(
        serve, hybrid_paths["v0"], hooks=(*RUN_HOOKS, "scope"), environment=broken_hooks.environment(folder)
    )
    with start() as api:
        load_of_a_run(api, hybrid_paths, hybrid_reference, "v1", 0)
        ran = [line.split("|") for line in broken_hooks.lines(folder, "ran")]
        raised, at_start = [], []
        for step, fault in enumerate(ROUNDS * [Fault(name, place) for name, kind in ran for place in PLACES[kind]]):
            arm(folder, fault)
            load_of_a_run(api, hybrid_paths, hybrid_reference, ("v2", "v1")[step % 2], step + 1)
            (raised if list(broken_hooks.lines(folder, "raised")) else at_start).append(fault)
        failed = failed_hooks(api)
        print(f"{len(raised)} of {len(raised)} faults survived, {sorted(failed)} report one")
        assert failed >= LOADED_ALWAYS

        arm(folder, Fault(CONTROL, "first", guarded=False))
        with pytest.raises((OSError, AssertionError)):  # without the guard the same fault ends the engine
            load_of_a_run(api, hybrid_paths, hybrid_reference, "v1", 0)

    at_start = [fault for fault in dict.fromkeys(at_start) if fault.place == "first"]
    arm(folder, *at_start)
    with start() as api:  # what is called at the start alone, all at once
        assert sorted(broken_hooks.lines(folder, "raised")) == sorted({fault.function for fault in at_start})
        arm(folder)
        # SGLang alone computes another window than the model's on a CPU (hf_window.py), so its answers aren't compared.
        load_of_a_run(api, hybrid_paths, None, "v1", 0)
        with pytest.raises(WireError, match=r"the scheduler made none: .*hook kv_evidence failed in"):
            api.report()


def failed_hooks(api: Api) -> set[str]:
    """The hooks that the scheduler reports as failed."""
    return {hook for hook, status in api.report().hooks.items() if status.startswith(FAILED)}
