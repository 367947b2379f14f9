"""AutoGen beyond the table: contexts that AutoGen loses, our own faults, one object only, and graphs."""

from __future__ import annotations

import sys
from collections.abc import AsyncGenerator, Callable
from typing import Annotated, Any

import pytest

pytest.importorskip("autogen_agentchat")

import sojourn
from autogen_agentchat.agents import AssistantAgent, BaseChatAgent, MessageFilterAgent, SocietyOfMindAgent
from autogen_agentchat.agents._message_filter_agent import MessageFilterConfig
from autogen_agentchat.base import Response
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import GraphFlow, RoundRobinGroupChat, SelectorGroupChat, Swarm
from autogen_agentchat.tools import AgentTool
from autogen_core import SingleThreadedAgentRuntime
from autogen_core.tools import FunctionTool
from autogen_ext.models.openai import OpenAIChatCompletionClient
from recorded_programs import problems, recorded_programs
from scenarios_autogen import COUNT, INFO, count, graph_with_a_condition, said
from sojourn.aeg import END, START
from sojourn.testing import FakeServer, ToolUse
from sojourn.wire_events import AegReport, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_integrations.autogen import run_scopes as autogen_runs
from sojourn_integrations.autogen.team_graph import graph_of

pytestmark = pytest.mark.timeout(120)  # an exception of ours out of a tool would make AutoGen wait for ever


def llm(server: FakeServer) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model="tiny", base_url=server.base_url, api_key="none", model_info=INFO)


@pytest.fixture
def client(server: FakeServer) -> OpenAIChatCompletionClient:
    """A client of a server that ``init`` names."""
    sojourn.init(server.url, probe_timeout_s=5)
    return llm(server)


def nodes(server: FakeServer) -> list[str | None]:
    return [request.context.sojourn.node for request in server.requests]


def recorded(server: FakeServer, kind: type) -> list[Any]:
    assert sojourn.flush(60)
    return [event for event in server.program_events() if isinstance(event, kind)]


def only_program(server: FakeServer) -> ProgramStart:
    """Everything belongs to it, and all is as it must be."""
    (start,) = recorded(server, ProgramStart)
    assert {request.context.program_id for request in server.requests} == {start.program_id}
    assert not problems(server, recorded_programs(server), [])
    return start


# ---- contexts that AutoGen loses


async def test_a_runtime_started_before_the_program(server: FakeServer, client: Any) -> None:
    server.script = ["I take bob.", COUNT, "alice", "alice speaks"]
    runtime = SingleThreadedAgentRuntime()
    runtime.start()
    tools = {"alice": [], "bob": [count], "carol": []}
    agents = [AssistantAgent(name, client, description=name, tools=tools[name]) for name in tools]
    team = SelectorGroupChat(agents, client, max_turns=2, runtime=runtime)
    await team.run(task="hi")
    await runtime.stop()
    only_program(server)
    assert nodes(server) == [None, "bob", None, "alice"]
    assert [stop.status for stop in recorded(server, ToolStop)] == ["ok"]
    assert not autogen_runs._teams


@pytest.mark.parametrize("decorate", [sojourn.tool, sojourn.program])
def test_a_decorated_function_keeps_its_annotations(decorate: Callable[..., Any]) -> None:
    """They are text here, since this module has ``from __future__ import annotations``."""

    def look(text: Annotated[str, "what to look for"]) -> Annotated[str, "what was found"]:
        return text

    async def look_async(text: Annotated[str, "what to look for"]) -> Annotated[str, "what was found"]:
        return text

    for function in (look, look_async):
        bare, decorated = (FunctionTool(each, description="looks") for each in (function, decorate(function)))
        assert decorated.schema == bare.schema


# ---- programs


async def test_each_run_is_a_program_unless_one_is_open(
    server: FakeServer, client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["agents/support.py"])
    team = RoundRobinGroupChat([AssistantAgent("alice", client)], max_turns=1)
    await team.run(task="hi")
    await team.reset()
    await team.run(task="hi")
    assert len(recorded(server, ProgramEnd)) == 2
    assert [start.agent_type for start in recorded(server, ProgramStart)] == ["support.py", "support.py"]
    server.forget()
    with sojourn.program("conversation") as program:
        await team.run(task="hi")
        await team.run(task="and then")
        await AssistantAgent("bob", client).run(task="check")
    assert only_program(server).name == "conversation"
    assert nodes(server) == ["alice", "alice", "bob"]
    assert [end.status for end in recorded(server, ProgramEnd)] == ["ok"]
    assert program.node is None
    assert all(not report.graph.complete for report in recorded(server, AegReport) if report.graph)


async def test_an_agent_class_of_the_users(server: FakeServer, client: Any) -> None:
    """With a stream of its own, which does not come from any class that AutoGen has."""

    class Asking(BaseChatAgent):
        produced_message_types = (TextMessage,)

        def __init__(self, name: str, client: Any) -> None:
            super().__init__(name, "asks")
            self.client = client

        async def on_messages(self, messages: Any, cancellation_token: Any) -> Response:
            raise NotImplementedError

        async def on_messages_stream(
            self, messages: Any, cancellation_token: Any
        ) -> AsyncGenerator[Any, None]:
            answer = await self.client.create([messages[-1].to_model_message()])
            yield Response(chat_message=TextMessage(content=answer.content, source=self.name))

        async def on_reset(self, cancellation_token: Any) -> None:
            pass

    own = vars(Asking)["on_messages_stream"]
    filtered = MessageFilterAgent("filtered", Asking("inner", client), MessageFilterConfig(per_source=[]))
    with pytest.raises(RuntimeError, match="list index"):  # the filter leaves no message
        await RoundRobinGroupChat([Asking("alice", client), filtered], max_turns=2).run(task="hi")
    assert nodes(server) == ["alice"]
    assert [end.status for end in recorded(server, ProgramEnd)] == ["error"]
    covered = vars(Asking)["on_messages_stream"]
    assert covered is not own
    await RoundRobinGroupChat([Asking("alice", client)], max_turns=1).run(task="hi")
    assert vars(Asking)["on_messages_stream"] is covered
    sojourn.uninstrument("autogen")
    assert vars(Asking)["on_messages_stream"] is own


# ---- one object


async def test_one_team_only(server: FakeServer, client: Any) -> None:
    sojourn.uninstrument()

    def look(text: str) -> str:
        """Where am I?"""
        seen.append(sojourn.current_program())
        return text

    seen: list[Any] = []
    uses = ToolUse("look", {"text": "x"}), ToolUse("helper", {"task": "x"})
    server.script = [uses[0], "two", uses[1], "helped", "three"]
    helper = AgentTool(AssistantAgent("helper", client, description="helps"))
    alice = AssistantAgent("alice", client, tools=[look], reflect_on_tool_use=True)
    bob = AssistantAgent("bob", client, tools=[helper], reflect_on_tool_use=True)
    team = RoundRobinGroupChat([alice, bob], max_turns=2)
    plain = team.dump_component()
    assert sojourn.wrap(team) is team
    assert sojourn.wrap(team) is team
    assert team.dump_component() == plain
    assert isinstance(team, RoundRobinGroupChat)
    result = await team.run(task="hi")
    assert said(result)[-1] == ("TextMessage", "bob", "three")
    outer, child = recorded(server, ProgramStart)
    assert child.parent_program_id == outer.program_id
    assert nodes(server) == ["alice", "alice", "bob", "helper", "bob"]
    assert sorted(start.tool for start in recorded(server, ToolStart)) == ["helper", "look"]
    assert [program.id for program in seen] == [outer.program_id]
    assert not problems(server, recorded_programs(server), [])
    server.forget()
    await AssistantAgent("stranger", llm(server)).run(task="hi")
    (request,) = server.requests
    assert request.context is None


async def test_autogens_own_spans_say_the_same_without_the_adapter(server: FakeServer, client: Any) -> None:
    """AutoGen asks for the global provider, which a process can set only once."""
    trace = pytest.importorskip("opentelemetry.trace")
    from opentelemetry.sdk.trace import TracerProvider
    from sojourn_integrations.otel.source import SojournSpanProcessor

    server.script = [COUNT, "two"]
    sojourn.uninstrument("autogen")
    provider, processor = TracerProvider(shutdown_on_exit=False), SojournSpanProcessor()
    trace.set_tracer_provider(provider)
    provider.add_span_processor(processor)
    await AssistantAgent("solo", client, tools=[count], reflect_on_tool_use=True).run(task="hi")
    processor.shutdown()
    start = only_program(server)
    assert (start.name, start.agent_type) == ("solo", "solo")
    (call,) = recorded(server, ToolStart)
    assert call.tool == "count"
    assert call.call_id.startswith("call_")


# ---- graphs


def test_the_graph_of_a_graph_flow(client: Any) -> None:
    agents, graph = graph_with_a_condition(client)
    found = graph_of(GraphFlow(agents, graph=graph, max_turns=9))
    assert set(found.nodes) == {"plan", "work", "check", "done"}
    assert set(found.edges) == {
        (START, "plan"), ("plan", "work"), ("work", "check"), ("check", "work"), ("check", "done"),
        ("plan", END), ("work", END), ("check", END), ("done", END),
    }  # fmt: skip
    assert found.complete
    assert set(found.edges.values()) == {None}, "a limit of turns leaves nothing certain"


async def test_the_graph_is_reported_with_its_tools(server: FakeServer, client: Any) -> None:
    alice = AssistantAgent("alice", client, tools=[count], handoffs=["bob", "user"])
    team = Swarm([alice, AssistantAgent("bob", client)], max_turns=1)
    await team.run(task="hi")
    (report,) = recorded(server, AegReport)
    assert {node.id: node.tools for node in report.graph.nodes} == {
        "alice": ["count", "transfer_to_bob", "transfer_to_user"],
        "bob": [],
    }
    assert {(edge.source, edge.target) for edge in report.graph.edges} == {
        (START, "alice"), ("alice", "alice"), ("alice", "bob"), ("bob", "bob"), ("alice", END), ("bob", END),
    }  # fmt: skip
    assert report.graph_hash == graph_of(Swarm([alice, AssistantAgent("bob", client)], max_turns=1)).hash


def test_teams_inside_teams(client: Any) -> None:
    inner = RoundRobinGroupChat([AssistantAgent("a", client), AssistantAgent("b", client)], name="inner")
    mind = SocietyOfMindAgent(
        "mind", RoundRobinGroupChat([AssistantAgent("a", client, tools=[count])], max_turns=1), client
    )
    found = graph_of(RoundRobinGroupChat([inner, mind], max_turns=2))
    assert dict(found.nodes) == {"inner/a": (), "inner/b": (), "mind": (), "mind/a": ("count",)}
    edges = set(found.edges)
    assert {(START, "inner/a"), (START, "inner/b"), ("inner/b", "mind/a"), ("mind/a", "mind"),
            ("mind", "inner/a"), ("mind", END)} <= edges  # fmt: skip
    assert ("mind/a", END) not in edges
    assert ("inner/a", "mind") not in edges
    assert found.complete
