"""The routes that agents ask all day, without FastAPI's layers around them, which take longer than the gateway itself.

FastAPI knows the same functions under the same paths: from there they get into /openapi.json.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from reef_service.api.common import unless_gone
from reef_service.data_plane.json_size import more_values_than
from reef_service.data_plane.workers import LARGE
from reef_service.error_answers import ANSWERED, answer_to
from reef_service.errors import bad_request
from reef_service.origin import is_json

Endpoint = Callable[[Any, Request], Awaitable[Response]]


class Lane:
    """The ASGI layer: POST to a path of `routers` whose function is `(body: Model, request) -> Response`."""

    def __init__(self, app: ASGIApp, inner: FastAPI, routers: Iterable[APIRouter]) -> None:
        self.app, self.inner = app, inner
        self.routes: dict[str, tuple[type[BaseModel], Endpoint]] = {}
        self.rare: dict[str, tuple[type[BaseModel], Endpoint]] = {}  # here because of their bodies, which are as large
        for route in (route for router in routers for route in router.routes):
            if isinstance(route, Route) and "POST" in (route.methods or ()):
                hints = get_type_hints(route.endpoint)
                returned = hints.get("return")
                if isinstance(returned, type) and issubclass(returned, Response):
                    kind = self.routes if returned is Response else self.rare
                    kind[route.path] = hints["body"], route.endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = None
        if scope["type"] == "http" and scope["method"] == "POST":
            route = self.routes.get(scope["path"]) or self.rare.get(scope["path"])
        if route is None:
            await self.app(scope, receive, send)
            return
        model, endpoint = route
        scope["app"] = self.inner  # where `request.app` is looked up
        request = Request(scope, receive, send)
        try:
            raw = await _json_body(request)
            response = await endpoint(await self._parsed(model, raw, request), request)
        except ANSWERED as error:
            response = answer_to(error, scope["path"])
        except ClientDisconnect:  # before all of its body had come
            return
        await response(scope, receive, send)

    async def _parsed(self, model: type[BaseModel], raw: bytes, request: Request) -> BaseModel:
        """Elsewhere where that takes long, after a look at how long it would."""
        if len(raw) < LARGE:
            return _parsed(model, raw)
        plane = self.inner.state.gateway.plane

        def parse(check: Callable[[], None]) -> BaseModel:
            most = plane.limits.values
            if more_values_than(raw, most):
                raise bad_request(f"the body has more than {most} values, which is more than a prompt may have")
            check()
            return _parsed(model, raw)

        return await unless_gone(request, plane.workers.run(parse))


def _parsed(model: type[BaseModel], raw: bytes) -> BaseModel:
    try:
        return model.model_validate_json(raw)
    except ValidationError as error:
        faults = error.errors(include_url=False, include_context=False, include_input=False)
        raise RequestValidationError(faults) from error


async def _json_body(request: Request) -> bytes:
    """A browser sends other types to any address without asking, so a page could use a gateway on this machine."""
    kind = request.headers.get("content-type", "")
    if not is_json(kind):
        kind = kind.partition(";")[0].strip().lower()
        raise bad_request(f"content-type is {kind!r}; send JSON, as application/json")
    return await request.body()
