"""A real engine behind the gateway, asked for the extremes of every field: it answers or refuses, and doesn't end.

REEF_FUZZ_REQUESTS=2000 for more, REEF_FUZZ_SEED for others. The engine has a tokenizer and a grammar backend, so that
no field is refused for the lack of one.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
from collections import Counter
from contextlib import asynccontextmanager
from typing import Any

import pytest

from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from tests.reef_service.engine_gateway import gateway_on_fleet

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]
REQUESTS = int(os.environ.get("REEF_FUZZ_REQUESTS", "300"))
SEED = int(os.environ.get("REEF_FUZZ_SEED", "1"))
AT_ONCE = 8
BOUNDS = [0, 1, -1, 2, 2**15, 2**30, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 2**70]
FLOATS = [0.0, -0.0, 1e-300, 5e-324, 1e-38, 1e-7, 1e-6, 0.001, 0.5, 1.0, 1.5, 2.0, 100.0, 1e38, 1e39, 1e300]
ODD = [None, True, "1", "", [], {}, math.nan, math.inf, -math.inf, "x" * 300, [1], {"a": 1}]
FIELDS: dict[str, Any] = {
    "temperature": FLOATS,
    "top_p": FLOATS,
    "min_p": FLOATS,
    "frequency_penalty": [*FLOATS, -2.0, -2.5],
    "presence_penalty": [*FLOATS, -2.0, -2.5],
    "repetition_penalty": FLOATS,
    "top_k": BOUNDS,
    "min_new_tokens": BOUNDS,
    "max_new_tokens": [1, 2, 8, 0, -1, 2**31],
    "sampling_seed": BOUNDS,
    "ignore_eos": [True, False, 1, "yes"],
    "stop_token_ids": [[], [0], [1, 2, 3], [255], [256], [-1], [2**31], [2**63], [10**15], [1] * 65],
    "custom_params": [
        {}, {"kv_anchors": [3]}, {"kv_anchors": [-1]}, {"kv_anchors": "x"}, {"kv_anchors": [2**62]}, {"a": 2**63},
        {"thinking_budget": 2}, {"thinking_budget": 2**40}, {"__sglang_reasoning_in_grammar": True}, {"a": {"b": [1]}},
    ],
    "regex": [
        "a", "(yes|no)", "[a-z]{1,9}", "(", "[", "a{5,2}", "(a{1,99}){1,99}", "(" * 31 + "a" + ")" * 31, r"\p{Greek}+",
        "(?=a)b", "a" * 4096, "(a*)*", "\x00", "é+", "(" * 5000,
    ],
    "ebnf": [
        'root ::= "a" | "b" dead\ndead ::= dead "c"',
        'root ::= "a"', "root ::= root", "root ::=", 'root ::= "a" | root root',
        "x" * 9000, 'root ::= "a"{1,900}',
    ],
    "json_schema": [
        "{}", "true", "false", '{"type":"object"}', '{"$ref":"#"}', '{"type":"wrong"}', '{"enum":[]}',
        '{"minItems":-1}',
        '{"type":"array","minItems":500,"items":{"type":"integer"}}', '{"type":"string","pattern":"(a{1,50}){1,50}"}',
        '{"a":' * 40 + "1" + "}" * 40, '{"anyOf":[{"$ref":"#/$defs/x"}]}', '{"type":"integer","minimum":1e308}',
        "[]", "{",
    ],
}  # fmt: skip
NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed", "max_new_tokens": "max_tokens"}
PROMPTS: list[dict[str, Any]] = [
    {"text": "hi"},
    {"input_ids": [5, 6, 7]},
    {"input_ids": [0]},
    {"input_ids": [10**9]},
    {"input_ids": []},
]
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def drawn(rng: random.Random) -> tuple[str, dict]:
    """One request: some fields, each at an extreme, and now and then of another type."""
    chosen = rng.sample(sorted(FIELDS), rng.choice((1, 1, 2, 2, 3)))
    fields = {"max_new_tokens": 4} | {
        name: rng.choice(ODD) if rng.random() < 0.1 else rng.choice(FIELDS[name]) for name in chosen
    }
    path = rng.choice(("/generate", "/generate", "/v1/completions", "/v1/chat/completions", "/v1/messages"))
    stream = {"stream": rng.random() < 0.3}
    if path == "/generate":
        return path, {**rng.choice(PROMPTS), "sampling_params": fields, **stream}
    own = {NAMES.get(name, name): value for name, value in fields.items()}
    return path, {**({"prompt": "hi"} if path == "/v1/completions" else CHAT), **own, **stream}


@asynccontextmanager
async def engine_behind(tmp_path, model):
    flags = ("--grammar-backend", "xgrammar")
    settings = EngineSettings(model=str(model), hooks=RUN_HOOKS, skip_tokenizer=False, extra=flags)
    engine = LocalEngine(settings, log_path=tmp_path / "engine.log", name="engine0")
    with running_engines([engine]):
        async with gateway_on_fleet(engine, model, tmp_path) as (client, gateway):
            yield engine, client, gateway


def test_no_request_ends_the_engine_and_the_control_does(tiny_model, tmp_path, run_async, monkeypatch):
    """The control, at the end: without the table, one int32 ends it."""
    rng = random.Random(SEED)
    requests = [drawn(rng) for _ in range(REQUESTS)]

    async def work():
        found: Counter[int] = Counter()
        async with engine_behind(tmp_path, tiny_model) as (engine, client, gateway):
            left = iter(requests)

            async def worker():
                for path, body in left:
                    status, answer = await client.post(path, body)
                    found[status] += 1
                    assert status in (200, 400), (status, path, body, answer, engine.last_words())
                    assert engine.alive(), (path, body, engine.last_words())

            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
            last = await client.post("/generate", {"text": "hi", "sampling_params": {"max_new_tokens": 4}})
            members = [(m.status, m.reason) for m in gateway.fleet.members.values()]

            monkeypatch.setattr(
                "reef_service.data_plane.engine_values.checked", lambda api, sampling, size: dict(sampling)
            )
            deadly = {"text": "hi", "sampling_params": {"max_new_tokens": 4, "top_k": 2**31}}
            ended = await client.post("/generate", deadly)
            return found, last[0], members, ended, gateway.fleet.retired()

    found, last, members, ended, retired = run_async(work(), 1700)
    print(f"{REQUESTS} requests: {dict(found)}")
    assert (last, members) == (200, [("confirmed", "")])
    assert found[200] > REQUESTS / 10, "too few of them reached the engine: the test shows little"
    assert ended[0] in (502, 503), ended
    assert list(retired) == ["engine0"]
