"""A gateway on a loopback port in front of a real engine, in the test's own event loop."""

from __future__ import annotations

from contextlib import asynccontextmanager

from reef_service.app import make_app
from reef_service.config import GatewayConfig
from reef_service.gateway import running_gateway
from reef_service.server import serving
from reef_service.store import open_store
from slime_backend.policy import decide
from tests.helpers import fleet_on
from tests.reef_service.harness import Client


@asynccontextmanager
async def gateway_on_fleet(engine, model, tmp_path, sharing="retract", prepare=None):
    """(client, gateway) in front of a real engine; `prepare(client of the engine)` comes before."""
    async with fleet_on(engine, decide("disjoint", sharing)) as (fleet, client):
        if prepare is not None:
            await prepare(client)
        with open_store(f"sqlite:///{tmp_path}/run/gateway.sqlite") as store:
            async with (
                running_gateway(GatewayConfig(), fleet, model, store, tmp_path / "run") as gateway,
                serving(make_app(gateway), "127.0.0.1", 0) as url,
            ):
                yield Client(url), gateway
