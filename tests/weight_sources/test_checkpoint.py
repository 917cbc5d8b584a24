"""Checkpoints written bucket by bucket: Hugging Face reads them, and they are complete or absent."""

from __future__ import annotations

import json

import pytest
import torch

from slime_backend.simulation.models import load_model
from slime_backend.weight_sources.buckets import in_buckets
from slime_backend.weight_sources.checkpoint import INDEX, read_shapes, write_checkpoint


@pytest.mark.parametrize("bucket_bytes", [1 << 30, 1 << 16])
def test_what_is_written_is_what_is_read(models, tiny_model, tmp_path, bucket_bytes):
    weights = dict(models["b"].named_parameters())
    buckets = list(in_buckets(((name, p.detach()) for name, p in weights.items()), bucket_bytes))
    assert max(sum(t.nbytes for _, t in bucket) for bucket in buckets if len(bucket) > 1) <= bucket_bytes
    write_checkpoint(tmp_path / "v1", tiny_model, iter(buckets))
    assert len(list((tmp_path / "v1").glob("*.safetensors"))) == len(buckets)
    assert (len(buckets) == 1) == (bucket_bytes == 1 << 30)
    assert (tmp_path / "v1" / INDEX).exists() == (len(buckets) > 1)
    assert (tmp_path / "v1" / "tokenizer.json").read_bytes() == (tiny_model / "tokenizer.json").read_bytes()
    again = dict(load_model(tmp_path / "v1").named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in weights.items())
    assert read_shapes(tmp_path / "v1") == {name: tuple(weight.shape) for name, weight in weights.items()}
    assert [p.name for p in tmp_path.iterdir()] == ["v1"]


def test_an_error_in_the_middle_leaves_nothing_and_a_complete_one_is_kept(tiny_model, tmp_path):
    def breaks():
        yield [("a", torch.zeros(2))]
        raise ConnectionError("rank 1 is gone")

    with pytest.raises(ConnectionError):
        write_checkpoint(tmp_path / "v1", tiny_model, breaks())
    assert list(tmp_path.iterdir()) == []
    write_checkpoint(tmp_path / "v1", tiny_model, [[("a", torch.ones(2))], [("b", torch.ones(3))]])
    write_checkpoint(tmp_path / "v1", tiny_model, breaks())  # not read
    assert set(json.loads((tmp_path / "v1" / INDEX).read_text())["weight_map"]) == {"a", "b"}
