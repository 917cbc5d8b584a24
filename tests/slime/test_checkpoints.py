"""What slime saves stays slime's: it loads without reef-slime, and a run goes on from it on a CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from slime_backend.slime_hooks.plain_checkpoints import files_with_ours
from tests.slime.jobs import SlimeRun

pytestmark = [pytest.mark.slime, pytest.mark.slow]

# As slime's own converter reads it (tools/convert_torch_dist_to_hf.py), in a process that has no reef-slime.
LOAD = """
import sys
sys.modules["slime_backend"] = None
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
state, reader = {}, FileSystemReader(sys.argv[1])
_load_state_dict(state, storage_reader=reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
print(len(state))
"""


@pytest.fixture(scope="module")
def saved(slime_run: Callable[..., SlimeRun]) -> SlimeRun:
    run = slime_run("--disjoint-prefix-sharing", "--save", "{dir}/saved", "--save-interval", "1")
    assert run.returncode == 0, run.tail()
    return run


def test_nothing_of_ours_is_in_a_checkpoint(saved: SlimeRun) -> None:
    root = saved.directory / "saved"
    assert list(root.rglob("*.distcp"))
    assert list(files_with_ours(root)) == []
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, str(root / "iter_0000001")],
        capture_output=True,
        text=True,
        timeout=120,
        cwd="/",
        env=_elsewhere(),
    )
    assert int(loaded.stdout or 0) > 0, loaded.stderr


def _elsewhere() -> dict[str, str]:
    """slime and Megatron on the path, and no reef-slime."""
    return {**os.environ, "PYTHONPATH": os.environ["SLIME_SRC"]}


def test_a_run_goes_on_from_it(saved: SlimeRun, slime_run: Callable[..., SlimeRun], tmp_path: Path) -> None:
    run = slime_run(
        "--disjoint-prefix-sharing",
        "--load",
        str(saved.directory / "saved"),
        "--num-rollout",
        "3",
        "--override-opt-param-scheduler",
    )
    assert run.returncode == 0, run.tail()
    assert run.logprob_diffs
    assert max(run.logprob_diffs) < 1e-5
