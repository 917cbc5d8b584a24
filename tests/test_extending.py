"""Runs the code of docs/extending.md: each example is read from the page and used as the page says.

Publications run over fake engines; the hook is attached to the installed SGLang in a process of its own, without
an engine.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from slime_backend.publication import publish
from slime_backend.wire import HOOKS_VARIABLE
from tests.fake_fleet import fake_fleet

PAGE = Path(__file__).resolve().parent.parent / "docs" / "extending.md"
SECTIONS = ("A transport", "A hook of the engine plugin", "A tracker", "A bench", "A task")


def blocks(section: str) -> list[str]:
    """The Python code under a heading of the page."""
    text = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (found,) = (part for part in text if part.startswith(f"{section}\n"))
    return re.findall(r"^```python\n(.*?)^```", found, flags=re.MULTILINE | re.DOTALL)


def load(section: str, name: str = "example", number: int = 0) -> Any:
    """A block of the page as a module."""
    module = ModuleType(name)
    exec(compile(blocks(section)[number], f"{PAGE.name}, {section}", "exec"), module.__dict__)
    return module


def test_each_section_has_an_example_rules_and_tests() -> None:
    text = PAGE.read_text()
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(SECTIONS)
    assert all(blocks(section) for section in SECTIONS)
    assert text.count("**Rules.**") == text.count("**Tests it needs.**") == len(SECTIONS)


class Source:
    """Weights that are one small file."""

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True)
        (directory / "weights").write_text(directory.name)


@pytest.mark.parametrize("trouble", ["none", "no directory is given", "the copy fails"])
def test_the_transport_publishes_and_names_the_engine_that_it_cannot_serve(
    tmp_path: Path, run_async: Any, trouble: str
) -> None:
    local = {f"engine{i}": tmp_path / f"disk{i}" for i in range(2)}
    if trouble == "no directory is given":
        del local["engine1"]
    elif trouble == "the copy fails":
        (local["engine1"] / "v1").mkdir(parents=True)  # the name is taken there
    transport = load("A transport").CopyTransport(Source(), tmp_path / "saved", local)

    async def run() -> None:
        async with fake_fleet(2) as (fleet, engines):
            report = await publish(fleet, transport, "v1")
            assert report.state == "resumed"
            assert (local["engine0"] / "v1" / "weights").read_text() == "v1"
            assert engines[0].loaded == "v1"
            if trouble == "none":
                assert report.unconfirmed == {}
                assert len(fleet.routable()) == 2
                return
            (why,) = report.unconfirmed.values()
            assert why.startswith("prepare: no local directory" if local.keys() == {"engine0"} else "prepare: the copy")
            assert [member.name for member in fleet.routable()] == ["engine0"]
            assert "/pause_generation" not in engines[1].calls
            await transport.close()

    run_async(run())


ATTACHED = """
import sys
from pathlib import Path
from types import ModuleType
from slime_backend import engine_plugin

module = ModuleType("slime_backend.engine_plugin.pause_log")
exec(Path(sys.argv[1]).read_text(), module.__dict__)
sys.modules[module.__name__] = module
engine_plugin.HOOK_MODULES["pause_log"] = module.__name__
engine_plugin.register()
from sglang.srt.plugins.hook_registry import HookRegistry
from slime_backend.engine_plugin import registry

before = registry.statuses()["pause_log"]
HookRegistry.apply_hooks()
print("pause_log:", registry.statuses()["pause_log"], "; before SGLang applied it:", before)
"""


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed; make env installs it")
def test_the_hook_attaches_to_the_installed_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = tmp_path / "pause_log.py"
    code.write_text(blocks("A hook of the engine plugin")[0])
    monkeypatch.setenv(HOOKS_VARIABLE, "pause_log")
    done = subprocess.run(
        [sys.executable, "-c", ATTACHED, str(code)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("pause_log:"))
    assert line.startswith("pause_log: active ;")
    assert "did not apply it to" in line.partition("before")[2], "the control: it isn't active before it is applied"


@pytest.mark.parametrize(("scheduler", "waiting"), [(SimpleNamespace(waiting_queue=[1, 2]), 2), (SimpleNamespace(), 0)])
def test_the_hook_logs_and_does_not_raise(scheduler: Any, waiting: int, caplog: pytest.LogCaptureFixture) -> None:
    hook = load("A hook of the engine plugin")
    with caplog.at_level(logging.INFO):
        hook._before_pause(scheduler, object())
    assert [record.getMessage() for record in caplog.records] == [f"a pause arrives; {waiting} requests wait"]


def test_the_tracker_writes_every_row_and_survives_its_writer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    example = load("A tracker")
    tracker = example.lines_tracker(tmp_path)
    tracker.log("train", 1, {"loss": 0.5, "nothing": None})
    tracker.alert([example.Alert("Engine retired", "engine1: load: disk full", "WARN")])
    tracker.finish({"steps": 1})
    lines = [json.loads(line) for line in (tmp_path / "lines" / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 1, "train/loss": 0.5},
        {"alert": "WARN: Engine retired: engine1: load: disk full"},
        {"summary": {"steps": 1}, "rollouts": 0},
    ]
    broken = example.lines_tracker(tmp_path)
    broken.log("train", 2, {"loss": object()})  # no JSON
    broken.log("train", 3, {"loss": 0.1})
    assert sum("off for the rest of the run" in record.getMessage() for record in caplog.records) == 1
    assert len((tmp_path / "lines" / "metrics.jsonl").read_text().splitlines()) == 3


def test_the_bench_runs_from_the_catalog_and_has_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_backend.bench import pages

    monkeypatch.setitem(sys.modules, "slime_backend.bench.digest", load("A bench", "slime_backend.bench.digest"))
    entry = load("A bench", number=1).DIGEST
    clock, rows = pages.Clock(), []
    asyncio.run(entry.run(lambda text: None, rows))
    (row,) = rows
    assert row.case == "digest of 1 MiB, ms"
    assert min(row.peer, row.ours) > 0
    page = pages.compose(entry, [clock.run(entry, None, rows)], [])
    assert "SHA-256 (peer) next to BLAKE2b (ours)" in page
    assert "| digest of 1 MiB, ms |" in page


def test_the_task_is_one_of_the_trainers_tasks(monkeypatch: pytest.MonkeyPatch, tiny_model: Path) -> None:
    from transformers import AutoTokenizer

    from slime_backend.local_trainer import task as tasks

    vowels = load("A task").Vowels
    monkeypatch.setitem(tasks.TASKS, "vowels", vowels)
    task = tasks.make_task("vowels")
    first, second = (list(islice(task.questions(random.Random(3)), 20)) for _ in range(2))
    assert first == second != list(islice(task.questions(random.Random(4)), 20))
    assert [task.reward(first[0], text) for text in ("", "aeiou", "xyz", "ax<|im_end|>")] == [0.0, 1.0, 0.0, 3 / 12]
    tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    assert tasks.shared_prompt_length(tokenizer, task) > len(task.system_prompt) // 2
