"""Checks every supported release of SGLang against what the engine plugin uses, without installing one.

    scripts/check_sglang_releases.py              the table; exit status 1 where a hook that a policy needs is lacking
    scripts/check_sglang_releases.py --write      into docs/sglang-releases.md

A wheel is downloaded once (`pip download --no-deps`, into $XDG_CACHE_HOME/reef-slime/wheels) and read as an archive.
Each hook's own plan is asked for its status there, so the table is what an engine of that release reports at its start.
A new release is one line of RELEASES.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.sglang_sources import Sources, from_wheel
from slime_backend.engine_plugin import HOOK_MODULES
from slime_backend.wire import ACTIVE, NOT_NEEDED

RELEASES = (
    "0.5.15.post1",
    "0.5.16",
    "0.5.17",
    "0.5.18",
    "0.5.19",
    "0.5.20",
    "0.5.21",
    "0.5.22",
    "0.5.23",
)
EVERYWHERE = ("kv_evidence", "kv_spans")  # without these no policy can be verified on a release
PAGE = Path(__file__).resolve().parent.parent / "docs" / "sglang-releases.md"
HEAD = """# SGLang releases

Written by `scripts/check_sglang_releases.py --write`, which reads each release's wheel without installing it and asks
every hook of the [engine plugin](engine-plugin.md) what it would report there. `works`: all names, attributes and
parameters that the hook uses are there. `not needed`: SGLang does by itself what the hook would add. `refused`: the
hook stays out and reports the reason, and an engine whose policy needs it isn't admitted. The table is about names:
engines of 0.5.15.post1, 0.5.17 and 0.5.23 are what the engine tests run on (`make test-compat RELEASE=0.5.17`).

"""


class NoWheel(RuntimeError):
    """A release's wheel is neither in the cache nor to be had from the package index."""


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reef-slime" / "wheels"


def wheel_of(release: str) -> Path:
    """The wheel of a release, downloaded where the cache lacks it. Raises NoWheel."""
    folder = cache_directory()
    folder.mkdir(parents=True, exist_ok=True)
    if not (found := sorted(folder.glob(f"sglang-{release}-*.whl"))):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
        try:
            done = subprocess.run(
                [*command, f"sglang=={release}", "--dest", str(folder)], capture_output=True, text=True, timeout=300
            )
        except subprocess.TimeoutExpired:
            raise NoWheel(f"pip download sglang=={release} took more than 300 s") from None
        if not (found := sorted(folder.glob(f"sglang-{release}-*.whl"))):
            raise NoWheel(f"pip download sglang=={release}: {(done.stderr.strip().splitlines() or ['no wheel'])[-1]}")
    return found[0]


def statuses(sources: Sources) -> dict[str, str]:
    """Hook -> the status that an engine of this release would report before its scheduler is built."""
    return {
        hook: importlib.import_module(module).plan(sources).status(sources) for hook, module in HOOK_MODULES.items()
    }


def page(found: dict[str, dict[str, str]]) -> str:
    """The table over releases, and the reasons below it."""
    reasons: dict[str, str] = {}

    def cell(status: str) -> str:
        if status in (ACTIVE, NOT_NEEDED):
            return "works" if status == ACTIVE else "not needed"
        number = reasons.setdefault(status, str(len(reasons) + 1))
        return f"refused: {number}"

    lines = ["| hook | " + " | ".join(found) + " |", "|---" * (len(found) + 1) + "|"]
    for hook in HOOK_MODULES:
        lines.append(f"| `{hook}` | " + " | ".join(cell(statuses_[hook]) for statuses_ in found.values()) + " |")
    listed = [f"{number}. {reason}" for reason, number in reasons.items()]
    return HEAD + "\n".join([*lines, "", *listed]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="Check SGLang's releases against what the engine plugin uses.")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name}")
    write = parser.parse_args().write
    try:
        found = {release: statuses(from_wheel(wheel_of(release))) for release in RELEASES}
    except NoWheel as error:
        print(f"check_sglang_releases: {error}", file=sys.stderr)
        return 2
    text = page(found)
    print(text)
    if write:
        PAGE.write_text(text)
    lacking = [f"{release}: {hook}: {found[release][hook]}" for release in RELEASES for hook in EVERYWHERE]
    lacking = [line for line in lacking if not line.endswith(f": {ACTIVE}")]
    for line in lacking:
        print(f"check_sglang_releases: {line}", file=sys.stderr)
    return 1 if lacking else 0


if __name__ == "__main__":
    sys.exit(main())
