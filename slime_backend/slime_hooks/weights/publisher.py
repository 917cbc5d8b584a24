"""Publishes from inside one of slime's processes: the trainer's rank 0, or the driver (full disk).

slime keeps the engines and decides when to update; this keeps the fleet: who is admitted, who is confirmed, and who may
be in slime's router. Synchronous outside, the transaction runs on an event loop of its own.

    publisher.enroll(engines)                 # new engines are checked against the policy; gone ones are forgotten
    publisher.finish(publisher.start(transport, "3"))     # confirmed engines are routed, retired ones taken out
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from slime_backend.arguments import policy_of
from slime_backend.engine_client import Deadlines, EngineClient, EngineError, EngineProtocolError
from slime_backend.engine_client.keys import EngineKeys, read_keys
from slime_backend.event_loop import LoopThread
from slime_backend.fleet import Fleet, FleetError, Member, admit
from slime_backend.fleet.weights import VerifyWeights
from slime_backend.policy import Policy
from slime_backend.publication import PublicationError, PublicationReport, publish
from slime_backend.run_files import RunDir
from slime_backend.run_files.jsonl import JsonlWriter
from slime_backend.slime_hooks.engines import router
from slime_backend.slime_hooks.weights.errors import PublicationFailed, from_publication
from slime_backend.tracking.metrics import publication_metrics
from slime_backend.transports import Transport

log = logging.getLogger(__name__)

FAMILY = "reef/publication"
SAY_MORE_S = 60.0
THREADS = 32  # for the blocking calls that route and discard


class Engine(Protocol):
    """One engine as slime knows it."""

    @property
    def key(self) -> str:
        """Another one for each process that slime starts, also at the same address."""

    @property
    def url(self) -> str: ...

    @property
    def router(self) -> str | None:
        """Base URL of the router that it belongs to."""

    def route(self) -> None:
        """Have it registered with the router, and return once it is listed there."""

    def discard(self) -> None:
        """End it for good; slime's fault tolerance starts another one in its place."""


class SlimePublisher:
    """One per run, in one process. `version`: the version that slime counts from."""

    def __init__(
        self,
        policy: Policy,
        version: str,
        *,
        run_dir: Path,
        deadlines: Deadlines,
        allow: Iterable[str] = (),
        discard_retired: bool = False,
        keys: EngineKeys | None = None,
        verify_weights: VerifyWeights = "auto",
    ) -> None:
        self._keys = keys
        self.fleet = Fleet(policy, version, allow=frozenset(allow), withdraw=self._withdraw)
        self.loop = LoopThread()
        self._deadlines = deadlines
        self._discard_retired = discard_retired
        self._engines: dict[str, Engine] = {}  # by the name of their member
        self._routed: set[str] = set()
        self._guard = threading.Lock()  # of `_routed`: the loop's helper threads take engines out at any time
        self.fleet.weights.mode = verify_weights
        self._records = JsonlWriter(RunDir(run_dir).publications)
        self._digests = JsonlWriter(RunDir(run_dir).weight_digests)

    def close(self) -> None:
        self._records.close()
        self._digests.close()
        self.loop.stop()

    # ---- who takes part -----------------------------------------------------------------------------------------

    def enroll(self, engines: Sequence[Engine]) -> None:
        """Take over slime's list of engines. A retired one that is still listed is tried again.

        Raises PublicationFailed for an engine that the policy refuses, and where none can be admitted. An engine that
        doesn't answer is left out and named in the log: a publication to the others is worth more than none.
        """
        listed = {engine.key for engine in engines}
        for name, engine in list(self._engines.items()):
            if engine.key not in listed:
                self._forget(name)
        new = [engine for engine in engines if self._must_be_admitted(engine)]
        for engine, error in zip(new, self.loop.submit(self._admit_all(new)).result(), strict=True):
            if isinstance(error, FleetError | EngineProtocolError):
                raise PublicationFailed(str(error)) from error
            if error is not None:
                log.error("engine %s is left out of the publication: %s", engine.url, error)
        if not self.fleet.updatable():
            raise PublicationFailed("no engine to publish to: none of slime's engines answers")

    def members(self) -> list[Member]:
        """The engines that the next publication goes to."""
        return self.fleet.updatable()

    def _must_be_admitted(self, engine: Engine) -> bool:
        member = self.fleet.members.get(name_of(engine.url))
        return member is None or member.status == "retired"

    async def _admit_all(self, engines: Sequence[Engine]) -> list[Exception | None]:
        return await asyncio.gather(*(self._admit(engine) for engine in engines))

    async def _admit(self, engine: Engine) -> Exception | None:
        client = EngineClient(engine.url, name=name_of(engine.url), deadlines=self._deadlines, keys=self._keys)
        try:
            await admit(self.fleet, client)
        except (FleetError, EngineError) as error:
            await client.close()
            return error
        self._engines[client.name] = engine
        return None

    def _forget(self, name: str) -> None:
        with self._guard:
            self._routed.discard(name)
        del self._engines[name]
        self.fleet.forget(self.fleet.members[name])

    # ---- a publication ------------------------------------------------------------------------------------------

    def start(self, transport: Transport, version: str) -> Future[PublicationReport]:
        """Begin the transaction; `finish` takes what this returns."""
        # `enroll` has offered admission to the retired engines, of slime's list alone.
        return self.loop.submit(publish(self.fleet, transport, version, readmit=False))

    def finish(self, publication: Future[PublicationReport]) -> dict[str, float]:
        """Wait for the end of the transaction, record it, and put its outcome into the router.

        Returns its figures, named reef/publication/*. Raises PublicationFailed.
        """
        try:
            report = publication.result()
        except PublicationError as error:
            self._record(error.report)
            self.settle_routing()
            raise from_publication(error) from error
        except Exception as error:  # no engine's failure: of the transport's preparation, or of what it reads from
            self.settle_routing()
            raise PublicationFailed(f"the publication ended early: {type(error).__name__}: {error}") from error
        self._record(report)
        self.settle_routing()
        figures = {**publication_metrics(report), "retired": len(report.unconfirmed), "version": int(report.version)}
        return {f"{FAMILY}/{name}": float(value) for name, value in figures.items()}

    def _record(self, report: PublicationReport) -> None:
        self._records.append(report.to_json())
        if report.digests is not None:
            self._digests.append(report.digests)
        for engine in report.engines:
            if not engine.confirmed:
                why = f"{engine.failed_step}: {engine.reason}"
                log.error("publication %s: %s is %s: %s", report.version, engine.engine, engine.fate, why)
        log.info(
            "published %s to %d of %d engines by %s, paused for %.0f ms",
            report.version,
            len(report.engines) - len(report.unconfirmed),
            len(report.engines),
            report.transport,
            report.wall_ms,
        )

    # ---- routing ------------------------------------------------------------------------------------------------

    def settle_routing(self) -> None:
        """Confirmed engines into the router, all others out of it; with fault tolerance the retired ones are ended.

        Raises PublicationFailed where no confirmed engine could be routed.
        """
        confirmed = self.loop.ask(lambda: {member.name for member in self.fleet.routable()})
        with ThreadPoolExecutor(THREADS) as pool:
            for name, member in list(self.fleet.members.items()):
                if member.status == "retired":
                    pool.submit(self._take_out, name)
            routed = dict(zip(wanted := sorted(confirmed - self._routed), pool.map(self._put_in, wanted), strict=True))
        with self._guard:
            self._routed &= confirmed
            self._routed |= {name for name, why in routed.items() if not why}
        if confirmed and not self._routed:
            raise PublicationFailed(f"no engine is routed: {'; '.join(why for why in routed.values() if why)}")

    def _put_in(self, name: str) -> str:
        """Returns why it couldn't be routed, or nothing."""
        try:
            self._engines[name].route()
        except Exception as error:  # Ray's errors, the router's: the engine can't be offered requests
            log.error("engine %s is confirmed and could not be routed: %s", name, error)
            return f"{name}: {error}"
        return ""

    def _take_out(self, name: str) -> None:
        self._unroute(name)
        if self._discard_retired:
            try:
                self._engines[name].discard()
            except Exception as error:  # it may be dead already
                log.warning("retired engine %s could not be ended: %s", name, error)

    def _unroute(self, name: str) -> None:
        engine = self._engines[name]
        with self._guard:
            self._routed.discard(name)
        if engine.router is None:
            return
        try:
            router.remove(engine.router, engine.url)
        except router.RouterError as error:
            log.error("%s", error)

    async def _withdraw(self, member: Member) -> None:
        await asyncio.to_thread(self._unroute, member.name)


def name_of(url: str) -> str:
    """What an engine is called in reports and logs."""
    return url.partition("://")[2].rstrip("/")


def deadlines(args: Any) -> Deadlines:
    """`--reef-load-timeout` is the trainer's; an engine's answer may come a little later, and says more."""
    return Deadlines(load=args.reef_load_timeout + SAY_MORE_S)


def engine_keys(args: Any) -> EngineKeys:
    """slime hands its `--sglang-` arguments on to the engines that it starts; external ones' keys are in variables."""
    read = read_keys()
    return replace(
        read,
        api=getattr(args, "sglang_api_key", None) or read.api,
        admin=getattr(args, "sglang_admin_api_key", None) or read.admin,
    )


def make(args: Any, version: str) -> SlimePublisher:
    """The publisher of a run, from slime's parsed arguments and ours."""
    return SlimePublisher(
        policy_of(args),
        version,
        run_dir=Path(args.reef_run_dir),
        deadlines=deadlines(args),
        allow=args.allow_kv_holder,
        discard_retired=bool(args.use_fault_tolerance) and not args.rollout_external,
        keys=engine_keys(args),
        verify_weights=args.verify_weights,
    )
