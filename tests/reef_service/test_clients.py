"""The official clients, unchanged: chats, completions, messages; streamed or not; tools and reasoning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.reef_service.harness import gateway_on

anthropic = pytest.importorskip("anthropic", reason="anthropic is not installed; pip install 'reef-slime[dev]'")
openai = pytest.importorskip("openai", reason="openai is not installed; pip install 'reef-slime[dev]'")

LOOK: dict[str, Any] = {"name": "look", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": LOOK}]
ANSWER = '<think>\nhm\n</think>\n\nI look.<tool_call>{"name": "look", "arguments": {"where": "é"}}</tool_call>'
USER = [{"role": "user", "content": "hi"}]


def openai_client(client):
    return openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0)


def anthropic_client(client):
    return anthropic.AsyncAnthropic(base_url=client.url, api_key="none", max_retries=0)


def test_openai_chat(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, ANSWER) as (client, gateway, _), openai_client(client) as api:
            raw = await api.chat.completions.with_raw_response.create(
                model="m", messages=USER, tools=TOOLS, logprobs=True
            )
            return raw, raw.parse(), await gateway.store.turn(raw.headers["x-reef-receipt"])

    raw, answer, turn = run_async(work())
    (choice,) = answer.choices
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "hm"
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("look", '{"where": "é"}')
    assert choice.finish_reason == "tool_calls"
    assert answer.usage.completion_tokens == len(turn["output_ids"]) == len(choice.logprobs.content)
    assert answer.reef["receipt"] == raw.headers["x-reef-receipt"]
    assert answer.reef["class"] == "pure"


def test_openai_chat_streamed_says_the_same(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, ANSWER) as (client, gateway, _), openai_client(client) as api:
            stream = await api.chat.completions.create(
                model="m", messages=USER, tools=TOOLS, stream=True, stream_options={"include_usage": True}
            )
            chunks = [chunk async for chunk in stream]
            receipt = next(c.reef["receipt"] for c in chunks if getattr(c, "reef", None))
            return chunks, await gateway.store.turn(receipt)

    chunks, turn = run_async(work())
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    assert "".join(d.content or "" for d in deltas) == "I look."
    assert "".join(getattr(d, "reasoning_content", None) or "" for d in deltas) == "hm"
    calls = [call for d in deltas for call in d.tool_calls or ()]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [(0, "look", '{"where": "é"}')]
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage.completion_tokens == len(turn["output_ids"])
    assert turn["state"] == "complete"


def test_openai_stream_helper(tmp_path, run_async):
    """The client's own accumulating helper takes our chunks."""
    strict = [{"type": "function", "function": {**LOOK, "strict": True}}]

    async def work():
        async with (
            gateway_on(tmp_path, ANSWER) as (client, _, _),
            openai_client(client) as api,
            api.chat.completions.stream(model="m", messages=USER, tools=strict) as stream,
        ):
            async for _ in stream:
                pass
            return await stream.get_final_completion()

    message = run_async(work()).choices[0].message
    assert (message.content, message.tool_calls[0].function.name) == ("I look.", "look")


@pytest.mark.parametrize("incremental", [False, True], ids=["engines repeat", "engines don't repeat"])
@pytest.mark.parametrize("stream", [False, True])
def test_openai_completions(tmp_path, run_async, stream, incremental):
    async def work():
        engine = {"incremental": incremental, "token_s": 0.0}  # so many tokens come together, after the stop text too
        made = gateway_on(tmp_path, "abc\u00e9|defghijklmnopqrstuvwxyz", **engine)
        async with made as (client, _, _), openai_client(client) as api:
            found = await api.completions.create(model="m", prompt="x", max_tokens=50, stop=["|"], stream=stream)
            if not stream:
                return found.choices[0].text, found.choices[0].finish_reason, found.reef
            chunks = [c async for c in found]
            return "".join(c.choices[0].text for c in chunks), chunks[-1].choices[0].finish_reason, chunks[-1].reef

    text, finish, reef = run_async(work())
    assert (text, finish) == ("abc\u00e9", "stop")
    assert reef["class"] == "pure"


def test_models(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _), openai_client(client) as api:
            return [model.id async for model in api.models.list()]

    assert run_async(work()) == ["model"]


def test_anthropic_messages(tmp_path, run_async):
    tools = [{"name": "look", "input_schema": {"type": "object"}}]

    async def work():
        async with gateway_on(tmp_path, ANSWER) as (client, _, _), anthropic_client(client) as api:
            one = await api.messages.create(model="m", max_tokens=200, system="s", messages=USER, tools=tools)
            async with api.messages.stream(model="m", max_tokens=200, system="s", messages=USER, tools=tools) as stream:
                other = await stream.get_final_message()
            raw = await api.messages.create(model="m", max_tokens=200, messages=USER, stream=True)
            events = [event async for event in raw]
            counted = await api.messages.count_tokens(model="m", system="s", messages=USER, tools=tools)
            return one, other, events, counted

    one, other, events, counted = run_async(work())
    for message in (one, other):
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        thinking, text, call = message.content
        assert (thinking.thinking, text.text, call.name, call.input) == ("hm", "I look.", "look", {"where": "é"})
        assert message.stop_reason == "tool_use"
    assert one.usage.output_tokens == other.usage.output_tokens
    assert one.usage.input_tokens + one.usage.cache_read_input_tokens == counted.input_tokens
    assert one.reef["receipt"]
    assert [e.type for e in events][:: len(events) - 1] == ["message_start", "message_stop"]
    assert events[-1].reef["class"] == "pure"


def test_anthropic_tool_results_and_stop_sequences(tmp_path, run_async):
    conversation = [
        *USER,
        {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "look", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "seen"}]},
    ]

    async def work():
        async with gateway_on(tmp_path, "one STOP two") as (client, gateway, _), anthropic_client(client) as api:
            found = await api.messages.create(model="m", max_tokens=99, messages=conversation, stop_sequences=["STOP"])
            turn = await gateway.store.turn(found.reef["receipt"])
            return found, gateway.plane.tokenizer.decode(turn["prompt_ids"]), turn

    found, prompt, turn = run_async(work())
    assert (found.content[0].text, found.stop_reason, found.stop_sequence) == ("one ", "stop_sequence", "STOP")
    assert "seen" in prompt
    assert "look" in prompt
    assert len(turn["output_ids"]) == len("one STOP")  # one token a byte: sampled up to the end of the stop text
    assert turn["state"] == "complete"


@pytest.mark.parametrize("path", ["openai", "anthropic"])
def test_errors_are_what_the_clients_expect(tmp_path, run_async, path):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            if path == "openai":
                async with openai_client(client) as api:
                    with pytest.raises(openai.BadRequestError, match="n is not supported") as refused:
                        await api.chat.completions.create(model="m", messages=USER, n=3)
                    assert refused.value.body["param"] == "n"
            else:
                async with anthropic_client(client) as api:
                    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
                    picture = [{"role": "user", "content": [image]}]
                    with pytest.raises(anthropic.BadRequestError, match="takes text only") as refused:
                        await api.messages.create(model="m", max_tokens=9, messages=picture)
                    assert refused.value.body["error"]["type"] == "invalid_request_error"

    run_async(work())
