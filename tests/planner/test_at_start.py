"""`auto`: what it takes, why, and that no kind of engine makes it take what the policy couldn't make safe there."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.arguments import add_reef_arguments, configure_sglang_runtime
from slime_backend.cli import app as cli
from slime_backend.config import ConfigError, make_config
from slime_backend.fleet.kv_holders import REFUSED, unhandled
from slime_backend.local_trainer.auto_sharing import resolve
from slime_backend.planner import at_start
from slime_backend.planner.at_start import StartFacts, choose, info_of_flags, safe_modes
from slime_backend.planner.traffic import Traffic
from slime_backend.policy import PolicyError, decide

TRAFFIC = Traffic(prompt=1000, shared=0, group=8, answers=(200.0,), in_flight=64, period_s=1, chunk=2048)
FACTS = StartFacts("disjoint", TRAFFIC, requests=64, sglang="0.5.23", engine_info={})
# A setting that makes each holder present.
PRESENT = {
    "hicache_storage": {"hicache_storage_backend": "file", "enable_hierarchical_cache": True},
    "hicache": {"enable_hierarchical_cache": True},
    "external_cache": {"radix_cache_backend": "flexkv"},
    "unknown_cache": {"internal_states": [{"reef_slime": {"kv": {"tree": "UnifiedRadixCache+c128"}}}]},
    "pipeline_parallel": {"pp_size": 2},
    "pdmux": {"enable_pdmux": True},
    "hisparse": {"enable_hisparse": True},
    "mamba_checkpoints": {"enable_int8_mamba_checkpoint": True},
    "encoder_disaggregation": {"language_only": True},
    "elastic_experts": {"elastic_ep_backend": "mooncake"},
    "weight_copies": {"offload_group_size": 4, "offload_mode": "sharded_gpu"},
    "linear_attention_flashinfer": {"linear_attn_decode_backend": "flashinfer"},
    "diffusion_decoding": {"dllm_algorithm": "LowConfidence"},
    "streaming_session": {"enable_streaming_session": True},
    "multimodal_features": {"enable_prefix_mm_cache": True},
    "draft_model": {"speculative_algorithm": "EAGLE"},
    "pd_disaggregation": {"disaggregation_mode": "prefill"},
    "lora": {"enable_lora": True},
    "tokenizer_workers": {"tokenizer_worker_num": 2},
}


def test_much_in_flight_and_much_to_share_is_scoped():
    choice = choose(FACTS)
    assert choice.sharing == "scoped"
    assert choice.why.startswith("the planner expects off to take ")
    assert "\n" not in choice.why


@pytest.mark.parametrize(
    ("change", "sharing", "why"),
    [
        ({"traffic": replace(TRAFFIC, in_flight=0)}, "retract", "the planner expects"),
        ({"traffic": replace(TRAFFIC, group=1)}, "off", "the planner expects"),
        ({"traffic": None}, "retract", "nothing is known of the traffic"),
        ({"layout": "colocated"}, "retract", "colocated engines always retract and flush"),
        ({"radix_cache_off": True}, "off", "the radix cache is turned off"),
        ({"sglang": "0.5.15.post1"}, "retract", "scoped needs SGLang 0.5.23, there is 0.5.15.post1"),
        ({"sglang": None}, "retract", "no known version"),
        ({"engines_elsewhere": "engines are elsewhere"}, "retract", "scoped is left out: engines are elsewhere"),
        ({"assumed": "assumed: 7 in flight"}, "scoped", "assumed: 7 in flight"),
    ],
)
def test_what_is_taken_and_why(change, sharing, why):
    choice = choose(replace(FACTS, **change))
    assert choice.sharing == sharing
    assert why in choice.why


def test_every_holder_is_known_here():
    assert set(PRESENT) == {holder.name for holder in REFUSED}
    for name, info in PRESENT.items():
        assert name in {holder.name for holder in unhandled(info)}


@pytest.mark.parametrize("name", PRESENT)
def test_where_kv_may_be_kept_elsewhere_nothing_is_scoped(name):
    choice = choose(replace(FACTS, engine_info=PRESENT[name]))
    assert choice.sharing == ("off" if name != "hicache" else choice.sharing)
    assert choice.sharing != "scoped"
    assert name in choice.why


@given(
    st.sampled_from(["colocated", "disjoint"]),
    st.one_of(st.none(), st.builds(replace, st.just(TRAFFIC), group=st.integers(1, 64), in_flight=st.integers(0, 999))),
    st.floats(1, 1e5),
    st.sampled_from(["0.5.15.post1", "0.5.23", "0.6.0rc1", "1.0", None, "main"]),
    st.sets(st.sampled_from(sorted(PRESENT))),
    st.booleans(),
    st.booleans(),
)
def test_it_is_never_a_policy_that_is_unsafe(layout, traffic, requests, sglang, holders, radix_off, elsewhere):
    info = {key: value for name in holders for key, value in PRESENT[name].items()}
    facts = StartFacts(layout, traffic, requests, sglang, info, radix_off, "elsewhere" if elsewhere else "")
    choice = choose(facts)
    policy = decide(layout, choice.sharing)
    assert policy.safe
    assert choice.why
    assert "\n" not in choice.why
    if layout == "disjoint" and choice.sharing == "scoped":
        assert not holders
        assert not elsewhere
        assert sglang in ("0.5.23", "0.6.0rc1", "1.0")
    assert "off" in safe_modes(facts)[0]


def test_flags_of_a_server_are_read_as_its_settings():
    flags = ["--enable-lora", "--tokenizer-worker-num=2", "--hicache-storage-backend", "file", "stray"]
    assert info_of_flags(flags) == {
        "enable_lora": True,
        "tokenizer_worker_num": "2",
        "hicache_storage_backend": "file",
    }
    assert {h.name for h in unhandled(info_of_flags(flags))} == {"lora", "tokenizer_workers", "hicache_storage"}


# ---- the local trainer ----------------------------------------------------------------------------------------------


@pytest.fixture
def _sglang(monkeypatch):
    monkeypatch.setattr("slime_backend.local_trainer.auto_sharing.installed_sglang", lambda: "0.5.23")


@pytest.mark.usefixtures("_sglang")
def test_a_config_is_resolved_before_a_policy_is_decided():
    config = make_config({"disjoint_prefix_sharing": "auto"}, "test")
    with pytest.raises(PolicyError, match="'auto' is unknown"):
        _ = config.policy
    resolved, choice = resolve(config, trains=True)
    assert choice is not None
    assert resolved.policy == decide("disjoint", choice.sharing)
    assert resolved.disjoint_prefix_sharing == choice.sharing == "scoped"  # 144 in flight with one system prompt
    unknown, choice = resolve(config, trains=False)
    assert unknown.disjoint_prefix_sharing == "retract"
    assert choice is not None
    assert "nothing is known" in choice.why


def test_a_word_of_the_policy_is_left_alone():
    config = make_config({"disjoint_prefix_sharing": "off"}, "test")
    assert resolve(config, trains=True) == (config, None)


@pytest.mark.usefixtures("_sglang")
def test_the_flags_of_the_engines_count():
    config = make_config({"disjoint_prefix_sharing": "auto", "engine_flags": ["--enable-lora"]}, "test")
    resolved, choice = resolve(config, trains=True)
    assert resolved.disjoint_prefix_sharing == "off"
    assert choice is not None
    assert "lora" in choice.why


@pytest.mark.usefixtures("_sglang")
def test_a_setting_that_contradicts_the_choice_is_refused():
    data = {"disjoint_prefix_sharing": "auto", "engine_flags": ["--enable-lora"], "disable_radix_cache": False}
    with pytest.raises(ConfigError, match=r"resolved to off: .*turns the radix cache on"):
        resolve(make_config(data, "test"), trains=True)


@pytest.mark.usefixtures("_sglang")
def test_the_command_says_what_it_took(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("disjoint_prefix_sharing: auto\n")
    settings = cli._load(path, [], trains=True)
    assert settings.policy.prefix_sharing == "scoped"
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert told[0].startswith("disjoint_prefix_sharing=auto takes scoped: the planner expects")


# ---- slime ----------------------------------------------------------------------------------------------------------

SLIME = {
    "rollout_num_gpus": 8,
    "rollout_num_gpus_per_engine": 2,
    "n_samples_per_prompt": 16,
    "rollout_batch_size": 64,
    "rollout_max_prompt_len": 8192,
    "rollout_max_response_len": 1024,
    "sglang_server_concurrency": 256,
    "rollout_function_path": "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
}


def slime_args(monkeypatch, sglang="0.5.23", **changes) -> SimpleNamespace:
    monkeypatch.setattr("slime_backend.planner.slime_args.installed_sglang", lambda: sglang)
    args = add_reef_arguments(argparse.ArgumentParser()).parse_args(["--disjoint-prefix-sharing=auto"])
    return SimpleNamespace(**{**vars(args), **SLIME, **changes})


@pytest.mark.parametrize(
    ("changes", "sharing", "why"),
    [
        ({}, "scoped", "assumed: 256 in flight per engine, prompts of 4096 tokens, answers of 512"),
        ({"sglang": "0.5.15.post1"}, "off", "scoped needs SGLang 0.5.23"),
        # Four requests of one prompt arrive at once and fit a prefill step: each computes it.
        ({"rollout_max_prompt_len": None}, "off", "prompts of 512 tokens"),
        # Nothing is in flight when slime's own loop publishes, so there is nothing to keep.
        ({"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"}, "retract", "0 in flight"),
        ({"rollout_external_engine_addrs": ["10.0.0.1:30000"]}, "off", "--rollout-external-engine-addrs"),
        ({"sglang_config": "groups.yaml"}, "off", "--sglang-config"),
        ({"sglang_enable_lora": True}, "off", "lora"),
        ({"sglang_disable_radix_cache": True}, "off", "nothing to share"),
        ({"rollout_max_response_len": None}, "retract", "nothing is known of the traffic"),
        ({"colocate": True}, "retract", "colocated"),
    ],
)
def test_slime_gets_one_decision_of_it(monkeypatch, changes, sharing, why):
    args = slime_args(monkeypatch, **changes)
    policy = configure_sglang_runtime(args)
    assert args.disjoint_prefix_sharing == sharing
    assert policy == args.reef_policy == decide("colocated" if changes.get("colocate") else "disjoint", sharing)
    assert args.sglang_disable_radix_cache == (not policy.radix_cache)
    assert args.pause_generation_mode == policy.pause_mode
    assert why in args.reef_sharing_reason


def test_without_auto_nothing_is_chosen(monkeypatch):
    args = slime_args(monkeypatch, disjoint_prefix_sharing="retract")
    configure_sglang_runtime(args)
    assert not hasattr(args, "reef_sharing_reason")


def test_a_missing_package_is_an_unknown_version(monkeypatch):
    def missing(name):
        raise at_start.importlib.metadata.PackageNotFoundError

    monkeypatch.setattr(at_start.importlib.metadata, "version", missing)
    assert at_start.installed_sglang() is None
