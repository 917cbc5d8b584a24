"""/healthz, /readyz, /metrics, and what the page lives on: /reef/state and /reef/events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from reef_service.api.common import dumps, event
from reef_service.api.feedback import NO_NUL
from reef_service.errors import ApiError
from reef_service.gateway import Gateway

router = APIRouter(tags=["status"])
EVERY_S = 1.0


@router.get("/healthz", summary="The process answers")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@router.get("/readyz", summary="An engine is confirmed and the store answers; 503 otherwise")
async def readyz(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway
    reasons = []
    if not gateway.fleet.routable():
        reasons.append("no engine is confirmed")
    if not await gateway.store_writes():
        reasons.append("the store doesn't write")
    return JSONResponse({"ready": not reasons, "reasons": reasons}, 503 if reasons else 200)


@router.get("/metrics", summary="For Prometheus")
async def metrics(request: Request) -> Response:
    text = request.app.state.gateway.plane.metrics.text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


@router.get("/reef/state", summary="Engines, publications, provenance classes, queue")
async def state(request: Request) -> dict[str, Any]:
    found: dict[str, Any] = await request.app.state.gateway.state()
    return found


@router.get("/reef/sessions", summary="A session's branches, scores and turns, by its name or a turn's receipt")
async def session(
    request: Request, name: Annotated[str, Query(min_length=1, max_length=200, pattern=NO_NUL)]
) -> dict[str, Any]:
    found: dict[str, Any] | None = await request.app.state.gateway.store.session(name)
    if found is None:
        raise ApiError(404, f"there is no session {name!r}, and no turn of that receipt")
    return found


@router.get("/reef/events", summary="The same once a second, as server-sent events")
async def events(request: Request) -> Response:
    gateway: Gateway = request.app.state.gateway

    async def stream() -> AsyncIterator[bytes]:
        while not gateway.stopping.is_set() and not await request.is_disconnected():
            yield event(dumps(await gateway.state()), "state")
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY_S):
                    await gateway.stopping.wait()

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"cache-control": "no-cache"})
