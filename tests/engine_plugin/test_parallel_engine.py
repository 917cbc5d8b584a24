"""Evidence of two data-parallel ranks without a radix cache, and each rank's own process identity."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from slime_backend.wire import REPORTS_PATH
from tests.engine_plugin.checks import TOLERANCE, audit_difference, check_form, prompt
from tests.engine_plugin.engine_api import Api, Endless, Serve, go_on
from tests.engine_plugin.tiny_models import Reference
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.soak]


@pytest.fixture(scope="module")
def api(serve: Serve, dense_paths: dict[str, str]) -> Iterator[Api]:
    with serve(
        dense_paths["v0"], dp_size=2, radix_cache=False, environment={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    ) as running:
        yield running


def test_every_rank_reports_itself_and_keeps_no_tree(
    api: Api, dense_paths: dict[str, str], dense_reference: Reference
) -> None:
    first, second = api.reports()
    assert first.instance_id != second.instance_id
    assert (first.kv.is_empty, second.kv.is_empty) == (True, True)
    prompts = [prompt(100) for _ in range(4)]
    calls = [Endless(api, ids) for ids in prompts]
    go_on(api, 4, calls)
    assert api.call("/pause_generation", {"mode": "in_place"})[0] == 200
    wait_until(lambda: all(report.kv.paused for report in api.reports()), "both ranks are paused")
    held = api.reports()
    assert sum(report.kv.requests_holding_kv for report in held) == 4
    assert [report.kv.tree_full_evictable + report.kv.tree_full_protected for report in held] == [0, 0]
    assert [report.kv.is_empty for report in held] == [report.kv.requests_holding_kv == 0 for report in held]
    api.load(dense_paths["v1"])
    api.label("v1")
    assert api.call("/continue_generation", {})[0] == 200
    go_on(api, 4, calls)
    for ids, call in zip(prompts, calls, strict=True):
        answer = call.end()
        check_form(ids, answer)
        assert audit_difference(dense_reference, ids, answer) < TOLERANCE
    assert [report.epoch for report in api.reports()] == [2, 2]
    assert api.call(REPORTS_PATH) == (200, [report.to_json() for report in api.reports()])
    assert all(report.kv.is_empty for report in api.reports())
