"""The agents of ``framework_instructions.py``: one of each framework, in three arms.

A scripted agent makes turns of one LLM request and one tool call, against a server in another process. The
arms are *bare*, *sojourn* and *empty*. The empty arm has the framework's own extension points and nothing in
them (callbacks, hooks, subclasses that only call their base, hooks of the HTTP client), so a library that
uses these points cannot add less. ``least_hooks`` is another lower bound. In place of sojourn, the plain
``openai`` loop has only what any such SDK needs, which is an id and a hint in the request, and four notes
with times in a queue without a reader.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from typing import Any, Literal, NamedTuple

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    MSWEA_SILENT_STARTUP="1",
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
)

import sojourn

Run = Callable[[], Any]
Arm = Literal["bare", "empty", "sojourn"]
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


def by_hand(
    ask: Callable[..., Any],
    arm: Arm,
    program: Callable[[str], Any] = sojourn.program,
    tool_call: Callable[[str, str], Any] = sojourn.tool_call,
) -> Run:
    """Return an agent loop that calls ``ask(messages=, tools=)``. In the arm ``sojourn``, the loop uses the
    context managers ``program`` and ``tool_call``. In the arm ``empty``, it uses ``empty_scope`` for both."""
    if arm == "empty":
        program = tool_call = empty_scope

    def run() -> None:
        messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
        with program("bench") if arm != "bare" else nullcontext():
            while True:
                message = ask(messages=messages, tools=[TOOL]).choices[0].message
                if not message.tool_calls:
                    return
                (call,) = message.tool_calls
                messages.append(message.model_dump(exclude_none=True))
                with tool_call(call.function.name, call.id) if arm != "bare" else nullcontext():
                    result = work(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})

    return run


class _EmptyScope:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


EMPTY_SCOPE = _EmptyScope()


def empty_scope(*_: Any) -> _EmptyScope:
    """Return a scope that does nothing."""
    return EMPTY_SCOPE


def http_hooks(arm: Arm, kind: str = "DefaultHttpxClient") -> dict[str, Any]:
    """Return arguments for an OpenAI client. In the arm ``empty``, they have an HTTP client of this kind with
    two empty hooks."""
    if arm != "empty":
        return {}
    import openai

    def nothing(_: Any) -> None: ...

    async def nothing_async(_: Any) -> None: ...

    hook = nothing_async if "Async" in kind else nothing
    return {"http_client": getattr(openai, kind)(event_hooks={"request": [hook], "response": [hook]})}


def openai_loop(base_url: str, arm: Arm) -> Run:
    from functools import partial

    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none", **http_hooks(arm))
    return by_hand(partial(client.chat.completions.create, model="m"), arm)


PROGRAM: ContextVar[str] = ContextVar("PROGRAM")
NOTES: deque[tuple[str, str, float]] = deque(maxlen=1000)


@contextmanager
def noted(name: str, call_id: str = "") -> Iterator[None]:
    """Notes the start and the stop of the block."""
    NOTES.append((f"{name} start", call_id, time.perf_counter()))
    try:
        yield
    finally:
        NOTES.append((f"{name} stop", call_id, time.perf_counter()))


@contextmanager
def least_program(name: str) -> Iterator[None]:
    """Sets the id of the program for the block."""
    token = PROGRAM.set(name)
    try:
        yield
    finally:
        PROGRAM.reset(token)


def least_loop(base_url: str, arm: Arm) -> Run:
    from openai import OpenAI

    client = OpenAI(base_url=base_url, api_key="none")

    def ask(**fields: Any) -> Any:
        if arm == "bare":
            return client.chat.completions.create(model="m", **fields)
        hint = json.dumps({"program_id": PROGRAM.get(), "seq": len(NOTES)})
        with noted("request"):
            return client.chat.completions.create(
                model="m",
                extra_headers={"X-Program": PROGRAM.get()},
                extra_body={"vllm_xargs": {"agentic_context": hint}},
                **fields,
            )

    return by_hand(ask, arm, least_program, noted)


def litellm_loop(base_url: str, arm: Arm) -> Run:
    import litellm
    from litellm.integrations.custom_logger import CustomLogger

    litellm.logging_callback_manager._reset_all_callbacks()
    if arm == "empty":
        litellm.callbacks = [CustomLogger()]

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

    class HookedEnvironment(Nothing):
        def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
            return super().execute(*args, **kwargs)

    class HookedModel(LitellmModel):
        def query(self, *args: Any, **kwargs: Any) -> Any:
            return super().query(*args, **kwargs)

    empty = arm == "empty"
    own = {"api_base": base_url, "api_key": "none"}
    model = (HookedModel if empty else LitellmModel)(model_name="openai/m", model_kwargs=own)
    texts = {"system_template": "You are an agent.", "instance_template": "Do {{task}}."}
    environment = HookedEnvironment() if empty else Nothing()
    agent = DefaultAgent(model, environment, cost_limit=0, step_limit=0, **texts)
    return lambda: agent.run("it")


def langchain(base_url: str, arm: Arm) -> Run:
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    agent = create_agent(_chat(base_url, arm), [tool(work)])
    return lambda: agent.invoke({"messages": [("user", "go")]}, _config(arm))


def langgraph(base_url: str, arm: Arm) -> Run:
    from langchain_core.tools import tool
    from langgraph.graph import START, MessagesState, StateGraph
    from langgraph.prebuilt import ToolNode, tools_condition

    tools = [tool(work)]
    chat = _chat(base_url, arm).bind_tools(tools)
    graph = StateGraph(MessagesState)
    graph.add_node("agent", lambda state: {"messages": [chat.invoke(state["messages"])]})
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    compiled = graph.compile()
    return lambda: compiled.invoke({"messages": [("user", "go")]}, _config(arm))


def _chat(base_url: str, arm: Arm) -> Any:
    from langchain_openai import ChatOpenAI

    # LangChain shares one HTTP client among its models, so the hooked one is shared too.
    return ChatOpenAI(model="m", base_url=base_url, api_key="none", **_shared_http_hooks(arm))


_shared_http_hooks = cache(http_hooks)


def _config(arm: Arm) -> Any:
    """Return a run's config. In the arm ``empty``, it has a handler of chains and tools that does nothing."""
    if arm != "empty":
        return {"recursion_limit": 1000}
    from langchain_core.callbacks import BaseCallbackHandler

    class Nothing(BaseCallbackHandler):
        run_inline = True
        ignore_llm = ignore_chat_model = ignore_retriever = ignore_retry = ignore_custom_event = True

        def on_chain_start(self, *args: Any, **kwargs: Any) -> None: ...

        def on_chain_end(self, *args: Any, **kwargs: Any) -> None: ...

        def on_tool_start(self, *args: Any, **kwargs: Any) -> None: ...

        def on_tool_end(self, *args: Any, **kwargs: Any) -> None: ...

    return {"recursion_limit": 1000, "callbacks": [Nothing()]}


def autogen(base_url: str, arm: Arm) -> Run:
    from autogen_agentchat.agents import AssistantAgent
    from autogen_core.tools import FunctionTool
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    class HookedAgent(AssistantAgent):
        async def on_messages_stream(self, *args: Any, **kwargs: Any) -> Any:
            async for each in super().on_messages_stream(*args, **kwargs):
                yield each

    class HookedTool(FunctionTool):
        async def run(self, *args: Any, **kwargs: Any) -> Any:
            return await super().run(*args, **kwargs)

    abilities = {"vision": False, "function_calling": True, "json_output": False, "structured_output": False}
    info: Any = {**abilities, "family": "unknown"}
    hooks = http_hooks(arm, "DefaultAsyncHttpxClient")
    client = OpenAIChatCompletionClient(
        model="m", base_url=base_url, api_key="none", model_info=info, **hooks
    )
    empty = arm == "empty"
    tool = (HookedTool if empty else FunctionTool)(work, description="Work.")
    kind = HookedAgent if empty else AssistantAgent
    agent = kind("bench", client, tools=[tool], max_tool_iterations=1000)
    return lambda: asyncio.run(agent.run(task="go"))


def openai_agents(base_url: str, arm: Arm) -> Run:
    from agents import (
        Agent,
        OpenAIChatCompletionsModel,
        RunHooks,
        Runner,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(True)
    # ``RunHooks`` itself has a method without a body for each hook.
    hooks = RunHooks() if arm == "empty" else None
    http = http_hooks(arm, "DefaultAsyncHttpxClient")
    model = OpenAIChatCompletionsModel("m", AsyncOpenAI(base_url=base_url, api_key="none", **http))
    agent = Agent(name="bench", model=model, tools=[function_tool(work)])
    return lambda: asyncio.run(Runner.run(agent, "go", max_turns=1000, hooks=hooks))


class Framework(NamedTuple):
    """A framework, and how to build its scripted agent."""

    package: str
    distribution: str
    prepare: Prepare
    is_ours: bool = True
    """Whether ``sojourn.instrument()`` makes the instrumented rounds."""


FRAMEWORKS = {
    "openai": Framework("openai", "openai", openai_loop),
    "least_hooks": Framework("openai", "openai", least_loop, is_ours=False),
    "litellm": Framework("litellm", "litellm", litellm_loop),
    "mini_swe_agent": Framework("minisweagent", "mini-swe-agent", mini),
    "langchain": Framework("langchain", "langchain", langchain),
    "langgraph": Framework("langgraph", "langgraph", langgraph),
    "autogen": Framework("autogen_agentchat", "autogen-agentchat", autogen),
    "openai_agents": Framework("agents", "openai-agents", openai_agents),
}

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


class ServerProcess:
    """Context manager that runs a ``FakeServer`` in its own process. Yields the server's URL, which ``code``
    prints; ``code`` ends with its standard input."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)
