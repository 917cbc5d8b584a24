"""slime's `--rollout-function-path reef_service.slime_rollout.generate_rollout`: a step's samples come from a gateway.

Agents ask the gateway and report scores; a step waits until there are `rollout_batch_size` groups of
`n_samples_per_prompt` (by the header x-reef-group; single samples where that is 1) and takes them under a lease. The
lease is acknowledged once slime has saved a checkpoint that was trained on it, or at the next step where slime saves
none. A run that crashed asks again under the same names and gets what it had; nothing is trained on twice or lost.

slime's data source isn't asked: what is trained on is what agents did.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from reef_service.client import Batch, BatchClient, Sample
from slime_backend.provenance.sampling_params import not_trainable as why_not_trainable

LEASE_S = 6 * 3600.0
WAIT_S = 24 * 3600.0

_leases: dict[int, str] = {}  # rollout -> its lease, until it is acknowledged


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime 0.3.1's form (slime/rollout/base_types.py). Raises GatewayError; NotImplementedError for an evaluation."""
    if evaluation:
        raise NotImplementedError("a gateway has no evaluation set; give --eval-function-path")
    from slime.rollout.base_types import RolloutFnTrainOutput

    client = make_client(args)
    acknowledge(client, args, rollout_id)
    batch = take(client, args, rollout_id)
    assert batch.lease is not None
    _leases[rollout_id] = batch.lease
    metrics = metrics_of(batch, rollout_temperature(args))
    return RolloutFnTrainOutput(samples=to_groups(args, batch, rollout_id), metrics=metrics)


def make_client(args: Any) -> BatchClient:
    url = getattr(args, "reef_gateway", None)
    if not url:
        raise ValueError("reef_service.slime_rollout needs --reef-gateway URL")
    file = getattr(args, "reef_gateway_token_file", None)
    return BatchClient(url, Path(file).read_text().splitlines()[0].strip() if file else None)


def acknowledge(client: BatchClient, args: Any, rollout_id: int) -> list[int]:
    """Acknowledge every earlier rollout whose training is safe on the disk; returns which."""
    safe = saved_rollout(args) if getattr(args, "save", None) else rollout_id - 1
    done = sorted(step for step in _leases if step <= safe and step < rollout_id)
    for step in done:
        client.ack(_leases.pop(step))
    return done


def saved_rollout(args: Any) -> int:
    """The last rollout that a checkpoint of Megatron's was saved after; -1 for none."""
    tracker = Path(args.save) / "latest_checkpointed_iteration.txt"
    text = tracker.read_text().strip() if tracker.is_file() else ""
    return int(text) if text.isdigit() else -1


def take(client: BatchClient, args: Any, rollout_id: int) -> Batch:
    groups, size = args.rollout_batch_size, args.n_samples_per_prompt
    wanted = groups * size
    return client.wait(
        f"{Path(getattr(args, 'save', None) or 'slime').name}-{rollout_id}",
        lambda batch: len(batch.samples) == wanted,
        deadline_s=WAIT_S,
        limit=groups,
        group_size=size if size > 1 else 0,
        lease_s=LEASE_S,
        max_version_lag=getattr(args, "max_version_lag", None),
    )


def to_groups(args: Any, batch: Batch, rollout_id: int) -> list[list[Any]]:
    size = args.n_samples_per_prompt
    first = rollout_id * len(batch.samples)
    temperature = rollout_temperature(args)
    made = [to_slime(sample, first + i, (first + i) // size, temperature) for i, sample in enumerate(batch.samples)]
    return [made[i : i + size] for i in range(0, len(made), size)]


def rollout_temperature(args: Any) -> float:
    """Return what slime's trainer divides all logits by (slime/backends/megatron_utils/loss.py)."""
    return float(getattr(args, "rollout_temperature", 1.0))


def not_trainable(sample: Sample, temperature: float) -> dict[str, tuple[int, int]]:
    """Receipt of a turn that slime can't compute the log-probs of -> its tokens: greedy, penalties, grammars, another
    temperature than slime's own."""
    return {
        turn["receipt"]: (turn["start"], turn["end"])
        for turn in sample.turns
        if why_not_trainable(turn["temperature"], turn["sampling"]) or turn["temperature"] != temperature
    }


def to_slime(sample: Sample, index: int, group: int, temperature: float = 1.0) -> Any:
    """One trajectory as slime's Sample: all that follows the first prompt is response, masked where it wasn't
    sampled or isn't trainable."""
    from slime.utils.types import Sample as SlimeSample

    cut = sample.finish_reason == "length"
    mask = list(sample.loss_mask)
    for start, end in not_trainable(sample, temperature).values():
        mask[start:end] = [0] * (end - start)
    return SlimeSample(
        group_index=group,
        index=index,
        tokens=[*sample.prompt_ids, *sample.response_ids],
        response_length=len(sample.response_ids),
        reward=sample.score,
        loss_mask=mask,
        rollout_log_probs=sample.logprobs,
        weight_versions=[str(span["version"]) for span in sample.spans],
        status=SlimeSample.Status.TRUNCATED if cut else SlimeSample.Status.COMPLETED,
        metadata={"reef": {"receipts": sample.receipts, "class": sample.rollout_class, "spans": sample.spans}},
        session_id=sample.session,
    )


def metrics_of(batch: Batch, temperature: float = 1.0) -> dict[str, float]:
    lags = [sample.lag for sample in batch.samples if sample.lag is not None]
    found = {"reef/version_lag_mean": sum(lags) / len(lags), "reef/version_lag_max": max(lags)} if lags else {}
    left_out = [span for sample in batch.samples for span in not_trainable(sample, temperature).values()]
    found["reef/tokens_not_trainable"] = sum(end - start for start, end in left_out)
    for name in ("pure", "recomputed", "mixed", "carried"):
        found[f"reef/class_{name}"] = sum(sample.rollout_class == name for sample in batch.samples)
    return found
