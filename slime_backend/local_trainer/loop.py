"""`train` is the local run: asynchronous GRPO on one machine, publishing to live engines at every step.

    rollouts   worker keeps requests in flight on the engines, always
    step k     next groups -> grpo_step -> its row in steps.jsonl -> weights v<k> and trainer state on disk
               -> publish v<k> while they fly -> its line in publications.jsonl (resumption.py: kills in between)
    end        drain, audit (or the end of the one in audit_process.py), summary, report

Files of a run are listed in docs/runs.md.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from slime_backend.audit import follow as audit_follow
from slime_backend.audit.audit import AuditResult, Violation, audit_run
from slime_backend.config import AuditConfig, ModelConfig, RunConfig
from slime_backend.errors import RunError, RunMisused
from slime_backend.fleet import Fleet
from slime_backend.ledger.lock import describe_holder, lock_run
from slime_backend.local_trainer.audit_process import AuditProcess
from slime_backend.local_trainer.batch import Batch, collect_batch
from slime_backend.local_trainer.checkpoint import (
    check_resumable,
    forget_unpublished,
    load_trainer_state,
    version_name,
)
from slime_backend.local_trainer.devices import place
from slime_backend.local_trainer.local_fleet import running_fleet
from slime_backend.local_trainer.memory import PeakMemory
from slime_backend.local_trainer.resumption import log_again, log_step, reconcile
from slime_backend.local_trainer.retention import audit_is_behind, prune
from slime_backend.local_trainer.rollouts import RolloutWorker
from slime_backend.local_trainer.task import make_task
from slime_backend.local_trainer.trainer import Trainer, check_trainer, make_trainer
from slime_backend.policy import Policy
from slime_backend.provenance.classes import count_classes
from slime_backend.provenance.staleness import count
from slime_backend.publication import PublicationError, PublicationReport, publish
from slime_backend.report.summary import write_summary
from slime_backend.report.write import report_at_the_end
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.run_files.rows import policy_of, sound_rows
from slime_backend.run_files.runs import is_used, new_run_dir, remove_unbegun
from slime_backend.simulation import models
from slime_backend.tracking.alerts import audit_alerts, contradiction_alerts, gap_alerts, publication_alerts
from slime_backend.tracking.columns import StepMetrics
from slime_backend.tracking.metrics import of_rollouts, publication_metrics
from slime_backend.tracking.tracker import Tracker, make_tracker
from slime_backend.transports import DiskTransport, Transport

NAMED_VIOLATIONS = 10  # that are logged one by one after a step


@dataclass(slots=True)
class Reporter:
    """A run reports its progress here; the command line shows it as bars or lines."""

    log: Callable[[str], None] = print
    progress: Callable[[str, int, int], None] = field(default=lambda stage, done, total: None)


def base_model(config: ModelConfig) -> Path:
    """Return the directory of the model to start from; one of ours is made where it is missing."""
    made = Path(config.models_dir)
    if config.name == "tiny":
        return models.make_tiny_model(made / f"tiny-seed{config.seed}", seed=config.seed)
    if config.name == "tiny_hybrid":
        return models.make_tiny_model(made / f"tiny-hybrid-seed{config.seed}", hybrid=True, seed=config.seed)
    if config.name == "smollm2":
        return models.make_smollm2(made / "smollm2-135m-instruct")
    directory = Path(config.name)
    if not (directory / "config.json").is_file():
        raise RunMisused(
            f"model={config.name!r} is neither tiny, tiny_hybrid, smollm2 nor a directory with a config.json"
        )
    return directory


def choose_run_dir(named: Path, resume: Path | None) -> Path:
    """Return where the run writes: `named` by its configuration, or the run that it resumes.

    Raises RunError for a resume of what isn't a run.
    """
    if resume is None:
        return new_run_dir(named)
    if not is_used(resume):
        raise RunMisused(f"{resume} holds no run to resume")
    return resume


async def train(config: RunConfig, run_dir: Path, *, resume: bool, reporter: Reporter) -> dict[str, Any]:
    """Run to `config.trainer.steps` and return the summary. Cancelling it (Ctrl-C) still writes a partial summary.

    Raises RunError and the typed errors of engines, fleet and publication.
    """
    # What can be refused is, before anything is written.
    place(config.engines, config.trainer)
    check_trainer(config.trainer)
    base = base_model(config.model)
    new = not run_dir.exists()
    lock = lock_run(run_dir)
    if lock is None:
        raise RunError(
            f"another process{describe_holder(RunDir(run_dir).run_lock_holder)} is running {run_dir}; wait for its "
            "end, or choose another name"
        )
    with lock:
        try:
            return await _train(config, base, run_dir, resume=resume, reporter=reporter)
        except BaseException:
            if new:
                remove_unbegun(run_dir)
            raise


async def _train(config: RunConfig, base: Path, run_dir: Path, *, resume: bool, reporter: Reporter) -> dict[str, Any]:
    started, files = time.monotonic(), RunDir(run_dir)
    state = load_trainer_state(run_dir) if resume else None  # a run that was ended before step 1 starts over
    first_step = state["step"] if state else 0
    if resume:
        check_resumable(run_dir, state, base)
        forget_unpublished(files.all_weights, first_step)
        reconcile(run_dir, first_step, config.policy, config.publication.transport, reporter.log)
    torch.set_num_threads(config.trainer.threads)
    torch.manual_seed(config.model.seed + first_step)
    version = version_name(first_step)
    weights = files.weights(version) if state else base
    device = place(config.engines, config.trainer).trainer
    trainer = make_trainer(config.trainer, config.model.seed, device, weights, base, run_dir, state)
    tracker = make_tracker(
        config.tracking.kind,
        run_dir,
        mode=config.tracking.mode,
        project=config.tracking.project,
        name=config.name,
        settings=config.to_record(),
        artifacts=config.tracking.artifacts,
    )
    if resume:
        log_again(run_dir, tracker)
    reporter.log(f"policy: {config.policy}")
    memory = PeakMemory()
    outcome: dict[str, Any] = {"completed": False}
    audit: AuditResult | None = None
    audit_process = AuditProcess(config.audit, run_dir) if config.audit.concurrent and config.audit.rollouts else None
    try:
        with memory, closing(trainer):
            served = files.weights(version)
            await asyncio.to_thread(trainer.source.save, served)
            async with running_fleet(config.engines, config.policy, served, version, run_dir, reporter.log) as fleet:
                fleet.weights.mode = config.publication.verify_weights
                outcome["engines_ready_s"] = round(time.monotonic() - started, 1)
                run = _Run(config, fleet, trainer, base, tracker, reporter, run_dir, audit_process, version)
                if audit_process is not None:
                    audit_process.start()
                try:
                    await run.steps(first_step)
                finally:
                    await asyncio.shield(run.close())
            if config.audit.rollouts:
                audit = await _audit(config.audit, run_dir, audit_process, reporter)
                found = audit_process.new_violations() if audit_process else audit.violations
                report_violations(found, tracker, reporter)
        outcome["completed"] = True
    finally:
        if audit_process is not None:
            await asyncio.to_thread(audit_process.stop)
        policies = policies_of(run_dir, config.policy)
        facts = {
            **outcome,
            "audit": audit.summary() if audit else None,
            "wall_s": round(time.monotonic() - started, 1),
            "peak_rss_gib": round(memory.peak_gib, 2),
            "policy": "; then ".join(map(str, policies)),
            "policies": [asdict(policy) for policy in policies],
            "wandb_run_dir": tracker.directory if config.tracking.kind == "wandb" else None,
            "tensorboard_dir": tracker.directory if config.tracking.kind == "tensorboard" else None,
        }
        summary, why_not = _summary(run_dir, facts)
        if why_not:
            reporter.log(why_not)
        tracker.finish(summary)
        report_at_the_end(run_dir, reporter.log)
    if why_not:
        raise RunError(why_not)
    return summary


def policies_of(run_dir: Path, current: Policy) -> list[Policy]:
    """Return the policies of a run's publications in order, then the current one, which a resume may have changed."""
    found = map(policy_of, sound_rows(RunDir(run_dir).publications))
    return list(dict.fromkeys([*(policy for policy in found if policy is not None), current]))


def _summary(run_dir: Path, facts: dict[str, Any]) -> tuple[dict[str, Any], str]:
    """Write the summary; return it and "", or the facts alone and why there is none.

    What comes after it, the tracker's last call and the report, must not be lost to a full disk, a damaged file or a
    lack of memory here.
    """
    try:
        return write_summary(run_dir, facts), ""
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())
        return facts, f"no summary: {what}; the run's other files are there, {RunDir(run_dir).summary} is not"


async def _audit(
    config: AuditConfig, run_dir: Path, audit_process: AuditProcess | None, reporter: Reporter
) -> AuditResult:
    """Return the result of the audit process, or of an audit made now where there is none or it failed."""
    if audit_process is not None:
        reporter.log("audit: waiting for the audit process to check the remaining rollouts")
        found = await audit_process.result()
        if found is not None:
            return found
        reporter.log(f"the audit process ended early ({audit_process.last_line()}); the audit is made now")
    reporter.log("audit: recomputing rollouts under the versions that they claim")
    audit = await asyncio.to_thread(
        audit_run,
        run_dir,
        models.load_model,
        rollouts=config.rollouts,
        tolerance=config.tolerance,
        progress=lambda done, total: reporter.progress("audit", done, total),
    )
    audit_follow.save(run_dir, audit)
    return audit


def report_violations(found: Sequence[Violation], tracker: Tracker, reporter: Reporter) -> None:
    tracker.alert(audit_alerts([v.receipt for v in found]))
    for violation in found[:NAMED_VIOLATIONS]:
        reporter.log(f"audit violation: {violation}")


class _Run:
    """This is the part of a run during which the engines live."""

    def __init__(
        self,
        config: RunConfig,
        fleet: Fleet,
        trainer: Trainer,
        base: Path,
        tracker: Tracker,
        reporter: Reporter,
        run_dir: Path,
        audit_process: AuditProcess | None,
        started_from: str,
    ) -> None:
        self.audit_process = audit_process
        self.config, self.fleet, self.trainer = config, fleet, trainer
        self.started_from = started_from
        self.tracker, self.reporter, self.run_dir = tracker, reporter, run_dir
        task = make_task(config.task.name)
        tokenizer = models.load_tokenizer(base)
        self.tokenizer = tokenizer
        self.worker = RolloutWorker(fleet, config.task, config.model.seed, task, tokenizer, run_dir, reporter.log)
        files = RunDir(run_dir)
        self.publications = JsonlWriter(files.publications, durable=True)
        self.weight_digests = JsonlWriter(files.weight_digests)
        self.steps_file = JsonlWriter(files.steps, durable=True)
        self.staleness = JsonlWriter(files.staleness)
        self.transport = self._transport()

    def _transport(self) -> Transport:
        if self.config.publication.transport == "distributed":
            from slime_backend.transports.distributed import DistributedTransport

            return DistributedTransport(self.trainer.source)
        return DiskTransport(self.trainer.source, RunDir(self.run_dir).all_weights, saved=True)

    async def steps(self, first: int) -> None:
        self.worker.start()
        for step in range(first + 1, self.config.trainer.steps + 1):
            batch = await collect_batch(
                self.worker,
                self.config.task.groups_per_step,
                trainer_version=step - 1,
                policy=self.config.trainer.staleness,
                bound=self.config.trainer.max_version_lag,
                log=self.reporter.log,
            )
            self._log_decisions(step, batch)
            metrics = await asyncio.to_thread(self._train, batch)
            self._compare_logprobs(step, metrics)
            self.worker.release(len(batch.groups))
            row = self._record_step(step, batch, metrics)
            version = version_name(step)
            # On disk before anybody serves it: see checkpoint.py.
            await asyncio.to_thread(self.trainer.source.save, RunDir(self.run_dir).weights(version))
            await asyncio.to_thread(self.trainer.save_state, self.run_dir, step)
            self._report_contradictions(step, batch)
            log_step(self.tracker, row)  # once it can't be trained again: no step is logged with two outcomes
            report = await self._publish(version)
            await self._remove_old_versions(step)
            self._record_publication(step, batch, row, report)
            if self.audit_process is not None:
                report_violations(self.audit_process.new_violations(), self.tracker, self.reporter)

    def _log_decisions(self, step: int, batch: Batch) -> None:
        """Log each rollout that isn't trained on unchanged and in full, before the step: a crash keeps it."""
        for decision in batch.decisions:
            if decision.action != "train":
                self.staleness.append({"step": step, **decision.to_json()})

    def _report_contradictions(self, step: int, batch: Batch) -> None:
        alerts = contradiction_alerts(step, [r.receipt for r in batch.records if r.contradicted])
        self.tracker.alert(alerts)
        for alert in alerts:
            self.reporter.log(f"{alert.title}: {alert.text}")

    def _train(self, batch: Batch) -> StepMetrics:
        return self.trainer.step(batch.samples())

    async def _remove_old_versions(self, step: int) -> None:
        keep = self.config.publication.keep_versions
        if keep is None or (self.audit_process is not None and await asyncio.to_thread(audit_is_behind, self.run_dir)):
            return
        weights, in_flight = RunDir(self.run_dir).all_weights, self.worker.versions_in_flight()
        await asyncio.to_thread(prune, weights, step, keep, in_flight, self.started_from)

    def _compare_logprobs(self, step: int, metrics: StepMetrics) -> None:
        gap, tokens = metrics.logprob_gap_at_lag_0, metrics.tokens_at_lag_0
        alerts = gap_alerts(step, gap, tokens, self.config.engines.dtype, self.config.task.temperature)
        self.tracker.alert(alerts)
        for alert in alerts:
            self.reporter.log(f"{alert.title}: {alert.text}")

    async def _publish(self, version: str) -> PublicationReport:
        try:
            report = await publish(self.fleet, self.transport, version)
        except PublicationError as error:
            self.publications.append(error.report.to_json())
            self.tracker.alert(publication_alerts(error.report))
            raise
        self.publications.append(report.to_json())
        if report.digests is not None:
            self.weight_digests.append(report.digests)
        self.tracker.alert(publication_alerts(report))
        for engine, reason in report.unconfirmed.items():
            self.reporter.log(f"publication {version}: {engine} is retired: {reason}")
        return report

    def _record_step(self, step: int, batch: Batch, metrics: StepMetrics) -> dict[str, Any]:
        """Write the step's line in steps.jsonl before its weights are saved: no kill can leave weights without it."""
        records, lag = batch.records, batch.lag
        staleness = {
            **count(batch.decisions),
            "tokens_masked_ratio_low": metrics.masked_ratio_low,
            "tokens_masked_ratio_high": metrics.masked_ratio_high,
        }
        row = {
            "step": step,
            **metrics.to_json(),
            "lag_mean": lag.mean,  # per token
            "lag_max": lag.max,
            "lag_tokens": lag.by_lag,
            "staleness": staleness,
            "mixed_share": sum(r.mixed for r in records) / len(records),
            "retracted_share": sum(r.retractions > 0 for r in records) / len(records),
            "classes": count_classes(r.rollout_class for r in records),
            **of_rollouts(records, self.worker.counts.resubmitted),
            "receipts": [r.receipt for r in records],
        }
        self.steps_file.append(row)
        return row

    def _record_publication(self, step: int, batch: Batch, row: dict[str, Any], report: PublicationReport) -> None:
        records = batch.records
        figures = publication_metrics(report)
        self.tracker.log("publication", step, figures)
        answers = [self.tokenizer.decode(r.output_ids, skip_special_tokens=False) for r in records]
        self.tracker.add_rollouts(records, answers, [judged.decision.lag.max for judged in batch.kept])
        self.reporter.progress("train", step, self.config.trainer.steps)
        self.reporter.log(
            f"step {step:>3}/{self.config.trainer.steps}  reward {row['reward_mean']:.3f}  lag {row['lag_mean']:.2f}  "
            f"published {report.version} to {figures['confirmed']}/{len(report.engines)} engines, paused "
            f"{figures['paused_ms_max']:.0f} ms, retracted {figures['requests_retracted']:.0f} in flight"
        )

    async def close(self) -> None:
        await self.worker.stop()
        await self.transport.close()
        self.publications.close()
        self.steps_file.close()
        self.staleness.close()
