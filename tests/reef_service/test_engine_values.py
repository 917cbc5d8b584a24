"""Every value of every API against what the engines store it in; what is refused reaches no engine."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from reef_service.data_plane.engine_values import TABLE, checked
from reef_service.data_plane.grammar_size import why_too_large
from reef_service.errors import ApiError
from tests.reef_service.harness import gateway_on

INT32, INT64 = 2**31, 2**63
REFUSED: dict[str, Any] = {
    "temperature": [-0.1, 100.5, math.nan, math.inf, -math.inf, 10**400, "1", True, [], {}],
    "top_p": [0, -1, 1.0001, 1e-300, 5e-324, math.nan, "1", False],
    "top_k": [INT32, INT32 + 1, 2**63, 2**70, -2, 0, 1.5, "5", True, math.nan, math.inf, 1e300],
    "min_p": [-0.1, 1.1, math.nan, 1e300, "0"],
    "frequency_penalty": [-2.1, 2.1, math.inf, None.__class__.__name__],
    "presence_penalty": [-2.1, 2.1, 1e39, {}],
    "repetition_penalty": [0, 1e-300, 1e-9, 2.5, math.nan, -1],
    "min_new_tokens": [-1, INT32, 2**64, 0.5, "1"],
    "max_new_tokens": [0, -1, INT32, 2**80, 1.5, "16"],
    "sampling_seed": [INT64, -INT64 - 1, 2**200, 0.5, "1"],
    "ignore_eos": ["yes", 1, 0.0, [], {}],
    "stop_token_ids": [[-1], [260], [10**15], [1.5], ["1"], [True], 5, "5", {"1": 1}, [1] * 65, [None]],
}
GENERATE_ONLY: dict[str, Any] = {
    "n": [0, 2, 2**40, "1"],
    "regex": [5, [], "(" * 100 + ")" * 100, "(a{1,1000}){1,1000}", "a" * 5000, "a{999999999999}"],
    "ebnf": [{}, "root ::= " + "(" * 100, "x" * 20_000],
    "json_schema": [{}, "{", "[1]", '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000, '{"pattern":"(a{1,999}){1,999}"}'],
    "custom_params": [5, [], {"__sglang_x": 1}, {"x": 2**63}, {"x": {"y": {"z": 1}}}, {"x": math.nan}, {"x": [0] * 65}],
}
ACCEPTED: dict[str, Any] = {
    "temperature": [0, 1e-40, 0.5, 1, 100],
    "top_p": [1e-9, 0.5, 1],
    "top_k": [-1, 1, 50.0, 2**30, INT32 - 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.001, 1, 2],
    "sampling_seed": [-INT64, INT64 - 1],
    "ignore_eos": [True, False],
    "stop_token_ids": [[], [0, 259]],
    "regex": ["[a-z]{1,50}(, [a-z]{1,50}){0,20}", r"\(\{\[", "[{(]{3}"],
    "json_schema": ['{"type":"object","properties":{"a":{"type":"array","maxItems":20}}}', "true"],
    "custom_params": [{"kv_anchors": [3]}, {"thinking_budget": 7}, {}],
}
NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed", "max_new_tokens": "max_tokens"}
MESSAGES = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
PATHS: dict[str, Any] = {
    "/generate": {"text": "hi"},
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": MESSAGES,
    "/v1/messages": MESSAGES,
}


def cases():
    for name, values in (REFUSED | GENERATE_ONLY).items():
        for value in values:
            yield name, value


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in ACCEPTED.items() for v in vs], ids=repr)
def test_what_the_engines_can_store_is_taken(name, value):
    assert checked("chat", {name: value}, 260)[name] == (0 if value == 1e-40 else value)


def test_everything_that_is_passed_on_is_in_the_table():
    with pytest.raises(KeyError):
        checked("chat", {"lora_path": "x"}, 260)
    with pytest.raises(ApiError):
        checked("generate", {"regex": "\ud800"}, 260)


@pytest.mark.parametrize("path", PATHS)
def test_no_api_passes_on_what_an_engine_cannot_store(tmp_path, run_async, path):
    """400 with field, value and range, whatever the value is; and the engines have seen nothing."""

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, engines):
            found = []
            for name, value in cases():
                if path == "/generate":
                    called = f"sampling_params.{name}"
                    body = {**PATHS[path], "sampling_params": {name: value}}
                elif name in GENERATE_ONLY:
                    continue
                else:
                    called = NAMES.get(name, name)
                    body = {**PATHS[path], called: value}
                found.append((called, value, *await client.post(path, body)))
            fine = await client.post(path, PATHS[path])
            return found, fine[0], sum(len(e.bodies) for e in engines)

    found, fine, asked = run_async(work(), 120)
    assert fine == 200
    for called, value, status, answer in found:
        assert status == 400, (called, value, answer)
        message = answer["error"]["message"]
        assert message.startswith(f"{called}="), message
        assert "must be" in message
        assert len(message) < 600
    assert asked == 1


def test_negative_control_without_the_table_it_reaches_an_engine(tmp_path, run_async, monkeypatch):
    """The engine that ends from it: test_fuzz_engine.py."""
    monkeypatch.setattr("reef_service.data_plane.engine_values.checked", lambda api, sampling, size: dict(sampling))

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, engines):
            body = {"text": "hi", "sampling_params": {"top_k": INT32}}
            status, _ = await client.post("/generate", body)
            return status, [body["sampling_params"]["top_k"] for engine in engines for body in engine.bodies]

    assert run_async(work()) == (200, [INT32])


def test_a_message_about_a_huge_value_is_short(tmp_path, run_async):
    with pytest.raises(ApiError) as caught:
        checked("generate", {"top_k": 10**4000}, 260)
    assert len(str(caught.value)) < 200


def test_a_chat_that_asks_for_no_tokens_by_the_newer_name_is_refused_too(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            body = {"messages": MESSAGES["messages"], "max_completion_tokens": 0}
            return await client.post("/v1/chat/completions", body)

    assert run_async(work())[0] == 400


def test_stop_texts_are_bounded_in_number_and_length(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            asked = [["x" * 1025], ["x"] * 17, ["x" * 1024] * 16]
            return [(await client.post("/v1/completions", {"prompt": "a", "stop": stop}))[0] for stop in asked]

    assert run_async(work()) == [400, 400, 200]


def test_more_tokens_at_least_than_at_most_are_refused_by_name(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return await client.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "min_tokens": 5})

    status, answer = run_async(work())
    assert (status, answer["error"]["param"]) == (400, "min_tokens")


@pytest.mark.parametrize(
    ("kind", "text", "seen"),
    [
        ("regex", "((a{100}){100}){3}", "unfold"),
        ("regex", "(" * 33 + "a" + ")" * 33, "groups"),
        ("ebnf", 'root ::= "(" ("a"){1,30000}', "unfold"),
        ("json_schema", json.dumps({"type": "string", "maxLength": 10**9}), "maxLength"),
        ("json_schema", json.dumps({"anyOf": [{"minItems": -1}]}), "minItems"),
    ],
)
def test_a_grammar_is_measured_by_what_it_unfolds_to(kind, text, seen):
    assert seen in why_too_large(kind, text)


DEAD = [
    ("ebnf", "root ::= root"),
    ("ebnf", 'root ::= "b" dead | "a"\ndead ::= dead "x" | (dead)+'),
    ("ebnf", "root ::= a\na ::= b\nb ::= a [x]"),
    ("json_schema", '{"$ref":"#"}'),
    ("json_schema", '{"type":"object","properties":{"a":{"$ref":"#/properties/a"}}}'),
    ("json_schema", '{"$ref":"#/$defs/a","$defs":{"a":{"anyOf":[{"$ref":"#/$defs/b"}]},"b":{"$ref":"#/$defs/a"}}}'),
]
ALIVE = [
    ("ebnf", 'root ::= "a" root | ""'),
    ("ebnf", 'root ::= (root)? "a"'),
    ("ebnf", 'root ::= item ("," item)*\nitem ::= [0-9]+ | "(" root ")"  # nested'),
    ("ebnf", 'root ::= root{0,3} "::= root" other'),
    ("json_schema", '{"type":"object","properties":{"a":{"$ref":"#"}},"required":["a"]}'),
    (
        "json_schema",
        '{"anyOf":[{"type":"null"},{"$ref":"#/$defs/n"}],"$defs":{"n":{"type":"array","items":{"$ref":"#"}}}}',
    ),
    ("json_schema", '{"$ref":"http://example.org/x"}'),
]


@pytest.mark.parametrize(("kind", "text"), DEAD)
def test_a_grammar_that_leaves_no_token_is_refused(kind, text):
    with pytest.raises(ApiError, match=r"reaches no text|nothing but itself"):
        checked("generate", {kind: text}, 260)


@pytest.mark.parametrize(("kind", "text"), ALIVE)
def test_one_that_recurs_and_ends_is_taken(kind, text):
    assert checked("generate", {kind: text}, 260) == {kind: text}


@pytest.mark.parametrize("kind", ["regex", "ebnf", "json_schema"])
def test_a_grammar_and_a_least_number_of_tokens_may_leave_none(kind):
    text = {"regex": "a", "ebnf": 'root ::= "a"', "json_schema": "true"}[kind]
    with pytest.raises(ApiError, match=rf"min_new_tokens can't be combined with sampling_params.{kind}"):
        checked("generate", {kind: text, "min_new_tokens": 1}, 260)
    assert checked("generate", {kind: text, "min_new_tokens": 0}, 260)


def test_the_description_names_the_ranges():
    assert TABLE["top_k"].schema["maximum"] == INT32 - 1
