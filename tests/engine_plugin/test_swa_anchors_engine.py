"""Anchors on a real engine with sliding-window layers: what is reused, that it is the right KV, and what is refused.

The engine runs under SGLang's strict memory checks, which end the scheduler on the first leaked or doubled slot, with
the hook `scope` beside ours. The long tests take further engines: the Python tree core, pages of 16, and the overlap
schedule.
"""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checks import TOLERANCE, audit_difference, contexts, plain_difference
from engine_api import Api, Background, Endless, Serve
from tiny_models import WINDOW, Reference

from slime_backend.engine_process import DEFAULT_HOOKS, LocalEngine
from slime_backend.simulation.models import byte_tokenizer
from slime_backend.wire import ACTIVE, NOT_NEEDED, SchedulerReport
from tests import tensor_parallel

pytestmark = [pytest.mark.engine, pytest.mark.slow]

HOOKS = (*DEFAULT_HOOKS, "scope", "swa_anchors")
CHUNK = 2048
SLOTS = 30000  # sliding-window slots: room for a grid of three
SETTINGS: dict[str, Any] = {
    "max_total_tokens": 40000,
    "chunked_prefill_size": CHUNK,
    "extra": ("--swa-full-tokens-ratio", str(SLOTS / 40000)),
}
STRICT = {
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1",
    "SGLANG_ENABLE_TREE_CACHE_SANITY_CHECK": "1",
    "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1",
}
ROUNDS = int(os.environ.get("REEF_ANCHOR_ROUNDS", "300"))
TAILS = 400
chance = random.Random(23)
END, SYSTEM, USER, ASSISTANT = (
    byte_tokenizer().convert_tokens_to_ids(name) for name in ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
)


def text(length: int) -> list[int]:
    """Tokens without a message mark, and unlike any others."""
    return [chance.randrange(256) for _ in range(length)]


def chat_head(length: int) -> list[int]:
    return [SYSTEM, *text(length - 3), END, USER]


@pytest.fixture(scope="module")
def paths(hybrid_paths: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The hybrid checkpoints with a tokenizer whose chat template marks messages."""
    folder = tmp_path_factory.mktemp("hybrid-chat")
    for version, path in hybrid_paths.items():
        shutil.copytree(path, folder / version)
        byte_tokenizer().save_pretrained(folder / version)
    return {version: str(Path(folder) / version) for version in hybrid_paths}


class Anchored:
    """An engine of one page size, and the reference that its answers are compared with."""

    def __init__(self, api: Api, reference: Reference, page: int = 1) -> None:
        self.api, self.reference, self.page = api, reference, page
        self.version = "v0"

    def floor(self, length: int) -> int:
        return length // self.page * self.page

    def ask(self, ids: Sequence[int], anchors: Any = None, tokens: int = 4, *, check: bool = True) -> Any:
        sampling = {} if anchors is None else {"custom_params": {"kv_anchors": anchors}}
        answer = self.api.generate(list(ids), tokens, sampling=sampling)
        assert answer["meta_info"]["finish_reason"]["type"] == "length", answer["meta_info"]
        if check:
            assert plain_difference(self.reference, self.version, list(ids), answer) < TOLERANCE
        return answer

    def found(self, ids: Sequence[int], anchors: Any = None, **options: Any) -> int:
        return int(self.ask(ids, anchors, **options)["meta_info"]["cached_tokens"])

    def first_fan_out(self, head: list[int], anchors: Any = None) -> int:
        """What a new question finds of a head that one earlier prompt had."""
        assert self.found(head + text(150), anchors, check=False) < 64
        return self.found(head + text(80), anchors)

    def idle(self) -> SchedulerReport:
        return self.api.until(
            lambda r: r.kv.running == r.kv.waiting == r.kv.requests_holding_kv == r.kv.tree_full_protected == 0, "idle"
        )


@pytest.fixture(scope="module", params=[1, 2] if os.environ.get("REEF_ALL_KINDS") else [1], ids="tp{}".format)
def running(
    request: pytest.FixtureRequest, serve: Serve, paths: dict[str, str], hybrid_reference: Reference
) -> Iterator[Anchored]:
    ranks = request.param
    settings = {**SETTINGS, "extra": (*SETTINGS["extra"], *tensor_parallel.flags(ranks))}
    with serve(
        paths["v0"], hooks=HOOKS, environment={**STRICT, **tensor_parallel.environment(ranks)}, **settings
    ) as api:
        yield Anchored(api, hybrid_reference)


@pytest.fixture
def anchored(running: Anchored, paths: dict[str, str]) -> Anchored:
    running.idle()
    assert running.api.flush() == 200
    running.version = "v0"
    running.api.load(paths["v0"])
    running.api.label("v0")
    return running


def test_no_gpu_is_visible_and_the_hooks_are_active(anchored: Anchored) -> None:
    assert not torch.cuda.is_available()
    assert anchored.api.report().hooks == dict.fromkeys(HOOKS, ACTIVE)


# --- reuse, and the right KV -------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1500, 2600])  # inside one chunk, and over two
def test_the_first_fan_out_finds_the_head(anchored: Anchored, length: int) -> None:
    """By a hint, by the message's mark alone, and by the grid; each answer is checked against Hugging Face."""
    assert anchored.first_fan_out(text(length), [length]) == length
    assert anchored.first_fan_out(chat_head(length)) == length
    assert anchored.first_fan_out(text(length)) == length // 1024 * 1024


def test_rounds_of_fan_out_and_append(anchored: Anchored) -> None:
    head = chat_head(700)
    histories = [head]
    for _ in range(8):
        history = chance.choice(histories)
        ids = [*history, *text(chance.choice((1, 40, 200))), END, ASSISTANT]
        answer = anchored.ask(ids, tokens=chance.choice((1, 20, 140)))
        if len(histories) > 1:
            assert answer["meta_info"]["cached_tokens"] >= len(history) - 3  # the last reply's token has no KV yet
        histories.append([*ids, *answer["output_ids"], END, USER])


@pytest.mark.parametrize("windows", [1, 2])
def test_prompts_around_one_and_two_windows(anchored: Anchored, windows: int) -> None:
    for extra in (-1, 0, 1):
        length = windows * WINDOW + extra
        head, behind = text(length), set()  # behind: tokens that the cache has behind the head, sampled ones among them
        for tail in (text(0), text(1)):  # the head alone, and one token more
            behind.add([*tail, *anchored.ask(head + tail, [length])["output_ids"]][0])
        for more in (0, 1, WINDOW - 1):
            first = next(token for token in range(256) if token not in behind)
            behind.add(first)
            assert anchored.found([*head, first, *text(more)], [length]) == length


def test_a_low_branch_does_not_hide_the_anchors_above_it(anchored: Anchored) -> None:
    words = text(200)
    first, second = words + text(1000), words + text(1100)
    anchored.ask(first + text(90), [len(first)])
    anchored.ask(second + text(90), [len(second)])
    assert anchored.found(second + text(90), [len(second)]) == len(second)
    assert anchored.found(words + text(50)) == len(words)


def test_eight_at_once(anchored: Anchored) -> None:
    head = chat_head(900)
    prompts = [[*head, *text(30 + i), END, ASSISTANT] for i in range(8)]
    answers = [call.result() for call in [Background(anchored.ask, ids) for ids in prompts]]
    again = [call.result() for call in [Background(anchored.ask, ids[:-1] + text(3)) for ids in prompts]]
    assert sum(a["meta_info"]["cached_tokens"] >= len(head) for a in answers) >= 1
    assert all(a["meta_info"]["cached_tokens"] >= len(head) for a in again)


def test_an_anchor_costs_one_window(anchored: Anchored) -> None:
    used = {}
    for anchors in ([], [300, 900, 1200]):
        assert anchored.api.flush() == 200
        anchored.ask(text(1023), anchors or None)  # too short for the grid
        kv = anchored.idle().kv
        used[len(anchors)] = kv.swa_capacity - kv.swa_free
        assert (kv.tree_swa_evictable, kv.tree_swa_protected) == (used[len(anchors)], 0)
    assert used[0] < used[3] <= used[0] + 2 * (WINDOW + 1)  # 1200 lies beyond the prompt


# --- publications ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_no_anchor_outlives_its_weights(anchored: Anchored, paths: dict[str, str], mode: str) -> None:
    head = chat_head(1400)
    assert anchored.first_fan_out(head) == 1400
    # A retracted request computes its prompt again, and may then share that: it gets a head of its own.
    crossing = (head if mode == "in_place" else text(1400)) + text(30)
    call = Endless(anchored.api, crossing).started()
    anchored.api.publish(paths["v1"], "v1", mode)
    anchored.version = "v1"
    assert anchored.first_fan_out(head) == 1400
    answer = call.result()
    assert contexts(answer)[-1] == (["v0", "v1"] if mode == "in_place" else ["v1"])
    assert audit_difference(anchored.reference, crossing, answer) < TOLERANCE
    anchored.idle()
    assert anchored.api.flush() == 200
    anchored.api.until(lambda report: report.kv.is_empty, "empty")


# --- bad input ---------------------------------------------------------------------------------------------------


def ask_raw(api: Api, anchors: Any, **more: Any) -> tuple[int, Any]:
    sampling = {"max_new_tokens": 2, "temperature": 0, "custom_params": {"kv_anchors": anchors}}
    return api.call("/generate", {"input_ids": text(700), "sampling_params": sampling, **more})


@pytest.mark.parametrize(
    "anchors", ["100", 100, True, {"at": 1}, [1.5], [True], ["7"], [None], [[1, 2]], [{}], [10**30]]
)
def test_what_is_no_list_of_integers_is_refused(anchored: Anchored, anchors: Any) -> None:
    before = anchored.api.report()
    status, answer = ask_raw(anchored.api, anchors)
    assert status == 400, answer
    assert "kv_anchors" in str(answer)
    _, streamed = ask_raw(anchored.api, anchors, stream=True)
    assert "kv_anchors" in streamed
    after = anchored.api.report()
    assert (after.instance_id, after.kv.full_free) == (before.instance_id, before.kv.full_free)


@pytest.mark.parametrize(
    "anchors",
    [
        [],
        None,
        [-1, -(10**6), 0],
        [700, 701, 10**6, 2**62, -(2**62)],
        [600, 100, 400, 100],
        [5] * 10_000,
        list(range(10_000)),
        list(range(10_000, -10_000, -1)),
    ],
    ids=["empty", "null", "negative", "beyond", "unsorted", "doubled", "ten thousand", "all over"],
)
def test_other_odd_anchors_are_clipped(anchored: Anchored, anchors: Any) -> None:
    head = text(650)
    assert anchored.found(head + text(50), anchors) == 0
    second = anchored.found(head + text(50), [len(head), *(anchors or [])])
    assert second >= highest_kept(anchors or [])
    assert (second == 0) == (not highest_kept(anchors or []))
    assert anchored.found(head + text(50)) == len(head)


def highest_kept(anchors: Sequence[int]) -> int:
    """The highest anchor up to 650 that a prompt of 700 tokens keeps: the first 16 that lie inside it."""
    kept = list(dict.fromkeys(a for a in anchors if 0 < a < 700))[:16]
    return max((a for a in kept if a <= 650), default=0)


def test_a_batch_with_one_hint_for_all(anchored: Anchored) -> None:
    head = text(600)
    prompts = [head + text(20 + i) for i in range(4)]
    answers = anchored.api.generate(prompts, 2, sampling={"custom_params": {"kv_anchors": [600, 10**9]}, "n": 2})
    assert len(answers) == 8
    assert anchored.found(head + text(30)) == 600


# --- where there is nothing to do, and the negative control -------------------------------------------------------


def test_a_dense_model_needs_no_anchors(engine: LocalEngine) -> None:
    api = Api(engine.url)
    assert api.report().hooks["swa_anchors"] == NOT_NEEDED
    ids, sampling = text(300), {"custom_params": {"kv_anchors": [200]}}
    api.generate(ids, 1, sampling=sampling)
    assert api.generate(ids[:200] + text(10), 1, sampling=sampling)["meta_info"]["cached_tokens"] == 200
    assert ask_raw(api, ["x"])[0] == 400


def test_negative_control_the_same_harness_without_the_hook(
    serve: Serve, paths: dict[str, str], hybrid_reference: Reference
) -> None:
    with serve(paths["v0"], hooks=DEFAULT_HOOKS, environment=STRICT, **SETTINGS) as api:
        plain = Anchored(api, hybrid_reference)
        assert plain.first_fan_out(text(1500), [1500]) == 0
        assert plain.first_fan_out(head := chat_head(1500)) == 0
        assert plain.found(head + text(80)) == 1500  # SGLang has learnt it by now
        assert plain.first_fan_out(text(1500)) == 0


# --- long --------------------------------------------------------------------------------------------------------

KINDS = [("rust", 1, True), ("python", 1, False), ("rust", 16, False), ("python", 16, True)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda k: f"{k[0]}-page{k[1]}-{'overlap' if k[2] else 'plain'}")
def kind(
    request: pytest.FixtureRequest, serve: Serve, paths: dict[str, str], hybrid_reference: Reference
) -> Iterator[Anchored]:
    core, page, overlap = request.param
    with serve(
        paths["v0"],
        hooks=HOOKS,
        page_size=page,
        overlap_schedule=overlap,
        environment={**STRICT, "SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND": core},
        **SETTINGS,
    ) as api:
        yield Anchored(api, hybrid_reference, page)


@pytest.mark.soak
def test_no_tail_length_makes_a_cliff(kind: Anchored) -> None:
    for tail in range(1, TAILS + 1):
        head, check = text(601), tail % 20 == 0
        first, second = ([*head, token, *text(tail - 1)] for token in (1, 2))  # they diverge behind the head
        kind.ask(first, [601], tokens=2, check=check)
        assert kind.found(second, tokens=2, check=check) == kind.floor(601), tail


@pytest.mark.soak
def test_many_rounds_leak_nothing(kind: Anchored) -> None:
    """Fan-out and append, hints and none, up to four at once, in a pool that has to evict all along."""
    heads = [chat_head(n) if n > 500 else text(n) for n in (127, 128, 129, 255, 256, 257, 900, 2500, 4000)]
    histories: list[list[int]] = []
    hits = 0

    def one(checked: bool) -> tuple[list[int], Any]:
        base = chance.choice(heads if not histories or chance.random() < 0.6 else histories[-12:])
        ids = [*base, *text(chance.choice((1, 16, 128, 300)))]
        anchors = chance.choice((None, [len(base)], [chance.randrange(-9, 5000) for _ in range(40)]))
        return ids, Background(kind.ask, ids, anchors, chance.choice((1, 8, 150)), check=checked)

    for number in range(ROUNDS):
        if number % 50 == 49:
            heads[chance.randrange(len(heads))] = chat_head(chance.choice((700, 1800, 3300)))
        for ids, call in [one(number % 10 == 0) for _ in range(chance.choice((1, 1, 2, 4)))]:
            answer = call.result()
            hits += answer["meta_info"]["cached_tokens"] > 0
            histories.append(ids + answer["output_ids"])
    assert hits > ROUNDS / 2
    kind.idle()
    kv = kind.api.report().kv
    assert kv.swa_free + kv.tree_swa_evictable == kv.swa_capacity
    assert kv.full_free + kv.tree_full_evictable == kv.full_capacity
    assert kind.api.flush() == 200
    kind.api.until(lambda report: report.kv.is_empty, "empty")
