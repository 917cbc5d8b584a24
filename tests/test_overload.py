"""What isn't the request's fault is waited for: 503, 429, 408, 425, a broken connection to an engine that lives."""

from __future__ import annotations

import asyncio

import pytest

from reef_service.data_plane.generation import Generation
from slime_backend.engine_client import EngineClient, EngineRefused
from slime_backend.fleet import dispatch
from slime_backend.fleet.dispatch import RequestLost, generate
from slime_backend.simulation.http_server import Reply
from tests.fake_fleet import fake_fleet, request


def refusing(engine, status, body=None):
    """`engine` refuses every /generate from now on; returns what ends that."""
    answer, refused = engine.on_generate, []

    async def on_generate(asked):
        refused.append(asked)
        return Reply(body or {"error": {"message": "no"}}, status)

    def accept():
        engine.on_generate = answer

    engine.on_generate = on_generate
    return accept, refused


async def one(fleet, through):
    if through == "dispatch":
        return (await generate(fleet, request(3))).body["output_ids"]
    sampling = {"max_new_tokens": 3}
    made = Generation(fleet, lambda found: found[0], "r", list(range(20)), sampling, through == "stream")
    async for _ in made.run():
        pass
    return made.output_ids


@pytest.fixture(autouse=True)
def in_haste(monkeypatch):
    monkeypatch.setattr(dispatch, "MOST_BACKOFF_S", 0.05)


THROUGH = ("dispatch", "answer", "stream")


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_a_refusal_for_now_is_waited_out(run_async, status, through):
    """Twice as many refusals as there were attempts before."""

    async def scenario():
        async with fake_fleet() as (fleet, engines):
            both = [refusing(engine, status) for engine in engines]
            asked = asyncio.create_task(one(fleet, through))
            while sum(len(refused) for _, refused in both) < 6:
                await asyncio.sleep(0.01)
            for accept, _ in both:
                accept()
            return await asked

    assert run_async(scenario()) == [7, 7, 7]


@pytest.mark.parametrize("through", THROUGH)
def test_it_ends_with_the_fleets_own_deadline(run_async, through):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            fleet.wait_s = 0.3
            for engine in engines:
                refusing(engine, 503, {"error": {"message": "HTTP 429 said the proxy behind"}})
            await one(fleet, through)

    with pytest.raises(RequestLost, match=r"no answer after .* HTTP 503"):
        run_async(scenario())


@pytest.mark.parametrize("through", THROUGH)
@pytest.mark.parametrize("status", [400, 401, 404, 413, 422])
def test_a_request_that_is_itself_wrong_is_raised_at_once(run_async, status, through):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            both = [refusing(engine, status) for engine in engines]
            with pytest.raises(EngineRefused) as refused:
                await one(fleet, through)
            return refused.value.status, sum(len(r) for _, r in both)

    assert run_async(scenario()) == (status, 1)


def test_an_error_inside_of_a_stream_is_judged_by_its_code(run_async):
    async def scenario():
        async with fake_fleet(1) as (fleet, engines):

            async def events(code):
                yield f'data: {{"error": {{"message": "HTTP 400", "code": {code}}}}}\n\n'

            answer = engines[0].on_generate
            codes = [503, 429]

            async def on_generate(body):
                return Reply(events=events(codes.pop(0))) if codes else await answer(body)

            engines[0].on_generate = on_generate
            return await one(fleet, "stream")

    assert run_async(scenario()) == [7, 7, 7]


def test_the_other_engine_is_asked_next(run_async):
    async def scenario():
        async with fake_fleet() as (fleet, engines):
            _, refused = refusing(engines[0], 503)
            answer = await generate(fleet, request(3))
            return len(refused), answer.engine, answer.attempts

    assert run_async(scenario()) == (1, "engine1", 2)


def test_retry_after_is_kept(run_async):
    """The header is read; dates, which need the server's clock, are not."""

    class Server:
        def __init__(self, value):
            self.value = value

        async def __call__(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 503 \r\nRetry-After: %s\r\nContent-Length: 0\r\n\r\n" % self.value)
            writer.close()

    async def asked(value):
        server = await asyncio.start_server(Server(value), "127.0.0.1", 0)
        async with EngineClient(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
            with pytest.raises(EngineRefused) as refused:
                await client.call("GET", "/")
        server.close()
        return refused.value.retry_after_s

    assert run_async(asked(b"7")) == 7.0
    assert run_async(asked(b"Wed, 21 Oct 2026 07:28:00 GMT")) is None
