"""The protocol between the rank that publishes and those that stand by, with made pieces and no trainer."""

from __future__ import annotations

import pytest
import torch

from slime_backend.weight_sources.checkpoint import write_checkpoint
from slime_backend.weight_sources.gathered import GatheredSource, Part, SourceError
from tests.weight_sources.gathered_rank import BUCKET_BYTES, CASES, TENSOR_BYTES, TENSORS
from tests.weight_sources.ranks import run_cases

SLACK = 128 << 10  # what the checks of the values allocate
RANK = "tests.weight_sources.gathered_rank:run"


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Case -> what both ranks saw."""
    cases = [{"case": name} for name in CASES]
    results = run_cases(RANK, 2, tmp_path_factory.mktemp("ranks"), cases)
    return dict(zip(CASES, results, strict=True))


def test_passes_are_whole_can_be_given_up_and_run_side_by_side(found):
    leader = found["passes"][0]
    assert leader["whole"] == {f"t{i}": True for i in range(TENSORS)}
    assert leader["left"] == "t0"
    assert leader["together"] == [True] * TENSORS
    assert "source.leading()" in leader["refused"]


def test_followers_hear_that_a_publication_failed(found):
    leader, follower = found["leader_fails"]
    assert leader["after"]
    assert follower["ended"] > 0


def test_two_buckets_at_most_and_nothing_on_the_other_rank(found):
    leader, follower = found["transport"]
    assert leader["bucket"] == BUCKET_BYTES
    assert BUCKET_BYTES <= leader["peak"] <= 2 * BUCKET_BYTES + SLACK
    assert follower["peak"] < SLACK


def test_control_the_count_sees_who_keeps_everything(found):
    leader, _ = found["everything"]
    assert leader["peak"] >= TENSORS * TENSOR_BYTES > 2 * BUCKET_BYTES + SLACK


def test_a_rank_that_is_gone_hides_no_error_of_the_block(template, monkeypatch):
    leader = source({"a": (2, 3), "b": (4,)}, template)

    def gone(index):
        raise RuntimeError("Connection closed by peer\nand a stack")

    monkeypatch.setattr(leader, "_announce", gone)
    with pytest.raises(SourceError, match="the first error"), leader.leading():
        raise SourceError("the first error")
    with pytest.raises(SourceError, match=r"told that it is over: Connection closed by peer$"), leader.leading():
        pass


def source(shapes, template):
    parts = [Part(name, shape, torch.float32, lambda: None) for name, shape in shapes.items()]
    return GatheredSource(parts, template, ranks=[0])


@pytest.fixture
def template(tmp_path):
    """A checkpoint of two tensors, with a tied copy written out."""
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text('{"tie_word_embeddings": true}')
    tensors = {"a": torch.zeros(2, 3), "b": torch.zeros(4), "lm_head.weight": torch.zeros(2, 3)}
    write_checkpoint(tmp_path / "template", bare, [list(tensors.items())])
    return tmp_path / "template"


def test_names_and_shapes_are_those_of_the_template(template):
    source({"a": (2, 3), "b": (4,)}, template)
    with pytest.raises(SourceError, match=r"module\.a is no tensor of"):
        source({"module.a": (2, 3), "b": (4,)}, template)
    with pytest.raises(SourceError, match=r"a has shape \[6\], and \[2, 3\] in"):
        source({"a": (6,), "b": (4,)}, template)
    with pytest.raises(SourceError, match=r"1 tensors of .* aren't in the model, the first is b"):
        source({"a": (2, 3)}, template)
    (template / "config.json").write_text('{"tie_word_embeddings": false}')
    with pytest.raises(SourceError, match=r"the first is lm_head\.weight"):
        source({"a": (2, 3), "b": (4,)}, template)
