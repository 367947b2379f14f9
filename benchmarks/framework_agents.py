"""The agents of ``framework_instructions.py``: one of each framework, *bare* and with *sojourn*.

A scripted agent makes turns of one LLM request and one tool call, against a server in another process.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Literal, NamedTuple

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    MSWEA_SILENT_STARTUP="1",
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
)

import sojourn

Run = Callable[[], Any]
Arm = Literal["bare", "sojourn"]
Prepare = Callable[[str, Arm], Run]
"""Function that builds the agent for one round, outside the measured time. It maps (base URL, arm) to a
function that runs the agent. ``sojourn.instrument()`` and ``uninstrument()`` are called before it."""


TOOL = {
    "type": "function",
    "function": {
        "name": "work",
        "description": "Work.",
        "parameters": {"type": "object", "properties": {"text": {"type": "string"}}},
    },
}


def work(text: str) -> str:
    """A tool without effect."""
    return text


def by_hand(ask: Callable[..., Any], arm: Arm) -> Run:
    """Return an agent loop that calls ``ask(messages=, tools=)``. In the arm ``sojourn``, the loop uses
    ``sojourn.program`` and ``sojourn.tool_call``."""

    def run() -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        with sojourn.program("bench") if arm != "bare" else nullcontext():
            while True:
                message = ask(messages=messages, tools=[TOOL]).choices[0].message
                if not message.tool_calls:
                    return
                (call,) = message.tool_calls
                messages.append(message.model_dump(exclude_none=True))
                with sojourn.tool_call(call.function.name, call.id) if arm != "bare" else nullcontext():
                    result = work(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return run


def openai_loop(base_url: str, arm: Arm) -> Run:
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")
    return by_hand(partial(client.chat.completions.create, model="m"), arm)


def litellm_loop(base_url: str, arm: Arm) -> Run:
    import litellm

    litellm.logging_callback_manager._reset_all_callbacks()

    def ask(**fields: Any) -> Any:
        return litellm.completion(model="hosted_vllm/m", api_base=base_url, **fields)

    return by_hand(ask, arm)


def mini(base_url: str, arm: Arm) -> Run:
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.exceptions import Submitted
    from minisweagent.models.litellm_model import LitellmModel

    class Nothing(LocalEnvironment):
        """An environment that starts no shell, because that would take most of a turn."""

        def execute(self, action: Any, cwd: str = "", **_: Any) -> dict[str, Any]:
            if action["command"] == "submit":
                raise Submitted({"role": "exit", "content": "", "extra": {"exit_status": "Submitted"}})
            return {"output": "x", "returncode": 0, "exception_info": ""}

    own = {"api_base": base_url, "api_key": "none"}
    model = LitellmModel(model_name="openai/m", model_kwargs=own)
    texts = {"system_template": "You are an agent.", "instance_template": "Do {{task}}."}
    agent = DefaultAgent(model, Nothing(), cost_limit=0, step_limit=0, **texts)
    return lambda: agent.run("it")


def langchain(base_url: str, arm: Arm) -> Run:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    agent = create_agent(_chat(base_url), [tool(work)])
    return lambda: agent.invoke({"messages": [("user", "go")]}, {"recursion_limit": 1000})


def langgraph(base_url: str, arm: Arm) -> Run:
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(work)]
    chat = _chat(base_url).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    compiled = graph.compile()
    return lambda: compiled.invoke({"messages": [("user", "go")]}, {"recursion_limit": 1000})


def _chat(base_url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(model="m", base_url=base_url, api_key="none")


def autogen(base_url: str, arm: Arm) -> Run:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    abilities = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    info: Any = {**abilities, "family": "unknown"}
    client = OpenAIChatCompletionClient(model="m", base_url=base_url, api_key="none", model_info=info)
    tool = FunctionTool(work, description="Work.")
    agent = AssistantAgent("bench", client, tools=[tool], max_tool_iterations=1000)
    return lambda: asyncio.run(agent.run(task="go"))


def openai_agents(base_url: str, arm: Arm) -> Run:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=base_url, api_key="none"))
    agent = Agent(name="bench", model=model, tools=[function_tool(work)])
    return lambda: asyncio.run(Runner.run(agent, "go", max_turns=1000))


class Framework(NamedTuple):
    """A framework, and how to build its scripted agent."""

    package: str
    distribution: str
    prepare: Prepare


FRAMEWORKS = {
    "openai": Framework("openai", "openai", openai_loop),
    "litellm": Framework("litellm", "litellm", litellm_loop),
    "mini_swe_agent": Framework("minisweagent", "mini-swe-agent", mini),
    "langchain": Framework("langchain", "langchain", langchain),
    "langgraph": Framework("langgraph", "langgraph", langgraph),
    "autogen": Framework("autogen_agentchat", "autogen-agentchat", autogen),
    "openai_agents": Framework("agents", "openai-agents", openai_agents),
}

ANSWER_S = 0.01
"""Time that the model takes for an answer."""
SERVER = """
import sys
from sojourn.testing import FakeServer, ToolUse

def answer(request):
    messages = request.body["messages"]
    if sum(message["role"] == "tool" for message in messages) >= {turns} - 1:
        name = None
    else:
        name = request.body["tools"][0]["function"]["name"]
    if name == "bash" or (name is None and any("bash" in str(m.get("tool_calls")) for m in messages)):
        return ToolUse("bash", {{"command": "submit" if name is None else "true"}})
    return "done" if name is None else ToolUse(name, {{"text": "x"}})

with FakeServer(answer) as server:
    server.reply_delay_s = {answer_s}
    print(server.url, flush=True)
    sys.stdin.read()
"""


@contextmanager
def fake_server(turns: int) -> Iterator[str]:
    """Run a server of an agent with so many turns in a process of its own. Yield its URL."""
    code = SERVER.format(turns=turns, answer_s=ANSWER_S)
    piped = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code], **piped) as process:
        yield process.stdout.readline().strip()
