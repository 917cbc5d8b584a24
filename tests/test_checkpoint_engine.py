"""Checkpoints and keys on a real engine that wants both of SGLang's keys: a bad checkpoint leaves it generating and
alive, though SGLang itself would end on it; a good one is what it then serves."""

from __future__ import annotations

import asyncio
import json
import shutil
import urllib.error
import urllib.request

import pytest
from safetensors.torch import load_file, save_file

from slime_backend.engine_client import EngineClient
from slime_backend.engine_client.keys import EngineKeys
from slime_backend.engine_process import RUN_HOOKS, EngineSettings, LocalEngine, running_engines
from slime_backend.fleet import Fleet, admit
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.transports import CheckpointTransport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit
from tests.checkpoint_faults import FAULTS, rewritten
from tests.helpers import DEADLINES, body, difference, prompt

pytestmark = pytest.mark.engine
KEYS = EngineKeys("the-api-key", "the-admin-key")


@pytest.fixture(scope="module")
def guarded(tiny_model, tmp_path_factory):
    settings = EngineSettings(
        model=str(tiny_model),
        weight_version="v0",
        max_total_tokens=40000,
        hooks=RUN_HOOKS,
        extra=["--api-key", KEYS.api, "--admin-api-key", KEYS.admin],
    )
    engine = LocalEngine(settings, log_path=tmp_path_factory.mktemp("guarded") / "engine.log")
    with running_engines([engine]):
        yield engine


def status_of(url, key):
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_nothing_bad_reaches_an_engine_that_wants_keys(guarded, models, sources, tiny_model_b, tmp_path, run_async):
    # The control of the keys: our own route and SGLang's are closed without.
    for path in ("/reef_slime/reports", "/server_info"):
        assert [status_of(guarded.url + path, key) for key in ("", KEYS.admin, KEYS.api)] == [401, 401, 200]

    async def scenario():
        async with EngineClient(guarded.url, name="engine0", deadlines=DEADLINES, keys=KEYS) as client:
            fleet = Fleet(decide("disjoint", "retract"), "v0")
            await admit(fleet, client)
            running = asyncio.create_task(client.generate(body(prompt(50), tokens=400)))
            for name, (fault, names) in FAULTS.items():
                checkpoint = shutil.copytree(tiny_model_b, tmp_path / name)
                fault(checkpoint)
                before = await client.reports()
                with pytest.raises(CheckpointUnfit, match=names):
                    await publish(fleet, CheckpointTransport(checkpoint), "v1")
                after = await client.reports()
                assert not any(report.kv.paused for report in after)
                assert [r.kv.flush_epoch for r in after] == [r.kv.flush_epoch for r in before]
            answer = await running
            assert len(answer["output_ids"]) == 400
            assert {span["version"] for span in answer["meta_info"]["weight_versions"]} == {"v0"}

            half = shutil.copytree(tiny_model_b, tmp_path / "half")
            rewritten(half, lambda t: t.update({n: v.bfloat16() for n, v in t.items()}))
            report = await publish(fleet, CheckpointTransport(half, finite=True), "v1")
            assert (report.state, report.unconfirmed) == ("resumed", {})
            ids = prompt(60)
            assert difference(models["b"], ids, await client.generate(body(ids))) < 0.05  # rounded to bf16
            report = await publish(fleet, DistributedTransport(sources["a"]), "v2")
            assert (report.state, report.unconfirmed) == ("resumed", {})
            ids = prompt(60)
            assert difference(models["a"], ids, await client.generate(body(ids))) < 1e-3

    run_async(scenario(), timeout=240)


def test_sglang_itself_takes_a_checkpoint_without_half_of_its_tensors(guarded, tiny_model_b, tmp_path, run_async):
    """The control: what is refused above is a success to the engine, and its weights are of no version."""
    checkpoint = shutil.copytree(tiny_model_b, tmp_path / "half")
    FAULTS["half_missing"][0](checkpoint)

    async def scenario():
        async with EngineClient(guarded.url, deadlines=DEADLINES, keys=KEYS) as client:
            await client.load_from_disk(str(checkpoint))

    run_async(scenario(), timeout=120)


def test_an_engine_takes_shards_with_their_index_and_leaves_an_adapter_alone(
    guarded, models, tiny_model_b, tmp_path, run_async
):
    checkpoint = shutil.copytree(tiny_model_b, tmp_path / "shards")
    tensors = load_file(checkpoint / "model.safetensors")
    (checkpoint / "model.safetensors").unlink()
    places = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(places.values()):
        save_file({n: tensors[n] for n in tensors if places[n] == file}, checkpoint / file, metadata={"format": "pt"})
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    save_file({"lora_a": tensors["model.norm.weight"]}, checkpoint / "adapter_model.safetensors")

    async def scenario():
        async with EngineClient(guarded.url, name="engine0", deadlines=DEADLINES, keys=KEYS) as client:
            fleet = Fleet(decide("disjoint", "retract"), await client.weight_version() or "")
            await admit(fleet, client)
            report = await publish(fleet, CheckpointTransport(checkpoint), "sharded")
            assert (report.state, report.unconfirmed) == ("resumed", {})
            ids = prompt(60)
            assert difference(models["b"], ids, await client.generate(body(ids))) < 1e-3

    run_async(scenario(), timeout=120)
