"""`auto`: what it takes, why, and that no kind of engine makes it take what the policy couldn't make safe there."""

from __future__ import annotations

import argparse
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from slime_backend.arguments import add_reef_arguments, configure_sglang_runtime, policy_of
from slime_backend.cli.options import load_settings
from slime_backend.config import ConfigError, RunConfig, make_config
from slime_backend.fleet import EngineUnfit
from slime_backend.fleet.kv_holders import REFUSED, unhandled
from slime_backend.fleet.membership import check_fit
from slime_backend.local_trainer.expected_traffic import expected_traffic
from slime_backend.planner.at_start import StartFacts, choose, info_of_flags, modes_left
from slime_backend.planner.traffic import Traffic
from slime_backend.policy import decide
from slime_backend.simulation.fake_scheduler import FakeRank
from slime_backend.wire import SchedulerReport

TRAFFIC = Traffic(prompt=1000, shared=0, group=8, answers=(200.0,), in_flight=64, period_s=1, chunk=2048)
FACTS = StartFacts("disjoint", TRAFFIC, requests=64, sglang="0.5.23", engine_info={})
# A setting that makes each holder present.
PRESENT: dict[str, dict[str, Any]] = {
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


@pytest.mark.parametrize(
    ("change", "sharing", "why"),
    [
        ({"traffic": replace(TRAFFIC, in_flight=0)}, "retract", "the planner expects"),
        ({"traffic": replace(TRAFFIC, group=1)}, "off", "the planner expects"),
        ({"traffic": None}, "retract", "nothing is known of the traffic"),
        ({"layout": "colocated"}, "retract", "colocated engines always retract and flush"),
        ({"disable_radix_cache": True}, "off", "the radix cache is turned off"),
        ({"engine_info": {"disable_radix_cache": True}}, "off", "the radix cache is turned off"),
        ({"traffic": replace(TRAFFIC, group=1), "disable_radix_cache": False}, "scoped", "off is left out: an over"),
        ({"sglang": "0.5.15.post1"}, "retract", "scoped needs SGLang 0.5.22, there is 0.5.15.post1"),
        ({"sglang": None}, "retract", "no known version"),
        ({"engines_elsewhere": "engines are elsewhere"}, "retract", "off and scoped are left out: engines are else"),
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
    # SGLang starts with no HiCache where the radix cache is off.
    assert choice.sharing == ("retract" if name in ("hicache", "hicache_storage") else "off")
    assert name in choice.why


@given(
    st.sampled_from(["colocated", "disjoint"]),
    st.one_of(st.none(), st.builds(replace, st.just(TRAFFIC), group=st.integers(1, 64), in_flight=st.integers(0, 999))),
    st.floats(1, 1e5),
    st.sampled_from(["0.5.15.post1", "0.5.23", "0.6.0rc1", "1.0", None, "main"]),
    st.sets(st.sampled_from(sorted(PRESENT))),
    st.sampled_from([None, True, False]),
    st.booleans(),
)
def test_it_is_never_a_policy_that_is_unsafe(layout, traffic, requests, sglang, holders, override, elsewhere):
    info = {key: value for name in holders for key, value in PRESENT[name].items()}
    facts = StartFacts(layout, traffic, requests, sglang, info, override, "elsewhere" if elsewhere else "")
    choice = choose(facts)
    policy = decide(layout, choice.sharing)
    assert policy.safe
    assert choice.why
    assert "\n" not in choice.why
    if layout == "disjoint" and choice.sharing == "scoped":
        assert not holders
        assert not elsewhere
        assert sglang in ("0.5.23", "0.6.0rc1", "1.0")
    assert ("off" in modes_left(facts)[0]) == (not elsewhere and not facts.why_radix_cache_stays_on)


# Settings that decide whether an engine has a radix cache: (of the engine, a user's override, whether engines are
# started elsewhere).
RADIX = {
    "no setting": ({}, None, False),
    "HiCache": ({"enable_hierarchical_cache": True}, None, False),
    "HiCache with a storage": ({"enable_hierarchical_cache": True, "hicache_storage_backend": "file"}, None, False),
    "LMCache": ({"enable_lmcache": True}, None, False),
    "an external linker": ({"enable_unified_cache_external_linker": True}, None, False),
    "a decode engine with a cache": (
        {"disaggregation_mode": "decode", "disaggregation_decode_enable_radix_cache": True},
        None,
        False,
    ),
    "an override that keeps it": ({}, False, False),
    "an override that drops it": ({}, True, False),
    "engines that run already": ({}, None, True),
    "a flag that drops it": ({"disable_radix_cache": True}, None, False),
}


def refused(sharing, info, override, elsewhere) -> str:
    """Why an engine of these settings can't be started under this policy, or is turned away at admission by what it
    reports then; with all its KV holders allowed. Two rules of SGLang 0.5.23, and our own admission."""
    policy = decide("disjoint", sharing)
    asked_off = not elsewhere and override is not False and (not policy.radix_cache or bool(override))
    off = bool(asked_off or info.get("disable_radix_cache"))
    if info.get("disaggregation_decode_enable_radix_cache"):
        off = False
    caches = ("enable_hierarchical_cache", "enable_lmcache", "enable_unified_cache_external_linker")
    if off and any(info.get(cache) for cache in caches):
        return "SGLang doesn't start"
    holders = {holder.name for holder in REFUSED}
    scoping = "active" if not {h.name for h in unhandled(info)} else "a KV holder keeps it from scoping"
    plain = SchedulerReport.from_json(FakeRank(True, True, instance_id="one").report({}))
    report = replace(plain, hooks={"kv_evidence": "active", "kv_spans": "active", "scope": scoping})
    try:
        check_fit("e0", {**info, "disable_radix_cache": off}, [report], policy, frozenset(holders))
    except EngineUnfit as error:
        return str(error)
    return ""


@pytest.mark.parametrize("group", [1, 8], ids=["nothing shared", "much shared"])
@pytest.mark.parametrize("case", RADIX)
def test_what_is_taken_is_refused_only_where_everything_is(case, group):
    info: Any
    info, override, elsewhere = RADIX[case]
    facts = replace(
        FACTS,
        traffic=replace(TRAFFIC, group=group),
        engine_info=info,
        disable_radix_cache=override,
        engines_elsewhere="they run" if elsewhere else "",
    )
    others = {sharing: refused(sharing, info, override, elsewhere) for sharing in ("off", "retract", "scoped")}
    taken = choose(facts).sharing
    assert not others[taken], others
    assert not all(others.values())


def test_some_mode_is_refused_in_each_of_these_cases():
    """The control of the test above: `off`, which is the fastest where nothing is shared, is refused there."""
    passing = {case for case, settings in RADIX.items() if not refused("off", *settings)}
    assert passing == {"no setting", "an override that drops it", "a flag that drops it"}
    assert "left out" not in choose(replace(FACTS, traffic=replace(TRAFFIC, group=1))).why


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
    monkeypatch.setattr("slime_backend.config.reading.installed_sglang", lambda: "0.5.23")


@pytest.mark.usefixtures("_sglang")
def test_a_config_is_made_with_a_word_of_the_policy():
    log_lines: list[str] = []
    known = make_config({"disjoint_prefix_sharing": "auto"}, "test", traffic=expected_traffic, log=log_lines.append)
    assert known.publication.disjoint_prefix_sharing == "scoped"  # 144 in flight with one system prompt
    assert known.policy == decide("disjoint", "scoped")
    unknown = make_config({"disjoint_prefix_sharing": "auto"}, "test", log=log_lines.append)
    assert unknown.publication.disjoint_prefix_sharing == "retract"
    assert [line.partition(":")[0] for line in log_lines] == [
        "disjoint_prefix_sharing=auto takes scoped",
        "disjoint_prefix_sharing=auto takes retract",
    ]
    assert "nothing is known" in log_lines[1]


def test_no_configuration_is_made_that_still_says_auto():
    with pytest.raises(ValidationError, match="disjoint_prefix_sharing"):
        RunConfig(disjoint_prefix_sharing="auto")


def test_a_word_of_the_policy_is_left_alone():
    log_lines: list[str] = []
    config = make_config({"disjoint_prefix_sharing": "off"}, "test", traffic=expected_traffic, log=log_lines.append)
    assert (config.publication.disjoint_prefix_sharing, log_lines) == ("off", [])


@pytest.mark.usefixtures("_sglang")
@pytest.mark.parametrize(
    ("keys", "sharing", "why"),
    [
        ({"engine_flags": ["--enable-lora"]}, "off", "lora"),
        ({"engine_flags": ["--disable-radix-cache"]}, "off", "nothing to share"),
        ({"engine_flags": ["--enable-hierarchical-cache"]}, "retract", "for --enable-hierarchical-cache"),
        # What can't be started is refused before it is; off would contradict the user's own override.
        ({"engine_flags": ["--enable-lora"], "disable_radix_cache": False}, "retract", "an override keeps"),
        ({"disable_radix_cache": True}, "off", "nothing to share"),
    ],
)
def test_the_settings_of_the_engines_count(keys, sharing, why):
    log_lines: list[str] = []
    config = make_config(
        {"disjoint_prefix_sharing": "auto", **keys}, "test", traffic=expected_traffic, log=log_lines.append
    )
    assert config.publication.disjoint_prefix_sharing == sharing
    assert why in log_lines[0]


def test_what_else_is_wrong_is_said_before_anything_is_chosen():
    log_lines: list[str] = []
    with pytest.raises(ConfigError, match=r"^test: steps=0: "):
        make_config({"disjoint_prefix_sharing": "auto", "steps": 0}, "test", log=log_lines.append)
    assert log_lines == []


@pytest.mark.usefixtures("_sglang")
def test_the_command_says_what_it_took(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("disjoint_prefix_sharing: auto\n")
    settings = load_settings(path, [], trains=True)
    assert settings.policy.prefix_sharing == "scoped"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("disjoint_prefix_sharing=auto takes scoped: the planner expects")


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
        ({"sglang": "0.5.15.post1"}, "off", "scoped needs SGLang 0.5.22"),
        # Four requests of one prompt arrive at once and fit a prefill step: each computes it.
        ({"rollout_max_prompt_len": None}, "off", "prompts of 512 tokens"),
        # Nothing is in flight when slime's own loop publishes, so there is nothing to keep.
        ({"rollout_function_path": "slime.rollout.sglang_rollout.generate_rollout"}, "retract", "0 in flight"),
        # Admission turns an engine away whose radix cache is on under off; retract holds either way.
        ({"rollout_external_engine_addrs": ["10.0.0.1:30000"]}, "retract", "--rollout-external-engine-addrs"),
        ({"sglang_config": "groups.yaml"}, "retract", "--sglang-config"),
        ({"sglang_enable_hierarchical_cache": True}, "retract", "--enable-hierarchical-cache"),
        ({"sglang_overrides": {"disable_radix_cache": False}, "rollout_max_prompt_len": None}, "scoped", "override"),
        ({"sglang_overrides": {"disable_radix_cache": True}}, "off", "nothing to share"),
        ({"sglang_enable_lora": True}, "off", "lora"),
        ({"rollout_max_response_len": None}, "retract", "nothing is known of the traffic"),
        ({"colocate": True}, "retract", "colocated"),
    ],
)
def test_slime_gets_one_decision_of_it(monkeypatch, changes, sharing, why):
    args = slime_args(monkeypatch, **changes)
    policy = configure_sglang_runtime(args)
    assert args.disjoint_prefix_sharing == sharing
    assert policy == policy_of(args) == decide("colocated" if changes.get("colocate") else "disjoint", sharing)
    assert args.sglang_disable_radix_cache == (not policy.radix_cache)
    assert args.pause_generation_mode == policy.pause_mode
    assert why in args.reef_sharing_reason
