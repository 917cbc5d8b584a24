"""The shared-prefix forward against the plain one, sequence by sequence without any cache or padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from slime_backend.local_trainer.shared_prefix import Row, SharedPrefix, common_prefix_length, suffix_logprobs


@pytest.fixture
def rows(token_ids: Callable[[int], list[int]]) -> list[Row]:
    """Five rows of different lengths; the prefix (300) and one suffix are longer than the hybrid's window (128)."""
    shared = token_ids(300)
    lengths = [(9, 20), (9, 5), (30, 1), (1, 40), (150, 17)]
    return [([*shared, *token_ids(question)], token_ids(answer)) for question, answer in lengths]


def plain_logprobs(model: Any, row: Row) -> Tensor:
    prompt, output = row
    logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0].log_softmax(-1)
    return logits[len(prompt) - 1 : -1].gather(1, torch.tensor(output)[:, None])[:, 0]


def gradients(model: Any) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    return found


def objective(logprobs: list[Tensor]) -> Tensor:
    return sum((0.1 * (i + 1) * lp.square().sum() for i, lp in enumerate(logprobs)), torch.zeros(()))


def test_logprobs_and_gradients_equal_the_plain_forward(either_model: Any, rows: list[Row]) -> None:
    plain = [plain_logprobs(either_model, row) for row in rows]
    objective(plain).backward()
    expected = gradients(either_model)

    prefix = SharedPrefix.run(either_model, [prompt for prompt, _ in rows])
    shared = suffix_logprobs(either_model, prefix, rows)
    objective(shared).backward()
    found = gradients(either_model)

    assert prefix.length == 300
    assert [len(lp) for lp in shared] == [len(output) for _, output in rows]
    assert max(float((a - b).detach().abs().max()) for a, b in zip(shared, plain, strict=True)) < 1e-5
    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-4, name


def test_detached_leaves_bring_the_whole_gradient_through_micro_batches(either_model: Any, rows: list[Row]) -> None:
    objective([plain_logprobs(either_model, row) for row in rows]).backward()
    expected = gradients(either_model)

    prefix = SharedPrefix.run(either_model, [prompt for prompt, _ in rows])
    leaves = prefix.detached()
    for i, row in enumerate(rows):
        (0.1 * (i + 1) * suffix_logprobs(either_model, leaves, [row])[0].square().sum()).backward()
    prefix.backward(leaves)
    found = gradients(either_model)

    for name, gradient in expected.items():
        assert float((found[name] - gradient).norm() / gradient.norm()) < 1e-4, name


def test_prompts_without_a_common_token_run_in_full(tiny: Any) -> None:
    rows: list[Row] = [([1, 2, 3], [4, 5]), ([9, 2, 3], [4])]
    prefix = SharedPrefix.run(tiny, [prompt for prompt, _ in rows])
    found = suffix_logprobs(tiny, prefix, rows)
    assert prefix.length == 0
    for logprobs, row in zip(found, rows, strict=True):
        torch.testing.assert_close(logprobs, plain_logprobs(tiny, row), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("prompts", "expected"),
    [
        ([], 0),
        ([[5]], 0),
        ([[5, 6, 7]], 2),  # the last token of a prompt is always run with its row
        ([[5, 6, 7], [5, 6, 7]], 2),
        ([[5, 6], [5, 6, 7]], 1),
        ([[5, 6, 7, 8], [5, 6, 9, 8], [5, 6, 7, 1]], 2),
        ([[1, 2], [3, 2]], 0),
    ],
)
def test_common_prefix_length(prompts: list[list[int]], expected: int) -> None:
    assert common_prefix_length(prompts) == expected
