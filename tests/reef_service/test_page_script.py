"""The page's script, run by Node with as much of a DOM as it uses: what somebody would see of a state."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

import reef_service
from reef_service.recent import Recent
from tests.reef_service.harness import CHAT, gateway_on

HARNESS = Path(__file__).parent / "page_in_node.mjs"


@pytest.fixture
def look(tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no Node here; apt-get install nodejs")
    script = tmp_path / "app.mjs"  # Node takes it for a module by its name
    script.write_text((Path(reef_service.__file__).parent / "page" / "app.js").read_text())

    def run(state, **given):
        asked = json.dumps({"script": str(script), "state": state, **given})
        ended = subprocess.run([node, HARNESS], input=asked, capture_output=True, text=True, timeout=60)
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


@pytest.fixture
def state(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            await client.post("/v1/chat/completions", CHAT)
            return (await client.get("/reef/state"))[1]

    return run_async(work())


def test_figures_are_shown(look, state):
    state["store"] |= {"leased": 41, "expired": 42, "classes": {"pure": 43}}
    state["recent"] = Recent().to_json() | {"p50_ms": 44.0, "p90_ms": 45.0, "p99_ms": 4600.0, "error_rate": 0.471}
    (seen,) = look(state)
    assert "44 ms / 45 ms / 4.60 s" in seen["shown"]["figures"]
    assert "47.1 %" in seen["shown"]["figures"]
    assert "2 / 2" in seen["shown"]["figures"]
    assert "under a lease that holds 41" in seen["shown"]["queue"]
    assert "under one that ran out 42" in seen["shown"]["queue"]
    assert "43 · 100.0 %" in seen["shown"]["classes"]
    assert seen["live"] == ["one look", "pill good"]
    assert seen["hidden"] == {"sign-in": True, "wrong": True, "no-engine": True}


def test_without_an_engine_it_is_red(look, state):
    for engine in state["engines"]:
        engine["status"] = "retired"
    (seen,) = look(state)
    assert not seen["hidden"]["no-engine"]
    assert seen["live"] == ["one look", "pill bad"]


def test_a_wrong_token_says_so_and_is_tried_once(look, state):
    none, wrong, right = look(state, token="right", entered=["wrong", "right"])
    assert none["live"] == ["admin token needed", "pill bad"]
    assert (none["hidden"]["sign-in"], none["hidden"]["wrong"], none["asked"]) == (False, True, 1)
    assert wrong["live"] == ["wrong token", "pill bad"]
    assert (wrong["hidden"]["sign-in"], wrong["hidden"]["wrong"], wrong["asked"]) == (False, False, 2)
    assert right["live"] == ["one look", "pill good"]
    assert (right["hidden"]["sign-in"], right["hidden"]["wrong"], right["asked"]) == (True, True, 3)


def test_a_session_is_drawn_with_its_branches_and_spans(look, tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for _ in range(2):
                await client.post("/v1/chat/completions", CHAT, x_reef_session="a/b.c", x_reef_group="g")
            await client.post("/reef/report", {"id": "r", "score": 0.25, "session": "a/b.c"})
            found = (await client.get("/reef/sessions?name=a%2Fb.c"))[1]
            by_receipt = (await client.get(f"/reef/sessions?name={found['turns'][0]['receipt']}"))[1]
            missing = await client.get("/reef/sessions?name=nobody")
            return found, by_receipt, missing, (await client.get("/reef/state"))[1]

    found, by_receipt, missing, state = run_async(work())
    assert by_receipt == found
    assert missing[0] == 404
    assert [(b["trajectory"], b["score"], b["trains"], b["place"]) for b in found["branches"]] == [
        (0, 0.25, False, "scored"),
        (1, 0.25, True, "scored"),
    ]
    assert [t["spans"][0]["version"] for t in found["turns"]] == ["v0", "v0"]
    assert all(t["spans"][-1]["end"] == t["output_tokens"] > 0 for t in found["turns"])
    path = "/reef/sessions?name=a%2Fb.c"
    _, seen, none = look(state, answers={path: found}, sessions=["a/b.c", "nobody"])
    shown = seen["shown"]["session"]
    assert "branch 0 · group g · score 0.25 · scored" in shown
    assert "branch 1 · group g · score 0.25 · scored · trains" in shown
    assert all(t["receipt"] in shown for t in found["turns"])
    assert "there is no such session" in none["shown"]["session"]
