"""What the tests of publications on a real engine share."""

from __future__ import annotations

import itertools
import random
import time
from contextlib import asynccontextmanager

import torch

from slime_backend.engine_client import Deadlines, EngineClient
from slime_backend.fleet import Fleet, admit

DEADLINES = Deadlines(load=30.0, generate=120.0)
versions = (f"t{i}" for i in itertools.count(1))


def prompt(length=600):
    return [random.randrange(256) for _ in range(length)]


def body(ids, tokens=8, temperature=0.0):
    return {
        "input_ids": ids,
        "return_logprob": True,
        "sampling_params": {"max_new_tokens": tokens, "temperature": temperature, "ignore_eos": True},
    }


def logprobs(answer):
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


@torch.no_grad()
def reference(model, ids, answer):
    """The sampled tokens' log-probs, and the greedy tokens, by a plain forward."""
    out = answer["output_ids"]
    rows = model(torch.tensor([ids + out])).logits[0, len(ids) - 1 : -1].log_softmax(-1)
    return [float(row[t]) for row, t in zip(rows, out, strict=True)], rows.argmax(-1).tolist()


def difference(model, ids, answer):
    return max(abs(a - b) for a, b in zip(logprobs(answer), reference(model, ids, answer)[0], strict=True))


@asynccontextmanager
async def fleet_on(engine, policy):
    """A fleet of the one engine, at a fresh version name."""
    async with EngineClient(engine.url, name="engine0", deadlines=DEADLINES) as client:
        start = next(versions)
        await client.label(start)
        fleet = Fleet(policy, start)
        await admit(fleet, client)
        yield fleet, client


async def load(client, source, root):
    """Start a test from known weights and an empty cache."""
    name = f"start-{time.time_ns()}"
    source.save(root / name)
    await client.load_from_disk(str(root / name))
    await client.flush()
