"""Which alerts a publication and an audit give. Pure."""

from __future__ import annotations

from slime_backend.publication import EngineOutcome, PublicationReport
from slime_backend.tracking.alerts import audit_alerts, publication_alerts


def report(*engines: EngineOutcome, state: str = "resumed") -> PublicationReport:
    return PublicationReport("v3", "v2", "a policy", "disk", state=state, engines=list(engines))  # type: ignore[arg-type]


GOOD = EngineOutcome("engine0", confirmed=True)
UNVERIFIED = EngineOutcome("engine1", failed_step="flush", reason="1 request\nstill holds KV")
LOST = EngineOutcome("engine1", failed_step="load", reason="no answer in 60 s")


def test_a_clean_publication_gives_none():
    assert publication_alerts(report(GOOD)) == []


def test_an_unverified_flush_is_an_alert_of_its_own_in_one_line():
    flush, retired = publication_alerts(report(GOOD, UNVERIFIED))
    assert (flush.title, flush.level) == ("Flush not verified", "ERROR")
    assert flush.text == "engine1 at v3: flush: 1 request still holds KV"
    assert (retired.title, retired.level) == ("Engine retired", "WARN")
    assert retired.text.endswith("; 1 of 2 engines go on")


def test_another_failure_is_a_degraded_fleet():
    (alert,) = publication_alerts(report(GOOD, LOST))
    assert (alert.title, alert.text) == (
        "Engine retired",
        "engine1 at v3: load: no answer in 60 s; 1 of 2 engines go on",
    )


def test_a_failed_publication_is_said():
    titles = [a.title for a in publication_alerts(report(LOST, state="failed"))]
    assert titles == ["Engine retired", "Publication failed"]


def test_the_audit_names_receipts():
    assert audit_alerts([]) == []
    (alert,) = audit_alerts(["a", "b", "c", "d"])
    assert alert.text == "4 audited rollouts don't hold: a, b, c, ...; audit.json says why"
