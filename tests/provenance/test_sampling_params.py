"""Which sampling parameters change what a log-prob means; an audit that meets them; ledgers with and without them."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from slime_backend.audit.audit import AuditResult, audit_run
from slime_backend.provenance.records import RolloutRecord
from slime_backend.provenance.sampling_params import (
    not_auditable,
    not_trainable,
    scored_temperature,
    transforming,
)
from slime_backend.simulation.models import load_model

from .conftest import pure
from .examples import example

CHANGES_LOGITS = {
    "frequency_penalty": 0.5,
    "presence_penalty": -0.5,
    "repetition_penalty": 1.1,
    "min_new_tokens": 4,
    "logit_bias": {"5": 1.0},
    "json_schema": "{}",
    "regex": "a+",
    "ebnf": "root ::= 'a'",
    "structural_tag": "{}",
    "custom_logit_processor": "x",
    "watermark": {"key": 1},
    "beam_width": 2,
}
NEUTRAL = {
    "temperature": 0.7,
    "max_new_tokens": 5,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "sampling_seed": 4,
    "custom_params": {"kv_anchors": [4]},
    "frequency_penalty": 0.0,
    "presence_penalty": None,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
    "logit_bias": {},
    "json_schema": "",
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "beam_width": 1,
}


@pytest.mark.parametrize("name", CHANGES_LOGITS)
def test_what_changes_the_logits_is_named(name):
    sampling = {**NEUTRAL, name: CHANGES_LOGITS[name]}
    assert transforming(sampling) == {name: CHANGES_LOGITS[name]}
    assert not_auditable(sampling) == not_trainable(0.7, sampling) == name


def test_what_changes_nothing_is_not_recorded():
    assert transforming(NEUTRAL) == {}
    assert transforming({**NEUTRAL, "top_k": 1 << 30}) == {}
    assert not_auditable(NEUTRAL) == not_trainable(0.7, NEUTRAL) == ""


def test_a_cut_distribution_is_recorded_and_holds_a_greedy_one_has_no_weight():
    cut = {"top_p": 0.9, "top_k": 20, "min_p": 0.1}
    assert transforming({**NEUTRAL, **cut}) == cut
    assert not_auditable(cut) == not_trainable(1.0, cut) == ""
    assert not_trainable(0.0, {}) == not_trainable(1e-7, {}) == not_trainable(1.0, {"top_k": 1}) == "greedy"
    assert not_auditable({"top_k": 1}) == ""
    assert [scored_temperature(t) for t in (0.0, 1e-7, 0.5, 2.0)] == [1.0, 1.0, 0.5, 2.0]


def test_a_record_keeps_them_and_one_without_is_written_as_ever():
    record = replace(example("pure"), sampling={"top_p": 0.9, "logit_bias": {"5": 1.0}})
    assert RolloutRecord.from_json(json.loads(json.dumps(record.to_json()))) == record
    plain = example("pure").to_json()
    assert "sampling" not in plain  # the Parquet columns and older readers know nothing of it
    assert RolloutRecord.from_json(plain).sampling == {}
    assert hash(record) == hash(example("pure"))


@pytest.mark.parametrize("rollouts", [None, 8])
def test_rollouts_that_can_not_be_audited_are_counted_by_name_and_are_no_violations(made_run, rollouts):
    good = [replace(made_run.record(pure("v1")), receipt=f"good{i}") for i in range(4)]
    odd = replace(made_run.record(pure("v1")), logprobs=tuple(lp - 0.5 for lp in good[0].logprobs))
    penalised = [replace(odd, receipt=f"p{i}", sampling={"frequency_penalty": 0.5}) for i in range(2)]
    guided = [replace(odd, receipt="g", sampling={"regex": "a+", "min_new_tokens": 2})]
    made_run.write([*good, *penalised, *guided])
    result = audit_run(made_run.directory, load_model, rollouts=rollouts)
    assert (result.rollouts, result.recorded, result.violations) == (4, 7, [])
    assert result.not_auditable == {"frequency_penalty": 2, "min_new_tokens, regex": 1}
    assert result.clean
    assert "3 more are not auditable: 2 frequency_penalty, 1 min_new_tokens, regex" in result.verdict.text
    assert AuditResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    made_run.write([*good, replace(odd, receipt="bad"), *penalised])  # the control: without parameters it is a fault
    bad = audit_run(made_run.directory, load_model, rollouts=rollouts)
    assert [v.receipt for v in bad.violations] == ["bad"]
    assert not bad.clean


def test_a_run_of_which_nothing_can_be_audited_is_not_clean(made_run):
    made_run.write([replace(made_run.record(pure("v1")), sampling={"regex": "a"})])
    result = audit_run(made_run.directory, load_model)
    assert not result.clean
    assert result.verdict.outcome == "not enough samples"
    assert "1 more are not auditable: 1 regex" in result.verdict.text
