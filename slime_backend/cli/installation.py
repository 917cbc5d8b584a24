"""`reef-slime doctor --installation`: whether this Python can run engines, slime jobs and tracking with our hooks.

Nothing is started but a child process of the same Python, which sees what an engine's process would see.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from slime_backend import __version__
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.engine_process import plugin_entry
from slime_backend.slime_hooks.contract import checkout, fit
from slime_backend.slime_hooks.contract.symbols import ContractError
from slime_backend.wire import ACTIVE, NOT_NEEDED

CHILD_S = 180.0  # SGLang's imports on a slow disk
PYTHONS = ((3, 11), (3, 12))
NEEDED = ("kv_evidence", "kv_spans")  # without these nothing can be verified
State = Literal["ok", "absent", "fault"]

# What an engine's process sees; the last line of its output is JSON.
CHILD = """
import importlib, importlib.metadata, json, sys
found = {"entries": [e.value for e in importlib.metadata.entry_points(group=sys.argv[1])], "hooks": {}}
try:
    import sglang
    from slime_backend.engine_plugin import HOOK_MODULES
    from slime_backend.engine_plugin.names import IMPORTED
    for name, module in HOOK_MODULES.items():
        found["hooks"][name] = importlib.import_module(module).plan(IMPORTED).status(IMPORTED)
except Exception as error:
    found["error"] = f"{type(error).__name__}: {error}"
print(json.dumps(found))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    """One line: what was looked at, what was seen, and what to do where it is a fault. `absent`: only some need it."""

    what: str
    state: State
    seen: str
    todo: str = ""


def examine() -> list[Finding]:
    child = _child()
    return [_python(), *_plugin(child), *_sglang(child), _slime(), *_tracking()]


def _python() -> Finding:
    here = sys.version_info[:2]
    seen = f"{sys.version.split()[0]}, {sys.executable}, reef-slime {__version__}"
    if here in PYTHONS:
        return Finding("Python", "ok", seen)
    known = " and ".join(".".join(map(str, python)) for python in PYTHONS)
    return Finding("Python", "fault", seen, f"use Python {known}, which the tests run on")


def _child() -> dict[str, Any]:
    """Without the directory of this command in the path, as for an engine that is started elsewhere."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", CHILD, plugin_entry.GROUP],
            capture_output=True,
            text=True,
            timeout=CHILD_S,
            cwd="/",
            env={**os.environ, "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "")},
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found
    except subprocess.TimeoutExpired:
        return {"entries": [], "hooks": {}, "error": f"it didn't answer within {CHILD_S:g} s"}
    except (ValueError, IndexError):
        lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
        return {"entries": [], "hooks": {}, "error": lines[-1]}


def _plugin(child: dict[str, Any]) -> Iterator[Finding]:
    try:
        plugin_entry.require()
    except plugin_entry.PluginNotInstalledError as error:
        yield Finding("entry point", "fault", "none in this Python", str(error))
        return
    if plugin_entry.VALUE not in child["entries"]:
        yield Finding(
            "entry point",
            "fault",
            f"this process has it, and a child process doesn't ({child.get('error', 'it has others')})",
            "install the package into the environment instead of adding its directory to sys.path",
        )
        return
    yield Finding("entry point", "ok", f"{plugin_entry.GROUP}: {plugin_entry.VALUE}, in a child process too")


def _sglang(child: dict[str, Any]) -> Iterator[Finding]:
    installed = _version("sglang")
    if installed is None:
        yield Finding("SGLang", "absent", "not installed", "engines need it in the Python that starts them")
        return
    if "error" in child:
        yield Finding("SGLang", "fault", f"{installed}: {child['error']}", "mend its installation first")
        return
    yield Finding("SGLang", "ok", installed)
    for hook in HOOK_MODULES:
        status = child["hooks"].get(hook, "not loaded")
        if status in (ACTIVE, NOT_NEEDED):
            yield Finding(f"hook {hook}", "ok", status)
        else:
            todo = "use a release of docs/sglang-releases.md that has it"
            yield Finding(f"hook {hook}", "fault" if hook in NEEDED else "absent", status, todo)


def _slime() -> Finding:
    checkout.make_importable()
    try:
        root = checkout.root()
        lacking = fit.missing(root, cpu=False)
    except checkout.SlimeNotFoundError as error:
        named = os.environ.get(checkout.VARIABLE)
        return Finding("slime", "fault" if named else "absent", str(error), f"set {checkout.VARIABLE}" if named else "")
    except (ContractError, OSError, SyntaxError) as error:
        return Finding("slime", "fault", f"{error}", "use a complete checkout")
    if lacking:
        return Finding("slime", "fault", f"{root}: {'; '.join(lacking[: fit.NAMED])}", f"use slime at {fit.KNOWN}")
    return Finding("slime", "ok", str(root))


def _tracking() -> Iterator[Finding]:
    for name, extra in (("wandb", "wandb"), ("plotly", "report")):
        installed = _version(name)
        if installed is None:
            todo = f"pip install {name} for {'--use-wandb and tracker: wandb' if name == 'wandb' else 'the report'}"
            yield Finding(extra, "absent", f"{name} is not installed", todo)
        else:
            yield Finding(extra, "ok", f"{name} {installed}")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def show(findings: list[Finding], as_json: bool) -> bool:
    """Print them; whether nothing is a fault."""
    sound = all(finding.state != "fault" for finding in findings)
    if as_json:
        print(json.dumps({"sound": sound, "findings": [asdict(finding) for finding in findings]}))
        return sound
    table = Table(title=f"reef-slime in {Path(sys.prefix)}", title_justify="left")
    for column in ("what", "", "seen", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        table.add_row(finding.what, finding.state, finding.seen, finding.todo)
    Console(highlight=False).print(table)
    return sound
