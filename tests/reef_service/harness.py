"""A gateway on a loopback port in front of fake engines, in the test's own event loop."""

from __future__ import annotations

import asyncio
import itertools
import json
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

from reef_service.app import make_app
from reef_service.config import GatewayConfig
from reef_service.gateway import running_gateway
from reef_service.server import serving
from reef_service.store import open_store
from reef_service.text.tokenizer import ModelTokenizer
from slime_backend.simulation.http_messages import read_response
from tests import waiting
from tests.fake_fleet import fake_fleet
from tests.waiting import DEADLINE_S

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role if m.role in ('system', 'user', 'assistant') else 'user' }}|>"
    "{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}{# knows <think> #}"
)

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}


def make_model(directory: Path) -> Path:
    """A directory with a byte-level tokenizer and a template with reasoning and tools; no weights, no torch."""
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|system|>", "<|user|>", "<|assistant|>"]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    (directory / "config.json").write_text(json.dumps({"max_position_embeddings": 8192}))
    return directory


class Script:
    """What the engines answer: texts in turn, each ended by the model's end token; then the last one again."""

    def __init__(self, tokenizer: ModelTokenizer, *texts: str, end: bool = True) -> None:
        self.tokenizer, self.end = tokenizer, end
        self.texts = itertools.chain(texts, itertools.repeat(texts[-1]))

    def __call__(self, ids):
        return self.tokenizer.encode(next(self.texts)) + (list(self.tokenizer.end_ids) if self.end else [])


class Client:
    """JSON over HTTP, each request on a connection of its own."""

    def __init__(self, url: str, **headers: str) -> None:
        self.url, self.headers = url, headers

    async def call(self, method, path, body=None, **headers):
        """(status, JSON or text, headers)."""
        reader, writer = await self.send(method, path, body, **headers)
        message = await read_response(reader)
        writer.close()
        is_json = message.headers.get("content-type", "").startswith("application/json")
        body = json.loads(message.body) if is_json else message.body.decode("utf-8", "replace")
        return message.status, body, message.headers

    async def send(self, method, path, body=None, **headers):
        """Only send; the connection, to be read or broken."""
        parts = urlsplit(self.url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port, limit=1 << 24)
        content = b"" if body is None else json.dumps(body).encode()
        lines = [f"{method} {path} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(content)}"]
        lines += ["Content-Type: application/json", "Connection: close"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in {**self.headers, **headers}.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + content)
        return reader, writer

    async def post(self, path, body, **headers):
        return (await self.call("POST", path, body, **headers))[:2]

    async def get(self, path, **headers):
        return (await self.call("GET", path, **headers))[:2]


@asynccontextmanager
async def gateway_on(tmp_path, *texts, engines=2, sharing="retract", end=True, url=None, config=None, **engine):
    """(client, gateway, engines). `texts`: see Script."""
    model = make_model(tmp_path / "model")
    if texts:
        engine["answer"] = Script(ModelTokenizer(model), *texts, end=end)
    with open_store(url or f"sqlite:///{tmp_path}/gateway.sqlite") as store:
        async with fake_fleet(engines, sharing, **engine) as (fleet, fakes):
            settings = GatewayConfig(port=0, **(config or {}))
            async with (
                running_gateway(settings, fleet, model, store, tmp_path / "run") as gateway,
                serving(make_app(gateway), "127.0.0.1", 0, gateway.connections) as base,
            ):
                yield Client(base), gateway, fakes


async def until(condition, seconds=DEADLINE_S):
    """Wait for something that happens soon."""
    await waiting.until(condition, "what the test waits for", seconds)


def checkpoint(tmp_path: Path, name: str) -> str:
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    return str(directory)


async def read_stream(reader):
    """The JSON of every event, and whether [DONE] came."""
    raw = (await reader.read()).decode()
    data = [line[6:] for line in raw.split("\n") if line.startswith("data: ")]
    return [json.loads(d) for d in data if d != "[DONE]"], "[DONE]" in data


async def scored(client, number, score=1.0, **headers):
    _, answer = await client.post("/v1/chat/completions", CHAT, **headers)
    receipt = answer["reef"]["receipt"]
    body = {"id": f"r{number}", "score": score, "receipts": [receipt]}
    assert (await client.post("/reef/report", body))[0] == 200
    return receipt
