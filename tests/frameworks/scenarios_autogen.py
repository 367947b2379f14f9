"""AutoGen 0.7: agents, every kind of team, agents as tools, code executors. Nothing here knows sojourn."""

from __future__ import annotations

import asyncio
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from scenario_types import Scenario, StreamPiece, ToolFact, cancel_once, fact, scenarios_of
from sojourn.testing import Reply, ToolUse

INFO: dict[str, Any] = {
    "vision": False,
    "function_calling": True,
    "json_output": True,
    "family": "unknown",
    "structured_output": False,
}

Body = Callable[[Any], Awaitable[Any]]


def scenario_runner(body: Body) -> Callable[[str, str], Any]:
    """Return a play that runs ``body(model_client)`` in its own event loop."""

    def play(base_url: str, model: str) -> Any:
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        async def run() -> Any:
            llm = OpenAIChatCompletionClient(model=model, base_url=base_url, api_key="none", model_info=INFO)
            try:
                return await body(llm)
            finally:
                await llm.close()

        return asyncio.run(run())

    play.__name__ = body.__name__
    return play


def said(result: Any) -> list[tuple[str, str, str] | StreamPiece]:
    """Content of a ``TaskResult`` or of a list of messages, without ids and times."""
    messages = getattr(result, "messages", result)
    return [_told(each) for each in messages if hasattr(each, "source")]


def _told(message: Any) -> tuple[str, str, str] | StreamPiece:
    kind = type(message).__name__
    if kind == "ModelClientStreamingChunkEvent":
        return StreamPiece(message.source, message.content)
    return kind, message.source, _text(message)


def _text(message: Any) -> str:
    content = message.content
    if isinstance(content, list):
        return " ".join(f"{each.name}:{getattr(each, 'content', '')}" for each in content)
    return str(content)


# ---- parts


def agent(name: str, llm: Any, tools: Sequence[Any] = (), **options: Any) -> Any:
    from autogen_agentchat.agents import AssistantAgent

    return AssistantAgent(name, llm, tools=list(tools) or None, **options)


def upper(text: str) -> str:
    """In capitals; not async, so that AutoGen runs it in a thread."""
    return text.upper()


async def count(text: str) -> str:
    """How long it is."""
    await asyncio.sleep(0.002)
    return str(len(text))


async def broken(text: str) -> str:
    """Never works."""
    raise ValueError(f"no {text}")


async def late(text: str) -> str:
    """Takes too long."""
    raise asyncio.TimeoutError


# ---- what the model says, and what is reported


UPPER, COUNT = ToolUse("upper", {"text": "hi"}), ToolUse("count", {"text": "hi"})
LIMITED = fact("agent", "alice alice", "count", limit=2)
THREE_TOOLS = fact("agent", "alice alice", "count", "count", "upper", limit=2)
FAILING = [ToolUse("broken", {"text": "x"}), ToolUse("late", {"text": "x"}), ToolUse("nosuch"), UPPER]
FAILED = ToolFact("broken", "error"), ToolFact("late", "timeout"), ToolFact("nosuch", "error")
WAITED = fact("agent", "alice", ToolFact("wait", "cancelled"), status="cancelled", limit=1)
CODE = ("python", "print(6 * 7)"), ("sh", "cd . && ls | head -1"), ("python", "raise SystemExit(3)")
RUN = [ToolFact("code", *how) for how in (("ok", "ls"), ("ok", "python"), ("nonzero", "python"))]
CODER = fact("team", "coder coder coder", *RUN, limit=6)
HANDED = fact("team", "alice bob bob", "count", "transfer_to_bob", limit=3)
AGAIN = fact("team", "plan work check work check done", limit=9)
HELPED = (
    fact("boss", "boss boss", "helper", limit=2),
    fact("helper", "helper helper", "count", parent="boss", limit=2),
)
OFFICE = (
    fact("outer", "boss boss", "office", limit=1),
    fact("office", "alice bob", parent="outer", limit=2),
)
RESEARCH = (
    fact("boss", "boss boss", "research", limit=2),
    fact("helper", "helper", parent="boss", limit=1),
)
MIND = fact("outer", "mind/alice mind/bob mind carol", limit=2)
SCENARIOS: list[Scenario] = []


def scene(row: str, script: Sequence[Reply], *programs: Any, **more: Any) -> Callable[[Body], Body]:
    """Decorate the body of a scenario's play."""
    made = scenarios_of("autogen", "autogen_agentchat", "autogen_ext", "openai")

    def add(body: Body) -> Body:
        run = scenario_runner(body)
        SCENARIOS.append(made(row, run, script, *programs, name=body.__name__, **more))
        return body

    return add


# ---- plays


@scene("sync", [UPPER, "bob speaks", "alice speaks"], fact("team", "alice bob alice", "upper", limit=3))
async def round_robin(llm: Any) -> Any:
    from autogen_agentchat.teams import RoundRobinGroupChat

    team = RoundRobinGroupChat([agent("alice", llm, [upper]), agent("bob", llm)], max_turns=3)
    return said(await team.run(task="hi"))


@scene("async", [COUNT, "two letters"], LIMITED)
async def reflecting_agent(llm: Any) -> Any:
    return said(await agent("alice", llm, [count], reflect_on_tool_use=True).run(task="hi"))


@scene("stream", [COUNT, "two letters it is"], LIMITED)
async def streaming_agent(llm: Any) -> Any:
    alice = agent("alice", llm, [count], reflect_on_tool_use=True, model_client_stream=True)
    return said([each async for each in alice.run_stream(task="hi")])


@scene("stream", ["one two three"], fact("agent", "alice", status="cancelled", limit=1))
async def broken_off_stream(llm: Any) -> Any:
    """The consumer leaves the stream at the first word of the answer."""
    from autogen_agentchat.messages import ModelClientStreamingChunkEvent

    stream = agent("alice", llm, model_client_stream=True).run_stream(task="hi")
    async for each in stream:
        if isinstance(each, ModelClientStreamingChunkEvent):
            break
    await stream.aclose()
    return each.content.strip()[:1]  # the length of the first piece depends on the network


@scene("stream", ["one", "two"], fact("team", "alice bob", status="cancelled", limit=2))
async def broken_off_team(llm: Any) -> Any:
    """The consumer leaves the stream of a team. AutoGen lets the team continue until it is idle."""
    from autogen_agentchat.teams import RoundRobinGroupChat

    team = RoundRobinGroupChat([agent("alice", llm), agent("bob", llm)], max_turns=2)
    stream = team.run_stream(task="hi")
    async for each in stream:
        if each.source == "alice":
            break
    await stream.aclose()
    return said([each])


@scene("error", [FAILING, "oh"], fact("agent", "alice alice", *FAILED, "upper", limit=2))
async def failing_tools(llm: Any) -> Any:
    alice = agent("alice", llm, [broken, late, upper], reflect_on_tool_use=True)
    return said(await alice.run(task="hi"))


@scene("error", [COUNT, COUNT], LIMITED._replace(status="error"), raises="RuntimeError")
async def failing_agent(llm: Any) -> Any:
    """AutoGen fails on a tool call where it asked for text."""
    return said(await agent("alice", llm, [count], reflect_on_tool_use=True).run(task="hi"))


@scene("cancel", [ToolUse("wait", {"text": "x"})], WAITED, raises="CancelledError")
async def cancelled_in_a_tool(llm: Any) -> Any:
    """Cancel the task, not by a ``CancellationToken``, because AutoGen 0.7 never recovers from that."""
    started = asyncio.Event()

    async def wait(text: str) -> str:
        """For ever."""
        started.set()
        await asyncio.sleep(60)
        return text

    await cancel_once(started, agent("alice", llm, [wait]).run(task="hi"))


@scene("parallel", [[UPPER, COUNT, COUNT], "done"], THREE_TOOLS)
async def two_tools_at_once(llm: Any) -> Any:
    return said(await agent("alice", llm, [upper, count], reflect_on_tool_use=True).run(task="hi"))


@scene("parallel", ["same"] * 4, fact("team", "start left right join"))
async def two_branches_at_once(llm: Any) -> Any:
    from autogen_agentchat.teams import DiGraphBuilder, GraphFlow

    start, left, right, join = (agent(name, llm) for name in ("start", "left", "right", "join"))
    graph = DiGraphBuilder()
    for each in (start, left, right, join):
        graph.add_node(each)
    graph.add_edge(start, left).add_edge(start, right).add_edge(left, join).add_edge(right, join)
    team = GraphFlow([start, left, right, join], graph=graph.build())
    return sorted(said(await team.run(task="hi")))


@scene("sub_agent", [ToolUse("helper", {"task": "help"}), COUNT, "helped", "done"], *HELPED)
async def agent_tool(llm: Any) -> Any:
    from autogen_agentchat.tools import AgentTool

    helper = AgentTool(agent("helper", llm, [count], description="helps", reflect_on_tool_use=True))
    return said(await agent("boss", llm, [helper], reflect_on_tool_use=True).run(task="hi"))


@scene("sub_agent", [ToolUse("office", {"task": "help"}), "alice speaks", "bob speaks", "done"], *OFFICE)
async def team_tool(llm: Any) -> Any:
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_agentchat.tools import TeamTool

    team = RoundRobinGroupChat([agent("alice", llm), agent("bob", llm)], max_turns=2)
    tool = TeamTool(team, name="office", description="helps")
    boss = agent("boss", llm, [tool], max_tool_iterations=2)
    outer = RoundRobinGroupChat([boss], max_turns=1, name="outer")
    return said(await outer.run(task="hi"))


@scene("sub_agent", [ToolUse("research", {"text": "what"}), "that", "done"], *RESEARCH)
async def agent_in_a_plain_tool(llm: Any) -> Any:
    """A function that is not async runs an agent, in the thread in which AutoGen calls it."""
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    def research(text: str) -> str:
        """Ask somebody else."""

        async def ask() -> str:
            client = OpenAIChatCompletionClient(**settings, api_key="none", model_info=INFO)
            try:
                return said(await agent("helper", client).run(task=text))[-1][-1]
            finally:
                await client.close()

        return asyncio.run(ask())

    settings = {"model": llm._raw_config["model"], "base_url": llm._raw_config["base_url"]}
    return said(await agent("boss", llm, [research], reflect_on_tool_use=True).run(task="hi"))


@scene("sub_agent", ["one", "two", "summed up", "three"], MIND)
async def society_of_mind(llm: Any) -> Any:
    from autogen_agentchat.agents import SocietyOfMindAgent
    from autogen_agentchat.teams import RoundRobinGroupChat

    inner = RoundRobinGroupChat([agent("alice", llm), agent("bob", llm)], max_turns=2)
    outer = RoundRobinGroupChat([SocietyOfMindAgent("mind", inner, llm), agent("carol", llm)], max_turns=2)
    return said(await outer.run(task="hi"))


@scene("sync", [[COUNT, ToolUse("transfer_to_bob")], "bob speaks", "bob speaks again"], HANDED)
async def swarm(llm: Any) -> Any:
    from autogen_agentchat.teams import Swarm

    alice = agent("alice", llm, [count], handoffs=["bob"])
    return said(await Swarm([alice, agent("bob", llm)], max_turns=3).run(task="hi"))


@scene("sync", ["the plan", "first try", "once again", "second try", "good", "bye"], AGAIN)
async def graph_flow(llm: Any) -> Any:
    """The answer of ``check`` decides the next node."""
    from autogen_agentchat.teams import GraphFlow

    agents, graph = graph_with_a_condition(llm)
    return said(await GraphFlow(agents, graph=graph, max_turns=9).run(task="hi"))


def graph_with_a_condition(llm: Any) -> tuple[list[Any], Any]:
    """A graph plan → work → check, which then goes back to work or on to done."""
    from autogen_agentchat.teams import DiGraphBuilder

    plan, work, check, done = agents = [agent(name, llm) for name in ("plan", "work", "check", "done")]
    graph = DiGraphBuilder()
    for each in agents:
        graph.add_node(each)
    graph.add_edge(plan, work, activation_group="first")
    graph.add_edge(work, check)
    graph.add_edge(check, work, condition="again", activation_group="again")
    graph.add_edge(check, done, condition=lambda message: "good" in message.to_model_text())
    graph.set_entry_point(plan)
    return agents, graph.build()


@scene("sync", [f"```{kind}\n{text}\n```" for kind, text in CODE], CODER)
async def code_executor(llm: Any) -> Any:
    """Real Python and a real shell, in a folder of their own."""
    from autogen_agentchat.agents import CodeExecutorAgent
    from autogen_agentchat.agents._code_executor_agent import ApprovalResponse
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.code_executors.local import LocalCommandLineCodeExecutor

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # AutoGen warns of code that is run outside of a container
        async with LocalCommandLineCodeExecutor(work_dir=folder, timeout=20) as executor:
            computer = CodeExecutorAgent(
                "computer",
                executor,
                approval_func=lambda request: ApprovalResponse(approved=True, reason="a test"),
            )
            team = RoundRobinGroupChat([agent("coder", llm), computer], max_turns=6)
            return said(await team.run(task="hi"))
