"""What admission would refuse is refused when slime's arguments are parsed, with the flag and the way to allow it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from slime_backend.fleet.kv_holders import REFUSED, unhandled
from slime_backend.policy import PolicyError, decide
from slime_backend.slime_hooks import refusals

RETRACT, SCOPED = decide("disjoint", "retract"), decide("disjoint", "scoped")


def args(**given: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"hf_checkpoint": "/models/actor", "allow_kv_holder": [], **given})


def refused(given: SimpleNamespace) -> str:
    with pytest.raises(PolicyError) as raised:
        refusals.check(given, RETRACT)
    assert "\n" not in str(raised.value)
    return str(raised.value)


# Each holder of the table that a flag can ask for: (slime's argument, what the message begins with).
FLAGS: dict[str, tuple[dict[str, Any], str]] = {
    "draft_model": ({"sglang_speculative_algorithm": "EAGLE"}, "--sglang-speculative-algorithm EAGLE"),
    "lora": ({"sglang_enable_lora": True}, "--sglang-enable-lora"),
    "pd_disaggregation": ({"prefill_num_servers": 2}, "--prefill-num-servers 2"),
    "hicache": ({"sglang_enable_hierarchical_cache": True}, "--sglang-enable-hierarchical-cache"),
    "hicache_storage": ({"sglang_hicache_storage_backend": "file"}, "--sglang-hicache-storage-backend file"),
    "external_cache": ({"sglang_enable_lmcache": True}, "--sglang-enable-lmcache"),
    "pipeline_parallel": ({"sglang_pp_size": 2}, "--sglang-pp-size 2"),
    "pdmux": ({"sglang_enable_pdmux": True}, "--sglang-enable-pdmux"),
    "hisparse": ({"sglang_enable_hisparse": True}, "--sglang-enable-hisparse"),
    "mamba_checkpoints": ({"sglang_enable_int8_mamba_checkpoint": True}, "--sglang-enable-int8-mamba-checkpoint"),
    "encoder_disaggregation": ({"sglang_language_only": True}, "--sglang-language-only"),
    "elastic_experts": ({"sglang_elastic_ep_backend": "mooncake"}, "--sglang-elastic-ep-backend mooncake"),
    "weight_copies": ({"sglang_kt_weight_path": "/w"}, "--sglang-kt-weight-path /w"),
    "linear_attention_flashinfer": (
        {"sglang_linear_attn_backend": "flashinfer"},
        "--sglang-linear-attn-backend flashinfer",
    ),
    "diffusion_decoding": ({"sglang_dllm_algorithm": "LowConfidence"}, "--sglang-dllm-algorithm LowConfidence"),
    "streaming_session": ({"sglang_enable_streaming_session": True}, "--sglang-enable-streaming-session"),
    "multimodal_features": ({"sglang_enable_mm_global_cache": True}, "--sglang-enable-mm-global-cache"),
    "tokenizer_workers": ({"sglang_tokenizer_worker_num": 4}, "--sglang-tokenizer-worker-num 4"),
}


def test_every_holder_that_a_flag_asks_for_is_tried_here() -> None:
    assert {holder.name for holder in REFUSED} - set(FLAGS) == {"unknown_cache"}  # only an engine's report shows it


@pytest.mark.parametrize("name", FLAGS)
def test_the_flag_and_the_way_to_allow_it_are_named(name: str) -> None:
    given, flag = FLAGS[name]
    message = refused(args(**given))
    assert message.startswith(f"{flag}: {name}: ")
    assert f"--allow-kv-holder {name}" in message
    refusals.check(args(**given, allow_kv_holder=[name]), RETRACT)


def test_arguments_without_any_of_it_pass() -> None:
    refusals.check(args(sglang_speculative_algorithm=None, sglang_pp_size=1, sglang_tokenizer_worker_num=1), RETRACT)


def test_engines_of_somebody_else_are_asked_at_admission() -> None:
    given, _ = FLAGS["draft_model"]
    refusals.check(args(**given, rollout_external_engine_addrs=["h:1"]), SCOPED)


# ---- --sglang-config ------------------------------------------------------------------------------------------------


def config(tmp_path: Path, *models: dict[str, Any]) -> SimpleNamespace:
    file = tmp_path / "engines.yaml"
    file.write_text(yaml.safe_dump({"sglang": list(models)}))
    return args(sglang_config=str(file))


def group(kind: str = "regular", **overrides: Any) -> dict[str, Any]:
    return {"worker_type": kind, "num_gpus": 1, **({"overrides": overrides} if overrides else {})}


@pytest.mark.parametrize(
    ("groups", "name", "place"),
    [
        ([group("prefill"), group("decode")], "pd_disaggregation", "server_groups[0]: worker_type prefill"),
        ([group(), group("encoder")], "encoder_disaggregation", "server_groups[1]: worker_type encoder"),
        (
            [group(speculative_algorithm="NEXTN")],
            "draft_model",
            "server_groups[0].overrides.speculative_algorithm",
        ),
        ([group(enable_lora=True)], "lora", "server_groups[0].overrides.enable_lora"),
    ],
)
def test_a_group_of_the_file_is_named(tmp_path: Path, groups: list[Any], name: str, place: str) -> None:
    given = config(tmp_path, {"name": "actor", "server_groups": groups})
    message = refused(given)
    assert message.startswith(f"{given.sglang_config}: model actor, {place}: {name}: ")
    given.allow_kv_holder = [name]
    refusals.check(given, RETRACT)


@pytest.mark.parametrize("key", ["server_groups", "engine_groups"])  # slime takes both
def test_a_frozen_model_gets_no_weights_and_may_do_as_it_likes(tmp_path: Path, key: str) -> None:
    actor = {"name": "actor", key: [group()]}
    drafting = [group(speculative_algorithm="EAGLE")]
    refusals.check(config(tmp_path, actor, {"name": "ref", "model_path": "/models/ref", key: drafting}), RETRACT)
    refusals.check(config(tmp_path, actor, {"name": "ref", "update_weights": False, key: drafting}), RETRACT)
    assert "model judge" in refused(config(tmp_path, actor, {"name": "judge", "update_weights": True, key: drafting}))


def test_flags_hold_for_the_groups_of_a_file_too(tmp_path: Path) -> None:
    given = config(tmp_path, {"name": "actor", "server_groups": [group()]})
    given.sglang_speculative_algorithm = "EAGLE"
    assert refused(given).startswith("--sglang-speculative-algorithm EAGLE: draft_model")
    lifted = config(tmp_path, {"name": "actor", "server_groups": [group(speculative_algorithm=None)]})
    lifted.sglang_speculative_algorithm = "EAGLE"
    refusals.check(lifted, RETRACT)


@pytest.mark.parametrize("text", ["", "[1, 2]", "sglang: 7", "a: [", "sglang:\n- 3"])
def test_a_file_that_slime_would_refuse_is_left_to_slime(tmp_path: Path, text: str) -> None:
    (tmp_path / "engines.yaml").write_text(text)
    refusals.check(args(sglang_config=str(tmp_path / "engines.yaml")), RETRACT)
    refusals.check(args(sglang_config=str(tmp_path / "none.yaml")), RETRACT)


# ---- scoped ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "passes"), [("0.5.15.post1", False), ("0.5.21", False), ("0.5.22", True), (None, True)]
)
def test_scoped_on_a_release_that_cannot_is_refused(
    version: Any, passes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refusals, "installed_sglang", lambda: version)
    refusals.check(args(), RETRACT)
    if passes:
        refusals.check(args(), SCOPED)
        return
    with pytest.raises(PolicyError, match=rf"scoped: scoped needs SGLang 0\.5\.22, there is {version}; use --disjoint"):
        refusals.check(args(), SCOPED)


def test_the_table_is_the_one_of_admission() -> None:
    """The control: what is refused here is what an engine's own report would be refused for."""
    for name, (given, _) in FLAGS.items():
        (asked,) = refusals.engines(args(**given))
        assert [holder.name for holder in unhandled(asked.settings)] == [name]
