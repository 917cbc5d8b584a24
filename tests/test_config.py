"""Configuration: unknown and contradictory settings are one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_backend.config import ConfigError, load_config, make_config
from slime_backend.config.run import SECTION_OF, SECTIONS

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_config_loads(path):
    assert load_config(path).policy.safe


def test_what_is_written_down_is_flat_and_can_be_read_again():
    given = {"engines": 3, "task": "bare_sums", "trainer_threads": 2, "audit_rollouts": 0, "tracker": "none"}
    config = make_config({**given, "gateway": {"port": 1}}, "test")
    record = config.to_record()
    assert {key: record[key] for key in given} == given
    assert not any(isinstance(value, dict) for key, value in record.items() if key != "gateway")
    assert make_config(record, "test") == config


def test_every_key_belongs_to_one_section():
    keys = [key for section in SECTIONS.values() for key in section.flat_keys()]
    assert len(set(keys)) == len(keys) == len(SECTION_OF) - len({"name", "runs_dir", "gateway"})


@pytest.mark.parametrize("section", ["publication", "audit", "tracking"])
def test_a_section_is_no_key(section):
    with pytest.raises(ConfigError, match=f"unknown key '{section}'"):
        make_config({section: {}}, "test")


def load(tmp_path, text="", *overrides):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    return load_config(path, overrides)


def test_overrides_win_and_are_yaml(tmp_path):
    config = load(tmp_path, "steps: 3", "steps=7", "ports=[31000, 31001]", "disjoint-prefix-sharing=retract")
    assert (config.trainer.steps, config.engines.ports, config.policy.pause_mode) == (7, [31000, 31001], "retract")


@pytest.mark.parametrize("word", ["off", "no", "false"])
def test_a_bare_off_is_a_mode_not_a_boolean(tmp_path, word):
    assert load(tmp_path, f"disjoint_prefix_sharing: {word}").publication.disjoint_prefix_sharing == "off"


@pytest.mark.parametrize(
    ("text", "overrides", "expected"),
    [
        ("stesp: 3", (), "unknown key 'stesp'; did you mean 'steps'?"),
        ("steps: 0", (), r"steps=0: .*greater than or equal to 1"),
        ("", ("steps",), r"--set 'steps': give it as key=value"),
        ("", ("steps=abc",), r"steps='abc': .*integer"),
        ("ports: [1, 2, 3]", (), "ports lists 3 ports for engines=2"),
        ("ports: [31000, 31000]", (), "one port twice"),
        ("layout: colocated", (), "needs a trainer that shares GPUs"),
        ("disjoint_prefix_sharing: sometimes", (), "disjoint_prefix_sharing='sometimes'"),
        ("disable_radix_cache: false", (), "disable_radix_cache=false turns the radix cache on.*Ways out"),
        ("hooks: [cpu_attention]", (), "hooks lacks kv_evidence, kv_spans"),
        ("hooks: [kv_evidence, kv_spans, paused_slep]", (), "hooks names unknown hooks: paused_slep; known are cpu_"),
        ("staleness: drop", (), "staleness=drop does nothing without a bound; give max_version_lag as well"),
        ("staleness: ignore\nmax_version_lag: 1", (), "staleness='ignore': .*'drop', 'mask_tokens' or 'correct'"),
        ("max_version_lag: -1", (), "max_version_lag=-1: .*greater than or equal to 0"),
        ("ratio_low: 2", (), "ratio_low=2"),
        ("name: ../x", (), "name='../x'"),
        ("- a\n- b", (), "expected keys and values, found list"),
        ("a: [", (), "not valid YAML"),
        ("1: 2", (), "unknown key 1"),
        ("engines: two", (), r"c\.yaml: engines='two': .*integer"),
        ("task: sums", (), r"c\.yaml: task='sums': .*'character_kinds'"),
        ("ports: [1, x]", (), r"c\.yaml: ports\.1='x': .*integer"),
    ],
)
def test_bad_input_is_one_line(tmp_path, text, overrides, expected):
    with pytest.raises(ConfigError, match=expected) as refused:
        load(tmp_path, text, *overrides)
    assert "\n" not in str(refused.value)


def test_a_missing_file_lists_what_there_is(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(ConfigError, match=r"no config file nowhere.yaml; there are .*configs/cpu_tiny.yaml"):
        load_config(Path("nowhere.yaml"))


def test_the_policy_adds_the_hooks_that_it_needs(tmp_path):
    scoped = load(tmp_path, "hooks: [kv_evidence, kv_spans]", "disjoint_prefix_sharing=scoped")
    assert hooks(scoped) == ("kv_evidence", "kv_spans", "scope")
    assert hooks(load(tmp_path)) == tuple(load(tmp_path).engines.hooks)


def hooks(config):
    return config.engines.hooks_under(config.policy)


def test_an_override_may_turn_the_cache_off_but_not_on(tmp_path):
    def radix_cache(text):
        config = load(tmp_path, text)
        return config.engines.radix_cache_under(config.policy)

    assert radix_cache("disjoint_prefix_sharing: retract")
    assert not radix_cache("disjoint_prefix_sharing: retract\ndisable_radix_cache: true")
    assert not radix_cache("disjoint_prefix_sharing: off")
