"""Spans of any framework become programs, nodes and tool calls, and requests find their program by them."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import openai
import pytest
import sojourn
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from sojourn import instrumentation
from sojourn.errors import ConfigError
from sojourn.testing import FakeServer
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_integrations.otel.export import export_spans
from sojourn_integrations.otel.source import SojournSpanProcessor, install


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        sojourn.init(fake.url)
        yield fake
        sojourn.shutdown()


@pytest.fixture
def provider() -> Iterator[TracerProvider]:
    made = TracerProvider(shutdown_on_exit=False)
    install(made)
    yield made
    made.shutdown()


@pytest.fixture
def tracer(provider: TracerProvider):
    return provider.get_tracer("some.framework")


def ask(server: FakeServer) -> None:
    with openai.OpenAI(base_url=server.base_url, api_key="x") as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def told(server: FakeServer, kind):
    assert sojourn.flush(60)
    return [event for event in server.program_events() if isinstance(event, kind)]


def agent(tracer, name: str = "fixer", **more):
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": name, **more}
    return tracer.start_as_current_span(f"invoke_agent {name}", attributes=attributes)


def tool(tracer, name: str = "bash", call_id: str | None = "call_7", **more):
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": name, **more}
    if call_id is not None:
        attributes["gen_ai.tool.call.id"] = call_id
    return tracer.start_as_current_span(f"execute_tool {name}", attributes=attributes)


def test_an_agent_span_is_a_program_and_its_requests_and_tools_belong_to_it(server, tracer):
    with agent(tracer):
        ask(server)
        with tool(tracer, **{"gen_ai.tool.type": "function"}):
            time.sleep(0.01)
        ask(server)
    (start,), (end,) = told(server, ProgramStart), told(server, ProgramEnd)
    assert (start.name, start.agent_type, start.parent_program_id) == ("fixer", "fixer", None)
    assert (end.program_id, end.status) == (start.program_id, "ok")
    assert [request.context.program_id for request in server.requests] == [start.program_id] * 2
    (began,), (stopped,) = told(server, ToolStart), told(server, ToolStop)
    assert (began.tool, began.call_id, began.tool_class) == ("bash", "call_7", "function")
    assert (stopped.status, stopped.program_id) == ("ok", start.program_id)
    assert 0.01 <= stopped.duration_s < 1


def test_an_agent_inside_a_tool_is_a_child_and_one_inside_an_agent_a_node(server, tracer):
    with agent(tracer, "boss"):
        with tool(tracer, "research", "call_1"), agent(tracer, "researcher"):
            ask(server)
        with agent(tracer, "writer"):
            ask(server)
        ask(server)
    boss, child = told(server, ProgramStart)
    assert (child.name, child.parent_program_id, child.call_id) == ("researcher", boss.program_id, "call_1")
    in_child, in_node, after = (request.context for request in server.requests)
    assert (in_child.program_id, in_child.parent_program_id) == (child.program_id, boss.program_id)
    assert (in_node.program_id, in_node.sojourn.node) == (boss.program_id, "writer")
    assert (after.program_id, after.sojourn.node) == (boss.program_id, None)
    assert [end.program_id for end in told(server, ProgramEnd)] == [child.program_id, boss.program_id]


@pytest.mark.parametrize("own", [False, True])
def test_a_workflow_holds_its_agents_as_nodes_of_one_program(server, own):
    """A span of the conventions, or a named one of the user's own."""
    provider = TracerProvider(shutdown_on_exit=False)
    install(provider, workflows=("triage",) if own else ())
    tracer = provider.get_tracer("some.framework")
    attributes = {"gen_ai.operation.name": "invoke_workflow", "gen_ai.workflow.name": "triage"}
    with tracer.start_as_current_span("triage", attributes=None if own else attributes):
        for name in ("first", "second"):
            with agent(tracer, name):
                ask(server)
    provider.shutdown()
    assert [start.name for start in told(server, ProgramStart)] == ["triage"]
    assert [request.context.sojourn.node for request in server.requests] == ["first", "second"]


def test_a_conversation_names_its_program_and_agents_at_the_same_time_share_it(server, tracer):
    begun, other_done = threading.Event(), threading.Event()

    def slow() -> None:
        with agent(tracer, "slow", **{"gen_ai.conversation.id": "chat-42"}):
            begun.set()
            assert other_done.wait(10)
            ask(server)

    def quick() -> None:
        with agent(tracer, "quick", **{"gen_ai.conversation.id": "chat-42"}):
            ask(server)

    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(slow)
        assert begun.wait(10)
        quick()
        other_done.set()
        first.result()
    quick()
    first_id, second_id = [start.program_id for start in told(server, ProgramStart)]
    assert first_id == second_id
    assert len(told(server, ProgramEnd)) == 2
    assert {request.context.program_id for request in server.requests} == {first_id}
    assert [request.context.sojourn.node for request in server.requests] == ["quick", None, None]


@pytest.mark.parametrize(
    ("error", "tool_status", "program_status"),
    [
        (ValueError("no"), "error", "error"),
        (TimeoutError(), "timeout", "error"),
        (asyncio.CancelledError(), "cancelled", "cancelled"),
        (KeyboardInterrupt(), "cancelled", "cancelled"),
    ],
)
def test_how_a_span_ended_is_how_the_call_and_the_program_ended(
    server, tracer, error, tool_status, program_status
):
    with pytest.raises(type(error)), agent(tracer), tool(tracer):
        raise error
    assert [stop.status for stop in told(server, ToolStop)] == [tool_status]
    assert [end.status for end in told(server, ProgramEnd)] == [program_status]


def test_the_openinference_spelling(server, tracer):
    def span(name: str, kind: str, **more):
        return tracer.start_as_current_span(name, attributes={"openinference.span.kind": kind, **more})

    with span("LangGraph", "CHAIN"):
        with span("plan", "CHAIN", **{"graph.node.id": "plan"}), span("ChatOpenAI", "LLM"):
            ask(server)
        search = span("search", "TOOL", **{"tool_call.id": "call_3"})
        with span("RunnableSequence", "CHAIN"), search, span("x", "AGENT", **{"agent.name": "Helper"}):
            ask(server)
    root, child = told(server, ProgramStart)
    assert (root.name, child.name) == ("LangGraph", "Helper")
    assert (child.parent_program_id, child.call_id) == (root.program_id, "call_3")
    assert [(start.tool, start.call_id) for start in told(server, ToolStart)] == [("search", "call_3")]
    assert server.requests[0].context.sojourn.node == "plan"
    assert server.requests[1].context.program_id == child.program_id


def test_the_openllmetry_spelling_which_comes_after_the_start(server, tracer):
    @contextmanager
    def span(entity: str, kind: str):
        with tracer.start_as_current_span(f"{entity}.{kind}") as begun:
            begun.set_attributes({"traceloop.span.kind": kind, "traceloop.entity.name": entity})
            yield

    with span("joke", "workflow"):
        ask(server)  # no further span: the request itself looks what the current one has become
        with span("comedian", "agent"):
            with span("dice", "tool"):
                time.sleep(0.02)
            ask(server)
    (start,) = told(server, ProgramStart)
    assert start.name == "joke"
    assert [request.context.program_id for request in server.requests] == [start.program_id] * 2
    assert server.requests[1].context.sojourn.node == "comedian"
    ((began,), (stopped,)) = told(server, ToolStart), told(server, ToolStop)
    assert began.tool == "dice"
    assert stopped.duration_s >= 0.02


def test_spans_inside_an_open_program_are_ignored(server, tracer):
    with sojourn.program("by hand") as program, agent(tracer, "spoken for"):
        with tool(tracer), agent(tracer, "child"):
            pass
        ask(server)
    assert [start.name for start in told(server, ProgramStart)] == ["by hand"]
    assert told(server, ToolStart) == []
    assert server.requests[0].context.program_id == program.id


def test_a_framework_with_an_adapter_at_work_is_left_to_it(server, provider, monkeypatch):
    monkeypatch.setitem(
        instrumentation.FRAMEWORKS, "autogen", instrumentation.Framework("autogen_agentchat", "none")
    )
    monkeypatch.setattr(instrumentation, "_active", {"openai", "autogen"})
    for scope in ("autogen-core", "openinference.instrumentation.autogen_agentchat"):
        with agent(provider.get_tracer(scope)):
            pass
    assert told(server, ProgramStart) == []
    with agent(provider.get_tracer("openinference.instrumentation.openai_agents"), "other"):
        pass
    assert [start.name for start in told(server, ProgramStart)] == ["other"]


def test_spans_never_ended_are_forgotten_and_their_programs_ended(server):
    provider = TracerProvider(shutdown_on_exit=False)
    processor = SojournSpanProcessor(max_spans=20)
    provider.add_span_processor(processor)
    tracer = provider.get_tracer("some.framework")
    for number in range(100):
        tracer.start_span(f"invoke_agent a{number}")
    assert len(processor._spans) == 20
    assert len(processor._programs) == 20
    assert [end.status for end in told(server, ProgramEnd)] == ["cancelled"] * 80
    provider.shutdown()
    assert len(told(server, ProgramEnd)) == 100
    assert not processor._spans
    assert not processor._programs


def test_before_init_and_after_shutdown_it_does_nothing(tracer, provider):
    with agent(tracer), tool(tracer):
        pass
    assert not install(provider)._spans


@pytest.mark.parametrize("name", ["_enter", "_ended"])
def test_faults_are_counted_and_never_raised(server, provider, tracer, monkeypatch, name):
    monkeypatch.setattr(install(provider), name, lambda *_: 1 / 0)
    with agent(tracer):
        pass
    assert sojourn.stats()["internal_error"] == 1


@pytest.mark.parametrize("begin", [install, export_spans])
def test_each_way_needs_a_provider_and_is_begun_once(provider, begin):
    assert begin(provider) is begin(provider)
    with pytest.raises(ConfigError, match="TracerProvider"):
        begin(trace.ProxyTracerProvider())
    if begin is export_spans:
        begin(provider).close()


# -- Without OpenTelemetry's SDK the modules name the package to install


@pytest.mark.parametrize("absent", ["opentelemetry", "opentelemetry.sdk"])
@pytest.mark.parametrize("name", ["install", "export_spans"])
def test_the_error_names_the_extra(absent, name):
    code = f"import sys; sys.modules[{absent!r}] = None\nfrom sojourn_integrations.otel import {name}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install '.[otel]'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError")
