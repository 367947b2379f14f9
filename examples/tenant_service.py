"""A web service for the customers of several tenants, behind a gateway; four lines for sojourn.

    sojourn serve MODEL --host 127.0.0.1 --port 8001     # one that calls tools; as many engines as you have
    export ACME_KEY=sk-a BOLT_KEY=sk-b                   # for the gateway and for the service
    sojourn gateway --engines http://127.0.0.1:8001 --tenants tenants.toml
    python examples/tenant_service.py --model MODEL --tenant acme --tenant bolt
    curl http://127.0.0.1:9000/acme -d 'Where is order 17?'

tenants.toml has [tenants] and below it acme = "env:ACME_KEY" and bolt = "env:BOLT_KEY". The gateway gives
each tenant its share and charges the owner of the key. sojourn reports with one key for each process, so
each tenant has processes of its own. The lines marked with an arrow are all that sojourn adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager

import sojourn  # <── sojourn
import uvicorn
from openai import OpenAI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

TEXT = {"type": "string"}
PARAMETERS = {"type": "object", "properties": {"number": TEXT}, "required": ["number"]}
LOOK_UP = {"name": "look_up", "description": "The state of an order.", "parameters": PARAMETERS}
TOOLS = [{"type": "function", "function": LOOK_UP}]


def begin(url: str, key: str) -> None:
    """Runs once in each worker process."""
    global client
    sojourn.init(url, api_key=key)  # <── sojourn
    client = OpenAI(base_url=f"{url}/v1", api_key=key)


@sojourn.tool  # <── sojourn
def look_up(number: str) -> str:
    return f"Order {number} was shipped yesterday."


@sojourn.program(agent_type="support")  # <── sojourn: every question is a program
def answer(model: str, question: str) -> str:
    messages: list[dict] = [{"role": "user", "content": question}]
    for _ in range(8):
        chat = client.chat.completions.create(model=model, messages=messages, tools=TOOLS, max_tokens=256)
        message = chat.choices[0].message
        if not message.tool_calls:
            return message.content or ""
        messages.append(message.model_dump(exclude_none=True))
        for call in message.tool_calls:
            result = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return "I do not know."


def service(url: str, model: str, tenants: list[str], workers: int) -> Starlette:
    pools = {
        tenant: ProcessPoolExecutor(
            workers, multiprocessing.get_context("spawn"), begin, (url, os.environ[f"{tenant.upper()}_KEY"])
        )
        for tenant in tenants
    }

    @asynccontextmanager
    async def lifespan(app: Starlette):
        with ExitStack() as running:
            for pool in pools.values():
                running.enter_context(pool)
            yield

    async def ask(request: Request) -> PlainTextResponse:
        # Your log-in decides who asks; here the path does.
        pool = pools.get(request.path_params["tenant"])
        if pool is None:
            return PlainTextResponse("no such tenant\n", 404)
        question = (await request.body()).decode()
        text = await asyncio.get_running_loop().run_in_executor(pool, answer, model, question)
        return PlainTextResponse(f"{text}\n")

    return Starlette(routes=[Route("/{tenant}", ask, methods=["POST"])], lifespan=lifespan)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8100", help="the gateway")
    parser.add_argument("--model", default="smol")
    parser.add_argument("--tenant", action="append", required=True, help="its key is in NAME_KEY")
    parser.add_argument("--workers", type=int, default=4, help="processes of each tenant: questions at once")
    parser.add_argument("--port", type=int, default=9000)
    options = parser.parse_args()
    uvicorn.run(service(options.url, options.model, options.tenant, options.workers), port=options.port)


if __name__ == "__main__":
    main()
