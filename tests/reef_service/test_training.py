"""Reports and batches over HTTP."""

from __future__ import annotations

import asyncio

import pytest

from tests.reef_service.harness import checkpoint, gateway_on, scored

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 30}


def test_from_answer_to_acknowledged_sample(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            receipt = await scored(client, 1, 0.25)
            status, batch = await client.post("/reef/batches", {"limit": 8, "holder": "me"})
            assert status == 200
            assert (await client.post("/reef/batches", {}))[1]["samples"] == []
            acked = await client.post(f"/reef/batches/{batch['lease']}/ack", {})
            again = await client.post(f"/reef/batches/{batch['lease']}/ack", {})
            return receipt, batch, acked, again, gateway.plane.tokenizer

    receipt, batch, acked, again, tokenizer = run_async(work())
    (sample,) = batch["samples"]
    assert sample["receipts"] == [receipt]
    assert (sample["score"], sample["class"], sample["lag"]) == (0.25, "pure", 0)
    assert tokenizer.decode(sample["response_ids"]) == "yes"
    assert sample["loss_mask"] == [1] * 4
    assert len(sample["logprobs"]) == 4
    assert sample["spans"] == [{"version": "v0", "start": 0, "end": 4}]
    assert acked == again == (200, {"lease": batch["lease"], "trained": 1})


def test_lag_counts_successful_publications(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", engines=1) as (client, _, engines):
            await scored(client, 1)
            engines[0].faults["/pause_generation"] = ["refuse"]
            failed = {"version": "vx", "checkpoint": checkpoint(tmp_path, "vx")}
            assert (await client.post("/reef/publications", failed))[0] == 502
            for name in ("v1", "v2"):
                body = {"version": name, "checkpoint": checkpoint(tmp_path, name)}
                assert (await client.post("/reef/publications", body))[0] == 200
            await scored(client, 2)
            fresh = (await client.post("/reef/batches", {"max_version_lag": 1}))[1]["samples"]
            old = (await client.post("/reef/batches", {"max_version_lag": 2}))[1]["samples"]
            return fresh, old

    fresh, old = run_async(work())
    assert [s["lag"] for s in fresh] == [0]
    assert [s["lag"] for s in old] == [2]


def test_groups_and_classes_and_scores(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for i, group in enumerate(("q", "q", "z")):
                await scored(client, i, i / 2, x_reef_group=group)
            groups = (await client.post("/reef/batches", {"group_size": 2}))[1]
            none = (await client.post("/reef/batches", {"rollout_class": ["carried"]}))[1]
            high = (await client.post("/reef/batches", {"min_score": 0.9}))[1]
            return groups, none, high

    groups, none, high = run_async(work())
    assert [s["group"] for s in groups["samples"]] == ["q", "q"]
    assert (none["lease"], none["samples"]) == (None, [])
    assert [s["score"] for s in high["samples"]] == [1.0]


def test_a_trainer_that_asks_again_gets_the_same_batch(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            await scored(client, 1)
            first = (await client.post("/reef/batches", {"lease": "step-1"}))[1]
            await scored(client, 2)
            again = (await client.post("/reef/batches", {"lease": "step-1"}))[1]
            released = await client.post("/reef/batches/step-1/release", {})
            gone = await client.post("/reef/batches/step-1/ack", {})
            return first, again, released, gone

    first, again, released, gone = run_async(work())
    assert first["samples"] == again["samples"]
    assert released[1]["released"] == 1
    assert gone[0] == 409
    assert gone[1]["error"]["code"] == "lease_gone"


def test_reports_many_times_at_once_are_one(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            _, answer = await client.post("/v1/chat/completions", CHAT)
            body = {"id": "r", "score": 1.0, "receipts": [answer["reef"]["receipt"]]}
            return await asyncio.gather(*(client.post("/reef/report", body) for _ in range(20)))

    assert set(map(str, run_async(work()))) == {str((200, {"id": "r", "trajectories": 1, "late": []}))}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        ({"id": "r", "score": 1}, 400, "give either receipts or a session"),
        ({"id": "r", "score": 1, "receipts": ["x"], "session": "s"}, 400, "give either receipts or a session"),
        ({"id": "", "score": 1, "session": "s"}, 400, "id: "),
        ({"id": "r", "score": "high", "session": "s"}, 400, "score: "),
        ({"id": "r", "scores": 1, "session": "s"}, 400, "scores: "),
        ({"id": "r", "score": 1, "receipts": ["nope"]}, 404, "no turn is stored under nope"),
        ({"id": "r", "score": 1, "session": "nope"}, 404, "no turn is stored in session 'nope'"),
    ],
)
def test_bad_reports(tmp_path, run_async, body, status, words):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            return await client.post("/reef/report", body)

    found, answer = run_async(work())
    assert found == status
    assert words in answer["error"]["message"]
