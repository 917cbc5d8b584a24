"""What `auto` believes of SGLang's own refusals, asked of SGLang: its server's arguments, resolved as at a start."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from slime_backend.planner.at_start import KEEPS_RADIX_CACHE

pytestmark = pytest.mark.engine

RESOLVE = """
import json, sys
from sglang.srt.server_args import prepare_server_args
found = {}
for name, flags in json.loads(sys.argv[1]).items():
    try:
        args = prepare_server_args(flags)
        args.resolve_once()
        found[name] = "off" if args.resolved_dict()["disable_radix_cache"] else "on"
    except ValueError as error:
        found[name] = f"refused: {error}"
print(json.dumps(found))
"""
OFF = "--disable-radix-cache"
BESIDES = {"disaggregation_decode_enable_radix_cache": ["--disaggregation-mode", "decode"]}


@pytest.fixture(scope="module")
def resolved(tiny_model):
    """`resolved[name][asked]`: what becomes of the radix cache with `name`, where off is asked for or not."""
    base = ["--model-path", str(tiny_model), "--device", "cpu"]
    settings = {name: [f"--{name.replace('_', '-')}", *BESIDES.get(name, ())] for name in KEEPS_RADIX_CACHE}
    settings["none of them"] = []
    asked = {f"{name}|{off}": [*base, *flags, *off.split()] for name, flags in settings.items() for off in ("", OFF)}
    done = subprocess.run(
        [sys.executable, "-c", RESOLVE, json.dumps(asked)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    return {name: {off: found[f"{name}|{off}"] for off in ("", OFF)} for name in settings}


@pytest.mark.parametrize("name", KEEPS_RADIX_CACHE)
def test_off_would_be_refused_with_it(resolved, name):
    """By SGLang itself, or by admission, which finds the radix cache on."""
    assert resolved[name][""] == "on"
    assert resolved[name][OFF] == "on" or resolved[name][OFF].startswith("refused: "), resolved[name]


def test_control_without_such_a_setting_off_is_off(resolved):
    assert resolved["none of them"] == {"": "on", OFF: "off"}
