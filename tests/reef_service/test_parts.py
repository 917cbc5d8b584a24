"""The gateway's parts alone: gate, router, template, tokenizer, parser, messages."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from reef_service.api.common import dumps
from reef_service.data_plane.admission import Gate
from reef_service.data_plane.limits import Limits
from reef_service.data_plane.router import BLOCK, SLACK, Router
from reef_service.errors import ApiError
from reef_service.publisher import GatedTransport
from reef_service.text.answer_parser import AnswerParser
from reef_service.text.messages import digests, normalise
from reef_service.text.tokenizer import ModelTokenizer, TextStream, TokenizerError
from slime_backend.engine_client import EngineClient
from slime_backend.fleet import Fleet, Member
from slime_backend.policy import decide
from slime_backend.simulation.transport import NameTransport
from slime_backend.transports import expect_loads
from tests.reef_service.harness import make_model, until

# ---- the gate -------------------------------------------------------------------------------------------------------


def test_a_transport_behind_the_gate_hears_which_engines_will_load(run_async):
    """Else it would wait for those that failed at the pause, while the others are paused."""

    class Inner(NameTransport):
        def expect_loads(self, clients):
            self.expected = list(clients)

    async def work():
        inner, clients = Inner(), [EngineClient("http://127.0.0.1:1")]
        expect_loads(GatedTransport(inner, Gate(limit=1, queue=1, hold_s=1.0)), clients)
        return inner.expected == clients

    assert run_async(work())


def test_the_gate_lets_in_by_order_and_number(run_async):
    async def work():
        gate, order = Gate(limit=2, queue=10, hold_s=5.0), []

        async def one(i):
            async with gate.passed():
                order.append(i)
                await asyncio.sleep(0)
                assert gate.inside <= 2

        gate.close()
        tasks = []
        for i in range(8):
            tasks.append(asyncio.create_task(one(i)))
            await asyncio.sleep(0)
        assert (gate.waiting, gate.inside) == (8, 0)
        gate.open()
        await asyncio.gather(*tasks)
        return order, gate.inside, gate.waiting

    assert run_async(work()) == (list(range(8)), 0, 0)


def test_the_gate_is_never_wrong_about_who_is_inside(run_async):
    """Requests are cancelled, time out and end at random while the gate opens and closes."""

    async def work():
        rng = random.Random(0)
        gate, refused = Gate(limit=3, queue=8, hold_s=0.01), 0

        async def one():
            nonlocal refused
            try:
                async with gate.passed():
                    await asyncio.sleep(rng.random() / 200)
            except ApiError as error:
                refused += error.status == 503

        tasks = []
        for _ in range(600):
            tasks.append(asyncio.create_task(one()))
            action = rng.random()
            if action < 0.1:
                gate.close()
                asyncio.get_running_loop().call_later(rng.random() / 50, gate.open)
            elif action < 0.4:
                rng.choice(tasks).cancel()
            await asyncio.sleep(rng.random() / 500)
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: not gate.closed)  # the last timer that opens it
        return gate.inside, gate.waiting, gate.closed, refused

    inside, waiting, closed, refused = run_async(work())
    assert (inside, waiting, closed) == (0, 0, False)
    assert refused > 0


# ---- the router -----------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet():
    made = Fleet(decide("disjoint", "retract"), "v0")
    for i in range(3):
        member = Member(EngineClient(f"http://127.0.0.1:{i + 1}", name=f"engine{i}"))
        made.add(member)
        made.confirm(member, "v0")
    return made


def choose(router, prompt, session=""):
    return router.choose_for(prompt, session)(router.fleet.routable()).name


def test_prompts_go_where_their_beginning_was(fleet):
    router = Router(fleet)
    one, other = list(range(4 * BLOCK)), list(range(1000, 1000 + 4 * BLOCK))
    fleet.members["engine0"].in_flight = 1
    first = choose(router, one)
    assert first != "engine0"
    for member in fleet.members.values():
        member.in_flight = 4
    fleet.members[first].in_flight = 5  # a quarter more is even
    assert choose(router, [*one, 7]) == first
    assert choose(router, other) != first  # least to do
    assert choose(router, one[: BLOCK - 1]) != first  # not a complete block in common


def test_load_comes_before_the_prefix(fleet):
    router = Router(fleet)
    prompt = list(range(4 * BLOCK))
    first = choose(router, prompt)
    assert choose(router, prompt) == first
    fleet.members[first].in_flight = 1
    assert choose(router, prompt) != first


def test_a_publication_empties_what_is_remembered(fleet):
    router = Router(fleet)
    prompt = list(range(4 * BLOCK))
    first, of_session = choose(router, prompt), choose(router, [1], "s")
    assert choose(router, prompt) == first
    fleet.members[of_session].in_flight = 2
    assert choose(router, [1], "s") == of_session
    fleet.members[of_session].in_flight = 0
    fleet.move_to("v1", list(fleet.members.values()))
    assert choose(router, prompt) != first  # the one that was chosen the longest ago
    fleet.members[of_session].in_flight = 2
    assert choose(router, [1], "s") != of_session


def test_a_crowded_engine_is_left_alone(fleet):
    router = Router(fleet)
    first = choose(router, [1], "s")
    fleet.members[first].in_flight = SLACK
    assert choose(router, [1], "s") == first
    fleet.members[first].in_flight = SLACK + 1
    assert choose(router, [1], "s") != first


def test_among_busy_engines_one_with_half_as_many_again_is_crowded(fleet):
    router = Router(fleet)
    first = choose(router, [1], "s")
    busy = 4 * SLACK
    for member in fleet.members.values():
        member.in_flight = busy
    fleet.members[first].in_flight = busy * 3 // 2
    assert choose(router, [1], "s") == first
    fleet.members[first].in_flight = busy * 3 // 2 + 1
    assert choose(router, [1], "s") != first


def test_a_retired_engine_loses_its_sessions(fleet):
    router = Router(fleet)
    first = choose(router, [1], "s")
    fleet.retire(fleet.members[first], "gone")
    second = choose(router, [1], "s")
    assert second != first
    fleet.members[second].in_flight = 2
    assert choose(router, [1], "s") == second


# ---- tokenizer and template -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return ModelTokenizer(make_model(tmp_path_factory.mktemp("model")))


def test_pieces_of_text_add_up_to_the_whole(tokenizer):
    rng = random.Random(1)
    for _ in range(50):
        text = "".join(rng.choice("aé€😀\n ") for _ in range(30))
        ids = tokenizer.encode(text) + [rng.randrange(256) for _ in range(rng.randrange(4))]
        stream, text, rest = TextStream(tokenizer), "", list(ids)
        while rest:
            size = rng.randrange(1, 4)
            text += stream.push(rest[:size])
            rest = rest[size:]
        text += stream.push((), last=True)
        assert text == tokenizer.decode(ids)


CONVERSATIONS = [
    ([{"role": "user", "content": "hi <b> é"}], None),
    (
        [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a", "tool_calls": [{"function": {"name": "f", "arguments": {"x": "<"}}}]},
            {"role": "tool", "content": "t"},
        ],
        [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}],
    ),
]
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {{ m['role'] }}: {{ m.content | tojson }}\n{% endfor %}",
    "{% for m in messages %}{% if loop.index > 3 %}{% break %}{% endif %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% endfor %}{{ tools | tojson(indent=2) if tools else 'none' }}",
    "{%- if tools %}{{ tools[0].function.name }}{% endif -%}{{ messages[-1].role }}"
    "{% if add_generation_prompt %}>{% endif %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }} {{ enable }}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize(("messages", "tools"), CONVERSATIONS)
def test_templates_are_rendered_as_transformers_renders_them(template, messages, tools):
    from transformers.utils.chat_template_utils import render_jinja_template

    from reef_service.text.template import ChatTemplate

    ours = ChatTemplate(template, {"bos_token": "<s>"}).render(messages, tools=tools, options={"enable": True})
    shared = {"add_generation_prompt": True, "bos_token": "<s>", "enable": True}
    (theirs,), _ = render_jinja_template(conversations=[messages], tools=tools, chat_template=template, **shared)
    assert ours == theirs


def test_the_tiny_models_tokens_are_those_of_transformers(tiny_model):
    from slime_backend.simulation.models import load_tokenizer

    ours, theirs = ModelTokenizer(tiny_model), load_tokenizer(tiny_model)
    messages: Any = CONVERSATIONS[0][0]
    text = ours.template.render(messages)
    assert ours.encode(text) == list(
        theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    )
    assert ours.end_ids == (theirs.eos_token_id,)


def test_what_a_template_refuses_is_the_clients_fault():
    from reef_service.text.template import ChatTemplate

    for source in ("{{ raise_exception('roles must alternate') }}", "{{ messages[0].content + 1 }}"):
        with pytest.raises(ApiError, match="the model's chat template refuses these messages") as refused:
            ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])
        assert refused.value.status == 400


def test_ids_that_only_the_model_knows_are_ids(tokenizer, tmp_path):
    """Embeddings are padded, so a model may sample what its tokenizer doesn't know, and a client sends it back."""
    model = make_model(tmp_path / "model")
    known = tokenizer.size
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "vocab_size": known + 7}))
    padded = ModelTokenizer(model)
    assert padded.size == known + 7
    assert padded.decode([known + 3]) == ""


def test_a_directory_without_a_tokenizer_is_one_line(tmp_path):
    with pytest.raises(TokenizerError, match=r"tokenizer.json can't be read|no usable tokenizer") as refused:
        ModelTokenizer(tmp_path)
    assert "\n" not in str(refused.value)


# ---- answers and messages -------------------------------------------------------------------------------------------

ANSWERS = {
    "plain": ("Hello <b> there", [("content", "Hello <b> there")]),
    "reasoning": ("<think>\nhm\n</think>\n\nyes", [("reasoning", "hm"), ("content", "yes")]),
    "call": (
        'I do.\n<tool_call>{"name":"f","arguments":{"a":1}}</tool_call>',
        [("content", "I do."), ("f", '{"a": 1}')],
    ),
    "two calls": (
        '<tool_call>{"name":"f"}</tool_call>\n<tool_call>{"name":"g","parameters":{}}</tool_call>',
        [("f", "{}"), ("g", "{}")],
    ),
    "broken call": ("<tool_call>{nope}</tool_call> so", [("content", "<tool_call>{nope}</tool_call> so")]),
    "call without an end": ('a <tool_call>{"name":', [("content", 'a <tool_call>{"name":')]),
    "no end of reasoning": ("<think>and so", [("reasoning", "and so")]),
    "talk of tags": ("write <think> so", [("content", "write <think> so")]),
}


@pytest.mark.parametrize("size", [1, 2, 5, 1000])
@pytest.mark.parametrize("name", ANSWERS)
def test_answers_are_cut_alike_in_whatever_pieces_they_come(name, size):
    text, expected = ANSWERS[name]
    parser = AnswerParser(reasoning=True, tools=True)
    pieces = [p for at in range(0, len(text), size) for p in parser.push(text[at : at + size])] + parser.finish()
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.call is not None:
            found.append((piece.call.name, piece.call.arguments))
        elif found and found[-1][0] == piece.kind:
            found[-1] = (piece.kind, found[-1][1] + piece.text)
        else:
            found.append((piece.kind, piece.text))
    assert found == expected


def test_without_tags_in_the_template_nothing_is_cut():
    parser = AnswerParser(reasoning=False, tools=False)
    text = ANSWERS["reasoning"][0] + ANSWERS["call"][0]
    assert "".join(p.text for p in parser.push(text) + parser.finish()) == text


def test_what_clients_change_when_they_hand_an_answer_back_does_not_count():
    ours: list[Any] = [
        {"role": "user", "content": "u"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"function": {"name": "f", "arguments": '{"b":1, "a":2}'}}],
        },
    ]
    theirs: list[Any] = [
        {"role": "user", "content": [{"type": "text", "text": "u"}]},
        {
            "role": "assistant",
            "content": "",
            "reasoning_content": "r",
            "refusal": None,
            "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 2, "b": 1}'}}],
        },
    ]
    assert digests(normalise(ours), []) == digests(normalise(theirs), [])
    other: list[Any] = [ours[0], {"role": "assistant", "content": "no"}]
    assert digests(normalise(ours), [])[:2] == digests(normalise(other), [])[:2]
    assert digests(normalise(ours), [])[2] != digests(normalise(other), [])[2]
    assert digests(normalise(ours), [])[0] != digests(normalise(ours), ["tools"])[0]


@pytest.mark.parametrize(
    ("prompt", "asked", "expected"), [(10, None, 40), (10, 5, 5), (10, 100, 40), (80, None, 20), (99, 50, 1)]
)
def test_output_is_bounded_by_limit_and_context(prompt, asked, expected):
    assert Limits(context=100, prompt=99, output=40).output_for(prompt, asked) == expected


@pytest.mark.parametrize(("prompt", "asked"), [(0, 5), (100, 5), (10, 0)])
def test_what_has_no_room_is_refused(prompt, asked):
    with pytest.raises(ApiError):
        Limits(context=100, prompt=99, output=40).output_for(prompt, asked)


@pytest.mark.parametrize("count", range(1, 11))
def test_a_record_that_is_cut_at_a_stop_text_still_holds(count):
    from reef_service.data_plane.recording import clip
    from slime_backend.audit.audit import why_inconsistent
    from slime_backend.provenance.records import RolloutRecord
    from tests.reef_service.examples import turn

    record = turn("r", output=range(10), versions=("v0", "v1", "v2")).record.to_json()
    assert why_inconsistent(RolloutRecord.from_json({**record, "output_ids": [1], "logprobs": [-1.0]}))  # the control
    cut = clip({"weight_versions": record["spans"], "kv_provenance": record["segments"]}, 3, count)
    kept = {
        **record,
        "output_ids": record["output_ids"][:count],
        "logprobs": record["logprobs"][:count],
        "spans": cut["weight_versions"],
        "segments": cut["kv_provenance"],
    }
    assert why_inconsistent(RolloutRecord.from_json(kept)) == ""


@pytest.mark.parametrize("value", [{"a": [1, 0.5, None, "é"]}, {"big": 2**70}, {"half": "\ud800"}])
def test_whatever_a_model_writes_into_a_call_can_be_sent(value):
    sent = json.loads(dumps(value))
    assert sent == ({"half": "?"} if "half" in value else value)
