"""A checkpoint that an engine can't load as it is, is refused while everybody still generates: by every way to publish
one. The engines here are fake ones that report a real model's directory as what they serve."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from slime_backend.cli.engines import publish_checkpoint
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import VersionTaken
from slime_backend.policy import decide
from slime_backend.publication import publish
from slime_backend.simulation.transport import NameTransport
from slime_backend.transports import CheckpointTransport, DiskTransport
from slime_backend.transports.distributed import DistributedTransport
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit, check_finite, read_checkpoint
from slime_backend.weight_sources.torch_module import TorchModuleSource
from tests.checkpoint_faults import FAULTS, rewritten
from tests.fake_fleet import fake_fleet
from tests.reef_service.harness import gateway_on

TOUCHED = {"/pause_generation", "/flush_cache", "/update_weights_from_disk", "/update_weight_version"}


@pytest.fixture
def checkpoint(tiny_model_b, tmp_path):
    return shutil.copytree(tiny_model_b, tmp_path / "new")


def untouched(engines):
    return all(not TOUCHED & set(engine.calls) for engine in engines)


@pytest.mark.parametrize("name", FAULTS)
def test_a_bad_checkpoint_pauses_nobody(name, tiny_model, checkpoint, run_async):
    fault, names = FAULTS[name]
    fault(checkpoint)

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for engine in engines:
                engine.info["model_path"] = str(tiny_model)
            with pytest.raises(CheckpointUnfit, match=names) as caught:
                await publish(fleet, CheckpointTransport(checkpoint), "v1")
            assert "\n" not in str(caught.value)
            assert untouched(engines)
            assert len(fleet.routable()) == 2

    run_async(scenario())


def with_config(directory, **changes):
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def published(run_async, served, checkpoint, **settings):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for engine in engines:
                engine.info["model_path"] = str(served)
            try:
                return await publish(fleet, CheckpointTransport(checkpoint, **settings), "v1")
            except CheckpointUnfit:
                assert untouched(engines)
                raise

    return run_async(scenario())


def test_a_good_checkpoint_is_published(tiny_model, checkpoint, run_async):
    """Also in another precision, with a buffer, a draft model's layer and an adapter next to an index."""
    layers = json.loads((tiny_model / "config.json").read_text())["num_hidden_layers"]

    def change(tensors):
        tensors.update({name: tensor.bfloat16() for name, tensor in tensors.items()})
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)
        tensors[f"model.layers.{layers}.eh_proj.weight"] = torch.zeros(4)

    rewritten(checkpoint, change)
    names = dict.fromkeys(load_file(checkpoint / "model.safetensors"), "model.safetensors")
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    save_file({"lora_a": torch.zeros(2)}, checkpoint / "adapter_model.safetensors")
    report = published(run_async, tiny_model, checkpoint, finite=True)
    assert (report.state, report.unconfirmed) == ("resumed", {})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("lacking", ["served", "new"])
def test_only_a_tied_head_may_be_on_one_side(tied, lacking, tiny_model, tmp_path, run_async):
    paths = {name: shutil.copytree(tiny_model, tmp_path / name) for name in ("served", "new")}
    for directory in paths.values():
        with_config(directory, tie_word_embeddings=tied)
    rewritten(paths[lacking], lambda t: t.pop("lm_head.weight"))
    if tied:
        assert published(run_async, paths["served"], paths["new"]).state == "resumed"
    else:
        with pytest.raises(CheckpointUnfit, match=r"lm_head.weight is"):
            published(run_async, paths["served"], paths["new"])


def test_a_model_that_this_machine_doesnt_see_is_checked_in_itself(checkpoint, run_async):
    """The control of what is compared: the same missing tensor passes where there is nothing to compare with."""
    FAULTS["one_missing"][0](checkpoint)
    for elsewhere in ("/nowhere/model", "relative/model", ""):
        assert published(run_async, elsewhere, checkpoint).state == "resumed"
    FAULTS["cut_off"][0](checkpoint)
    with pytest.raises(CheckpointUnfit, match="cut off"):
        published(run_async, "/nowhere/model", checkpoint)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_by_its_bits(dtype, value, tmp_path):
    tensor = torch.linspace(-3, 3, 64).to(dtype)
    (tmp_path / "config.json").write_text("{}")
    save_file({"first": tensor.clone(), "w": tensor}, tmp_path / "model.safetensors")
    check_finite(read_checkpoint(tmp_path))  # the largest finite values pass, see below
    wrong = tensor.clone()
    wrong[41] = value
    save_file({"first": tensor, "w": wrong}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointUnfit, match=r"w has a NaN or an infinity \(element 41 of 64\)"):
        check_finite(read_checkpoint(tmp_path))
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny], dtype=dtype)
    save_file({"w": largest}, tmp_path / "model.safetensors")
    check_finite(read_checkpoint(tmp_path))


def test_nan_is_refused_by_the_command(tiny_model, checkpoint, run_async):
    rewritten(checkpoint, lambda t: t["model.norm.weight"].__setitem__(0, float("nan")))

    async def scenario():
        async with fake_fleet(1) as (_, (engine,)):
            engine.info["model_path"] = str(tiny_model)
            policy = decide("disjoint", "retract")
            with pytest.raises(CheckpointUnfit, match=r"model.norm.weight has a NaN"):
                await publish_checkpoint(policy, [engine.url], checkpoint, "v1", frozenset())
            assert untouched([engine])
            report = await publish_checkpoint(policy, [engine.url], checkpoint, "v1", frozenset(), finite=False)
            assert report.state == "resumed"  # the control: headers show nothing of it

    run_async(scenario())


@pytest.mark.parametrize("name", ["cut_off", "one_missing", "one_too_many"])
def test_the_gateway_answers_400_and_its_gate_stays_open(name, tiny_model, checkpoint, tmp_path, run_async):
    FAULTS[name][0](checkpoint)

    async def scenario():
        async with gateway_on(tmp_path, "x") as (client, _, engines):
            for engine in engines:
                engine.info["model_path"] = str(tiny_model)
            body = {"version": "v1", "checkpoint": str(checkpoint)}
            status, answer = await client.post("/reef/publications", body)
            assert (status, answer["error"]["code"]) == (400, "checkpoint_unfit")
            assert untouched(engines)
            shutil.rmtree(checkpoint)
            shutil.copytree(tiny_model, checkpoint)
            status, report = await client.post("/reef/publications", body)  # the name wasn't used up
            assert (status, report["state"]) == (200, "resumed")

    run_async(scenario())


class OneMore(TorchModuleSource):
    def shapes(self):
        return super().shapes() | {"model.extra.weight": ((2,), torch.float32)}


@pytest.mark.parametrize("kind", ["disk", "distributed"])
def test_a_source_in_memory_is_compared_as_well(kind, tiny_model, models, tmp_path, run_async):
    source = OneMore(models["b"], tiny_model)
    transport = DiskTransport(source, tmp_path) if kind == "disk" else DistributedTransport(source)

    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for engine in engines:
                engine.info["model_path"] = str(tiny_model)
            with pytest.raises(CheckpointUnfit, match=r"model.extra.weight is no tensor of"):
                await publish(fleet, transport, "v1")
            assert untouched(engines)
            assert not any("/init_weights_update_group" in engine.calls for engine in engines)
        assert list(tmp_path.iterdir()) == []

    run_async(scenario())


# ---- a directory, or a name, that is taken ------------------------------------------------------------------------


def test_an_older_file_is_never_published_for_the_sources_weights(sources, tmp_path, run_async):
    """A trainer that starts again in the same directory and counts from 1."""

    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            await publish(fleet, DiskTransport(sources["a"], tmp_path), "step1")
        async with fake_fleet(1) as (fleet, engines):
            with pytest.raises(CheckpointUnfit, match=r"step1 is taken: its \S+ has other values"):
                await publish(fleet, DiskTransport(sources["b"], tmp_path), "step1")
            assert untouched(engines)
            report = await publish(fleet, DiskTransport(sources["a"], tmp_path), "step1")  # the same weights
            assert report.state == "resumed"

    run_async(scenario())
    assert [p.name for p in tmp_path.iterdir()] == ["step1"]


@pytest.mark.parametrize("there", ["config only", "file", "cut off"])
def test_what_else_has_the_name_is_no_version(there, sources, tmp_path, run_async):
    place = tmp_path / "v1"
    if there == "file":
        place.write_text("")
    elif there == "config only":
        place.mkdir()
        (place / "config.json").write_text("{}")
    else:
        sources["a"].save(place)
        FAULTS["cut_off"][0](place)

    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            with pytest.raises(CheckpointUnfit, match="v1 is taken"):
                await publish(fleet, DiskTransport(sources["a"], tmp_path), "v1")
            assert untouched(engines)

    run_async(scenario())


class Slow:
    """A source that writes until it is let go."""

    def __init__(self, source):
        self.source, self.writing, self.go_on = source, threading.Event(), threading.Event()

    def named_tensors(self):
        return self.source.named_tensors()

    def save(self, directory):
        self.writing.set()
        assert self.go_on.wait(30)
        self.source.save(directory)


def test_a_cancelled_prepare_leaves_neither_thread_nor_version(sources, tmp_path, run_async):
    source = Slow(sources["a"])

    async def scenario():
        async with fake_fleet(1) as (fleet, engines):
            work = asyncio.create_task(publish(fleet, DiskTransport(source, tmp_path), "v1"))
            await asyncio.to_thread(source.writing.wait, 30)
            for _ in range(3):  # also a second and third Ctrl-C
                work.cancel()
                await asyncio.wait({work}, timeout=0.05)
            assert not work.done()  # it waits for the thread
            source.go_on.set()
            with pytest.raises(asyncio.CancelledError):
                await work
            assert list(tmp_path.iterdir()) == []  # the thread has ended: nothing comes later
            assert untouched(engines)
            report = await publish(fleet, DiskTransport(sources["b"], tmp_path), "v1")
            assert report.state == "resumed"

    run_async(scenario())


@pytest.mark.parametrize("version", ["../v1", "a/b", ".hidden", "", "/tmp"])
def test_a_version_is_the_name_of_one_directory(version, sources, tmp_path, run_async):
    with pytest.raises(CheckpointUnfit, match="is no name of a directory"):
        run_async(DiskTransport(sources["a"], tmp_path / "root").prepare(version, []))
    assert list(tmp_path.iterdir()) == []


def test_a_name_stands_for_one_set_of_weights(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            for version in ("v0", ""):
                with pytest.raises(VersionTaken):
                    await publish(fleet, NameTransport(), version)
            assert untouched(engines)
            await publish(fleet, NameTransport(), "v1")
            await publish(fleet, NameTransport(), "v2")
            for version in ("v0", "v1", "v2"):
                with pytest.raises(VersionTaken, match=f"'{version}' is taken"):
                    await publish(fleet, NameTransport(), version)
            assert fleet.version == "v2"

    run_async(scenario())


def test_a_failed_publication_doesnt_use_its_name_up(run_async):
    async def scenario():
        async with fake_fleet(2) as (fleet, engines):
            engines[1].faults["/update_weights_from_disk"] = ["refuse"]
            engines[0].faults["/pause_generation"] = ["refuse"]
            with pytest.raises(Exception, match="failed on every engine"):
                await publish(fleet, NameTransport(), "v1")
            report = await publish(fleet, NameTransport(), "v1")
            assert report.state == "resumed"

    run_async(scenario())


def test_the_command_refuses_a_name_that_an_engine_serves(tiny_model_b, run_async):
    async def scenario():
        async with fake_fleet(2) as (_, engines):
            async with EngineClient(engines[1].url) as client:
                await client.label("v1")
                for engine in engines:
                    engine.calls.clear()
            urls = [engine.url for engine in engines]
            with pytest.raises(VersionTaken, match=f"{engines[1].url} serves weights of that name"):
                await publish_checkpoint(decide("disjoint", "retract"), urls, tiny_model_b, "v1", frozenset())
            assert untouched(engines)

    run_async(scenario())
