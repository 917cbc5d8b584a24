"""Counters for Prometheus, in a registry of the gateway's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from reef_service.connections import Connections
from reef_service.recent import Recent
from reef_service.store.turn_classes import class_of
from slime_backend.fleet import Fleet
from slime_backend.provenance.records import RolloutRecord
from slime_backend.publication import PublicationReport

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class GateFigures(Protocol):
    """The metrics read these figures of the gate in front of the engines (data_plane/admission.py)."""

    inside: int
    refused: int

    @property
    def waiting(self) -> int: ...

    @property
    def closed(self) -> bool: ...


class Metrics:
    """Filled where things happen; fleet and gate are read when somebody asks."""

    def __init__(self, fleet: Fleet, gate: GateFigures) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.turns = Counter("reef_turns", "Turns stored", ["api", "state", "class"], registry=r)
        self.tokens = Counter("reef_tokens", "Tokens of stored turns", ["kind"], registry=r)
        self.replayed = Counter("reef_replayed", "Requests that got the answer they had before", registry=r)
        self.seconds = Histogram("reef_turn_seconds", "From submitted to stored", registry=r, buckets=_SECONDS)
        self.publications = Counter("reef_publications", "Publications", ["state"], registry=r)
        self.paused = Histogram(
            "reef_publication_paused_seconds", "Pause to resumed, all engines", registry=r, buckets=_SECONDS
        )
        self.reports = Counter("reef_reports", "Reports stored, retries included", registry=r)
        self.leased = Counter("reef_samples_leased", "Samples given to trainers", registry=r)
        self.acked = Counter("reef_samples_trained", "Samples acknowledged", registry=r)
        self.recent = Recent()
        self.on_turn: Callable[[RolloutRecord], None] = lambda record: None
        r.register(_Live(fleet, gate))

    def watch_connections(self, connections: Connections) -> None:
        self.registry.register(_Sockets(connections))

    def turn(self, record: RolloutRecord, state: str, api: str) -> None:
        rollout_class = class_of(record) if state == "complete" else "unproven"
        self.turns.labels(api, state, rollout_class).inc()
        self.tokens.labels("prompt").inc(len(record.prompt_ids))
        self.tokens.labels("output").inc(len(record.output_ids))
        seconds = max(0.0, record.finished_at - record.submitted_at)
        self.seconds.observe(seconds)
        if state != "disconnected":  # the client's own doing, and as long as it wished
            self.recent.add(seconds, len(record.output_ids), failed=state == "failed")
        self.on_turn(record)

    def publication(self, report: PublicationReport) -> None:
        self.publications.labels(report.state).inc()
        self.paused.observe(report.wall_ms / 1000)

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Sockets(Collector):
    def __init__(self, connections: Connections) -> None:
        self.connections = connections

    def collect(self) -> Iterator[Metric]:
        found = self.connections
        yield GaugeMetricFamily("reef_connections", "Clients' connections", value=len(found.open))
        yield GaugeMetricFamily("reef_connections_most", "Clients' connections that fit", value=found.most)
        ended = CounterMetricFamily("reef_connections_ended", "Connections ended by the gateway", labels=["why"])
        ended.add_metric(["no room"], found.turned_away)
        ended.add_metric(["made room"], found.evicted)
        ended.add_metric(["late"], found.timed_out)
        yield ended


class _Live(Collector):
    def __init__(self, fleet: Fleet, gate: GateFigures) -> None:
        self.fleet, self.gate = fleet, gate

    def collect(self) -> Iterator[Metric]:
        engines = GaugeMetricFamily("reef_engines", "Engines by status", labels=["status"])
        for status in ("joining", "confirmed", "retired"):
            engines.add_metric([status], sum(m.status == status for m in self.fleet.members.values()))
        yield engines
        in_flight = GaugeMetricFamily("reef_engine_in_flight", "Requests sent and not yet answered", labels=["engine"])
        for member in self.fleet.members.values():
            in_flight.add_metric([member.name], member.in_flight)
        yield in_flight
        quarantine = self.fleet.quarantine
        given_up = CounterMetricFamily("reef_quarantined", "Requests given up because an engine ended during them")
        given_up.add_metric([], quarantine.count)
        yield given_up
        refused = CounterMetricFamily("reef_quarantine_refused", "Quarantined requests that came again")
        refused.add_metric([], quarantine.refused)
        yield refused
        yield GaugeMetricFamily("reef_gate_inside", "Requests that were let in", value=self.gate.inside)
        yield GaugeMetricFamily("reef_gate_waiting", "Requests that wait at the gate", value=self.gate.waiting)
        yield GaugeMetricFamily("reef_gate_closed", "1 during a publication", value=int(self.gate.closed))
        yield GaugeMetricFamily(
            "reef_gate_refused", "Requests that were refused for now, to be sent again", value=self.gate.refused
        )
