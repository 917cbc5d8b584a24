"""Sessions: a turn goes on from the tokens of the one before, whatever its text would be tokenised to."""

from __future__ import annotations

import pytest

from tests.reef_service.harness import gateway_on

# The model answers with bytes that are no text, which no tokeniser gives back.
RAW = [250, 250, 256]


def chat(*texts, max_tokens=50, **more):
    roles = ["user", "assistant"]
    messages = [{"role": roles[i % 2], "content": text} for i, text in enumerate(texts)]
    return {"messages": messages, "max_tokens": max_tokens, **more}


class Api:
    def __init__(self, client, store):
        self.client, self.store = client, store

    async def ask(self, path, body, session="s"):
        """The answer, and the turn that was stored of it."""
        status, answer = await self.client.post(path, body, **({"x_reef_session": session} if session else {}))
        assert status == 200, answer
        reef = answer.get("reef") or answer["meta_info"]["reef"]
        return answer, await self.store.turn(reef["receipt"])


def test_a_chat_goes_on_token_by_token(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, answer=lambda ids: list(RAW)) as (client, gateway, _):
            api = Api(client, gateway.store)
            first, one = await api.ask("/v1/chat/completions", chat("hi"))
            reply = first["choices"][0]["message"]["content"]
            _, two = await api.ask("/v1/chat/completions", chat("hi", reply, "more"))
            return one, two, gateway.plane.tokenizer

    one, two, tokenizer = run_async(work())
    assert one["output_ids"] == tuple(RAW)
    prefix = [*one["prompt_ids"], *one["output_ids"]]
    assert list(two["prompt_ids"][: len(prefix)]) == prefix
    assert tokenizer.decode(two["prompt_ids"][len(prefix) :]) == "more"
    assert two["prompt_ids"][-1] == tokenizer.encode("<|assistant|>")[0]
    assert (two["parent"], two["trajectory"]) == (one["receipt"], 0)


def test_without_a_session_a_chat_is_tokenised_anew(tmp_path, run_async):
    """The control: the same conversation without a session loses the sampled tokens."""

    async def work():
        async with gateway_on(tmp_path, answer=lambda ids: list(RAW)) as (client, gateway, _):
            api = Api(client, gateway.store)
            first, one = await api.ask("/v1/chat/completions", chat("hi"), session="")
            reply = first["choices"][0]["message"]["content"]
            _, two = await api.ask("/v1/chat/completions", chat("hi", reply, "more"), session="")
            return one, two

    one, two = run_async(work())
    prefix = [*one["prompt_ids"], *one["output_ids"]]
    assert list(two["prompt_ids"][: len(prefix)]) != prefix
    assert two["parent"] is None
    assert two["session"] != one["session"]


def test_an_answer_that_was_cut_off_gets_its_end(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "abcdefgh", end=False) as (client, gateway, _):
            api = Api(client, gateway.store)
            first, one = await api.ask("/v1/chat/completions", chat("hi", max_tokens=3))
            assert first["choices"][0]["message"]["content"] == "abc"
            assert first["choices"][0]["finish_reason"] == "length"
            _, two = await api.ask("/v1/chat/completions", chat("hi", "abc", "more"))
            return one, two, gateway.plane.tokenizer

    one, two, tokenizer = run_async(work())
    prefix = [*one["prompt_ids"], *one["output_ids"]]
    assert list(two["prompt_ids"][: len(prefix) + 1]) == [*prefix, tokenizer.end_ids[0]]


def test_reasoning_and_tool_calls_stay_in_the_tokens(tmp_path, run_async):
    answer = '<think>why</think>I look.<tool_call>{"name": "look", "arguments": {"b": 1, "a": 2}}</tool_call>'
    tools = [{"type": "function", "function": {"name": "look", "parameters": {}}}]

    async def work():
        async with gateway_on(tmp_path, answer, "seen") as (client, gateway, _):
            api = Api(client, gateway.store)
            first, one = await api.ask("/v1/chat/completions", chat("hi", tools=tools, max_tokens=200))
            message = first["choices"][0]["message"]
            assert message.pop("reasoning_content") == "why"  # as most clients do
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "it is there"}
            body = {"messages": [{"role": "user", "content": "hi"}, message, result], "tools": tools, "max_tokens": 9}
            _, two = await api.ask("/v1/chat/completions", body)
            return one, two, gateway.plane.tokenizer

    one, two, tokenizer = run_async(work())
    prefix = [*one["prompt_ids"], *one["output_ids"]]
    assert list(two["prompt_ids"][: len(prefix)]) == prefix
    assert "why" in tokenizer.decode(two["prompt_ids"])
    assert tokenizer.decode(two["prompt_ids"][len(prefix) :]) == "it is there"


@pytest.mark.parametrize(
    ("change", "why"),
    [({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"messages": 0}, "another answer")],
)
def test_another_conversation_is_another_trajectory(tmp_path, run_async, change, why):
    async def work():
        async with gateway_on(tmp_path, "yes") as (client, gateway, _):
            api = Api(client, gateway.store)
            await api.ask("/v1/chat/completions", chat("hi"))
            body = chat("hi", "no" if why == "another answer" else "yes", "more")
            _, two = await api.ask("/v1/chat/completions", body | ({} if "messages" in change else change))
            return two

    two = run_async(work())
    assert (two["parent"], two["trajectory"]) == (None, 1)


def test_branches_of_a_session(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "a", "b", "c") as (client, gateway, _):
            api = Api(client, gateway.store)
            await api.ask("/v1/chat/completions", chat("hi"))
            _, left = await api.ask("/v1/chat/completions", chat("hi", "a", "left"))
            _, right = await api.ask("/v1/chat/completions", chat("hi", "a", "right"))
            return left, right

    left, right = run_async(work())
    assert left["parent"] == right["parent"]
    assert (left["trajectory"], right["trajectory"]) == (0, 1)


def test_texts_and_token_ids_go_on_too(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, answer=lambda ids: list(RAW)) as (client, gateway, _):
            api = Api(client, gateway.store)
            answer, one = await api.ask("/v1/completions", {"prompt": "x", "max_tokens": 9})
            text = "x" + answer["choices"][0]["text"]
            _, two = await api.ask("/v1/completions", {"prompt": text + "y", "max_tokens": 9})
            native, three = await api.ask("/generate", {"input_ids": [5, 6]}, session="t")
            ids = [5, 6, *native["output_ids"], 7]
            _, four = await api.ask("/generate", {"input_ids": ids, "return_logprob": True}, session="t")
            return one, two, three, four, gateway.plane.tokenizer

    one, two, three, four, tokenizer = run_async(work())
    assert list(two["prompt_ids"]) == [*one["prompt_ids"], *RAW, *tokenizer.encode("y")]
    assert two["parent"] == one["receipt"]
    assert four["parent"] == three["receipt"]


def test_a_restarted_gateway_goes_on_with_a_session(tmp_path, run_async):
    async def first():
        async with gateway_on(tmp_path, answer=lambda ids: list(RAW)) as (client, gateway, _):
            answer, turn = await Api(client, gateway.store).ask("/v1/chat/completions", chat("hi"))
            return answer["choices"][0]["message"]["content"], turn

    async def second(reply):
        async with gateway_on(tmp_path, answer=lambda ids: list(RAW)) as (client, gateway, _):
            _, turn = await Api(client, gateway.store).ask("/v1/chat/completions", chat("hi", reply, "more"))
            return turn

    reply, one = run_async(first())
    two = run_async(second(reply))
    assert two["parent"] == one["receipt"]


def test_a_session_stays_on_its_engine(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "a", engines=4) as (client, gateway, _):
            api = Api(client, gateway.store)
            turns = [(await api.ask("/v1/chat/completions", chat("hi"), session=f"s{i % 3}"))[1] for i in range(9)]
            return [t["engine"] for t in turns]

    engines = run_async(work())
    assert engines[:3] == engines[3:6] == engines[6:]


HOOKS = ("kv_evidence", "kv_spans", "swa_anchors")


def test_on_hybrid_models_anchors_stand_where_other_prompts_leave_this_one(tmp_path, run_async):
    def ids(*values):
        return {"input_ids": list(values), "sampling_params": {"max_new_tokens": 2}}

    async def work():
        async with gateway_on(tmp_path, engines=1, hooks=HOOKS) as (client, gateway, fakes):
            api = Api(client, gateway.store)
            head = range(1, 101)
            _, one = await api.ask("/generate", ids(*head))
            reply = [*one["prompt_ids"], *one["output_ids"]]
            await api.ask("/generate", ids(*reply, 5, 5, 5))  # goes on after token 102
            await api.ask("/generate", ids(*reply, 6, 6))  # a branch
            await api.ask("/generate", ids(*head[:60], 9, 9, 9))  # edited: no turn's continuation
            await api.ask("/generate", ids(*head, 5), session="")
            own = ids(*head)
            own["sampling_params"]["custom_params"] = {"kv_anchors": [3]}
            await api.ask("/generate", own)
            return [body["sampling_params"]["custom_params"]["kv_anchors"] for body in fakes[0].bodies]

    assert run_async(work()) == [[99], [102, 104], [102, 103], [60, 62], [100], [3]]


def test_a_dense_model_is_told_nothing_of_anchors(tmp_path, run_async):
    async def work():
        async with gateway_on(tmp_path, "yes", engines=1) as (client, _, fakes):
            await client.post("/generate", {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}})
            return fakes[0].bodies[0]["sampling_params"]

    assert "custom_params" not in run_async(work())
