"""POST /reef/batches, POST /reef/batches/{lease}/ack and .../release, /reef/jobs/{job}/...: samples for trainers."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi import Path as PathParameter
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy import Connection, select

from reef_service.api.feedback import NO_NUL
from reef_service.errors import ApiError, bad_request
from reef_service.gateway import Gateway
from reef_service.store import LeaseGone, UnknownLease
from reef_service.store.leases import Wish
from reef_service.store.samples import StoredSample
from reef_service.store.schema import publications
from reef_service.store.turn_classes import TURN_CLASSES, TurnClass
from slime_backend.provenance.records import RolloutRecord

router = APIRouter(prefix="/reef", tags=["training"])
JOB = r"^[A-Za-z0-9._:-]*$"
JobName = Annotated[str, PathParameter(pattern=JOB, min_length=1, max_length=150)]


class BatchQuery(BaseModel):
    model_config = ConfigDict(extra="forbid")

    limit: int = Field(64, ge=1, le=4096, description="samples, or groups where group_size is given")
    lease_s: float | None = Field(None, gt=0, le=7 * 86400, description="default: gateway.lease_s")
    lease: str | None = Field(
        None, pattern=r"^[A-Za-z0-9._:-]{1,200}$", description="yours; asking again gives the same"
    )
    holder: str = Field("", max_length=200, pattern=NO_NUL)
    min_score: float | None = Field(None, allow_inf_nan=False)
    max_score: float | None = Field(None, allow_inf_nan=False)
    rollout_class: list[TurnClass] = Field(default_factory=list, description="default: all")
    max_version_lag: int | None = Field(None, ge=0, le=100_000)
    group_size: int = Field(0, ge=0, le=1024, description="complete groups of this many sessions, by x-reef-group")
    at_least: int = Field(0, ge=0, le=4096, description="samples, or groups; nothing is given where there are fewer")
    job: str = Field("", pattern=JOB, max_length=150, description="the only one that may use the lease")
    step: int | None = Field(None, ge=0, le=2**31 - 1, description="of the job; names the lease in place of `lease`")


class OfJob(BaseModel):
    model_config = ConfigDict(extra="forbid")

    job: str | None = Field(None, pattern=JOB, max_length=150, description="checked against the lease's")


class Saved(BaseModel):
    model_config = ConfigDict(extra="forbid")

    step: int = Field(ge=-1, le=2**31 - 1, description="the last one that the checkpoint holds; -1: none")
    lease_s: float | None = Field(
        None, gt=0, le=7 * 86400, description="hold those of later steps for this long, from now on"
    )


@router.get("/batches", include_in_schema=False)
async def not_by_get() -> None:
    """A page of another origin can make a browser GET anything, and samples under a lease are nobody else's."""
    raise ApiError(405, "samples are taken by POST /reef/batches, with the same fields as JSON", allow="POST")


@router.post("/batches", summary="A batch under a lease; acknowledge it once it is trained on and saved")
async def batch(
    wanted: BatchQuery, request: Request, in_address: Annotated[BatchQuery, Query(include_in_schema=False)]
) -> dict[str, Any]:
    """The fields come as JSON; those of the address stand where the body has none."""
    gateway: Gateway = request.app.state.gateway
    query = in_address.model_copy(update=wanted.model_dump(exclude_unset=True))
    numbers = await gateway.store.read(_successful)
    oldest = 0
    if query.max_version_lag is not None:
        oldest = numbers[query.max_version_lag] if query.max_version_lag < len(numbers) else 0
    if query.step is not None and not query.job:
        raise bad_request("step is a job's; give job as well", "step")
    if query.step is not None and query.lease is not None:
        raise bad_request("give either lease or job and step: a step names its lease by itself", "lease")
    wish = Wish(
        limit=query.limit,
        lease_s=query.lease_s or gateway.config.lease_s,
        holder=query.holder,
        id=query.lease,
        min_score=query.min_score,
        max_score=query.max_score,
        classes=tuple(query.rollout_class) or TURN_CLASSES,
        oldest=oldest,
        group_size=query.group_size,
        at_least=query.at_least,
        job=query.job,
        step=query.step,
    )
    try:
        lease = await gateway.store.lease(wish)
    except LeaseGone as error:
        raise ApiError(409, str(error), code="lease_gone") from error
    samples = await gateway.store.samples(lease)
    gateway.plane.metrics.leased.inc(len(samples))
    place = {number: lag for lag, number in enumerate(numbers)}
    return {
        "lease": lease.id if samples else None,
        "ends_at": lease.ends_at,
        "version": gateway.fleet.version,
        "samples": [to_json(sample, place.get(sample.oldest)) for sample in samples],
    }


@router.post("/batches/{lease}/ack", summary="These samples were trained on; safe to send again")
async def ack(lease: str, request: Request, body: OfJob | None = None) -> dict[str, Any]:
    gateway: Gateway = request.app.state.gateway
    try:
        count = await gateway.store.ack(lease, body.job if body else None)
    except UnknownLease as error:
        raise ApiError(404, str(error)) from error
    except LeaseGone as error:
        raise ApiError(409, str(error), code="lease_gone") from error
    gateway.plane.metrics.acked.inc(count)
    return {"lease": lease, "trained": count}


@router.post("/batches/{lease}/release", summary="Give the samples back before the lease ends")
async def release(lease: str, request: Request, body: OfJob | None = None) -> dict[str, Any]:
    store = request.app.state.gateway.store
    try:
        return {"lease": lease, "released": await store.release(lease, body.job if body else None)}
    except UnknownLease as error:
        raise ApiError(404, str(error)) from error
    except LeaseGone as error:
        raise ApiError(409, str(error), code="lease_gone") from error


@router.post("/jobs/{job}/saved", summary="The job's checkpoint holds its training up to a step; safe to send again")
async def saved(job: JobName, body: Saved, request: Request) -> dict[str, Any]:
    """Acknowledges the job's leases up to the step."""
    gateway: Gateway = request.app.state.gateway
    found: dict[str, Any] = await gateway.store.saved(job, body.step, body.lease_s)
    gateway.plane.metrics.acked.inc(found["trained"])
    return found


@router.get("/jobs/{job}/leases", summary="The job's leases that are neither acknowledged nor given back")
async def job_leases(job: JobName, request: Request) -> dict[str, Any]:
    return {"job": job, "leases": await request.app.state.gateway.store.job_leases(job)}


def to_json(sample: StoredSample, lag: int | None) -> dict[str, Any]:
    """Per-token lists are over `response_ids`. `lag`: publications since its oldest token; None where not known."""
    start = len(sample.prompt_ids)
    spans = [
        {"version": s.version, "start": len(r.prompt_ids) - start + s.start, "end": len(r.prompt_ids) - start + s.end}
        for r in sample.turns
        for s in r.spans
    ]
    return {
        "session": sample.session,
        "trajectory": sample.trajectory,
        "group": sample.label,
        "score": sample.score,
        "class": sample.rollout_class,
        "lag": lag,
        "prompt_ids": sample.prompt_ids,
        "response_ids": sample.response_ids,
        "loss_mask": sample.mask,
        "logprobs": sample.logprobs,
        "spans": spans,
        "receipts": [r.receipt for r in sample.turns],
        "turns": [_turn(r, start) for r in sample.turns],
        "finish_reason": sample.turns[-1].finish_reason,
    }


def _turn(record: RolloutRecord, start: int) -> dict[str, Any]:
    """Describe how a turn's tokens were sampled, which a trainer needs to compute their log-probs."""
    begin = len(record.prompt_ids) - start
    return {
        "receipt": record.receipt,
        "start": begin,
        "end": begin + len(record.output_ids),
        "temperature": record.temperature,
        "sampling": dict(record.sampling),
    }


def _successful(connection: Connection) -> list[int]:
    """Numbers of the versions that were served, newest first: its place in this list is a version's lag."""
    query = select(publications.c.number).where(publications.c.state.in_(("found", "resumed")))
    return [row.number for row in connection.execute(query.order_by(publications.c.number.desc()))]
