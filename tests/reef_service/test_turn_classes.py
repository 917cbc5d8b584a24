"""What a request asked for is recorded, and a turn is called what it is: `not_auditable` where its distribution isn't
the weights' own, and no turn at all where its log-probs are no numbers."""

from __future__ import annotations

import pytest

from slime_backend.simulation.fake_engine import FakeEngine
from tests.reef_service.harness import CHAT, gateway_on

CHANGES = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_tokens": 2,
    "response_format": {"type": "json_object"},
}
RECORDED = {"min_tokens": "min_new_tokens", "response_format": "json_schema"}
LEAVES = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "frequency_penalty": 0, "repetition_penalty": 1.0, "seed": 3}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_the_distribution_is_never_pure(tmp_path, run_async, name):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            await client.post("/v1/chat/completions", {**CHAT, **LEAVES}, x_reef_session="plain")
            status, answer = await client.post(
                "/v1/chat/completions", {**CHAT, name: CHANGES[name]}, x_reef_session="s"
            )
            assert status == 200, answer
            _, turn = await client.get(f"/reef/turns/{answer['reef']['receipt']}")
            for i, session in enumerate(("plain", "s")):
                await client.post("/reef/report", {"id": f"r{i}", "score": 1, "session": session})
            _, pure = await client.post("/reef/batches", {"rollout_class": ["pure"], "limit": 9})
            _, rest = await client.post("/reef/batches", {"limit": 9})
            metrics = (await client.get("/metrics"))[1]
            return answer["reef"], turn, pure["samples"], rest["samples"], await gateway.store.counts(), metrics

    reef, turn, pure, rest, counts, metrics = run_async(work())
    parameter = RECORDED.get(name, name)
    assert (reef["class"], reef["not_auditable"]) == ("not_auditable", parameter)
    assert turn["class"] == "not_auditable"
    assert [(s["session"], s["class"]) for s in pure] == [("plain", "pure")]
    assert [(s["session"], s["class"], list(s["turns"][0]["sampling"])) for s in rest] == [
        ("s", "not_auditable", [parameter])
    ]
    assert counts["classes"] == {"pure": 1, "not_auditable": 1}
    assert 'class="not_auditable"' in metrics


@pytest.mark.parametrize("stream", [False, True])
def test_log_probs_that_are_no_numbers_are_one_error_and_a_record(tmp_path, run_async, monkeypatch, stream):
    """NaN in the weights: the other engine has them too, so it is asked once."""
    plain = FakeEngine._answer
    asked = []

    def broken(self, request, planned, end, sent=0):
        answer = plain(self, request, planned, end, sent)
        asked.append(self)
        for entry in answer["meta_info"]["output_token_logprobs"]:
            entry[0] = None  # as SGLang writes NaN
        return answer

    monkeypatch.setattr(FakeEngine, "_answer", broken)
    body = {**CHAT, "temperature": 0.25, "frequency_penalty": 0.5, "stream": stream}

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            status, answer, headers = await client.call("POST", "/v1/chat/completions", body, x_reef_session="s")
            rows = await gateway.store.read(
                lambda c: c.exec_driver_sql("SELECT receipt, state, finish_reason, temperature FROM turns").all()
            )
            _, turn = await client.get(f"/reef/turns/{rows[0][0]}")
            engines = [m.status for m in gateway.fleet.members.values()]
            return status, answer, headers, rows, turn, engines

    status, answer, headers, rows, turn, engines = run_async(work())
    assert (status, answer["error"]["code"], headers["x-should-retry"]) == (502, "no_logprobs", "false")
    assert (
        "the log-prob of output token 0 is null (NaN or an infinity: are there NaN in the weights of v0?)"
        in (answer["error"]["message"])
    )
    assert [row[1:] for row in rows] == [("failed", "no log-probs", 0.25)]
    assert turn["class"] == ""
    assert len({id(engine) for engine in asked}) == 1
    assert engines == ["confirmed", "confirmed"]
