"""What is published from DeepSpeed's ZeRO: the weights after the step, under the checkpoint's names, in bounded memory.

On real DeepSpeed, one and two processes, gloo. Not here: GPUs, offloading (its pieces lie on the CPU, as all do here).
"""

from __future__ import annotations

import functools

import pytest
import torch
from safetensors.torch import load_file

from slime_backend.bench.gathering import HOWS
from slime_backend.simulation.models import load_model, make_tiny_model
from tests.needs import needs_deepspeed
from tests.weight_sources.ranks import run_cases

pytestmark = needs_deepspeed
RANK = "tests.weight_sources.deepspeed_rank:"
SLACK = 64 << 10  # small tensors of torch's and DeepSpeed's own


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    """The tiny model with its output layer tied to the embeddings."""
    from transformers import Qwen3ForCausalLM

    untied = make_tiny_model(tmp_path_factory.mktemp("untied") / "m", seed=2)
    config = load_model(untied).config
    config.tie_word_embeddings = True
    torch.manual_seed(2)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path_factory.mktemp("tied") / "m")
    return next(tmp_path_factory.getbasetemp().glob("tied*/m"))


def read(directory):
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.fixture(scope="module")
def published(tiny_model, tied, tmp_path_factory):
    """`published(ranks, stage, kind)`: the directory of a run of `publish`, and what rank 0 returned; `kind`: float32,
    bfloat16, or tied (in float32). All of one number of ranks are run at once."""

    @functools.cache
    def all_of(ranks):
        kinds = ("float32", "bfloat16", "tied") if ranks > 1 else ("float32",)
        keys = [(stage, kind) for stage in (1, 2, 3) for kind in kinds]
        cases = [
            {"checkpoint": str(tied if kind == "tied" else tiny_model), "stage": stage}
            | ({"dtype": kind} if kind != "tied" else {})
            for stage, kind in keys
        ]
        folder = tmp_path_factory.mktemp(f"ranks{ranks}")
        results = run_cases(RANK + "publish", ranks, folder, cases)
        return {key: (folder / str(i), result[0]) for i, (key, result) in enumerate(zip(keys, results, strict=True))}

    return lambda ranks, stage, kind="float32": all_of(ranks)[stage, kind]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_weights_after_the_step_under_the_checkpoints_names(published, tiny_model, stage, ranks):
    folder, found = published(ranks, stage)
    start = read(tiny_model)
    one, two = read(folder / "v1"), read(folder / "v2")
    master = torch.load(folder / "master.pt")
    assert sorted(found["names"]) == sorted(start) == sorted(two)
    assert len(found["names"]) == len(set(found["names"]))
    assert found["buckets"] > 1
    for name, weight in two.items():
        assert weight.dtype == start[name].dtype == torch.float32
        assert torch.equal(weight, master[name])
    # Every step moved every tensor, so what was published is of its own step.
    for before, after in ((start, one), (one, two)):
        assert [name for name in start if torch.equal(before[name], after[name])] == []
    load_model(folder / "v2")


def test_any_number_of_processes_publishes_the_same(published):
    reference = read(published(1, 2)[0] / "v2")
    for other in ((2, 2), (1, 3), (2, 3)):
        found = read(published(*other)[0] / "v2")
        assert max(float((found[name] - weight).abs().max()) for name, weight in reference.items()) < 1e-4


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bf16_stays_bf16(published, stage):
    folder, _ = published(2, stage, "bfloat16")
    master = torch.load(folder / "master.pt")
    for name, weight in read(folder / "v2").items():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, master[name].bfloat16())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_tied_weights_are_published_once(published, stage):
    folder, found = published(2, stage, "tied")
    assert "lm_head.weight" not in found["names"]
    model = load_model(folder / "v2")
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model of 10 MB, so that its tensors outweigh everything else that is allocated."""
    return make_tiny_model(tmp_path_factory.mktemp("wide") / "m", seed=0, hidden_size=256, layers=4)


BUCKET = 2 << 20


@pytest.fixture(scope="module")
def peaks(wide, tmp_path_factory):
    """`peaks[how]`: what both ranks allocated at the most."""
    cases = [{"checkpoint": str(wide), "how": how, "bucket_bytes": BUCKET} for how in HOWS]
    found = run_cases(RANK + "memory", 2, tmp_path_factory.mktemp("memory"), cases)
    return dict(zip(HOWS, found, strict=True))


@pytest.mark.parametrize("how", ["transport", "save"])
def test_two_buckets_at_most_and_nothing_on_the_other_rank(peaks, how):
    leader, follower = peaks[how]
    assert BUCKET / 2 < leader["bucket"] <= BUCKET < leader["whole"] / 4
    assert leader["bucket"] / 2 < leader["allocated"] <= 2 * leader["bucket"] + SLACK
    assert follower["allocated"] < SLACK


def test_control_gathering_everything_exceeds_it(peaks):
    leader, follower = peaks["everything"]
    assert leader["allocated"] > leader["whole"] * 0.95 > 2 * leader["bucket"] + SLACK
    assert follower["allocated"] < SLACK


def test_what_deepspeed_itself_takes_for_the_same_buckets(peaks):
    """Why the source doesn't use it: it builds every bucket on every rank."""
    for rank in peaks["deepspeed"]:
        assert rank["allocated"] > peaks["transport"][1]["allocated"] + rank["bucket"] / 2
