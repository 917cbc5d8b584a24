"""POST /reef/report and GET /reef/turns/{receipt}: agents' reports on their turns, and what was recorded of one."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from reef_service.errors import ApiError, bad_request
from reef_service.store import ReportConflict, UnknownReceipts
from reef_service.store.reports import Report

router = APIRouter(prefix="/reef", tags=["feedback"])


NO_NUL = r"^[^\x00]*$"  # which PostgreSQL takes in no text
_Name = Annotated[str, Field(max_length=200, pattern=NO_NUL)]


class ReportBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    id: str = Field(
        min_length=1, max_length=200, pattern=NO_NUL, description="yours; the same id twice is the same report"
    )
    score: float | None = Field(None, allow_inf_nan=False)
    text: str = Field("", max_length=100_000)
    receipts: list[_Name] = Field(default_factory=list, max_length=10_000)
    session: str = Field(
        "", max_length=200, pattern=NO_NUL, description="instead of receipts: everything in the session so far"
    )
    train: bool = Field(True, description="false: the branches that it is about are not to be trained on")


@router.post("/report", summary="Score turns, or a session; safe to send again")
async def report(body: ReportBody, request: Request) -> dict[str, Any]:
    if bool(body.receipts) == bool(body.session):
        raise bad_request("give either receipts or a session")
    gateway = request.app.state.gateway
    stored = Report(body.id, body.score, body.text, tuple(dict.fromkeys(body.receipts)), body.session, body.train)
    try:
        outcome: dict[str, Any] = await gateway.store.add_report(stored)
    except UnknownReceipts as error:
        raise ApiError(404, str(error)) from error
    except ReportConflict as error:
        raise ApiError(409, str(error)) from error
    gateway.plane.metrics.reports.inc()
    return outcome


@router.get("/turns/{receipt}", summary="Everything recorded of one turn")
async def turn(receipt: str, request: Request) -> dict[str, Any]:
    found = await request.app.state.gateway.store.turn(receipt)
    if found is None:
        raise ApiError(404, f"no turn is stored under {receipt}")
    return dict(found)
