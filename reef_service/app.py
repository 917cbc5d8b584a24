"""The FastAPI application around a gateway."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse
from fastapi.routing import APIRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from reef_service.api import (
    anthropic_messages,
    batches,
    feedback,
    groups,
    headers,
    openai_chat,
    openai_completions,
    openai_responses,
    publications,
    sglang_generate,
    status,
)
from reef_service.error_answers import ANSWERED, answer_to
from reef_service.gateway import Gateway
from reef_service.lane import Lane
from reef_service.security import Guard, Tokens, needed, read_token
from slime_backend import __version__

DATA_PLANE = (openai_chat, openai_responses, openai_completions, anthropic_messages, sglang_generate)
HEADERS = headers.describe_headers()
PAGE = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def make_app(gateway: Gateway) -> ASGIApp:
    """Make the application with its guard and lane. Raises ConfigError for a token file that can't be used."""
    config = gateway.config
    tokens = Tokens(read_token(config.agent_token_file), read_token(config.admin_token_file))
    inner = make_inner(gateway)
    lane = Lane(inner, inner, [api.router for api in DATA_PLANE])
    return Guard(lane, tokens, int(config.max_body_mib * 2**20), (config.host, *config.allowed_hosts))


def make_inner(gateway: Gateway) -> FastAPI:
    """Make the application without the guard and the lane."""
    app = FastAPI(title="reef-slime gateway", version=__version__, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    for api in (*DATA_PLANE, feedback, batches, groups, publications, status):
        app.include_router(api.router)
    for error in ANSWERED:
        app.exception_handler(error)(_answer)
    _add_page(app)
    _describe_tokens(app)
    return app


def _describe_tokens(app: FastAPI) -> None:
    """Add to the API's description the token that each path needs, so that /docs can send it, and the headers that
    requests to the engines take."""
    answering = {path for api in DATA_PLANE for path in _answering(api.router)}
    make = app.openapi

    def described() -> dict[str, Any]:
        found = make()
        found.setdefault("components", {})["securitySchemes"] = {
            "bearer": {"type": "http", "scheme": "bearer"},
            "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
        }
        for path, operations in found["paths"].items():
            if needed(path) != "open":
                for operation in operations.values():
                    operation["security"] = [{"bearer": []}, {"key": []}]
            if path in answering:
                operations["post"].setdefault("parameters", []).extend(HEADERS)
        return found

    app.openapi = described  # type: ignore[method-assign]


def _answering(router: APIRouter) -> Iterator[str]:
    """Paths of a router whose answers are turns."""
    for route in router.routes:
        if isinstance(route, APIRoute) and get_type_hints(route.endpoint).get("return") is Response:
            yield route.path


def _add_page(app: FastAPI) -> None:
    app.mount("/static", StaticFiles(directory=PAGE), name="static")

    @app.get("/", include_in_schema=False)
    async def page() -> Response:
        return FileResponse(PAGE / "index.html", headers={"content-security-policy": _POLICY})

    assets = _docs_assets()
    if assets is not None:
        app.mount("/docs-assets", StaticFiles(directory=assets), name="docs-assets")

    @app.get("/docs", include_in_schema=False)
    async def docs() -> Response:
        if assets is None:
            return HTMLResponse(
                "<p>The API is described in <a href='/openapi.json'>/openapi.json</a>. To browse it here, without the "
                "internet: <code>pip install 'reef-slime[service]'</code> (fastapi-offline).</p>"
            )
        return get_swagger_ui_html(
            openapi_url="/openapi.json",
            title="reef-slime gateway",
            swagger_js_url="/docs-assets/swagger-ui-bundle.js",
            swagger_css_url="/docs-assets/swagger-ui.css",
            swagger_favicon_url="/docs-assets/favicon.png",
        )


def _docs_assets() -> Path | None:
    """Swagger's files, which FastAPI would load from a CDN; the package fastapi-offline ships them."""
    found = importlib.util.find_spec("fastapi_offline")
    return Path(found.origin).parent / "static" if found and found.origin else None


async def _answer(request: Request, error: Exception) -> Response:
    return answer_to(error, request.url.path)
