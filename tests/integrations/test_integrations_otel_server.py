"""The whole way round: request id out on the hint, into the real ledger, and back through the real routes."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import openai
import pytest
import sojourn
import uvicorn
from api_contract import VirtualRpc
from fastapi import FastAPI, Request
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from sojourn_integrations.otel.export import export_spans
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.routes import build_router
from virtual_engine import VirtualEngine, prompt
from waiting import wait_until

KEY = "correct-horse"


@pytest.fixture
def url() -> Iterator[str]:
    """A server whose model answers nothing and whose cache, leases and ledger are real."""
    engine = VirtualEngine("fixed-ttl")
    app = FastAPI()
    keys = ApiKeys()
    keys.configure([KEY])
    app.include_router(build_router(VirtualRpc(engine), keys))

    @app.post("/v1/chat/completions")
    async def chat(request: Request):
        body = await request.json()
        context = json.loads(body["vllm_xargs"]["agentic_context"])
        engine.now += 2.0
        engine.turn(context.pop("program_id"), prompt(20 * len(body["messages"])), **context)
        choice = {"index": 0, "message": {"role": "assistant", "content": ""}, "finish_reason": "stop"}
        return {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}

    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", ws="none", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


def test_each_request_finds_its_own_turn(url: str):
    exporter = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    sojourn.init(url, api_key=KEY)
    export = export_spans(provider)
    try:
        with (
            sojourn.program(id="a/b c", name="fixer"),
            openai.OpenAI(base_url=url + "/v1", api_key="x") as llm,
        ):
            for length in (2, 3, 4):
                messages = [{"role": "user", "content": "hi"}] * length
                llm.chat.completions.create(model="m", messages=messages)
        assert export.flush()
    finally:
        export.close()
        sojourn.shutdown()
        provider.shutdown()
    chats = [dict(span.attributes) for span in exporter.get_finished_spans() if span.name == "chat m"]
    names = (
        "sojourn.turn", "sojourn.leased", "sojourn.lease.ttl_s", "gen_ai.usage.input_tokens",
        "gen_ai.usage.cache_read.input_tokens", "sojourn.tier_hits.device", "sojourn.lost_tokens",
    )  # fmt: skip
    assert sorted([chat[name] for name in names] for chat in chats) == [
        [1, False, 10.0, 40, 0, 0, 0],
        [2, True, 10.0, 60, 40, 40, 0],
        [3, True, 10.0, 80, 60, 60, 0],
    ]
    assert {chat["sojourn.outcome"] for chat in chats} == {"stopped"}
