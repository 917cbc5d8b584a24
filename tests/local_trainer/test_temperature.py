"""The trainer's log-probs are the sampler's, at the temperature that each token was sampled at: rollouts of the very
weights that are trained have an importance weight of 1. The sampler here is the model itself, as SGLang reports it:
log_softmax(logits / temperature)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from slime_backend.local_trainer.batch import Judged
from slime_backend.local_trainer.grpo import GrpoConfig, Sample, grpo_step, make_optimizer, token_logprobs
from slime_backend.provenance.staleness import decide, rollout_lag
from slime_backend.tracking.alerts import GAP_AT_LAG_0, gap_alerts, gap_threshold
from slime_backend.wire import Span

from ..provenance.examples import example


@torch.no_grad()
def sampled(model: Any, prompt: list[int], count: int, length: int, temperature: float) -> list[Sample]:
    """Answers of one group as an engine returns them."""
    samples = []
    for number in range(count):
        ids, logprobs = list(prompt), []
        for _ in range(length):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float() / temperature
            token = int(torch.multinomial(logits.softmax(-1), 1))
            logprobs.append(float(logits.log_softmax(-1)[token]))
            ids.append(token)
        output = ids[len(prompt) :]
        fresh = [1] * length
        samples.append(Sample(prompt, output, logprobs, float(number), temperature=temperature, fresh=fresh))
    return samples


@pytest.fixture
def sharp(tiny: Any) -> Any:
    """The tiny model's output layer is narrow, so all tokens are nearly equally likely; a trained model's are not."""
    with torch.no_grad():
        tiny.get_output_embeddings().weight.mul_(10)
    return tiny


def step(model: Any, groups: list[list[Sample]]) -> Any:
    config = GrpoConfig()
    return grpo_step(model, make_optimizer(model, config), groups, config)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.6, 1.3])
def test_rollouts_of_the_very_weights_have_ratio_one(
    sharp: Any, token_ids: Callable[[int], list[int]], temperature: float
) -> None:
    torch.manual_seed(0)
    group = sampled(sharp, token_ids(12), count=4, length=24, temperature=temperature)
    logprobs = torch.cat([lp.detach() for lp in token_logprobs(sharp, group)])
    engine = torch.tensor([lp for s in group for lp in s.behaviour_logprobs])
    assert torch.allclose((logprobs - engine).exp(), torch.ones_like(engine), atol=1e-4)
    metrics = step(sharp, [group])
    assert metrics.ratio_max == pytest.approx(1.0, abs=1e-4)
    assert metrics.clipped_share == 0.0
    assert metrics.tokens_at_lag_0 == 4 * 24
    assert metrics.logprob_gap_at_lag_0 == pytest.approx(0.0, abs=1e-5)
    assert not gap_alerts(1, metrics.logprob_gap_at_lag_0, metrics.tokens_at_lag_0, "float32", temperature)


@pytest.mark.parametrize("temperature", [0.8, 0.6])
def test_the_control_without_the_temperature_is_off_and_is_an_alert(
    sharp: Any, token_ids: Callable[[int], list[int]], temperature: float
) -> None:
    torch.manual_seed(0)
    group = sampled(sharp, token_ids(12), count=4, length=24, temperature=temperature)
    metrics = step(sharp, [[replace(s, temperature=1.0) for s in group]])
    assert metrics.ratio_max > 1.2
    for dtype in GAP_AT_LAG_0:  # as large as it is, no dtype explains it
        found = gap_alerts(3, metrics.logprob_gap_at_lag_0, metrics.tokens_at_lag_0, dtype, temperature)
        assert [a.title for a in found] == ["Log-probs differ"]
        assert found[0].text.startswith("step 3: ")


def test_several_temperatures_in_one_batch(sharp: Any, token_ids: Callable[[int], list[int]]) -> None:
    torch.manual_seed(0)
    prompt = token_ids(12)
    groups = [sampled(sharp, [*prompt, number], 3, 16, t) for number, t in enumerate((1.0, 0.6, 0.8, 1.5))]
    metrics = step(sharp, groups)
    assert metrics.ratio_max == pytest.approx(1.0, abs=1e-4)


def test_a_trajectory_has_the_temperature_of_each_turn(sharp: Any, token_ids: Callable[[int], list[int]]) -> None:
    """Two turns of one trajectory, the second at another temperature and behind tokens that nobody sampled."""
    torch.manual_seed(0)
    prompt = token_ids(12)
    (first,) = sampled(sharp, prompt, 1, 8, 0.6)
    tool = token_ids(3)
    (second,) = sampled(sharp, [*prompt, *first.output_ids, *tool], 1, 8, 1.2)
    both = Sample(
        prompt,
        [*first.output_ids, *tool, *second.output_ids],
        [*first.behaviour_logprobs, 0.0, 0.0, 0.0, *second.behaviour_logprobs],
        1.0,
        loss_mask=[1] * 8 + [0] * 3 + [1] * 8,
        temperature=[0.6] * 8 + [1.0] * 3 + [1.2] * 8,
    )
    metrics = step(sharp, [[both, replace(both, reward=0.0)]])
    assert (metrics.tokens, metrics.ratio_max) == (32, pytest.approx(1.0, abs=1e-4))
    off = replace(both, temperature=0.6)
    assert step(sharp, [[off, replace(off, reward=0.0)]]).ratio_max > 1.1


def test_greedy_tokens_are_refused_in_one_line_unless_masked() -> None:
    good = Sample([1], [2, 3], [-1.0, -1.0], 1.0, "g7", temperature=[0.0, 1.0], loss_mask=[0, 1])
    assert good.divisors == [1.0, 1.0]
    for temperature in (0.0, 1e-7, -1.0, float("nan"), float("inf"), [1.0, 0.0]):
        with pytest.raises(ValueError, match=r"^group g7: output token \d was sampled at temperature [^\n]*$"):
            replace(good, temperature=temperature, loss_mask=None)
    with pytest.raises(ValueError, match="1 temperatures for 2 output tokens"):
        replace(good, temperature=[1.0])
    with pytest.raises(ValueError, match="1 marks of freshness"):
        replace(good, fresh=[1])


def test_only_tokens_of_lag_0_over_their_own_kv_are_compared() -> None:
    """A token that the trainer's weights sampled over KV of older ones has no single model's log-prob."""

    def fresh(name: str, trainer: int) -> list[int]:
        record = example(name)
        lag = rollout_lag(record.receipt, record.spans, trainer, lambda v: int(v[1:]))
        ((decision,),) = decide([[lag]], "correct", None)
        sample = Judged(replace(record, temperature=0.7), decision).sample()
        assert sample.temperature == 0.7
        return list(sample.fresh or ())

    boundary = next(s.end for s in example("mixed").spans)
    length = len(example("mixed").output_ids)
    assert fresh("pure", 0) == [1] * length
    assert fresh("pure", 1) == [0] * length
    assert fresh("mixed", 1) == [0] * boundary + [1] * (length - boundary)
    assert example("carried").spans == (Span("v0", 0, boundary), Span("v1", boundary, length))
    assert fresh("carried", 1) == [0] * length


def test_a_colder_sample_differs_by_more_and_16_bits_by_much_more() -> None:
    assert gap_threshold("float32", 0.5) == 2 * gap_threshold("float32", 1.0) == 2 * gap_threshold("float32", 2.0)
    assert gap_threshold("float32", 1) < gap_threshold("float16", 1) < gap_threshold("bfloat16", 1)
    assert gap_alerts(1, None, 0, "float32", 1.0) == []
    assert gap_alerts(1, 8e-3, 10, "bfloat16", 1.0) == []
    assert gap_alerts(1, 8e-3, 10, "float32", 1.0)
