"""Publications and the gate: while the engines are paused, requests wait in front of them.

prepare     the engines still answer, the gate is open
pause ...   the gate is closed; what is on the engines stays there and goes on afterwards
resumed     the gate opens; whoever waited goes in, in the order of arrival
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reef_service.data_plane.admission import Gate
from reef_service.errors import ApiError
from reef_service.metrics import Metrics
from reef_service.store import Store
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, VersionTaken
from slime_backend.publication import PublicationError, PublicationReport, publish
from slime_backend.transports import (
    CheckpointTransport,
    Refused,
    Transport,
    digests_of,
    expect_digests,
    expect_loads,
    is_counted,
    refused_by,
)
from slime_backend.weight_sources.checkpoint_check import CheckpointUnfit

log = logging.getLogger(__name__)


class GatedTransport:
    """A transport that closes the gate once it is prepared."""

    def __init__(self, inner: Transport, gate: Gate) -> None:
        self.inner, self.gate, self.name = inner, gate, inner.name
        self.counted = is_counted(inner)
        self.closed = False

    async def prepare(self, version: str, clients: Sequence[EngineClient]) -> None:
        await self.inner.prepare(version, clients)
        self.gate.close()
        self.closed = True

    def expect_digests(self, ahead_bytes: float, paused_bytes: float) -> None:
        expect_digests(self.inner, ahead_bytes, paused_bytes)

    async def digests(self) -> Mapping[str, Sequence[str]] | None:
        return await digests_of(self.inner)

    def expect_loads(self, clients: Sequence[EngineClient]) -> None:
        expect_loads(self.inner, clients)

    async def load(self, client: EngineClient, version: str) -> None:
        await self.inner.load(client, version)

    def why_not(self, client: EngineClient) -> Refused | None:
        return refused_by(self.inner, client)

    async def close(self) -> None:
        await self.inner.close()


class Publisher:
    """Publishes and keeps the list of versions, in the store and, for audits, as links in `weights`."""

    def __init__(self, fleet: Fleet, gate: Gate, store: Store, metrics: Metrics, weights: Path | None) -> None:
        self.fleet, self.gate, self.store, self.metrics, self.weights = fleet, gate, store, metrics, weights
        self.timeline: list[dict[str, Any]] = []  # the last publications, for the page
        self._one_at_a_time = asyncio.Lock()

    async def publish_checkpoint(self, checkpoint: Path, version: str) -> PublicationReport:
        """Raises ApiError: 400 for a checkpoint that the engines can't load as it is, 409 for a version that was used,
        502 where no engine reached it. Goes on to its end also if the caller is cancelled."""
        return await asyncio.shield(self._publish(CheckpointTransport(checkpoint, finite=True), version, checkpoint))

    async def _publish(self, transport: Transport, version: str, checkpoint: Path) -> PublicationReport:
        async with self._one_at_a_time:
            if version == self.fleet.version or await self.store.is_used(version):
                raise ApiError(409, f"version {version!r} was used before; a name stands for one set of weights")
            gated = GatedTransport(transport, self.gate)
            try:
                report = await publish(self.fleet, gated, version)
            except CheckpointUnfit as error:
                raise ApiError(400, str(error), code="checkpoint_unfit", param="checkpoint") from error
            except VersionTaken as error:
                raise ApiError(409, str(error)) from error
            except OSError as error:  # of the checkpoint: nothing else of a publication reads files
                raise ApiError(400, f"the checkpoint can't be read: {str(error)[:300]}", param="checkpoint") from error
            except PublicationError as error:
                await self._keep(error.report, checkpoint)
                raise ApiError(502, str(error), code="publication_failed") from error
            else:
                await self._keep(report, checkpoint)
            finally:
                if gated.closed:
                    self.gate.open()
            return report

    async def _keep(self, report: PublicationReport, checkpoint: Path) -> None:
        # Before the gate opens: a turn that the new version samples must find its number.
        await self.store.add_publication(
            report.version, report.state, checkpoint=str(checkpoint), report=report.to_json()
        )
        self.metrics.publication(report)
        self.timeline = [*self.timeline[-49:], brief(report.to_json())]
        if report.state == "resumed":
            self.link(report.version, checkpoint)

    def link(self, version: str, checkpoint: Path) -> None:
        """weights/<version> -> the checkpoint, where an audit looks for it."""
        if self.weights is None or "/" in version or version.startswith("."):
            return
        self.weights.mkdir(parents=True, exist_ok=True)
        place = self.weights / version
        if not place.exists() and not place.is_symlink():
            place.symlink_to(checkpoint.resolve(), target_is_directory=True)


def brief(report: dict[str, Any]) -> dict[str, Any]:
    """A publication for the page: without evidence."""
    engines = [{k: v for k, v in engine.items() if k != "evidence"} for engine in report["engines"]]
    return {**report, "engines": engines}
