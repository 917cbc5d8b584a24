"""What a request has is honoured or refused by name; what can't be found says what there is."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from slime_backend.simulation.fake_engine import FakeEngine
from tests.reef_service.harness import gateway_on, read_stream

USER = {"role": "user", "content": "hi"}
YES = {"role": "assistant", "content": "yes"}
CHAT: dict[str, Any] = {"messages": [USER], "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": "hi", "max_tokens": 4}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
    "/v1/completions": TEXT,
    "/v1/responses": {"input": "hi"},
}

REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((path, {name: value}, name) for path in PATHS for name, value in (("guided_json", {}), ("temprature", 0.5))),
    ("/v1/chat/completions", {"messages": [USER, YES]}, "last message"),
    ("/v1/messages", {"messages": [USER, YES]}, "last message"),
    ("/v1/messages/count_tokens", {"messages": [USER, YES]}, "last message"),
    ("/v1/chat/completions", {"continue_final_message": True}, "continue_final_message"),
    ("/v1/chat/completions", {"add_generation_prompt": False}, "add_generation_prompt"),
    ("/v1/chat/completions", {"modalities": ["audio"]}, "modalities"),
    ("/v1/chat/completions", {"modalities": ["text", "audio"], "audio": {"voice": "x"}}, "modalities"),
    ("/v1/chat/completions", {"web_search_options": {"a": 1}}, "web_search_options"),
    ("/v1/chat/completions", {"prediction": {"type": "content"}}, "prediction"),
    ("/v1/chat/completions", {"n": 2}, "n is not"),
    ("/v1/completions", {"echo": True}, "echo"),
    ("/v1/messages", {"thinking": {"type": "disabled"}}, "thinking"),
    ("/v1/messages", {"output_config": {"format": {"type": "xml"}}}, "output_config"),
    ("/v1/messages", {"output_config": {"more": 1}}, "output_config.more"),
    ("/v1/messages", {"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
]
TAKEN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"n": 1, "user": "u", "store": False, "metadata": {"a": "b"}, "modalities": ["text"]}),
    ("/v1/chat/completions", {"guided_json": None, "logit_bias": {}, "top_logprobs": 0, "parallel_tool_calls": True}),
    ("/v1/completions", {"best_of": 1, "echo": False, "suffix": None, "user": "u"}),
    ("/v1/messages", {"metadata": {"user_id": "u"}, "thinking": {"type": "enabled", "budget_tokens": 1024}}),
    (
        "/v1/messages",
        {"output_config": {"effort": "high"}, "service_tier": "auto", "context_management": {"edits": []}},
    ),
    ("/v1/responses", {"truncation": "disabled", "prompt_cache_key": "k", "include": ["reasoning.encrypted_content"]}),
]


def test_every_setting_is_honoured_or_refused_by_name(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            refused = [await client.post(path, {**PATHS.get(path, CHAT), **more}) for path, more, _ in REFUSED]
            return refused, [await client.post(path, {**PATHS[path], **more}) for path, more in TAKEN]

    refused, taken = run_async(work())
    for (path, more, name), (status, body) in zip(REFUSED, refused, strict=True):
        assert status == 400, (path, more, body)
        assert name in body["error"]["message"], body
    assert [status for status, _ in taken] == [200] * len(TAKEN), taken


def test_thinking_is_disabled_where_the_template_can(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, gateway, _):
            from reef_service.text.template import ChatTemplate

            switch = "{{ '' if enable_thinking is defined and not enable_thinking else '<think>' }}"
            gateway.plane.tokenizer.template = ChatTemplate(switch, {})
            found = []
            for more in ({}, {"thinking": {"type": "disabled"}}):
                found.append((await client.post("/v1/messages/count_tokens", CHAT | more))[1])
            return found

    assert run_async(work())[0] == {"input_tokens": len("<think>")}


def test_a_system_message_in_the_middle(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            given = [USER, {"role": "system", "content": [{"type": "text", "text": "BE BRIEF"}]}]
            first = await client.post("/v1/messages", {**CHAT, "messages": given}, x_reef_session="s")
            more = [*given, {"role": "assistant", "content": first[1]["content"]}, USER]
            second = await client.post("/v1/messages", {**CHAT, "messages": more}, x_reef_session="s")
            turn = await gateway.store.turn(first[1]["reef"]["receipt"])
            return first, second, gateway.plane.tokenizer.decode(turn["prompt_ids"])

    first, second, prompt = run_async(work())
    assert (first[0], second[0]) == (200, 200)
    assert "BE BRIEF" in prompt
    assert first[1]["reef"]["trajectory"] == second[1]["reef"]["trajectory"]


@pytest.mark.parametrize("length", [9000, 2_000_000], ids=["tokens", "characters"])
def test_a_full_context_has_the_code_that_agents_look_for(tmp_path, run_async, length):
    long = "x" * length
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": long}]},
        "/v1/messages": {"messages": [{"role": "user", "content": long}], "max_tokens": 4},
        "/v1/completions": {"prompt": long},
        "/v1/responses": {"input": long},
    }

    async def work():
        async with gateway_on(tmp_path, "x", config={"context_length": 8192}) as (client, _, _):
            return {path: await client.post(path, body) for path, body in bodies.items()}

    for path, (status, body) in run_async(work()).items():
        assert status == 400
        if path == "/v1/messages":
            assert body["error"]["message"].startswith("prompt is too long: ")
        else:
            assert body["error"]["code"] == "context_length_exceeded"


def test_the_room_is_the_engines(tmp_path, run_async, monkeypatch):
    """SGLang keeps some tokens of a context for itself: what it doesn't take, the gateway doesn't either."""

    info, lengths = FakeEngine.on_server_info, itertools.chain([101], itertools.repeat(100))

    async def bounded(self, body):
        self.info.setdefault("max_req_input_len", next(lengths))
        return await info(self, body)

    monkeypatch.setattr(FakeEngine, "on_server_info", bounded)

    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            return [await client.post("/v1/completions", {"prompt": "x" * n, "max_tokens": 1}) for n in (99, 100)]

    (fits, _), (status, body) = run_async(work())
    assert (fits, status, body["error"]["code"]) == (200, 400, "context_length_exceeded")


def test_models_by_name_and_unknown_paths(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            head = await client.send("HEAD", "/v1/models/model")
            found = [await client.get(path) for path in ("/v1/models/model", "/v1/models/gpt-x", "/v1/nothing")]
            return (await head[0].readline()).decode(), found, (await client.get("/openapi.json"))[1]

    head, ((status, model), (missing, no_model), (nothing, error)), described = run_async(work())
    assert " 200 " in head
    assert (status, model["id"]) == (200, "model")
    assert (missing, no_model["error"]["code"]) == (404, "model_not_found")
    assert nothing == 404
    named = [word.strip(",") for word in error["error"]["message"].partition("there are ")[2].split() if word[0] == "/"]
    assert {path for path in named if path not in ("/docs", "/openapi.json")} <= set(described["paths"])
    assert "/v1/responses" in named


def test_log_probs_of_streamed_completions(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "abcdefgh") as (client, _, _):
            asked = {"prompt": "hi", "logprobs": 0, "max_tokens": 20}
            _, complete = await client.post("/v1/completions", asked)
            reader, writer = await client.send("POST", "/v1/completions", {**asked, "stream": True})
            events, _ = await read_stream(reader)
            writer.close()
            return complete["choices"][0]["logprobs"], [e["choices"][0]["logprobs"] for e in events if e["choices"]]

    complete, streamed = run_async(work())
    for name in ("tokens", "token_logprobs", "text_offset"):
        assert [x for row in streamed if row for x in row[name]] == complete[name], json.dumps(streamed)
    assert len(complete["tokens"]) > 8
