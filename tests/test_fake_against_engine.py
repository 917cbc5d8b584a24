"""The fake engine against a real one, route by route: the same status and the same shape of the answer in each state.

A fake that is kinder than SGLang hides faults: one that answered /health while paused did. The real engine is started
with a short SGLANG_HEALTH_CHECK_TIMEOUT, as the fake's `health_s`. What a route says is compared as its status and the
keys and types of its JSON, as far as the fake has them: it may say less, never otherwise.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import asynccontextmanager

import pytest

from slime_backend.engine_client.http import HttpChannel
from slime_backend.simulation.fake_engine import FakeEngine
from slime_backend.wire import REPORTS_PATH

pytestmark = pytest.mark.engine

HEALTH_S = 3
ANSWER_S = 60.0
IDS = [5, 6, 7, 8]
SAMPLING = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
GENERATE = {"input_ids": IDS, "sampling_params": SAMPLING, "return_logprob": True}
LABEL = {"new_version": "v0", "abort_all_requests": False}
TENSORS = {"names": ["x"], "dtypes": ["float32"], "shapes": [[1]], "group_name": "none", "flush_cache": False}

# What is asked in every state. (method, path, body)
READS = [
    ("GET", "/model_info", None),
    ("GET", "/server_info", None),
    ("GET", REPORTS_PATH, None),
    ("GET", "/no_such_route", None),
    ("POST", "/abort_request", {"rid": "nobody"}),
    ("POST", "/update_weight_version", LABEL),
]
SESSION = [  # in this order: outside of a session, inside, and what ends it
    ("POST", "/end_weight_update", {}),
    ("POST", "/update_weights_from_distributed", TENSORS),
    ("POST", "/begin_weight_update", {"selector": "all"}),
    ("POST", "/begin_weight_update", {"selector": "all"}),
    ("POST", "/end_weight_update", {}),
    ("POST", "/end_weight_update", {}),
]
RUNNING = [
    *READS,
    ("GET", "/health", None),
    ("POST", "/generate", GENERATE),
    ("POST", "/generate", {**GENERATE, "stream": True}),
    ("POST", "/flush_cache", None),
    ("POST", "/continue_generation", {}),  # of an engine that isn't paused
    *SESSION,
    # Wrong bodies.
    ("POST", "/generate", {"input_ids": [], "sampling_params": SAMPLING}),
    ("POST", "/pause_generation", {"mode": "sideways"}),
    ("POST", "/update_weight_version", {}),
    ("POST", "/update_weights_from_disk", {}),
    ("POST", "/update_weights_from_disk", {"model_path": "/nowhere/at/all", "flush_cache": False}),
    ("POST", "/abort_request", {"rid": 7}),
    ("POST", "/begin_weight_update", {"selector": 3}),
]
STATES = {
    "running": RUNNING,
    # A request is in flight in the next two.
    "in_place": [*READS, ("GET", "/health", None), ("POST", "/flush_cache", None), *SESSION],
    "retract": [*READS, ("GET", "/health", None), ("POST", "/flush_cache", None), *SESSION],
    # A second pause of either kind, and a resume.
    "paused twice": [("POST", "/pause_generation", {"mode": "in_place"}), *READS],
}


@pytest.fixture(scope="module")
def strict_engine(tiny_model, tmp_path_factory):
    from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines

    settings = EngineSettings(
        model=str(tiny_model),
        max_total_tokens=20000,
        hooks=(*RUN_HOOKS, "scope"),
        environment={"SGLANG_HEALTH_CHECK_TIMEOUT": str(HEALTH_S)},
    )
    with running_engines([LocalEngine(settings, log_path=tmp_path_factory.mktemp("strict") / "engine.log")]) as found:
        yield found[0]


def shape(value):
    """The form of a JSON value: names and types, no values."""
    if isinstance(value, dict):
        return {key: shape(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def contradictions(fake, real, where=""):
    """Where the fake's shape isn't found in the real one's. None and an empty list or object leave open what comes."""
    if isinstance(fake, dict) and isinstance(real, dict):
        found = []
        for key, entry in fake.items():
            if key not in real:
                if key not in OWN:
                    found.append(f"{where}.{key} is the fake's alone")
            else:
                found += contradictions(entry, real[key], f"{where}.{key}")
        return found
    if isinstance(fake, list) and isinstance(real, list):
        return contradictions(fake[0], real[0], f"{where}[]") if fake and real else []
    return [] if fake == real or "NoneType" in (fake, real) else [f"{where}: {fake} for {real}"]


OWN = {"truth"}  # what the fake says for tests to judge by


async def ask(channel, method, path, body):
    """(status, shape of the body)."""
    content = None if body is None else json.dumps(body).encode()
    status, raw, _ = await channel.request(method, path, content, ANSWER_S)
    text = raw.decode()
    if text.startswith("data:"):
        events = [line[5:].strip() for line in text.splitlines() if line.startswith("data:")]
        return status, {"events": [shape(json.loads(events[0]))], "last": events[-1]}
    try:
        return status, shape(json.loads(text))
    except ValueError:
        return status, "text" if text else "nothing"


async def ask_settled(channel, state, method, path, body):
    """As `ask`. A flush of an engine that isn't paused is asked until the last answer's batch is out of the way: a
    scheduler drops it one step after the answer was sent."""
    until = time.monotonic() + ANSWER_S
    while True:
        answer = await ask(channel, method, path, body)
        if answer[0] == 200 or state != "running" or path != "/flush_cache" or time.monotonic() > until:
            return answer
        await asyncio.sleep(0.02)


@asynccontextmanager
async def in_state(channel, state):
    """A request in flight, and the engine paused under it."""
    if state == "running":
        yield
        return
    long = {**GENERATE, "sampling_params": {**SAMPLING, "max_new_tokens": 2000}}
    flying = asyncio.create_task(channel.request("POST", "/generate", json.dumps(long).encode(), ANSWER_S))
    while True:
        _, raw, _ = await channel.request("GET", REPORTS_PATH, None, ANSWER_S)
        if json.loads(raw)[0]["kv"]["running"]:
            break
        await asyncio.sleep(0.02)
    mode = "retract" if state == "paused twice" else state
    await channel.request("POST", "/pause_generation", json.dumps({"mode": mode}).encode(), ANSWER_S)
    try:
        yield
    finally:
        await channel.request("POST", "/continue_generation", b"{}", ANSWER_S)
        await channel.request("POST", "/abort_request", b'{"abort_all": true}', ANSWER_S)
        await flying


async def answers(url):
    """{state: [(what was asked, status, shape)]}."""
    channel = HttpChannel(url)
    found = {}
    try:
        for state, asked in STATES.items():
            async with in_state(channel, state):
                found[state] = [
                    (f"{method} {path} {json.dumps(body)[:60]}", *await ask_settled(channel, state, method, path, body))
                    for method, path, body in asked
                ]
    finally:
        channel.close()
    return found


def differences(fake, real):
    found = []
    for state in STATES:
        for (what, status, form), (_, real_status, real_form) in zip(fake[state], real[state], strict=True):
            if status != real_status:
                found.append(f"{state}: {what}: {status} for {real_status} ({form} for {real_form})")
            found += [f"{state}: {what}: {place}" for place in contradictions(form, real_form)]
    return found


async def of_a_fake(**options):
    async with FakeEngine(hooks=("kv_evidence", "kv_spans", "scope", "grammar_flush"), **options) as engine:
        return await answers(engine.url)


def test_the_fake_answers_as_the_engine_does(strict_engine, run_async):
    real = run_async(answers(strict_engine.url), 240)
    fake = run_async(of_a_fake(), 60)
    assert not differences(fake, real), "\n".join(differences(fake, real))
    paused_health = [status for what, status, _ in real["in_place"] + real["retract"] if "/health" in what]
    assert paused_health == [503, 503]


def test_negative_control_a_kinder_fake_is_found(strict_engine, run_async, monkeypatch):
    """As it was: /health answers on a paused engine, and an answer lacks what SGLang's has."""
    from slime_backend.simulation import http_server

    async def healthy(self, body):
        return http_server.Reply()

    async def bare(self, body):
        return http_server.Reply({"version": self.label})

    monkeypatch.setattr(FakeEngine, "on_health", healthy)
    monkeypatch.setattr(FakeEngine, "on_model_info", bare)
    found = differences(run_async(of_a_fake(), 60), run_async(answers(strict_engine.url), 240))
    assert any("GET /health" in line and "200 for 503" in line for line in found)
    assert any("GET /model_info" in line and ".version is the fake's alone" in line for line in found)
