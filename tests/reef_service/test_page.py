"""The page in a headless Chromium, and the API's description without the internet."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from reef_service.recent import Recent
from tests.provenance.report.browser import FLAGS, Elements, find_chromium
from tests.reef_service.harness import CHAT, checkpoint, gateway_on


async def browse(url, tmp_path, *flags):
    chromium = find_chromium()
    if chromium is None:
        pytest.skip("no Chromium here; apt-get install chromium")
    command = [chromium, *FLAGS, "--window-size=1440,900", "--virtual-time-budget=5000"]
    command += [f"--user-data-dir={tmp_path}/profile", *flags, url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), 100)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return output.decode()


async def busy_gateway(client, tmp_path, engines):
    """Turns, two publications of which one loses an engine, and a sample that was trained on."""
    for i in range(5):
        await client.post("/v1/chat/completions", CHAT, x_reef_session=f"s{i}")
    await client.post("/reef/publications", {"version": "v1", "checkpoint": checkpoint(tmp_path, "v1")})
    for i in range(3):
        await client.post("/v1/chat/completions", CHAT, x_reef_session=f"s{i}")
    await client.post("/reef/report", {"id": "r", "score": 1, "session": "s1"})
    batch = (await client.post("/reef/batches", {"limit": 1}))[1]
    await client.post(f"/reef/batches/{batch['lease']}/ack", {})
    engines[2].faults["/update_weights_from_disk"] = ["refuse"]
    await client.post("/reef/publications", {"version": "v2", "checkpoint": checkpoint(tmp_path, "v2")})


def test_the_page_shows_what_there_is(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", engines=3, config={"watch_s": 0.1}) as (client, _, engines):
            await busy_gateway(client, tmp_path, engines)
            dom = await browse(client.url + "/?still", tmp_path, "--dump-dom")
            await browse(client.url + "/?still", tmp_path, f"--screenshot={tmp_path}/page.png")
            return dom

    dom = run_async(work(), 250)
    page = Elements(dom)
    assert page.title == "reef-slime gateway"
    text = re.sub(r"<[^>]+>", " ", dom)
    for words in ("v1 → v2", "v0 → v1", "all confirmed", "1 retired", "one look", "free KV", "prefix hit rate", "pure"):
        assert words in text, words
    # The third was retired for its load, and is back since, to be published to the next time.
    assert sorted(e["class"] for e in page.classed("engine"))[:2] == ["engine confirmed", "engine confirmed"]
    assert len(page.classed("engine")) == 3
    assert "hidden" in page.tagged("form")[0]
    assert not [a for a in page.addresses() if a.startswith(("http:", "https:", "//"))]
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_the_page_asks_for_a_token_where_one_is_needed(tmp_path, run_async):
    (tmp_path / "t").write_text("a-token-of-16-letters\n")
    tokens = {"agent_token_file": tmp_path / "t", "admin_token_file": tmp_path / "t"}

    async def work():
        async with gateway_on(tmp_path, "yes", config=tokens) as (client, _, _):
            return await browse(client.url + "/?still", tmp_path, "--dump-dom")

    page = Elements(run_async(work(), 150))
    (form,) = page.tagged("form")
    assert "hidden" not in form
    assert not page.classed("engine")


def test_the_page_is_red_where_no_engine_is_left(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", config={"watch_s": 60.0}) as (client, gateway, _):
            there = Elements(await browse(client.url + "/?still", tmp_path, "--dump-dom"))
            for member in gateway.fleet.members.values():
                gateway.fleet.retire(member, "gone")
            return there, Elements(await browse(client.url + "/?still", tmp_path, "--dump-dom"))

    there, gone = run_async(work(), 250)
    assert "hidden" in there.classed("alarm")[0]
    assert "hidden" not in gone.classed("alarm")[0]
    assert gone.tagged("body")[0]["class"] == "no-engine"
    assert "bad" in next(e for e in gone.classed("pill") if e.get("id") == "live")["class"]


def test_the_state_has_the_last_minute(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            for _ in range(3):
                await client.post("/v1/chat/completions", CHAT)
            return (await client.get("/reef/state"))[1]["recent"]

    recent = run_async(work())
    assert recent["requests"] == 3
    assert recent["error_rate"] == 0
    assert 0 < recent["p50_ms"] <= recent["p99_ms"]
    assert recent["requests_per_s"] > 0
    assert recent["tokens_per_s"] > recent["requests_per_s"]


def test_rates_and_latencies_are_of_the_last_minute():
    clock = [0.0]
    recent = Recent(lambda: clock[0])
    assert recent.to_json()["p50_ms"] is None
    assert recent.to_json()["error_rate"] is None
    recent.add(100.0, 1000, failed=False)
    clock[0] = 100.0
    for i in range(1, 101):
        recent.add(i / 1000, 6, failed=False)
    for _ in range(25):
        recent.add(50.0, 0, failed=True)
    found = recent.to_json()
    assert (found["requests"], found["window_s"], found["error_rate"]) == (125, 60.0, 0.2)
    assert [round(found[f"p{q}_ms"]) for q in (50, 90, 99)] == [50, 90, 99]
    assert (found["requests_per_s"], found["tokens_per_s"]) == (125 / 60, 10.0)
    clock[0] = 161.0
    assert recent.to_json()["requests"] == 0


def test_events_are_the_state_once_a_second(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            reader, writer = await client.send("GET", "/reef/events")
            found = []
            while len(found) < 2:
                line = await reader.readline()
                if line.startswith(b"data: "):
                    found.append(json.loads(line[6:]))
            writer.close()
            return found

    first, second = run_async(work())
    assert second["now"] > first["now"]
    assert [e["status"] for e in first["engines"]] == ["confirmed", "confirmed"]


def test_docs_and_page_load_nothing_from_elsewhere(tmp_path, run_async):
    pytest.importorskip("fastapi_offline", reason="fastapi-offline is not installed; pip install 'reef-slime[service]'")

    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            found = {path: await client.get(path) for path in ("/", "/docs")}
            for _, text in list(found.values()):
                for address in Elements(text).addresses():
                    if not address.startswith(("data:", "/docs")) or address.startswith("/docs-assets"):
                        found[address] = await client.get(address)
            return found

    found = run_async(work())
    assert len(found) > 5
    assert {status for status, _ in found.values()} == {200}
    assert all(path.startswith("/") for path in found)


def test_metrics(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, _, _):
            await client.post("/v1/chat/completions", CHAT)
            return await client.get("/metrics")

    status, text = run_async(work())
    assert status == 200
    assert 'reef_turns_total{api="chat",class="pure",state="complete"} 1.0' in text
    assert 'reef_engines{status="confirmed"} 2.0' in text
    assert "reef_gate_inside 0.0" in text
