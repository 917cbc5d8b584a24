"""Spans in slime's own Sample, through its own buffer and its saved rollout data. In a process of its own, since
slime's modules are changed when they are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.launch_scripts import ROOT

pytestmark = pytest.mark.slime

CODE = """
import json, sys
from types import SimpleNamespace
from slime_backend.slime_hooks import patches
from slime_backend.slime_hooks.contract import checkout

checkout.make_importable()
patches.install()
from slime.observability.rollout_data_utils import load_debug_rollout_data, save_debug_rollout_data
from slime.rollout import fully_async_rollout, sglang_rollout
from slime.rollout.data_source import RolloutDataSourceWithBuffer
from slime.utils.types import Sample
from slime_backend.slime_hooks.rollouts.generate_calls import calls_of, record_of, response_spans
from slime_backend.audit.audit import why_inconsistent
from tests.slime_hooks.samples import answer

def call(sample, before, tokens, versions, finish="stop", **more):
    sample.append_response_tokens(
        SimpleNamespace(), tokens=list(range(tokens)), log_probs=[-1.0] * tokens, text="x",
        meta_info=answer(before, tokens, versions, finish=finish, weight_version=versions[-1], **more),
    )

sample = Sample(group_index=0, index=0, prompt="q", tokens=list(range(6)), metadata={"source": "math"})
call(sample, 6, 5, ["1"], finish="abort")
args = SimpleNamespace(rollout_global_dataset=False, prompt_data=None, buffer_filter_path=None, n_samples_per_prompt=1)
buffer = RolloutDataSourceWithBuffer(args)
buffer.add_samples([[sample]])
sample = buffer.get_samples(1)[0][0]
sample.append_response_tokens(SimpleNamespace(), tokens=[9, 9], trainable=False)
call(sample, 13, 4, ["2"])
save_debug_rollout_data(sys.argv[1] + "/{rollout_id}.pt", [sample], rollout_id=0, evaluation=False)
(loaded,) = load_debug_rollout_data(sys.argv[1] + "/{rollout_id}.pt", rollout_id=0, subsample_ratio=None)
records = [record_of(loaded, c, group="g", engine="e", temperature=1.0, reward=0.0) for c in calls_of(loaded)]
print(json.dumps({
    "spans": [[s.version, s.start, s.end] for s in response_spans(loaded)],
    "slime": loaded.weight_versions, "status": loaded.status.value, "metadata": sorted(loaded.metadata),
    "inconsistent": [why_inconsistent(r) for r in records],
    "patched": fully_async_rollout.generate_and_rm_group is sglang_rollout.generate_and_rm_group
        and sglang_rollout.generate_and_rm_group.__wrapped__.__module__ != "slime_backend.slime_hooks.rollouts"
        and sglang_rollout.generate_and_rm_group.__code__.co_filename.endswith("slime_hooks/rollouts/functions.py"),
}))
"""


def test_spans_survive_slime_s_buffer_and_its_saved_data(slime_src, tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "SLIME_SRC": str(slime_src), "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "spans": [["1", 0, 5], ["2", 7, 11]],
        "slime": ["1", "2"],  # all that slime keeps by itself
        "status": "completed",
        "metadata": ["reef_slime", "source"],
        "inconsistent": ["", ""],
        "patched": True,
    }
