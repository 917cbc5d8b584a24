"""Errors are turned into the answer that a client gets, in its API's shape."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from reef_service.errors import ApiError
from reef_service.store import StoreError

log = logging.getLogger(__name__)
THERE_IS = (
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/completions",
    "/v1/models",
    "/generate",
    "/reef/report",
    "/docs",
)
ANSWERED = (ApiError, RequestValidationError, HTTPException, StoreError)


def answer_to(error: Exception, path: str) -> JSONResponse:
    """The answer to one of ANSWERED."""
    more: dict[str, str] = {}
    if isinstance(error, ApiError):
        answer = error
    elif isinstance(error, RequestValidationError):
        answer = _invalid(error.errors())
    elif isinstance(error, HTTPException) and error.status_code == 404 and error.detail == "Not Found":
        answer = ApiError(404, f"there is no {path[:200]}; there are {', '.join(THERE_IS)}, and more in /openapi.json")
    elif isinstance(error, HTTPException):
        answer, more = ApiError(error.status_code, str(error.detail)), dict(error.headers or {})
    else:  # where the database lies is nothing that agents are to know
        log.error("%s: %s", path, error)
        answer = ApiError(503, "the store doesn't answer, the gateway's log says why; try again", retry_after=1)
    return JSONResponse(answer.body(path), answer.status, headers={**answer.headers, **more})


def _invalid(faults: Sequence[Any]) -> ApiError:
    """A body that doesn't fit its schema: the first fault, in one line."""
    first = faults[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
    return ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None)
