"""The audit accepts what is true and names what isn't. See conftest.py for what is made and how."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from slime_backend.audit.audit import AuditResult, audit_run, check, why_inconsistent
from slime_backend.audit.sampling import Sample
from slime_backend.audit.scorer import Scorer
from slime_backend.provenance.errors import AuditError
from slime_backend.provenance.records import RolloutRecord
from slime_backend.simulation.models import load_model
from slime_backend.wire import KvSegment, Prefill

from .conftest import OUTPUT, PROMPT, carried, pure, recomputed, span

TRUE = {
    "pure": pure("v1"),
    "carried": carried("v0", "v1", 9),
    "recomputed": recomputed("v0", "v2", 5),
    "first token": recomputed("v0", "v1", 1),
    # Paused in the middle of a chunked prefill: no token yet, part of the prompt computed by v0.
    "mid prefill": (KvSegment(0, OUTPUT, "v1", (span("v0", 0, 31), span("v1", 31, PROMPT + OUTPUT - 1))),),
}


@pytest.mark.parametrize("kind", TRUE)
def test_true_claims_pass(made_run, kind):
    violation, diffs = check(made_run.record(TRUE[kind]), made_run.scorer, 1e-5)
    assert violation is None
    assert len(diffs) == OUTPUT


def test_the_scorer_agrees_with_a_plain_forward(made_run):
    record = made_run.record(pure("v1"))
    model = load_model(made_run.directory / "weights" / "v1")
    ids = torch.tensor([record.prompt_ids + record.output_ids])
    with torch.no_grad():
        rows = model(ids).logits[0].log_softmax(-1)[PROMPT - 1 : -1]
    plain = rows.gather(1, ids[0, PROMPT:, None])[:, 0]
    assert torch.allclose(plain, torch.tensor(record.logprobs), atol=1e-5)


FALSE = {
    "wrong version": (pure("v0"), pure("v1")),
    "stale prefix": (  # v0's prompt KV under a claim of v1 throughout
        (KvSegment(0, OUTPUT, "v1", (span("v0", 0, 40), span("v1", 40, PROMPT + OUTPUT - 1))),),
        pure("v1"),
    ),
    "carried, declared recomputed": (carried("v0", "v1", 9), recomputed("v0", "v1", 9)),
    "recomputed, declared carried": (recomputed("v0", "v1", 9), carried("v0", "v1", 9)),
    "boundary off by one": (carried("v0", "v1", 9), carried("v0", "v1", 10)),
}


@pytest.mark.parametrize("kind", FALSE)
def test_false_claims_are_named(made_run, kind):
    truth, claim = FALSE[kind]
    record = made_run.record(truth, claim)
    violation, _ = check(record, made_run.scorer, 1e-4)
    assert violation is not None
    assert violation.receipt == record.receipt
    assert violation.kind == "log-prob"
    assert violation.max_abs_diff > 1e-3


def test_a_run_with_one_bad_rollout_names_it_and_what_would_explain_it(made_run):
    bad = made_run.record(pure("v0"), pure("v2"))
    made_run.write([made_run.record(t) for t in TRUE.values()] + [bad])
    result = audit_run(made_run.directory, load_model)
    assert not result.passed
    assert [v.receipt for v in result.violations] == [bad.receipt]
    assert result.violations[0].fault == "wrong label"
    assert "v0 explains what it calls v2" in result.violations[0].detail
    assert result.verdict.outcome == "contaminated"
    assert AuditResult.from_json(json.loads(json.dumps(result.to_json()))) == result
    assert result.rollouts == len(TRUE) + 1
    assert result.tokens == OUTPUT * (len(TRUE) + 1)


def test_a_clean_run_passes(made_run):
    made_run.write([made_run.record(t) for t in TRUE.values()])
    result = audit_run(made_run.directory, load_model)
    assert result.passed
    assert result.max_abs_logprob_diff < 1e-5
    assert result.crossing == 4


@pytest.mark.parametrize(
    ("change", "detail"),
    [
        ({"segments": pure("v1")[:0]}, "KV segments cover 0"),
        ({"spans": (span("v1", 0, OUTPUT - 1),)}, "sampled spans cover"),
        ({"spans": (span("v1", 1, OUTPUT),)}, "gap or overlap at token 0"),
        ({"spans": (span("v0", 0, OUTPUT),)}, "KV says v1"),
        ({"segments": (KvSegment(0, OUTPUT, "v1", (span("v1", 0, PROMPT),)),)}, f"covers {PROMPT} positions"),
        ({"segments": (KvSegment(0, OUTPUT, "v1", (span("v1", 5, PROMPT),)),)}, "gap at position 0"),
        ({"logprobs": (0.0,)}, "1 log-probs"),
    ],
)
def test_records_that_contradict_themselves(made_run, change, detail):
    record = dataclasses.replace(made_run.record(pure("v1")), **change)
    assert detail in why_inconsistent(record)
    violation, _ = check(record, made_run.scorer, 1e-4)
    assert violation is not None
    assert violation.kind == "spans"


def test_a_version_without_saved_weights_is_a_violation(made_run):
    record = made_run.record(pure("v1"), pure("v9"))
    violation, _ = check(record, made_run.scorer, 1e-4)
    assert violation is not None
    assert "v9" in violation.detail


def test_nan_does_not_pass(made_run):
    record = made_run.record(pure("v1"))
    record = dataclasses.replace(record, logprobs=(float("nan"), *record.logprobs[1:]))
    violation, _ = check(record, made_run.scorer, 1e-4)
    assert violation is not None


def test_an_empty_run_is_an_error(tmp_path):
    with pytest.raises(AuditError, match="no rollouts"):
        audit_run(tmp_path, load_model)


def test_the_choice_prefers_rollouts_that_crossed():
    sample = Sample(12)
    for number in range(34):
        sample.offer(f"r{number}", crossing=number >= 30)
    assert len(sample.holds()) == 12
    assert sample.holds() >= {"r30", "r31", "r32", "r33"}


def test_removed_weights_of_a_published_version_are_no_violation(made_run):
    """A run that removes old weights: what names them can't be audited, and is counted."""
    publications = made_run.directory / "publications.jsonl"
    made_run.write([made_run.record(pure("v1")), made_run.record(pure("v1"), pure("v9"))])
    assert [v.fault for v in audit_run(made_run.directory, load_model).violations] == ["unknown version"]
    publications.write_text(json.dumps({"previous_version": "v1", "version": "v9"}) + "\n")
    try:
        result = audit_run(made_run.directory, load_model)
    finally:
        publications.unlink()
    assert result.violations == []
    assert (result.rollouts, result.recorded, result.gone) == (1, 2, 1)
    assert "the weights of 1 more were no longer there" in result.verdict.text


def test_prompts_computed_once_give_the_same_scores(made_run):
    """Rollouts under one prompt, and under one that begins alike, against a scorer that has seen none of them."""
    first = made_run.record(pure("v1"))
    others = [
        dataclasses.replace(first, prompt_ids=(*first.prompt_ids[:n], *made_run.record(pure("v1")).prompt_ids[n:]))
        for n in (0, 1, 31, PROMPT - 1, PROMPT)
    ]
    seen = Scorer(made_run.directory / "weights", load_model)
    for record in (first, *others):
        for claim in TRUE.values():
            fresh = Scorer(made_run.directory / "weights", load_model).score_all(record, claim)
            assert seen.score_all(record, claim) == pytest.approx(fresh, abs=2e-6)


def test_a_record_survives_the_file(made_run):
    record = made_run.record(TRUE["recomputed"])
    again = RolloutRecord.from_json(record.to_json())
    assert again == record
    assert (again.versions, again.mixed, again.carried, again.retractions) == (("v0", "v2"), True, False, 0)
    twice = dataclasses.replace(record, prefills=(Prefill(0, 1, "v0", 0, 60), Prefill(1, 0, "v2", 0, 65)))
    assert twice.retractions == 1
