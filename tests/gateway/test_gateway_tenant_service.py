"""``examples/tenant_service.py`` behind a gateway: each tenant's programs arrive as that tenant's, whole."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import aiohttp
from fake_engine import FakeEngine, running
from gateway_harness import until, world
from sojourn.testing import Answer, ToolUse
from sojourn.testing.scripted_answers import answer_body
from sojourn_server.launch.engine_server import free_port
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

EXAMPLE = Path(__file__).parents[2] / "examples" / "tenant_service.py"
LIFE = {"program_start", "tool_start", "tool_stop", "program_end"}


class Support(FakeEngine):
    """Asks for the order, then answers with what the tool said."""

    async def _generate(self, request: Request) -> Response:
        await super()._generate(request)
        body = self.requests[-1]
        last = body["messages"][-1]
        reply = last["content"] if last["role"] == "tool" else ToolUse("look_up", {"number": "17"})
        return JSONResponse(answer_body("/chat/completions", body, Answer.of(reply)))


def hints(engine: FakeEngine) -> list[dict[str, Any]]:
    return [json.loads(body["vllm_xargs"]["agentic_context"]) for body in engine.requests]


def arrived(engine: FakeEngine) -> dict[str, set[str]]:
    """Types of the events by program, from batches and from requests."""
    found: dict[str, set[str]] = defaultdict(set)
    for event in [
        *engine.events,
        *(event for hint in hints(engine) for event in hint["sojourn"].get("events", [])),
    ]:
        found[event["program_id"]].add(event["type"])
    return found


async def test_each_tenants_questions_are_programs_of_that_tenant() -> None:
    port = free_port("127.0.0.1")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SOJOURN_")}
    environment |= {"ACME_KEY": "sk-a", "BOLT_KEY": "sk-b"}
    tenants = {"sk-a": "acme", "sk-b": "bolt"}
    async with running(Support()) as [engine], world([engine], tenants=tenants) as it:
        service = await asyncio.create_subprocess_exec(
            sys.executable, str(EXAMPLE), "--url", it.url, "--model", "tiny", "--tenant", "acme",
            "--tenant", "bolt", "--workers", "1", "--port", str(port), env=environment,
        )  # fmt: skip

        async def ask(tenant: str) -> tuple[int, str]:
            url = f"http://127.0.0.1:{port}/{tenant}"
            async with it.http.post(url, data="Where is order 17?") as answer:
                return answer.status, await answer.text()

        async def listens() -> bool:
            assert service.returncode is None
            try:
                return (await ask("nobody"))[0] == 404
            except aiohttp.ClientConnectionError:
                return False

        try:
            await until(listens)
            answers = await asyncio.gather(ask("acme"), ask("bolt"))
        finally:
            service.send_signal(signal.SIGTERM)
            await asyncio.wait_for(service.wait(), 60)
        assert answers == [(200, "Order 17 was shipped yesterday.\n")] * 2
        await until(lambda: all(types >= LIFE for types in arrived(engine).values()))
    assert sorted(name.partition("/")[0] for name in arrived(engine)) == ["acme", "bolt"]
    for hint in hints(engine):
        assert hint["sojourn"]["tenant"] == hint["program_id"].partition("/")[0]
        assert hint["sojourn"]["agent_type"] == "support"
    assert len(hints(engine)) == 4
