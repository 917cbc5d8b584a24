"""POST and GET /reef/publications."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from reef_service.errors import bad_request
from reef_service.publisher import brief

router = APIRouter(prefix="/reef/publications", tags=["publications"])


class PublicationBody(BaseModel):
    model_config = ConfigDict(extra="forbid")

    version: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")
    checkpoint: str = Field(min_length=1, max_length=4096, description="a directory that the engines can read")


@router.post("", summary="Publish a checkpoint to every engine, verified; answers when it is done")
async def publish(body: PublicationBody, request: Request) -> dict[str, Any]:
    if "\0" in body.checkpoint:
        raise bad_request("checkpoint is no path", "checkpoint")
    report = await request.app.state.gateway.publisher.publish_checkpoint(Path(body.checkpoint), body.version)
    return {**brief(report.to_json()), "unconfirmed": report.unconfirmed}


@router.get("", summary="The last publications, newest first")
async def publications(request: Request) -> dict[str, Any]:
    found = await request.app.state.gateway.store.publications(50)
    return {
        "publications": [
            {**p, "report": brief(json.loads(p["report"])) if p["report"] != "{}" else None} for p in found
        ]
    }
