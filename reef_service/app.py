"""The FastAPI application around a gateway."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.responses import FileResponse, HTMLResponse, JSONResponse
from starlette.exceptions import HTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp

from reef_service.api import (
    anthropic_messages,
    batches,
    feedback,
    openai_chat,
    openai_completions,
    publications,
    sglang_generate,
    status,
)
from reef_service.errors import ApiError
from reef_service.gateway import Gateway
from reef_service.security import Guard, Tokens, read_token
from reef_service.store import StoreError
from slime_backend import __version__

PAGE = Path(__file__).parent / "page"
_POLICY = "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; frame-ancestors 'none'"


def make_app(gateway: Gateway) -> ASGIApp:
    """Raises ConfigError for a token file that can't be used."""
    config = gateway.config
    tokens = Tokens(read_token(config.agent_token_file), read_token(config.admin_token_file))
    return Guard(make_inner(gateway), tokens, int(config.max_body_mib * 2**20))


def make_inner(gateway: Gateway) -> FastAPI:
    """Without the guard."""
    app = FastAPI(title="reef-slime gateway", version=__version__, docs_url=None, redoc_url=None)
    app.state.gateway = gateway
    for api in (
        openai_chat, openai_completions, anthropic_messages, sglang_generate, feedback, batches, publications, status,
    ):  # fmt: skip
        app.include_router(api.router)
    app.exception_handler(ApiError)(_api_error)
    app.exception_handler(RequestValidationError)(_invalid)
    app.exception_handler(HTTPException)(_http_error)
    app.exception_handler(StoreError)(_store_error)
    _add_page(app)
    return app


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


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return JSONResponse(error.body(request.url.path), error.status, headers=error.headers)


async def _invalid(request: Request, error: Exception) -> Response:
    """A body that doesn't fit its schema: the first fault, in one line."""
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"] if part not in ("body", "query"))
    told = ApiError(400, f"{where or 'body'}: {first['msg']}", param=where or None)
    return await _api_error(request, told)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    answer = await _api_error(request, ApiError(error.status_code, str(error.detail)))
    answer.headers.update(error.headers or {})
    return answer


async def _store_error(request: Request, error: Exception) -> Response:
    return await _api_error(request, ApiError(503, str(error), retry_after=1))
