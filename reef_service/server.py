"""An ASGI application on a port, inside the caller's event loop."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext

import uvicorn
from starlette.types import ASGIApp

from reef_service.connections import Connections, bounded
from reef_service.descriptors import BACKLOG
from slime_backend.engine_process import PortOccupiedError

GRACE_S = 5  # for answers that are under way when the server stops


class _Server(uvicorn.Server):
    """Leaves signals to the caller, who cancels."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


@asynccontextmanager
async def serving(app: ASGIApp, host: str, port: int, connections: Connections | None = None) -> AsyncIterator[str]:
    """Serve while the block runs; yields the base URL. Port 0 is any free one. Raises PortOccupiedError."""
    listening = _listen(host, port)
    bounds = connections or Connections()
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,  # paths and headers of agents are nobody's business
        lifespan="off",
        server_header=False,
        proxy_headers=False,  # who asks is never looked at
        timeout_graceful_shutdown=GRACE_S,
        timeout_keep_alive=max(1, int(bounds.idle_s) + 1),  # ours comes before
        http=bounded(bounds),
        backlog=BACKLOG,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        while not server.started:
            if task.done():
                await task
                raise OSError("the HTTP server ended while starting")
            await asyncio.sleep(0.01)
        shown = f"[{host}]" if ":" in host else host
        yield f"http://{shown}:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await asyncio.shield(task)
        listening.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise PortOccupiedError(
            f"port {port} on {host} can't be used ({error.strerror}); stop what listens there or set gateway.port"
        ) from error
    listening.setblocking(False)
    return listening
