"""Prints a table of agents' clients: does a tool loop of five turns work, unchanged, and stay one trajectory?

    python scripts/check_clients.py --python ENV/bin/python      # an environment that has the clients

The gateway runs here, in front of fake engines; each client runs in the other environment, as its users run it. What
isn't installed there is shown as such.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from datetime import date
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

CALL = '<think>\nhm\n</think>\n\nI look.<tool_call>{"name": "look", "arguments": {"where": "x"}}</tool_call>'
TURNS = 5
LIMIT_S = 120

_OPENAI = """
import sys, openai
client = openai.OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", default_headers={"x-reef-session": sys.argv[2]})
parameters = {"type": "object", "properties": {"where": {"type": "string"}}}
"""
CLIENTS = {
    "openai: responses, previous_response_id": (
        "openai",
        _OPENAI
        + """
tools = [{"type": "function", "name": "look", "parameters": parameters, "strict": False}]
given, before = "hi", None
while True:
    answer = client.responses.create(model="m", input=given, tools=tools, previous_response_id=before)
    calls = [item for item in answer.output if item.type == "function_call"]
    if not calls:
        break
    before = answer.id
    given = [{"type": "function_call_output", "call_id": call.call_id, "output": "seen"} for call in calls]
""",
    ),
    "openai: chats": (
        "openai",
        _OPENAI
        + """
tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
messages = [{"role": "user", "content": "hi"}]
while True:
    message = client.chat.completions.create(model="m", messages=messages, tools=tools).choices[0].message
    messages.append(message)
    if not message.tool_calls:
        break
    messages += [{"role": "tool", "tool_call_id": call.id, "content": "seen"} for call in message.tool_calls]
""",
    ),
    "openai-agents: defaults": (
        "openai-agents",
        """
import sys, openai, agents
agents.set_tracing_disabled(True)
header = {"x-reef-session": sys.argv[2]}
client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", default_headers=header)
agents.set_default_openai_client(client)

@agents.function_tool
def look(where: str) -> str:
    return "seen"

found = agents.Runner.run_sync(agents.Agent(name="a", instructions="s", tools=[look], model="m"), "hi")
assert found.final_output == "done", found.final_output
""",
    ),
    "openai-agents: defaults, streamed": (
        "openai-agents",
        """
import asyncio, sys, openai, agents
agents.set_tracing_disabled(True)
header = {"x-reef-session": sys.argv[2]}
client = openai.AsyncOpenAI(base_url=sys.argv[1] + "/v1", api_key="none", default_headers=header)
agents.set_default_openai_client(client)

@agents.function_tool
def look(where: str) -> str:
    return "seen"

async def work():
    found = agents.Runner.run_streamed(agents.Agent(name="a", instructions="s", tools=[look], model="m"), "hi")
    async for _ in found.stream_events():
        pass
    assert found.final_output == "done", found.final_output

asyncio.run(work())
""",
    ),
}


async def _check(python: str, package: str, program: str) -> tuple[str, str]:
    """Return (version, what was seen)."""
    from sqlalchemy import select

    from reef_service.store.schema import turns
    from tests.reef_service.harness import gateway_on

    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    status, version = await _run(python, code)
    if status:
        return "-", "not installed"
    with tempfile.TemporaryDirectory() as directory:
        made = gateway_on(Path(directory), *[CALL] * (TURNS - 1), "done")
        async with made as (client, gateway, _):
            status, text = await _run(python, program, client.url, "loop")
            if status:
                return version, (text.splitlines() or ["no words"])[-1][:160]
            asked = select(turns.c.trajectory).where(turns.c.session == "loop")
            rows = await gateway.store.read(lambda connection: connection.execute(asked).all())
    found = f"{len(rows)} turns, {len({row.trajectory for row in rows})} trajectory"
    return version, found if len(rows) == TURNS and len({row.trajectory for row in rows}) == 1 else f"WRONG: {found}"


async def _run(python: str, program: str, *arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        python, "-c", program, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(LIMIT_S):
            out, _ = await process.communicate()
    except TimeoutError:
        return 1, f"still running after {LIMIT_S} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, out.decode("utf-8", "replace").strip()


async def _main(python: str) -> None:
    print(f"| client | version | {date.today()} |\n| --- | --- | --- |")
    for name, (package, program) in CLIENTS.items():
        version, seen = await _check(python, package, program)
        print(f"| {name} | {version} | {seen} |", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="the environment that has the clients")
    asyncio.run(_main(parser.parse_args().python))
