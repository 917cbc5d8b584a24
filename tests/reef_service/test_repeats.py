"""A request that comes again gets the answer that there is: complete and streamed, of every API, also after a restart.

Without the headers it is answered a second time, as the controls show.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import pytest

from tests.reef_service.harness import gateway_on, read_stream, until

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = '<think>hm</think>first <tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
BODIES = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 100, "tools": TOOLS, "logprobs": True},
    "/v1/completions": {"prompt": "hi", "max_tokens": 100},
    "/v1/messages": {
        "messages": MESSAGES, "max_tokens": 100, "model": "m",
        "tools": [{"name": "look", "input_schema": {"type": "object"}}],
    },
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 100, "stop": ["call>"]}, "return_logprob": True},
}  # fmt: skip
SESSION = {"x_reef_session": "s"}
KEY = {"idempotency_key": "k-1"}
RETRY = {"x_stainless_retry_count": "1"}


def same(answer):
    return {name: value for name, value in answer.items() if name != "created"}


async def turns(gateway):
    return (await gateway.store.counts())["states"]


@pytest.mark.parametrize("again", [KEY, RETRY], ids=["key", "retry"])
@pytest.mark.parametrize("path", BODIES)
def test_an_answer_is_given_again(tmp_path, run_async, path, again):
    first = {} if again is RETRY else again

    async def work():
        async with gateway_on(tmp_path, TEXT, "second") as (client, gateway, _):
            one = await client.call("POST", path, BODIES[path], **SESSION, **first)
            two = await client.call("POST", path, BODIES[path], **SESSION, **again)
            count = await turns(gateway)
            control = await client.call("POST", path, BODIES[path], **SESSION)
            return one, two, count, control

    one, two, count, control = run_async(work())
    assert one[0] == two[0] == control[0] == 200
    assert same(two[1]) == same(one[1])
    assert ("x-reef-replayed" in one[2], two[2]["x-reef-replayed"]) == (False, "true")
    assert count == {"complete": 1}
    assert control[2]["x-reef-receipt"] != one[2]["x-reef-receipt"] == two[2]["x-reef-receipt"]


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_is_given_again(tmp_path, run_async, path):
    """Its text, calls and log-probs are those of the first; the events may be fewer."""
    body = {**BODIES[path], "stream": True}

    async def stream(client, **headers):
        reader, writer = await client.send("POST", path, body, **SESSION, **headers)
        events, ended = await read_stream(reader)
        writer.close()
        return events, ended

    async def work():
        async with gateway_on(tmp_path, TEXT, "second") as (client, gateway, _):
            one, two = await stream(client), await stream(client, **RETRY)
            return one, two, await turns(gateway), await stream(client)

    (one, ended), (two, ended_again), count, (control, _) = run_async(work())
    assert ended == ended_again
    assert count == {"complete": 1}
    assert content_of(path, two) == content_of(path, one) != content_of(path, control)


def content_of(path, events):
    if path == "/generate":
        last = events[-1]
        return last["text"], last["output_ids"], last["meta_info"]["output_token_logprobs"], last["meta_info"]["reef"]
    if path == "/v1/messages":
        deltas = [e["delta"] for e in events if e["type"] == "content_block_delta"]
        joined = {}
        for delta in deltas:
            for name in ("text", "thinking", "partial_json"):
                joined[name] = joined.get(name, "") + delta.get(name, "")
        return joined, events[-1]["reef"]
    choices = [c for e in events for c in e["choices"]]
    if path == "/v1/completions":
        return "".join(c["text"] for c in choices), events[-1]["reef"]
    joined = {name: "".join(c["delta"].get(name) or "" for c in choices) for name in ("content", "reasoning_content")}
    calls = [call for c in choices for call in c["delta"].get("tool_calls", [])]
    logprobs = [row for c in choices for row in (c["logprobs"] or {}).get("content", [])]
    return joined, calls, logprobs, [e["reef"] for e in events if "reef" in e]


def test_a_restarted_gateway_gives_it_again(tmp_path, run_async):
    path = "/v1/chat/completions"

    async def ask(**headers):
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return (await client.post(path, BODIES[path], **headers))[1]["reef"]["receipt"]

    first = run_async(ask(**SESSION, **KEY))
    assert run_async(ask(**SESSION, **KEY)) == first
    assert run_async(ask(**SESSION, **RETRY)) == first
    assert run_async(ask(**KEY)) != first  # without the session it is another one's key


@pytest.mark.parametrize("session", [SESSION, {}], ids=["session", "alone"])
def test_a_key_is_of_one_request(tmp_path, run_async, session):
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "yes", token_s=0.02) as (client, gateway, _):
            body = BODIES[path]
            answers = await asyncio.gather(*(client.post(path, body, **session, **KEY) for _ in range(5)))
            assert len({answer["reef"]["receipt"] for _, answer in answers}) == 1  # while it was under way
            status, other = await client.post(path, {**body, "max_tokens": 50}, **session, **KEY)
            assert (status, other["error"]["code"]) == (422, "idempotency_key_reused")
            bad, why = await client.post(path, body, idempotency_key="k" * 256)
            assert (bad, "1 to 255" in why["error"]["message"]) == (400, True)
            return await turns(gateway)

    assert run_async(work()) == {"complete": 1}


def test_a_retry_takes_over_from_a_client_that_goes(tmp_path, run_async):
    """The client gave up and sent it again; the engine goes on, and one turn is stored."""
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "x" * 60, token_s=0.02) as (client, gateway, _):
            _, writer = await client.send("POST", path, BODIES[path], **SESSION)
            await until(lambda: gateway.plane.exchanges)
            (exchange,) = gateway.plane.exchanges
            retry = asyncio.create_task(client.post(path, BODIES[path], **SESSION, **RETRY))
            await until(lambda: exchange._joined)
            writer.close()
            status, answer = await retry
            return status, answer["reef"]["receipt"] == exchange.receipt, await turns(gateway)

    assert run_async(work()) == (200, True, {"complete": 1})


def test_what_has_no_answer_is_asked_again(tmp_path, run_async):
    """The client went before the answer was there, and nobody waited: the retry is a request of its own."""
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "x" * 60, token_s=0.02) as (client, gateway, _):
            _, writer = await client.send("POST", path, BODIES[path], **SESSION, **KEY)
            await until(lambda: gateway.plane.exchanges)
            writer.close()
            status, _ = await client.post(path, BODIES[path], **SESSION, **KEY, **RETRY)
            return status, (await turns(gateway))["complete"]

    assert run_async(work()) == (200, 1)


def test_a_retry_of_something_newer_is_not_answered_with_something_old(tmp_path, run_async):
    """The conversation went on from the answer, so the client had it; and one whose last attempt failed is new."""
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "one", "two", "three", "four") as (client, gateway, _):
            _, first = await client.post(path, BODIES[path], **SESSION)
            gateway.plane.gate.hold_s = 0.01
            gateway.plane.gate.close()
            assert (await client.post(path, BODIES[path], **SESSION))[0] == 503
            gateway.plane.gate.open()
            _, retried = await client.post(path, BODIES[path], **SESSION, **RETRY)
            assert retried["reef"]["receipt"] != first["reef"]["receipt"]
            message = retried["choices"][0]["message"]
            longer = {**BODIES[path], "messages": [*MESSAGES, message, *MESSAGES]}
            await client.post(path, longer, **SESSION)
            _, later = await client.post(path, BODIES[path], **SESSION, **RETRY)
            return retried["reef"]["receipt"] != later["reef"]["receipt"], await turns(gateway)

    assert run_async(work()) == (True, {"complete": 4})


def test_groups_are_right_when_answers_were_lost(tmp_path, run_async):
    """Of four agents one lost its answer and sent the request again: four rollouts, one sample each."""
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for i in range(4):
                headers = {"x_reef_session": f"s{i}", "x_reef_group": "q"}
                await client.post(path, BODIES[path], **headers)
                if i == 0:
                    await client.post(path, BODIES[path], **headers, **RETRY)
                    title = {**BODIES[path], "messages": [{"role": "user", "content": "a title"}] * 2}
                    await client.post(path, title, **headers, x_reef_train="false")
                await client.post("/reef/report", {"id": f"r{i}", "score": i, "session": f"s{i}"})
            status, batch = await client.post("/reef/batches", {"group_size": 4, "limit": 9})
            bad, _ = await client.post(path, BODIES[path], x_reef_train="maybe")
            return status, [(s["session"], s["trajectory"]) for s in batch["samples"]], bad

    assert run_async(work()) == (200, [(f"s{i}", 0) for i in range(4)], 400)


def test_incomplete_groups_are_listed_and_closed(tmp_path, run_async):
    path = "/v1/chat/completions"

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for i in range(3):
                await client.post(path, BODIES[path], x_reef_session=f"s{i}", x_reef_group="a/b")
                await client.post("/reef/report", {"id": f"r{i}", "score": i, "session": f"s{i}"})
            _, listed = await client.get("/reef/groups?group_size=4")
            _, none = await client.get("/reef/groups?group_size=3")
            careless, _ = await client.post("/reef/groups/close", {"group_size": 4})
            assert careless == 400
            closed = await client.post("/reef/groups/close", {"group_size": 4, "groups": ["a/b"]})
            _, after = await client.get("/reef/groups?group_size=4")
            return [(g["label"], g["ready"]) for g in listed["groups"]], none, closed, after

    assert run_async(work()) == ([("a/b", 3)], {"groups": []}, (200, {"closed": {"a/b": 3}}), {"groups": []})


@asynccontextmanager
async def losing_the_first_answer(url):
    """The address of a proxy that passes requests on and drops the first answer, complete as it is."""
    parts, lost = urlsplit(url), []

    async def serve(reader, writer):
        upstream_reader, upstream = await asyncio.open_connection(parts.hostname, parts.port)
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(re.search(rb"content-length: (\d+)", head.lower())[1])
        upstream.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + await reader.readexactly(length))
        answer = await upstream_reader.read()
        if lost:
            writer.write(answer)
            await writer.drain()
        lost.append(answer)
        upstream.close()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", lost
    finally:
        server.close()


@pytest.mark.parametrize("library", ["openai", "anthropic"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_official_clients_own_retry_is_one_turn(tmp_path, run_async, library, stream):
    module = pytest.importorskip(library, reason=f"{library} is not installed; pip install 'reef-slime[dev]'")

    async def ask(url):
        about = {"model": "m", "messages": MESSAGES, "max_tokens": 50, "extra_headers": {"x-reef-session": "s"}}
        if library == "openai":
            async with module.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as api:
                answer = await api.chat.completions.create(**about, stream=stream)
                return [event async for event in answer] if stream else answer
        async with module.AsyncAnthropic(base_url=url, api_key="none") as api:
            answer = await api.messages.create(**about, stream=stream)
            return [event async for event in answer] if stream else answer

    async def work():
        async with (
            gateway_on(tmp_path, "one", "two") as (client, gateway, _),
            losing_the_first_answer(client.url) as (url, answers),
        ):
            answer = await ask(url)
            return answer, answers, await turns(gateway)

    answer, answers, count = run_async(work())
    assert answer
    assert len(answers) == 2
    assert b"x-reef-replayed: true" in answers[1]
    assert count == {"complete": 1}
