"""slime's `--rollout-function-path reef_service.slime_rollout.generate_rollout`: a step's samples come from a gateway.

Agents ask the gateway and report scores; a step waits until there are `rollout_batch_size` groups of
`n_samples_per_prompt` sessions (by the header x-reef-group; single samples where that is 1) and takes them under a
lease of its job and step. The lease is acknowledged once slime has saved a checkpoint that was trained on it, or at the
next step where slime saves none.

Nothing is kept in mind for that. What the checkpoint holds that a process goes on from is acknowledged at its first
step; a later step that an earlier process had taken gets the same samples again. So each sample is in the checkpoint
once, wherever a process was killed, as long as its lease holds (`LEASE_S`, renewed at each step).

slime's data source isn't asked: what is trained on is what agents did.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reef_service.client import Batch, BatchClient, GatewayError, Sample
from reef_service.slime_job import Job, loaded
from slime_backend.provenance.sampling_params import not_trainable as why_not_trainable

LEASE_S = 6 * 3600.0
WAIT_S = 24 * 3600.0

log = logging.getLogger(__name__)
_leases: dict[str | None, Job] = {}  # --save -> the job for which this process takes leases


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """slime 0.3.1's form (slime/rollout/base_types.py). Raises GatewayError; NotImplementedError for an evaluation."""
    if evaluation:
        raise NotImplementedError("a gateway has no evaluation set; give --eval-function-path")
    from slime.rollout.base_types import RolloutFnTrainOutput

    client = make_client(args)
    acknowledge(client, args, rollout_id)
    batch = take(client, args, rollout_id)
    metrics = metrics_of(batch, rollout_temperature(args))
    return RolloutFnTrainOutput(samples=to_groups(args, batch, rollout_id), metrics=metrics)


def make_client(args: Any) -> BatchClient:
    url = getattr(args, "reef_gateway", None)
    if not url:
        raise ValueError("reef_service.slime_rollout needs --reef-gateway URL")
    file = getattr(args, "reef_gateway_token_file", None)
    return BatchClient(url, Path(file).read_text().splitlines()[0].strip() if file else None)


def acknowledge(client: BatchClient, args: Any, rollout_id: int) -> list[str]:
    """Acknowledge every earlier step whose training is safe on the disk; returns the leases."""
    job = _leases.get(getattr(args, "save", None))
    if job is not None:
        return _report(client, job.name, job.safe_step(rollout_id))
    job = _begin(args)
    found = loaded(args, rollout_id)
    if found is None:
        return _report(client, job.name, -1)
    return _report(client, *found, lease_s=LEASE_S if found[0] == job.name else None)


def at_end(args: Any) -> Callable[[], None]:
    """Return what slime's driver is to call after its loop: it acknowledges what was saved since now.

    Otherwise the last steps' samples would be given again once their leases end, to whoever asks.
    slime_hooks/entry.py does it.
    """
    job = Job.of(args)

    def acknowledge_last() -> None:
        step = job.saved_step()
        if step >= 0:
            try:
                _report(make_client(args), job.name, step)
            except GatewayError as error:
                log.warning("job %s: its last steps, up to %d, are not acknowledged: %s", job.name, step, error)

    return acknowledge_last


def _begin(args: Any) -> Job:
    job = _leases[getattr(args, "save", None)] = Job.of(args)
    return job


def _report(client: BatchClient, job: str, step: int, lease_s: float | None = LEASE_S) -> list[str]:
    found = client.saved(job, step, lease_s)
    if found["gone"]:
        log.warning(
            "job %s: leases %s ran out before the checkpoint that was trained on them was saved, and other trainers "
            "were given their samples: these are trained on twice; save more often than every %g s",
            job, ", ".join(found["gone"]), LEASE_S,
        )  # fmt: skip
    return list(found["acknowledged"])


def take(client: BatchClient, args: Any, rollout_id: int) -> Batch:
    size = args.n_samples_per_prompt
    job = _leases.get(getattr(args, "save", None)) or _begin(args)
    return client.wait_for_step(
        job.name,
        rollout_id,
        deadline_s=WAIT_S,
        limit=args.rollout_batch_size,
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
    for name in ("pure", "recomputed", "mixed", "carried", "not_auditable"):
        found[f"reef/class_{name}"] = sum(sample.rollout_class == name for sample in batch.samples)
    return found
