"""AutoGen's own OpenTelemetry spans, with no adapter and with one, and an export beside them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("autogen_agentchat")
pytest.importorskip("opentelemetry.sdk")

import sojourn
from autogen_agentchat.agents import AssistantAgent
from autogen_ext.models.openai import OpenAIChatCompletionClient
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from recorded_programs import recorded_programs
from scenarios_autogen import INFO
from sojourn.testing import FakeServer, ToolUse
from sojourn_integrations.otel.source import SojournSpanProcessor

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def provider() -> TracerProvider:
    """AutoGen asks for the global one, which a process can set only once."""
    made = TracerProvider(shutdown_on_exit=False)
    trace.set_tracer_provider(made)
    return made


@pytest.fixture
def spans_only(server: FakeServer, provider: TracerProvider) -> Iterator[None]:
    """The processor is all there is: no adapter but that which tags requests."""
    sojourn.init(server.url)
    sojourn.uninstrument()
    sojourn.instrument("openai")
    processor = SojournSpanProcessor(workflows=("run_team",))
    provider.add_span_processor(processor)
    yield
    processor.shutdown()


def llm(server: FakeServer, **options: Any) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(
        model="tiny", base_url=server.base_url, api_key="none", model_info=INFO, **options
    )


async def count(text: str) -> int:
    """How long a text is."""
    return len(text)


def recorded(server: FakeServer):
    assert sojourn.flush(60)
    return [each for each in recorded_programs(server).values() if each.start.name is not None]


def test_one_agent_and_its_tool(server, spans_only):
    server.script = [ToolUse("count", {"text": "hi"}), "two"]

    async def play() -> None:
        agent = AssistantAgent("solo", llm(server), tools=[count], reflect_on_tool_use=True)
        await agent.run(task="how long is hi?")

    asyncio.run(play())
    (program,) = recorded(server)
    assert (program.start.name, program.start.agent_type, program.status) == ("solo", "solo", "ok")
    assert [(tool.tool, tool.status) for tool in program.tools] == [("count", "ok")]
    assert program.tool_starts[0].call_id.startswith("call_")
    assert len(program.requests) == len(server.requests) == 2
    assert program.late == []
