"""Which anchors a prompt gets: hints, message boundaries learnt from chat templates, the grid, and their bound."""

from __future__ import annotations

import os

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import random
from array import array
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from slime_backend.engine_plugin.anchor_plan import (
    FIRST_BOUNDARIES,
    LAST_BOUNDARIES,
    MAX_ANCHORS,
    MAX_GRID,
    AnchorError,
    Planner,
    clip,
    grid,
    grid_limit,
    hint,
)
from slime_backend.engine_plugin.message_marks import boundaries, learn_marks, load_marks
from slime_backend.local_trainer.task import TASKS, Question, prompt_ids
from slime_backend.simulation.models import byte_tokenizer


def test_no_gpu_is_visible() -> None:
    assert not torch.cuda.is_available()


# --- hints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("100", "must be a list of token positions, got str"),
        (100, "got int"),
        (True, "got bool"),
        ({"0": 1}, "got dict"),
        ([1, 2.0], r"kv_anchors\[1\] must be an integer .*got float"),
        ([True], r"kv_anchors\[0\] .*got bool"),
        (["7"], "got str"),
        ([None], "got NoneType"),
        ([[1]], "got list"),
    ],
)
def test_what_is_no_list_of_integers_is_refused_in_one_line(value: Any, words: str) -> None:
    with pytest.raises(AnchorError, match=words) as caught:
        hint({"kv_anchors": value})
    assert "\n" not in str(caught.value)
    assert Planner().plan(range(500), {"kv_anchors": value}) == ()  # in the scheduler: as if there were none


@pytest.mark.parametrize("custom_params", [None, {}, {"other": 1}, {"kv_anchors": None}, [1], "x"])
def test_no_hint_is_no_anchor(custom_params: Any) -> None:
    assert hint(custom_params) == []
    assert Planner().plan(range(500), custom_params) == ()


@pytest.mark.parametrize(
    ("told", "page", "kept"),
    [
        ([-5, -1, 0], 1, []),  # nothing lies before them
        ([500, 501, 10**30, -(10**30)], 1, []),  # at or beyond the end of 500 tokens
        ([300, 100, 200], 1, [300, 100, 200]),
        ([7, 7, 7], 1, [7]),
        ([15, 16, 17, 31, 33], 16, [16, 32]),  # whole pages, each once
        (list(range(10_000)), 1, list(range(1, MAX_ANCHORS + 1))),
        (list(range(9_999, -1, -1)), 1, list(range(499, 499 - MAX_ANCHORS, -1))),
    ],
)
def test_hints_are_clipped(told: list[int], page: int, kept: list[int]) -> None:
    assert clip(told, 500, page) == kept
    assert Planner(page=page).plan(range(500), {"kv_anchors": told}) == tuple(sorted(kept))


# --- the grid, and what wins -------------------------------------------------------------------------------------


def test_the_grid_is_bounded_and_shared_by_prompts_of_similar_length() -> None:
    assert grid(1024, 4) == []
    assert grid(1025, 4) == [1024]
    assert grid(7300, 4) == [2048, 4096, 6144]
    for length in range(1, 200_000, 997):
        for limit in range(MAX_GRID + 1):
            found = grid(length, limit)
            assert len(found) <= limit
            assert all(0 < anchor < length for anchor in found)
            if limit and length > 1024:  # no stretch without an anchor is longer than this
                assert found
                assert max(b - a for a, b in zip([0, *found], [*found, length], strict=True)) <= max(
                    1024, 2 * length / limit
                )


def test_the_grid_takes_a_small_share_of_the_pool() -> None:
    assert grid_limit(6000, 128) == 0
    assert grid_limit(16384, 128) == 2
    assert grid_limit(10**7, 128) == MAX_GRID


def test_hints_before_boundaries_before_the_grid() -> None:
    mark = 3
    ids = [10] * 9000
    seen = range(100, 9000, 100)
    for position in seen:
        ids[position - 1] = mark
    planner = Planner(marks=((mark,),), grid_limit=4)
    ends = [*seen[:FIRST_BOUNDARIES], *seen[-LAST_BOUNDARIES:]]
    steps = grid(9000, 4)
    assert planner.plan(ids, None) == tuple(sorted({*ends, *steps}))
    hints = list(range(8001, 8001 + MAX_ANCHORS))
    assert planner.plan(ids, {"kv_anchors": hints}) == tuple(hints)
    assert planner.plan(ids, {"kv_anchors": hints[:-1]}) == (ends[0], *hints[:-1])
    few = MAX_ANCHORS - len(ends) - 1
    assert planner.plan(ids, {"kv_anchors": hints[:few]}) == tuple(sorted({*hints[:few], *ends, steps[0]}))


# --- marks of chat templates -------------------------------------------------------------------------------------


def tokenizer_with(template: str | None, *special: str) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(BPE(vocab={character: i for i, character in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False)
    tokenizer.chat_template = template
    return tokenizer


CHATML = tokenizer_with(
    "{% if tools %}{{ '<|im_start|>system\n' + messages[0].content + '\n# Tools\n' }}{% for tool in tools %}"
    "{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{% if not (tools and loop.first and m.role == 'system') %}"
    "{{ '<|im_start|>' + m.role + '\n' + (m.content or '') + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "<|im_start|>",
    "<|im_end|>",
)
# Tool schemas in a message of their own; the system prompt goes into the user's turn.
BRACKETS = tokenizer_with(
    "{{ '<s>' }}{% if tools %}{{ '[TOOLS]' + tools | tojson + '[/TOOLS]' }}{% endif %}"
    "{% for m in messages if m.role != 'system' %}"
    "{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}{% else %}{{ m.content + '</s>' }}{% endif %}"
    "{% endfor %}",
    *("<s>", "</s>", "[TOOLS]", "[/TOOLS]", "[INST]", "[/INST]"),
)
NO_SYSTEM = tokenizer_with(
    "{% for m in messages %}{% if m.role in ('system', 'tool') %}{{ raise_exception('no such role') }}{% endif %}"
    "{{ '<turn>' + m.role + '\n' + m.content + '</turn>\n' }}{% endfor %}",
    "<turn>",
    "</turn>",
)
TOOL = [{"type": "function", "function": {"name": "f", "description": "a tool", "parameters": {}}}]


def ids_of(tokenizer: Any, messages: list[tuple[str, str]], **options: Any) -> list[int]:
    rows = [{"role": role, "content": content} for role, content in messages]
    return tokenizer.apply_chat_template(rows, tokenize=True, return_dict=False, **options)


def text_behind(tokenizer: Any, ids: list[int], position: int) -> str:
    return tokenizer.decode(ids[position:])


@pytest.mark.parametrize("tools", [None, TOOL], ids=["plain", "tools"])
def test_the_end_of_system_prompt_and_tool_schemas_in_chatml(tools: Any) -> None:
    system = "You are terse. " * 20
    ids = ids_of(CHATML, [("system", system), ("user", "Hello?")], tools=tools, add_generation_prompt=True)
    found = boundaries(array("q", ids), learn_marks(CHATML))
    behind = [text_behind(CHATML, ids, position) for position in found]
    assert behind[0].startswith(system)
    assert behind[1] == "Hello?<|im_end|>\n<|im_start|>assistant\n"
    other = ids_of(CHATML, [("system", system), ("user", "Why?")], tools=tools, add_generation_prompt=True)
    assert ids[: found[1]] == other[: found[1]]


def test_a_content_that_swallows_the_end_of_the_mark_still_shows() -> None:
    start, newline = CHATML.convert_tokens_to_ids("<|im_start|>"), CHATML.encode("\n")[0]
    ids = ids_of(CHATML, [("user", "Hello?")])
    joined = [
        *ids[: ids.index(newline)],
        7,
        *ids[ids.index(newline) + 1 :],
    ]  # 7 stands for two line breaks in one token
    assert boundaries(ids, learn_marks(CHATML)) == [ids.index(newline) + 1]
    assert boundaries(joined, learn_marks(CHATML)) == [ids.index(start) + 1]


def test_tool_schemas_in_a_message_of_their_own() -> None:
    ids = ids_of(BRACKETS, [("user", "Hello?")], tools=TOOL)
    found = boundaries(ids, learn_marks(BRACKETS))
    assert "Hello?[/INST]" in [text_behind(BRACKETS, ids, position) for position in found]
    assert any(text_behind(BRACKETS, ids, position).startswith("{") for position in found) or len(found) >= 2


def test_a_template_that_refuses_roles_still_tells_the_others() -> None:
    ids = ids_of(NO_SYSTEM, [("user", "one"), ("assistant", "two"), ("user", "three")])
    found = boundaries(ids, learn_marks(NO_SYSTEM))
    assert [text_behind(NO_SYSTEM, ids, p).split("<")[0] for p in found] == ["one", "two", "three"]


@pytest.mark.parametrize(
    "tokenizer",
    [
        None,
        tokenizer_with(None, "<|end|>"),
        tokenizer_with("{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", "<|end|>"),
        tokenizer_with("{{ raise_exception('never') }}", "<|end|>"),
        tokenizer_with("{% this is no template", "<|end|>"),
        object(),
    ],
    ids=["none", "no template", "no special tokens", "refuses all", "broken", "no tokenizer"],
)
def test_without_marks_that_text_cannot_imitate_there_are_no_boundaries(tokenizer: Any) -> None:
    assert learn_marks(tokenizer) == ()
    assert boundaries([1, 2, 3], ()) == []


def test_a_tokenizer_that_does_not_load_is_no_error() -> None:
    def missing() -> Any:
        raise OSError("no tokenizer here")

    assert load_marks(missing) == ()


@pytest.mark.parametrize("task", [cls() for cls in TASKS.values()], ids=list(TASKS))
def test_the_boundary_is_where_the_questions_of_a_task_diverge(task: Any) -> None:
    tokenizer = byte_tokenizer()
    questions = task.questions(random.Random(0))
    prompts = [prompt_ids(tokenizer, task, next(questions)) for _ in range(6)]
    prompts.append(prompt_ids(tokenizer, task, Question("\nodd", "", 1)))
    planner = Planner(marks=learn_marks(tokenizer))
    shared = max(n for n in range(len(prompts[0])) if all(p[:n] == prompts[0][:n] for p in prompts))
    for ids in prompts:
        assert planner.plan(array("q", ids), None) == (shared,)
