"""What the plugin would report on every release of SGLang, from the wheels; and that both ways of looking agree."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from scripts import check_sglang_releases as check
from scripts.sglang_sources import Sources, from_directory, from_wheel
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.engine_plugin.names import IMPORTED
from slime_backend.wire import ACTIVE


@pytest.fixture(scope="module")
def releases() -> dict[str, Sources]:
    try:
        return {release: from_wheel(check.wheel_of(release)) for release in check.RELEASES}
    except check.NoWheel as error:
        pytest.skip(f"no wheels, and no package index to take them from: {error}")


def test_the_page_is_that_of_the_wheels(releases: dict[str, Sources]) -> None:
    assert check.PAGE.read_text() == check.page({r: check.statuses(s) for r, s in releases.items()})


def test_what_every_policy_needs_works_on_every_release(releases: dict[str, Sources]) -> None:
    for release, sources in releases.items():
        found = check.statuses(sources)
        assert {hook: found[hook] for hook in check.EVERYWHERE} == dict.fromkeys(check.EVERYWHERE, ACTIVE), release


def test_a_release_that_lacks_a_name_is_refused_with_it(releases: dict[str, Sources]) -> None:
    """The control: the shape of a request's record is looked for attribute by attribute."""

    class Lacking(Sources):
        def has(self, name: str) -> bool:
            return not name.endswith((".holds_kv", ".req_pool_idx")) and super().has(name)

    newest = releases[check.RELEASES[-1]]
    assert "ReqKvInfo.holds_kv or " in check.statuses(Lacking(newest._read))["kv_evidence"]


def test_the_imported_sglang_and_its_sources_answer_alike() -> None:
    import sglang

    sources = from_directory(Path(sglang.__file__).parent.parent)
    differing = []
    for module in HOOK_MODULES.values():
        plan, same = (importlib.import_module(module).plan(s) for s in (IMPORTED, sources))
        assert [f[:2] for f in plan.functions] == [f[:2] for f in same.functions]
        assert (plan.uses, plan.instead) == (same.uses, same.instead)
        for need in (*(target for target, _, _ in plan.functions), *plan.uses):
            names = (need,) if isinstance(need, str) else need
            differing += [name for name in names if IMPORTED.has(name) != sources.has(name)]
    assert differing == []
