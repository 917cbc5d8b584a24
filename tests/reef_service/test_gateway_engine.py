"""The gateway in front of a real engine: every receipt's provenance holds under audit, through publications too."""

from __future__ import annotations

import pytest

from slime_backend.cli.gateway import export
from tests.helpers import load
from tests.reef_service.engine_gateway import gateway_on_fleet
from tests.reef_service.harness import read_stream, until
from tests.waiting import ENDLESS, delayed, goes_on

pytestmark = pytest.mark.engine


def gateway_on_engine(engine, sources, tiny_model, tmp_path):
    """(client, gateway) at known weights: those of `a`, which are linked as the first version."""
    return gateway_on_fleet(engine, tiny_model, tmp_path, prepare=lambda client: load(client, sources["a"], tmp_path))


def chat(*texts, **more):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": 40, "ignore_eos": True, **more}


def test_sessions_publications_and_clients_that_leave_hold_under_audit(
    engine, sources, models, tiny_model, tiny_model_b, tmp_path, run_async
):
    from slime_backend.audit.audit import audit_run
    from slime_backend.simulation.models import load_model

    question = "Tell me of the sea. " * 20

    async def work():
        async with gateway_on_engine(engine, sources, tiny_model, tmp_path) as (client, gateway):
            status, first = await client.post("/v1/chat/completions", chat(question), x_reef_session="s")
            assert status == 200, first
            reply = first["choices"][0]["message"]["content"]
            _, second = await client.post("/v1/chat/completions", chat(question, reply, "and?"), x_reef_session="s")

            leaves = {**chat(question), "max_tokens": ENDLESS, "stream": True}
            reader, writer = await client.send("POST", "/v1/chat/completions", leaves, x_reef_session="left")
            await reader.readuntil(b"chat.completion.chunk")
            await delayed()
            writer.close()
            await until(lambda: not gateway.plane.exchanges, 30)

            through: list = []
            for tokens in (300, 2000, 8000):  # longer ones where the machine is too fast for the publication
                streams = [
                    await client.send(
                        "POST", "/v1/chat/completions", {**chat(f"{i}"), "max_tokens": tokens, "stream": True}
                    )
                    for i in range(4)
                ]
                for reader, _ in streams:
                    await reader.readuntil(b"chat.completion.chunk")
                await delayed()
                body = {"version": f"published-{tokens}", "checkpoint": str(tiny_model_b)}
                status, report = await client.post("/reef/publications", body)
                assert (status, report["state"]) == (200, "resumed"), report
                through += [await read_stream(reader) for reader, _ in streams]
                if report["engines"][0]["requests_retracted"] == 4:
                    break
            await client.post("/generate", {"text": "x", "sampling_params": {"max_new_tokens": 9}})
            turns = {r.receipt: r for r in gateway.store.records()}
            return second, through, turns, await gateway.store.counts(), gateway.fleet.version

    second, through, turns, counts, version = run_async(work(), 240)
    turns_made = 3 + len(through)
    again = turns[second["reef"]["receipt"]]
    # All but the last token of the turn before, whose KV was not computed yet, and what came since.
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(again.prompt_ids) - 20
    assert counts["states"] == {"complete": turns_made, "disconnected": 1}
    assert all(done for _, done in through)
    crossed = [turns[next(e["reef"]["receipt"] for e in events if "reef" in e)] for events, _ in through[-4:]]
    assert all(record.versions[-1] == version for record in crossed)
    assert all(len(record.versions) == 2 for record in crossed)
    assert f"{turns_made} turns added to the 0" in export(tmp_path / "run", None)
    audit = audit_run(tmp_path / "run", load_model)
    assert audit.rollouts == turns_made
    assert [str(v) for v in audit.violations] == []
    assert audit.max_abs_logprob_diff < 1e-4
    assert f"0 turns added to the {turns_made}" in export(tmp_path / "run", None)


def test_the_tokens_of_a_client_that_left_have_their_provenance(engine, sources, tiny_model, tmp_path, run_async):
    async def work():
        async with gateway_on_engine(engine, sources, tiny_model, tmp_path) as (client, gateway):
            for stream in (True, False):
                body = {**chat("go"), "max_tokens": ENDLESS, "stream": stream}
                _, writer = await client.send("POST", "/v1/chat/completions", body, x_reef_session=f"left-{stream}")
                (member,) = gateway.fleet.members.values()
                await goes_on(member.client, 1)
                writer.close()
                await until(lambda: not gateway.plane.exchanges, 30)
            from sqlalchemy import select

            from reef_service.store.schema import turns

            rows = await gateway.store.read(lambda c: [r.receipt for r in c.execute(select(turns.c.receipt))])
            return [await gateway.store.turn(receipt) for receipt in rows]

    found = run_async(work(), 120)
    assert len(found) == 2
    for turn in found:
        assert (turn["state"], turn["finish_reason"]) == ("disconnected", "abort")
        assert 0 < len(turn["output_ids"]) < ENDLESS
        assert turn["segments"][-1]["end"] == len(turn["output_ids"])
