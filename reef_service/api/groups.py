"""GET /reef/groups and POST /reef/groups/close: groups of rollouts that wait for others, and the end of the wait."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from pydantic import BaseModel, ConfigDict, Field

from reef_service.api.feedback import NO_NUL
from reef_service.errors import bad_request

router = APIRouter(prefix="/reef/groups", tags=["training"])
Size = Annotated[int, Query(ge=1, le=1024, description="sessions of a complete group")]


class Close(BaseModel):
    model_config = ConfigDict(extra="forbid")

    group_size: int = Field(ge=1, le=1024, description="sessions of a complete group: complete ones aren't closed")
    groups: list[Annotated[str, Field(max_length=200, pattern=NO_NUL)]] | None = Field(
        None, max_length=10_000, description="only these; without them idle_s must be given"
    )
    idle_s: float = Field(0, ge=0, allow_inf_nan=False, description="only those without a score for this long")


@router.get("", summary="Groups that wait for further sessions, the oldest first")
async def incomplete(
    request: Request, group_size: Size, limit: Annotated[int, Query(ge=1, le=10_000)] = 100
) -> dict[str, Any]:
    """Sessions of each: that there are, with a score, ready to be given, with a trainer, trained on."""
    return {"groups": await request.app.state.gateway.store.incomplete_groups(group_size, limit)}


@router.post("/close", summary="Give up incomplete groups: nobody trains on what is in them")
async def close(body: Close, request: Request) -> dict[str, Any]:
    if body.groups is None and not body.idle_s:
        raise bad_request("give groups, or idle_s: without either, groups whose agents are at work would be closed")
    store = request.app.state.gateway.store
    return {"closed": await store.close_groups(body.group_size, body.groups, body.idle_s)}
