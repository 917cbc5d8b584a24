"""What goes wrong while a client waits: engines die, clients leave, publications come in between."""

from __future__ import annotations

import asyncio

import pytest

from reef_service.data_plane.router import Router
from tests.reef_service.harness import CHAT, checkpoint, gateway_on, read_stream, until


def text_of(events):
    return "".join(c["delta"].get("content") or "" for e in events for c in e.get("choices", ()))


def test_a_stream_lives_through_a_publication(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x" * 80) as (client, gateway, _):
            reader, _ = await client.send("POST", "/v1/chat/completions", {**CHAT, "stream": True})
            await reader.readuntil(b"x")
            status, report = await client.post(
                "/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "v1")}
            )
            assert (status, report["state"], report["unconfirmed"]) == (200, "resumed", {})
            events, done = await read_stream(reader)
            reef = next(e["reef"] for e in events if "reef" in e)
            return done, await gateway.store.turn(reef["receipt"]), await gateway.store.publications()

    done, turn, publications = run_async(work())
    assert done
    assert [s["version"] for s in turn["spans"]] == ["v0", "v1"]
    assert (turn["state"], turn["class"], len(turn["output_ids"])) == ("complete", "mixed", 81)
    assert turn["oldest"] == 1
    assert [(p["version"], p["state"]) for p in publications] == [("v1", "resumed"), ("v0", "found")]


def test_the_weights_of_each_version_are_linked_for_audits(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, _, _):
            await client.post("/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "a")})

    run_async(work())
    assert (tmp_path / "run" / "weights" / "v0").resolve() == tmp_path / "model"
    assert (tmp_path / "run" / "weights" / "v1").resolve() == tmp_path / "a"


def test_requests_wait_for_a_publication_in_their_order(tmp_path, run_async, monkeypatch):
    """They are sent in it. Each has a connection of its own, so the engines may read them in another."""
    sent: list[int] = []
    choose_for = Router.choose_for

    def noted(self, prompt, session):
        sent.append(prompt[0])
        return choose_for(self, prompt, session)

    monkeypatch.setattr(Router, "choose_for", noted)

    async def work():
        async with gateway_on(tmp_path, "yes", latency_s=0.05) as (client, gateway, engines):
            published = asyncio.create_task(
                client.post("/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "v1")})
            )
            await until(lambda: gateway.plane.gate.closed)
            asks = []
            for i in range(6):
                asks.append(asyncio.create_task(client.post("/generate", {"input_ids": [i + 1]})))
                await until(lambda: gateway.plane.gate.waiting == i + 1)  # noqa: B023
            assert not any(engine.bodies for engine in engines)
            await published
            return [await ask for ask in asks]

    answers = run_async(work())
    assert [status for status, _ in answers] == [200] * 6
    assert {a["meta_info"]["reef"]["versions"][0] for _, a in answers} == {"v1"}
    assert sent == [1, 2, 3, 4, 5, 6]


def test_who_waits_too_long_is_told_to_come_again(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", config={"hold_s": 0.2}) as (client, gateway, _):
            gateway.plane.gate.close()
            status, body, headers = await client.call("POST", "/v1/chat/completions", CHAT)
            gateway.plane.gate.open()
            again, _ = await client.post("/v1/chat/completions", CHAT)
            return status, body, headers, again

    status, body, headers, again = run_async(work())
    assert (status, again) == (503, 200)
    assert headers["retry-after"] == "1"
    assert "a publication is under way" in body["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_at_the_engine_and_the_record_says_so(tmp_path, run_async, stream):
    async def work():
        async with gateway_on(tmp_path, "x" * 4000, engines=1) as (client, gateway, engines):
            body = {**CHAT, "max_tokens": 4000, "stream": stream}
            reader, writer = await client.send("POST", "/v1/chat/completions", body, x_reef_session="s")
            if stream:
                await reader.readuntil(b"x")
            else:
                await until(lambda: any(request.sampled for request in engines[0].ranks[0].requests))
            writer.close()
            await until(lambda: not gateway.plane.exchanges and engines[0].calls.count("/abort_request") == 1)
            assert not engines[0].ranks[0].requests
            receipt = engines[0].bodies[0]["rid"].split(".")[0]
            return await gateway.store.turn(receipt), gateway.plane.gate.inside

    turn, inside = run_async(work())
    assert (turn["state"], turn["finish_reason"], turn["trajectory"]) == ("disconnected", "abort", -1)
    assert 0 < len(turn["output_ids"]) < 4000
    assert turn["segments"][-1]["end"] == len(turn["output_ids"])
    assert inside == 0


def test_a_client_that_leaves_the_gate_leaves_nothing(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "x") as (client, gateway, engines):
            gateway.plane.gate.close()
            _, writer = await client.send("POST", "/v1/chat/completions", CHAT)
            await until(lambda: gateway.plane.gate.waiting == 1)
            writer.close()
            await until(lambda: gateway.plane.gate.waiting == 0)
            gateway.plane.gate.open()
            assert (await client.post("/v1/chat/completions", CHAT))[0] == 200
            return [len(e.bodies) for e in engines], gateway.plane.gate.inside

    bodies, inside = run_async(work())
    assert sum(bodies) == 1
    assert inside == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_during_which_an_engine_ends_is_sent_to_no_other(tmp_path, run_async, stream):
    """It may be why. The client learns it, and isn't asked to send it again; the same request is not let in again."""

    async def work():
        async with gateway_on(tmp_path, token_s=0.01) as (client, gateway, engines):
            body = {**CHAT, "stream": stream, "max_tokens": 60}
            reader, _ = await client.send("POST", "/v1/chat/completions", body)
            await until(lambda: any(r.sampled for e in engines for r in e.ranks[0].requests))
            victim = next(e for e in engines if e.bodies)
            await victim.stop()
            answer = (await reader.read()).decode()
            again = await client.call("POST", "/v1/chat/completions", body)
            other = await client.post("/v1/chat/completions", {**body, "max_tokens": 3, "stream": False})
            (_, metrics), (_, state) = await client.get("/metrics"), await client.get("/reef/state")
            counts = await gateway.store.counts()
            bodies = [[b["sampling_params"]["max_new_tokens"] for b in e.bodies] for e in engines]
            return answer, again, other, bodies, metrics, state, counts

    answer, again, other, bodies, metrics, state, counts = run_async(work())
    assert "ended during this request" in answer
    if not stream:
        assert answer.startswith("HTTP/1.1 502 ")
        assert "x-should-retry: false" in answer
    assert (again[0], again[1]["error"]["code"], again[2]["x-should-retry"]) == (422, "quarantined", "false")
    assert other[0] == 200
    assert sorted(bodies) == [[3], [60]]
    assert "reef_quarantined_total 1.0" in metrics
    assert "reef_quarantine_refused_total 1.0" in metrics
    assert (state["quarantine"]["count"], len(state["quarantine"]["latest"])) == (1, 1)
    assert counts["states"] == {"failed": 2, "complete": 1}


def test_negative_control_without_the_quarantine_one_request_ends_every_engine(tmp_path, run_async, monkeypatch):
    async def work(directory):
        async with gateway_on(directory, engines=3) as (client, _, engines):
            for engine in engines:
                engine.faults["/generate"] = ["die"] * 8
            status, _ = await client.post("/generate", {"text": "x"})
            return status, sum(e.dead for e in engines)

    assert run_async(work(tmp_path / "with")) == (502, 1)
    monkeypatch.setattr("slime_backend.fleet.membership.End", lambda: None)
    assert run_async(work(tmp_path / "without")) == (503, 3)


def test_with_no_engine_left_it_is_503_and_the_record_says_so(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, engines=1) as (client, gateway, engines):
            await engines[0].stop()
            status, body = await client.post("/v1/chat/completions", CHAT)
            return status, body, await gateway.store.counts(), await client.get("/readyz")

    status, body, counts, ready = run_async(work())
    assert status == 503
    assert "no engine answered" in body["error"]["message"]
    assert counts["states"] == {"failed": 1}
    assert ready == (503, {"ready": False, "reasons": ["no engine is confirmed"]})


def test_a_failed_publication_leaves_the_old_version_serving(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", engines=1) as (client, gateway, engines):
            engines[0].faults["/pause_generation"] = ["refuse"]
            status, body = await client.post(
                "/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "v1")}
            )
            assert status == 502, body
            again = await client.post("/reef/publications", {"version": "v0", "checkpoint": str(tmp_path / "v1")})
            nothing = await client.post("/reef/publications", {"version": "v2", "checkpoint": str(tmp_path / "none")})
            answer = await client.post("/v1/chat/completions", CHAT)
            return body, again, nothing, answer, gateway.plane.gate.closed

    body, again, nothing, answer, closed = run_async(work())
    assert "publication of v1 failed on every engine: pause" in body["error"]["message"]
    assert (again[0], nothing[0]) == (409, 400)
    assert answer[1]["reef"]["versions"] == ["v0"]
    assert not closed


def test_an_engine_that_comes_back_is_admitted_and_answers_from_the_next_publication_on(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", engines=2, config={"watch_s": 0.05}) as (client, gateway, engines):
            await client.post("/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "v1")})
            await engines[0].stop()
            await until(lambda: len(gateway.fleet.retired()) == 1)
            port = engines[0].port
            await engines[0].start(port)
            engines[0].label = engines[0].loaded = "v0"  # a new process, with the weights that it was started with
            await until(lambda: not gateway.fleet.retired())
            assert [m.status for m in gateway.fleet.members.values()].count("joining") == 1
            await client.post("/reef/publications", {"version": "v2", "checkpoint": checkpoint(tmp_path, "v2")})
            return [(m.status, m.version) for m in gateway.fleet.members.values()]

    assert run_async(work()) == [("confirmed", "v2"), ("confirmed", "v2")]


def test_what_the_store_refuses_is_not_given(tmp_path, run_async):
    """An answer that can't be stored is an error: no client holds a receipt of nothing."""

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            gateway.store.writer.close()
            return await client.post("/v1/chat/completions", CHAT)

    status, body = run_async(work())
    assert status == 503
    assert "could not be stored" in body["error"]["message"]
