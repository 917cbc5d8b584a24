"""What digests of weights show: each fault of a load is found on the engine that has it, and nothing else is blamed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_backend.engine_client.weight_digests import RankDigests, read_digests
from slime_backend.fleet.weights import ServedWeights
from slime_backend.publication.weights import KEPT, Look, judge
from slime_backend.weight_sources.digests import SentDigests, of_checkpoint, parts_of

Q, K, V, OUT = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkvo")
QKV = "model.layers.0.self_attn.qkv_proj.weight"
WHOLE = (0, 1, 0, 1)


def weights(version: int, *names: str) -> dict[str, str]:
    return {name: f"{name}@{version}" for name in names}


def sent_as(digests: Mapping[str, str], dtype: str = "F32") -> dict[str, tuple[str, ...]]:
    """As a source has them: some tensors have a second form."""
    return {name: (dtype, digest, f"padded {digest}") for name, digest in digests.items()}


def served(*ranks: Mapping[str, str], comparable: bool, places: Any = None) -> ServedWeights:
    places = places or [WHOLE] * len(ranks)
    digests = [RankDigests(place, rank) for place, rank in zip(places, ranks, strict=True)]
    return ServedWeights(
        frozenset("i"), "v0", digests, frozenset(), [dict.fromkeys(r if comparable else (), "F32") for r in ranks]
    )


def look(before: ServedWeights, *now: Mapping[str, str], **options: Any) -> Look:
    places = [rank.place for rank in before.ranks]
    return Look(before, [RankDigests(p, n) for p, n in zip(places, now, strict=True)], **options)


# ---- held against what was sent -------------------------------------------------------------------------------------

OLD, NEW = weights(0, Q, K, OUT), weights(1, Q, K, OUT)
SENT_OLD, SENT_NEW = sent_as(OLD), sent_as(NEW)


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        (NEW, []),
        (OLD, [f"{Q}, {K}, {OUT} {KEPT}"]),
        ({**NEW, K: OLD[K]}, [f"{K} {KEPT}"]),
        ({**NEW, K: "flipped"}, [f"{K} has other bytes than were sent"]),
        ({**NEW, Q: OLD[Q], K: "x"}, [f"{Q} {KEPT}", f"{K} has other bytes than were sent"]),
    ],
)
def test_each_tensor_is_held_against_what_was_sent(now: dict[str, str], wrong: list[str]) -> None:
    engine = look(served(OLD, comparable=True), now)
    judge({"a": engine}, SENT_NEW, SENT_OLD)
    assert engine.why_wrong() == wrong
    assert engine.verified == sum(now[name] == NEW[name] for name in now)


def test_a_tensor_that_was_never_as_it_was_sent_is_not_held_against_it() -> None:
    converted = {name: f"packed {digest}" for name, digest in NEW.items()}
    engine = look(served({n: f"packed {d}" for n, d in OLD.items()}, comparable=False), converted)
    judge({"a": engine}, SENT_NEW, None)
    assert (engine.why_wrong(), engine.verified) == ([], 0)
    judge({"a": engine}, SENT_NEW, SENT_OLD)  # but what the source changed has changed
    assert (engine.why_wrong(), engine.verified) == ([], 3)


def test_a_padded_tensor_is_as_it_was_sent() -> None:
    known = served({name: f"padded {digest}" for name, digest in OLD.items()}, comparable=False)
    known.learn(SENT_OLD)
    engine = look(known, {name: f"padded {digest}" for name, digest in {**NEW, K: OLD[K]}.items()})
    judge({"a": engine}, SENT_NEW, SENT_OLD)
    assert (engine.why_wrong(), engine.verified) == ([f"{K} {KEPT}"], 2)


def test_another_dtype_is_converted_by_the_engine_and_raises_no_alarm() -> None:
    engine = look(served(OLD, comparable=True), {name: f"converted {digest}" for name, digest in NEW.items()})
    judge({"a": engine}, sent_as(NEW, "BF16"), SENT_OLD)
    assert (engine.why_wrong(), engine.verified) == ([], 0)


def test_the_first_match_makes_a_tensor_comparable() -> None:
    known = served({**OLD, K: "packed"}, comparable=False)
    known.learn(SENT_OLD)
    assert known.comparable == [{Q: "F32", OUT: "F32"}]


# ---- held against what changed --------------------------------------------------------------------------------------


def test_joined_and_sharded_tensors_change_where_the_source_did() -> None:
    before, sent = weights(0, Q, K, V, OUT), {**weights(0, Q, V, OUT), K: "k@1"}
    places = [(0, 2, 0, 1), (1, 2, 0, 1)]
    start = served({QKV: "a0", OUT: "o0"}, {QKV: "b0", OUT: "p0"}, comparable=False, places=places)

    def wrong(*now: dict[str, str], current: bool = True) -> list[str]:
        engine = look(start, *now, current=current)
        judge({"a": engine}, sent_as(sent), sent_as(before))
        return engine.why_wrong()

    assert wrong({QKV: "a1", OUT: "o0"}, {QKV: "b1", OUT: "p0"}) == []
    assert wrong({QKV: "a0", OUT: "o0"}, {QKV: "b1", OUT: "p0"}) == []  # its shard of K may be as it was
    assert wrong({QKV: "a0", OUT: "o0"}, {QKV: "b0", OUT: "p0"}) == [f"{QKV} of tensor rank 0 {KEPT}"]
    changed = "has changed, and what was sent of it had not"
    assert wrong({QKV: "a1", OUT: "o0"}, {QKV: "b1", OUT: "p1"}) == [f"{OUT} of tensor rank 1 {changed}"]
    assert wrong({QKV: "a0", OUT: "o1"}, {QKV: "b0", OUT: "p1"}, current=False) == []  # it was behind


# ---- held against copies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("now", "wrong"),
    [
        ([NEW, NEW, NEW], [[], [], []]),
        ([NEW, OLD, NEW], [[], [f"{Q}, {K}, {OUT} {KEPT}"], []]),
        ([NEW, OLD], [[], [f"{Q}, {K}, {OUT} {KEPT}"]]),
        ([NEW, {**NEW, K: "x"}, NEW], [[], [f"{K} has other bytes than its copies"], []]),
        # Nobody knows which of two is right.
        ([NEW, {**NEW, K: "x"}], [[f"{K} has other bytes than its copies"]] * 2),
        ([OLD, OLD], [[], []]),  # all stayed as they were: nothing is wrong, and nothing is shown
    ],
)
def test_engines_that_were_alike_stay_alike(now: list[dict[str, str]], wrong: list[list[str]]) -> None:
    looks = {str(n): look(served(OLD, comparable=False), digests) for n, digests in enumerate(now)}
    judge(looks, None, None)
    assert [engine.why_wrong() for engine in looks.values()] == wrong
    if not any(wrong):
        assert [engine.verified for engine in looks.values()] == [3 if NEW in now else 0] * len(now)


def test_engines_that_never_were_alike_are_not_compared() -> None:
    looks = {"a": look(served(OLD, comparable=False), NEW)}
    looks["b"] = look(served(dict.fromkeys(OLD, "other"), comparable=False), dict.fromkeys(NEW, "packed"))
    judge(looks, None, None)
    assert [engine.why_wrong() for engine in looks.values()] == [[], []]


def test_what_was_sent_decides_between_two_copies() -> None:
    looks = {
        "right": look(served(OLD, comparable=True), NEW),
        "wrong": look(served(OLD, comparable=False), {**NEW, K: "x"}),
    }
    judge(looks, SENT_NEW, None)
    assert looks["right"].why_wrong() == []
    assert looks["wrong"].why_wrong() == [f"{K} has other bytes than its copies"]


@given(st.integers(1, 4), st.booleans(), st.booleans(), st.integers(0, 3))
def test_no_alarm_where_every_engine_has_what_was_sent(engines: int, comparable: bool, known: bool, same: int) -> None:
    """Whatever part of the weights the trainer left as it was, and whatever is known."""
    sent = {**NEW, **{name: OLD[name] for name in list(NEW)[:same]}}
    looks = {str(n): look(served(OLD, comparable=comparable), sent) for n in range(engines)}
    judge(looks, sent_as(sent) if known else None, SENT_OLD if known else None)
    assert not any(engine.why_wrong() for engine in looks.values())


# ---- digests --------------------------------------------------------------------------------------------------------


def test_digests_are_the_same_in_a_file_and_on_the_way(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import save_file

    from slime_backend.weight_sources.checkpoint_check import read_checkpoint

    torch.manual_seed(0)
    tensors = {name: torch.randn(4, 3).to(torch.bfloat16) for name in (Q, K, V, OUT)}
    tensors["scalar"] = torch.tensor(1.5)
    (tmp_path / "config.json").write_text("{}")
    save_file(tensors, str(tmp_path / "model.safetensors"))
    of_file = of_checkpoint(read_checkpoint(tmp_path))
    for order in ((Q, K, V), (V, K, Q), (K, Q, V)):
        sent = SentDigests()
        named = [(name, tensors[name]) for name in (*order, OUT, "scalar")]
        assert [name for name, _ in sent.taking(named)] == [*order, OUT, "scalar"]
        assert sent.digests == of_file
    padded = torch.cat([tensors[OUT], torch.zeros(60, 3, dtype=torch.bfloat16)])
    assert of_file[OUT][2] == hashlib.sha256(padded.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
    assert len(of_file["scalar"]) == 2
    joined = torch.cat([tensors[Q], tensors[K], tensors[V]])
    assert of_file[QKV] == (
        "BF16",
        hashlib.sha256(joined.view(torch.uint8).numpy().tobytes()).hexdigest()[:16],
    )


def test_names_of_joined_tensors() -> None:
    assert parts_of(QKV) == (Q, K, V)
    assert parts_of("model.layers.3.mlp.gate_up_proj.weight") == tuple(
        f"model.layers.3.mlp.{part}_proj.weight" for part in ("gate", "up")
    )
    assert parts_of(OUT) == (OUT,)
    assert parts_of("qkv_proj.weight") == ("qkv_proj.weight",)


PLACE = {"tp_rank": 1, "tp_size": 2, "pp_rank": 0, "pp_size": 1, "role": "target"}


@pytest.mark.parametrize("at", [PLACE, [PLACE, {**PLACE, "role": "draft"}]])  # before 0.5.21, and since
def test_an_answer_of_either_form(at: Any) -> None:
    answer = {"success": True, "ranks": [{"checksums": {Q: "ab"}, "per_gpu_checksum": "x", "parallelism_info": at}]}
    assert read_digests(answer) == [RankDigests((1, 2, 0, 1), {Q: "ab"})]


@pytest.mark.parametrize("answer", [None, {}, {"ranks": [{}]}, {"ranks": [{"parallelism_info": []}]}, "text"])
def test_anything_else_is_no_digest(answer: Any) -> None:
    with pytest.raises(ValueError, match="no digests of ranks"):
        read_digests(answer)
