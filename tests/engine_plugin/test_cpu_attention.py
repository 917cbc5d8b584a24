"""The attention backend on SGLang's own pools and layers, against attention written out. No model, no engine.

Not tested here: cross attention and encoders, which are left to SGLang's class.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
torch.set_num_threads(1)  # tiny tensors; more threads only fight over the cores
pytest.importorskip("sglang")

HEADS, KV_HEADS, DIM = 4, 2, 16
SLOTS, ROWS, LONGEST = 4096, 8, 1024


@dataclass
class Layer:
    """The fields of RadixAttention that a backend reads."""

    layer_id: int = 0
    sliding_window_size: int = -1
    logit_cap: float = 0.0
    tp_q_head_num: int = HEADS
    tp_k_head_num: int = KV_HEADS
    qk_head_dim: int = DIM
    v_head_dim: int = DIM
    scaling: float = DIM**-0.5
    is_cross_attention: bool = False
    attn_type: Any = None


class Pool:
    """One layer's K and V, dense."""

    def __init__(self, dtype: Any) -> None:
        self.k = torch.full((SLOTS, KV_HEADS, DIM), float("nan"), dtype=dtype)
        self.v = self.k.clone()
        self.k[0] = self.v[0] = 0  # SGLang's padding slot is written with real numbers

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.k

    def get_value_buffer(self, layer_id: int) -> Any:
        return self.v

    def set_kv_buffer(self, layer: Any, location: Any, k: Any, v: Any) -> None:
        slots = location.loc if hasattr(location, "loc") else location[0]
        self.k[slots] = k.view(-1, KV_HEADS, DIM).to(self.k.dtype)
        self.v[slots] = v.view(-1, KV_HEADS, DIM).to(self.v.dtype)


@dataclass
class Scene:
    """A backend over a pool whose slots are handed out in a random order, page by page."""

    dtype: Any
    page: int = 1
    kv: dict[int, tuple[Any, Any]] = field(default_factory=dict)  # row -> all K and V written to it
    lengths: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        from slime_backend.engine_plugin.cpu_attention_backend import CpuAttentionBackend

        self.random = torch.Generator().manual_seed(3)
        self.pool = Pool(self.dtype)
        self.rows = SimpleNamespace(req_to_token=torch.zeros(ROWS, LONGEST, dtype=torch.int32))
        runner = SimpleNamespace(device="cpu", req_to_token_pool=self.rows, token_to_kv_pool=self.pool)
        self.backend = CpuAttentionBackend(runner)
        pages = torch.randperm(SLOTS // self.page - 1, generator=self.random) + 1
        self.free = (pages[:, None] * self.page + torch.arange(self.page)).view(-1).tolist()

    def rand(self, *shape: int) -> Any:
        return torch.randn(*shape, generator=self.random).to(self.dtype)

    def grow(self, row: int, count: int) -> tuple[Any, Any, list[int]]:
        """New K, V and slots of `count` tokens of one request."""
        old = self.lengths.get(row, 0)
        slots = [self.free.pop(0) for _ in range(count)]
        self.rows.req_to_token[row, old : old + count] = torch.tensor(slots, dtype=torch.int32)
        self.lengths[row] = old + count
        k, v = self.rand(count, KV_HEADS, DIM), self.rand(count, KV_HEADS, DIM)
        k_old, v_old = self.kv.get(row, (k[:0], v[:0]))
        self.kv[row] = torch.cat([k_old, k]), torch.cat([v_old, v])
        return k, v, slots

    def run(self, layer: Layer, growth: dict[int, int], *, decode: bool, padding: int = 0) -> tuple[Any, Any]:
        """One forward; returns the backend's output and the written-out expectation."""
        prefixes = {row: self.lengths.get(row, 0) for row in growth}
        parts = [self.grow(row, count) for row, count in growth.items()]
        k, v = (torch.cat([part[i] for part in parts]) if parts else self.rand(0, KV_HEADS, DIM) for i in (0, 1))
        q = self.rand(k.shape[0] + padding, HEADS * DIM)
        batch = SimpleNamespace(
            seq_lens=torch.tensor([self.lengths[row] for row in growth], dtype=torch.long),
            req_pool_indices=torch.tensor(list(growth), dtype=torch.long),
            extend_prefix_lens=None if decode else torch.tensor(list(prefixes.values())),
            extend_seq_lens=None if decode else torch.tensor(list(growth.values())),
            encoder_lens=None,
            out_cache_loc=torch.tensor([slot for part in parts for slot in part[2]], dtype=torch.long),
        )
        self.backend.init_forward_metadata(batch)
        forward = self.backend.forward_decode if decode else self.backend.forward_extend
        got = forward(q, k, v, layer, batch)
        expected, base = [], 0
        for row, count in growth.items():
            expected.append(written_out(q[base : base + count], *self.kv[row], prefixes[row], layer))
            base += count
        return got, torch.cat(expected) if expected else q[:0]


def written_out(q: Any, k: Any, v: Any, prefix: int, layer: Layer) -> Any:
    """Attention of each query by itself, in float64."""
    groups, out = HEADS // KV_HEADS, []
    for index, query in enumerate(q.double().view(-1, HEADS, DIM)):
        position = prefix + index
        first = 0 if layer.sliding_window_size < 0 else max(0, position - layer.sliding_window_size)
        keys = k[first : position + 1].double().repeat_interleave(groups, dim=1)
        values = v[first : position + 1].double().repeat_interleave(groups, dim=1)
        logits = torch.einsum("hd,nhd->hn", query, keys) * layer.scaling
        if layer.logit_cap:
            logits = layer.logit_cap * torch.tanh(logits / layer.logit_cap)
        out.append(torch.einsum("hn,nhd->hd", logits.softmax(-1), values).reshape(-1))
    return torch.stack(out) if out else q.double()


LAYERS = {
    "full": Layer(),
    "window": Layer(sliding_window_size=63),
    "cap": Layer(logit_cap=2.0),
    "window and cap": Layer(sliding_window_size=63, logit_cap=2.0),
}


@pytest.fixture(params=LAYERS.values(), ids=list(LAYERS))
def layer(request: pytest.FixtureRequest) -> Layer:
    return request.param


@pytest.mark.parametrize(
    ("dtype", "page", "tolerance"), [("float32", 1, 2e-6), ("float32", 16, 2e-6), ("bfloat16", 1, 2e-2)]
)
def test_prefill_prefix_hit_mixed_batch_and_decode(layer: Layer, dtype: str, page: int, tolerance: float) -> None:
    scene = Scene(getattr(torch, dtype), page)
    steps: list[tuple[dict[int, int], bool]] = [
        ({1: 300, 2: 64, 3: 1}, False),  # fresh, longer and shorter than a query block and the window
        ({1: 260, 2: 5}, False),  # behind a prefix
        ({1: 1, 4: 200, 2: 1}, False),  # decode rows riding in a prefill batch
        ({1: 1, 2: 1, 3: 1, 4: 1}, True),  # lengths of several magnitudes
        ({4: 1, 1: 1}, True),
        ({3: 1}, True),
    ]
    for growth, decode in steps:
        got, expected = scene.run(layer, growth, decode=decode)
        assert (got.double() - expected).abs().max() < tolerance


def test_a_decode_batch_gathered_in_parts(layer: Layer, monkeypatch: pytest.MonkeyPatch) -> None:
    from slime_backend.engine_plugin import cpu_attention_backend

    most_keys = 130
    monkeypatch.setattr(cpu_attention_backend, "GATHER_BYTES", most_keys * KV_HEADS * DIM * 4)
    scene = Scene(torch.float32)
    scene.run(layer, {1: 64, 2: 100, 3: 90, 4: 127, 5: 200, 6: 9}, decode=False)
    got, expected = scene.run(layer, dict.fromkeys(range(1, 7), 1), decode=True)
    assert (got.double() - expected).abs().max() < 2e-6
    (parts,) = scene.backend._decode_parts.values()
    sizes = [members.numel() for members, _, _ in parts]
    assert sum(sizes) == 6
    assert all(size == 1 or slots.numel() <= most_keys for size, (_, slots, _) in zip(sizes, parts, strict=True))
    assert len(parts) == (4 if layer.sliding_window_size > 0 else 6)


def test_request_without_new_tokens_empty_batch_and_padding_rows() -> None:
    scene = Scene(torch.float32)
    scene.run(Layer(), {1: 10, 2: 20}, decode=False)
    got, expected = scene.run(Layer(), {1: 0, 2: 3}, decode=False)
    assert (got.double() - expected).abs().max() < 2e-6
    got, expected = scene.run(Layer(), {2: 4}, decode=False, padding=3)
    assert (got[:4].double() - expected).abs().max() < 2e-6
    assert got[4:].abs().max() == 0
    for decode in (False, True):
        got, _ = scene.run(Layer(), {}, decode=decode)
        assert got.shape == (0, HEADS * DIM)


def test_the_cap_is_of_consequence() -> None:
    """The layers above would pass with the cap ignored if it changed nothing."""
    q, k = torch.randn(1, 1, 1, DIM), torch.randn(1, 1, 50, DIM)
    from slime_backend.engine_plugin.cpu_attention_backend import attend

    capped, uncapped = (attend(q, k, k, None, 1 / math.sqrt(DIM), cap) for cap in (0.5, 0.0))
    assert (capped - uncapped).abs().max() > 1e-2


def test_window_of_transformers_models_is_shortened_once() -> None:
    from slime_backend.engine_plugin.hf_window import shorten_windows

    model = SimpleNamespace(text_config=SimpleNamespace(sliding_window=128), config=SimpleNamespace())
    instances = {0: SimpleNamespace(sliding_window_size=128), 1: SimpleNamespace(sliding_window_size=-1)}
    for _ in range(2):  # a version of SGLang that passes 127 itself is left alone
        shorten_windows(instances, model)
        assert [instance.sliding_window_size for instance in instances.values()] == [127, -1]
