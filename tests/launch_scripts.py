"""The launch scripts for GPU jobs, and what each prints when asked for its flags."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path

from slime_backend.arguments import add_reef_arguments

ROOT = Path(__file__).resolve().parent.parent
LOOPS = {
    "slime_qwen3_4b_disjoint": "train",
    "slime_qwen3_30b_a3b_colocated": "train",
    "slime_hybrid_swa_disjoint": "train",
    "slime_agentic_fully_async": "train_async",
}


def script(name: str) -> Path:
    return ROOT / "scripts" / f"{name}.sh"


def run(name: str, *more: str, **variables: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("SLIME_SRC", "MODELS", "RUNS", "PRINT_ARGS")}
    command = ["bash", str(script(name)), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**env, **variables})


def printed(name: str, **variables: str) -> list[str]:
    """Its flags and their values."""
    done = run(name, PRINT_ARGS="1", **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def our_flags() -> set[str]:
    """Those that slime doesn't know."""
    parser = argparse.ArgumentParser(add_help=False)
    add_reef_arguments(parser)
    return set(parser._option_string_actions)


def slime_flags() -> set[str]:
    """Every flag that slime's parsers know; made anew from what tests/slime/parse_flags.py prints."""
    return set((ROOT / "tests" / "contracts" / "slime-0.3.1-flags.txt").read_text().split())


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]
