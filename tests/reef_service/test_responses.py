"""/v1/responses with OpenAI's own client: complete and streamed, tools, earlier answers, tool loops."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.reef_service.harness import gateway_on

openai = pytest.importorskip("openai", reason="openai is not installed; pip install 'reef-slime[dev]'")

LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}
CALL = '<think>\nhm\n</think>\n\nI look.<tool_call>{"name": "look", "arguments": {"where": "é"}}</tool_call>'
TWO = CALL + '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
SHAPE = [("reasoning", "hm"), ("message", "I look."), ("function_call", '{"where": "é"}')]


def client_of(client):
    return openai.AsyncOpenAI(base_url=client.url + "/v1", api_key="none", max_retries=0)


def shape(response):
    return [
        (item.type, item.arguments if item.type == "function_call" else item.content[0].text)
        for item in response.output
    ]


def test_streamed_and_complete_are_the_same(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, CALL) as (client, _, _), client_of(client) as api:
            asked = {"model": "m", "instructions": "s", "input": "hi", "tools": [LOOK]}
            complete = await api.responses.create(**asked)
            events = [event async for event in await api.responses.create(**asked, stream=True)]
            async with api.responses.stream(**asked) as stream:
                async for _ in stream:
                    pass
                return complete, events, await stream.get_final_response()

    complete, events, helped = run_async(work())
    assert shape(complete) == shape(events[-1].response) == shape(helped) == SHAPE
    assert complete.output_text == "I look."
    assert (events[0].type, events[-1].type) == ("response.created", "response.completed")
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == "I look."
    assert complete.usage.output_tokens == events[-1].response.usage.output_tokens > 0
    assert complete.reef["class"] == "pure"


@pytest.mark.parametrize("way", ["items", "previous", "references"])
def test_a_tool_loop_is_one_trajectory(tmp_path, run_async, way):
    """Five turns, however the client hands the conversation back; each prompt holds the sampled tokens before it."""

    async def work():
        async with gateway_on(tmp_path, *[CALL] * 4, "done") as (client, gateway, _), client_of(client) as api:
            headers = {"x-reef-session": "s"} if way != "previous" else {}
            given = [{"role": "user", "content": "hi"}]
            answer = await api.responses.create(model="m", input=given, tools=[LOOK], extra_headers=headers)
            found = [answer.reef]
            for i in range(4):
                call = next(item for item in answer.output if item.type == "function_call")
                result = {"type": "function_call_output", "call_id": call.call_id, "output": f"seen {i}"}
                more = {}
                if way == "previous":
                    given, more = [result], {"previous_response_id": answer.id}
                elif way == "references":
                    given = [*given, *({"type": "item_reference", "id": item.id} for item in answer.output), result]
                else:
                    given = [*given, *(item.model_dump() for item in answer.output), result]
                answer = await api.responses.create(
                    model="m", input=given, tools=[LOOK], extra_headers=headers, stream=False, **more
                )
                found.append(answer.reef)
            turns = [await gateway.store.turn(reef["receipt"]) for reef in found]
            return answer, found, turns

    answer, found, turns = run_async(work())
    assert answer.output_text == "done"
    assert {(reef["session"], reef["trajectory"]) for reef in found} == {(found[0]["session"], found[0]["trajectory"])}
    for before, after in itertools.pairwise(turns):
        whole = [*before["prompt_ids"], *before["output_ids"]]
        assert list(after["prompt_ids"][: len(whole)]) == whole


def test_instructions_of_an_earlier_request_do_not_hold(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _), client_of(client) as api:
            one = await api.responses.create(model="m", instructions="BE BRIEF", input="hi")
            two = await api.responses.create(model="m", input="and?", previous_response_id=one.id)
            turn = await gateway.store.turn(two.reef["receipt"])
            kept_not = await api.responses.create(model="m", input="hi", store=False)
            with pytest.raises(openai.NotFoundError, match="isn't kept here") as error:
                await api.responses.create(model="m", input="and?", previous_response_id=kept_not.id)
            return gateway.plane.tokenizer.decode(turn["prompt_ids"]), error.value.code

    text, code = run_async(work())
    assert "BE BRIEF" not in text
    assert all(word in text for word in ("hi", "yes", "and?"))
    assert code == "previous_response_not_found"


def test_a_tool_that_takes_a_text(tmp_path, run_async):
    text = '<tool_call>{"name": "patch", "arguments": {"input": "*** Begin"}}</tool_call>'

    async def work():
        async with gateway_on(tmp_path, text, "done") as (client, _, _), client_of(client) as api:
            tools = [{"type": "custom", "name": "patch"}, {"type": "web_search"}]
            first = await api.responses.create(model="m", input="hi", tools=tools)
            (call,) = first.output
            given = [{"role": "user", "content": "hi"}, call.model_dump()]
            given.append({"type": "custom_tool_call_output", "call_id": call.call_id, "output": "ok"})
            header = {"x-reef-session": first.reef["session"]}
            second = await api.responses.create(model="m", input=given, tools=tools, extra_headers=header)
            return first, call, second

    first, call, second = run_async(work())
    assert (call.type, call.name, call.input) == ("custom_tool_call", "patch", "*** Begin")
    assert [tool.type for tool in first.tools] == ["custom"]  # what the model was shown
    assert second.reef["trajectory"] == first.reef["trajectory"]
    assert second.output_text == "done"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["chat", "messages", "responses"])
def test_one_call_at_most(tmp_path, run_async, api, stream):
    """The second call isn't sampled; without the setting it is there."""
    tool = {"name": "look", "parameters": {"type": "object"}}
    bodies: dict[str, tuple[str, dict[str, Any], str | None]] = {
        "chat": ("/v1/chat/completions", {"tools": [{"type": "function", "function": tool}]}, "parallel_tool_calls"),
        "messages": ("/v1/messages", {"tools": [{"name": "look", "input_schema": {}}], "max_tokens": 500}, None),
        "responses": ("/v1/responses", {"tools": [{"type": "function", **tool}]}, "parallel_tool_calls"),
    }
    path, body, name = bodies[api]
    body |= {"input" if api == "responses" else "messages": [{"role": "user", "content": "hi"}], "stream": stream}
    one = {name: False} if name else {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}

    async def work():
        async with gateway_on(tmp_path, TWO, end=True) as (client, gateway, _):
            found = []
            for asked in (body, body | one):
                status, answer, headers = await client.call("POST", path, asked)
                assert status == 200, answer
                found.append((json.dumps(answer), await gateway.store.turn(headers["x-reef-receipt"])))
            return found, gateway.plane.tokenizer

    ((_, both), (text, single)), tokenizer = run_async(work())
    assert tokenizer.decode(both["output_ids"]).count("<tool_call>") == 2
    assert tokenizer.decode(single["output_ids"]).endswith("</tool_call>")
    assert tokenizer.decode(single["output_ids"]).count("<tool_call>") == 1
    assert 'stop_sequence": "<' not in text


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"background": True}, "background"),
    ({"truncation": "auto"}, "truncation"),
    ({"tools": [{"type": "file_search"}]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"include": ["message.output_text.logprobs"]}, "include"),
    ({"input": [{"type": "computer_call"}]}, "input"),
    ({"input": [{"type": "item_reference", "id": "msg_x_0"}]}, "input"),
    ({"input": [3]}, "input"),
    ({"input": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"temprature": 1}, "temprature"),
]


def test_what_is_not_supported_is_refused_by_name(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            return [await client.post("/v1/responses", {"input": "hi", **more}) for more, _ in REFUSED]

    for (more, name), (status, body) in zip(REFUSED, run_async(work()), strict=True):
        assert (status, body["error"]["param"]) == (400, name), (more, body)
