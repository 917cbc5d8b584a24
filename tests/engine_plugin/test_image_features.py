"""No feature of an older vision tower is served after an update: on SGLang's own feature cache and lookup."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from sglang.srt.managers import mm_schedule
from sglang.srt.managers.schedule_batch import Modality, MultimodalDataItem
from sglang.srt.models.kimi_vl_moonvit import Learnable2DInterpPosEmb

from slime_backend.engine_plugin import image_features, kv_evidence
from slime_backend.engine_plugin.epoch import WeightEpoch


def serving(model: torch.nn.Module) -> SimpleNamespace:
    """A scheduler that serves a model which takes images."""
    worker = SimpleNamespace(model_runner=SimpleNamespace(model=model))
    return SimpleNamespace(model_config=SimpleNamespace(is_multimodal=True), tp_worker=worker)


MULTIMODAL = serving(torch.nn.Identity())
TEXT = SimpleNamespace(model_config=SimpleNamespace(is_multimodal=False))
TOKENS = 4


class Tower:
    """A vision tower of one weight."""

    weight, runs = 0.0, 0

    def __call__(self, items: list[MultimodalDataItem]) -> torch.Tensor:
        self.runs += 1
        return torch.full((TOKENS, 2), self.weight)


def feature(tower: Tower) -> float:
    """What SGLang gives a request with the one image, by its own lookup."""
    item = MultimodalDataItem(modality=Modality.IMAGE, hash=7, offsets=[(0, TOKENS - 1)], feature=torch.zeros(1))
    found, _ = mm_schedule._get_chunked_embedding_full(
        tower, [item], item.offsets, 0, TOKENS, torch.zeros(TOKENS, dtype=torch.int64), torch.device("cpu")
    )
    assert found is not None
    return float(found[0, 0])


@pytest.fixture
def tower(monkeypatch: pytest.MonkeyPatch) -> Tower:
    monkeypatch.setattr(mm_schedule, "embedding_cache", None)
    mm_schedule.init_mm_embedding_cache(1 << 20)
    return Tower()


@pytest.mark.parametrize(("listening", "after"), [(True, 1.0), (False, 0.0)])
def test_a_feature_after_an_update_is_the_new_towers(tower: Tower, listening: bool, after: float) -> None:
    """Without the listener, the control, SGLang serves the old one."""
    own = WeightEpoch(lambda: "v0")
    if listening:
        own.on_end(image_features.clear)
    assert [feature(tower), feature(tower)] == [0.0, 0.0]
    assert tower.runs == 1  # the cache works
    assert image_features.count(MULTIMODAL) == 1
    own.advance(MULTIMODAL)
    tower.weight = 1.0
    assert image_features.count(MULTIMODAL) == (0 if listening else 1)
    assert feature(tower) == after


def test_a_multimodal_model_whose_cache_is_not_found_is_no_empty_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mm_schedule, "embedding_cache", None)
    assert image_features.count(TEXT) == 0
    assert image_features.count(MULTIMODAL) == -1


def test_the_cache_of_the_older_generation_is_found(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.5.15.post1 keeps it in mm_utils."""
    older = ModuleType(image_features.MODULES[1])
    older.embedding_cache = mm_schedule.embedding_cache  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, image_features.MODULES[1], older)
    monkeypatch.setattr(mm_schedule, "embedding_cache", None)
    older.embedding_cache.set(3, mm_schedule.EmbeddingResult(embedding=torch.zeros(1)))
    assert image_features.count(MULTIMODAL) == 1
    image_features.clear(MULTIMODAL, 0)
    assert image_features.count(MULTIMODAL) == 0


def test_evidence_listens_under_every_policy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook that every policy needs clears it, not the one that only scoped mode has."""
    own = WeightEpoch(lambda: "v0")
    monkeypatch.setattr(kv_evidence, "EPOCH", own)
    monkeypatch.setattr(kv_evidence.registry, "install", lambda hook, plan: "active")
    assert kv_evidence.install() == "active"
    assert image_features.clear in own._listeners


@pytest.mark.parametrize("listening", [True, False])
def test_interpolated_position_embeddings_follow_their_weight(tower: Tower, listening: bool) -> None:
    """SGLang's own module of Kimi-VL's tower; without the listener it goes on adding the old embedding."""
    embedding = Learnable2DInterpPosEmb(4, 4, 2).eval()
    scheduler, grid = serving(embedding), torch.tensor([[2, 2]])

    def added(weight: float) -> float:
        with torch.no_grad():
            embedding.weight.fill_(weight)
            return float(embedding(torch.zeros(4, 2), grid)[0, 0])

    own = WeightEpoch(lambda: "v0")
    if listening:
        own.on_end(image_features.clear)
    assert added(1.0) == 1.0
    assert image_features.count(scheduler) == 1
    own.advance(scheduler)
    assert added(2.0) == (2.0 if listening else 1.0)
