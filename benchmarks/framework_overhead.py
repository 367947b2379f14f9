"""Cost of instrumentation for an agent of each framework: microseconds per turn over the bare framework.

    .tox/frameworks/bin/python benchmarks/framework_overhead.py [--rounds 40] [--turns 20] [--json FILE]

A scripted agent makes ``turns`` turns, each with one LLM request and one tool call, against a server in
another process. The server takes ``--answer-ms`` per answer, as a model would. Meanwhile the SDK's sender
thread works. With ``--answer-ms 0`` the agent never waits, unlike real agents, so the sender competes with it
for the interpreter. Rounds alternate between the arms, in turning order, so that all see the same machine. A
result is the median of the differences of each group of rounds. Frameworks that cannot be imported are left
out. Use the engine's environment for openai, litellm and mini-swe-agent, and ``tox``'s for the others.

The arms: bare; empty, with the framework's own extension points and nothing in them (callbacks, hooks,
subclasses that only call their base, hooks of the HTTP client); and sojourn. The empty arm is a lower bound,
because a library that uses these points cannot add less. sojourn's own cost is the difference between sojourn
and empty.

``least_hooks`` is another lower bound. In place of sojourn, the plain ``openai`` loop has only what any such
SDK needs, which is an id and a hint in the request, and four notes with times in a queue without a reader.

Wall time varies by more than the differences unless nothing else runs. The CPU time of the agent's own thread
varies less. It excludes all waiting of the agent, also for the interpreter's lock. The number of Python
functions that this thread calls per turn hardly varies. It is counted in runs of its own, after the timed
ones.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

os.environ.update(
    LITELLM_LOCAL_MODEL_COST_MAP="True",
    MSWEA_SILENT_STARTUP="1",
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
    SOJOURN_HISTORY="off",
)

import sojourn
from rich.console import Console
from rich.table import Table

TARGET_TURN_US = 100.0
"""Agreed maximum of the median difference, in microseconds per turn."""
WARM_UP_ROUNDS = 2

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

Run = Callable[[], Any]
Arm = Literal["bare", "empty", "sojourn"]
Prepare = Callable[[str, Arm], Run]
"""Function that builds the agent for one round, outside the measured time. It maps (base URL, arm) to a
function that runs the agent. ``sojourn.instrument()`` and ``uninstrument()`` are called before it."""


def main() -> None:
    """Measure and print; exit code 1 if the target is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--rounds", type=int, default=40, help="groups of rounds per framework, one round in each arm"
    )
    parser.add_argument("--turns", type=int, default=20, help="turns of one agent")
    parser.add_argument("--answer-ms", type=float, default=10.0, help="how long the model takes")
    parser.add_argument("--framework", action="append", choices=sorted(FRAMEWORKS), help="only this one")
    parser.add_argument("--json", metavar="FILE", help="also write the numbers to FILE")
    options = parser.parse_args()
    names = options.framework or sorted(FRAMEWORKS)
    report = measure(options.rounds, options.turns, options.answer_ms, names)
    show(report)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if report["passed"] else 1)


def measure(rounds: int, turns: int, answer_ms: float, names: list[str]) -> dict[str, Any]:
    """Measure the named frameworks that are installed. Return all figures as plain data."""
    here = [name for name in names if find_spec(FRAMEWORKS[name].package) is not None]
    rows = {name: one(name, rounds, turns, answer_ms) for name in here}
    settings = f"--rounds {rounds} --turns {turns} --answer-ms {answer_ms:g}"
    return {
        "command": f"python benchmarks/framework_overhead.py {settings}",
        "python": platform.python_version(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_1min": round(os.getloadavg()[0], 2),
        "frameworks": rows,
        "targets": {"turn_us": TARGET_TURN_US},
        "passed": bool(rows)
        and all(row["added_us"] <= TARGET_TURN_US for name, row in rows.items() if FRAMEWORKS[name].is_ours),
    }


def one(name: str, rounds: int, turns: int, answer_ms: float) -> dict[str, Any]:
    """Measure one framework and return its figures. Raises ``RuntimeError`` if its agent does not make the
    expected turns."""
    framework = FRAMEWORKS[name]
    arms: tuple[Arm, ...] = ("bare", "empty", "sojourn") if framework.is_ours else ("bare", "sojourn")
    took: dict[Arm, list[Took]] = {arm: [] for arm in arms}
    with ServerProcess(turns, answer_ms / 1000) as url:
        sojourn.init(url, dialect="sojourn")
        for number in range(rounds + WARM_UP_ROUNDS):
            first = number % len(arms)
            for arm in (*arms[first:], *arms[:first]):
                instruments = arm == "sojourn" and framework.is_ours
                if instruments:
                    sojourn.instrument()
                else:
                    sojourn.uninstrument()
                before = sojourn.stats()["requests_started"]
                took[arm].append(timed(framework.prepare(f"{url}/v1", arm), turns))
                told = sojourn.stats()["requests_started"] - before
                if told != (turns if instruments else 0):
                    raise RuntimeError(
                        f"{name}: {told} requests were told in the arm {arm}, of {turns} turns"
                    )
                sojourn.flush(2)
        stats = sojourn.stats()
        calls = {arm: calls_per_turn(framework, f"{url}/v1", arm, turns) for arm in arms}
        sojourn.shutdown()
    kept = {arm: each[WARM_UP_ROUNDS:] for arm, each in took.items()}
    figures = {
        "version": version(framework.distribution),
        "rounds": rounds,
        "turns": turns,
        "bare_us": round(statistics.median(each.wall_us for each in kept["bare"]), 1),
        "instrumented_us": round(statistics.median(each.wall_us for each in kept["sojourn"]), 1),
        **differences("added", kept["sojourn"], kept["bare"]),
        "bare_calls": calls["bare"],
        "added_calls": round(calls["sojourn"] - calls["bare"], 1),
        "dropped": stats["dropped_full"] + stats["dropped_send"],
    }
    if "empty" in kept:
        figures |= differences("empty_added", kept["empty"], kept["bare"])
        figures |= differences("own", kept["sojourn"], kept["empty"])
        figures["empty_added_calls"] = round(calls["empty"] - calls["bare"], 1)
    return figures


def calls_per_turn(framework: Framework, base_url: str, arm: Arm, turns: int) -> float:
    """Return the number of Python functions per turn that the agent's thread calls: the median of five
    runs."""
    if arm == "sojourn" and framework.is_ours:
        sojourn.instrument()
    else:
        sojourn.uninstrument()
    counts: list[int] = []

    def count(_frame: Any, event: str, _argument: Any) -> None:
        counts[-1] += event == "call"

    for _ in range(5):
        run = framework.prepare(base_url, arm)
        counts.append(0)
        sys.setprofile(count)
        try:
            run()
        finally:
            sys.setprofile(None)
    return round(statistics.median(counts) / turns, 1)


def differences(name: str, these: list[Took], those: list[Took]) -> dict[str, Any]:
    """Return median and quartiles of the differences of each group of rounds, for wall and CPU time."""
    figures: dict[str, Any] = {}
    pairs = [this.minus(that) for this, that in zip(these, those, strict=True)]
    for kind, values in (("", [each.wall_us for each in pairs]), ("_cpu", [each.cpu_us for each in pairs])):
        values.sort()
        quarter = len(values) // 4
        figures[f"{name}{kind}_us"] = round(statistics.median(values), 1)
        figures[f"{name}{kind}_quartiles_us"] = [round(values[quarter], 1), round(values[-1 - quarter], 1)]
    return figures


class Took(NamedTuple):
    """Cost per turn in microseconds."""

    wall_us: float
    cpu_us: float
    """CPU time of the agent's own thread; other threads of the framework and the sender do not count."""

    def minus(self, other: Took) -> Took:
        return Took(self.wall_us - other.wall_us, self.cpu_us - other.cpu_us)


def timed(run: Run, turns: int) -> Took:
    """Return the cost per turn of one run, with garbage collection disabled."""
    gc.collect()
    gc.disable()
    try:
        wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        run()
        cpu_ns, wall_ns = time.thread_time_ns() - cpu_ns, time.perf_counter_ns() - wall_ns
    finally:
        gc.enable()
    return Took(wall_ns / 1000 / turns, cpu_ns / 1000 / turns)


# ---- one agent of each


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


class ServerProcess:
    """Context manager that runs a scripted ``FakeServer`` in its own process. Yields the server's URL."""

    def __init__(self, turns: int, answer_s: float) -> None:
        code = SERVER.format(turns=turns, answer_s=answer_s)
        self._process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def __enter__(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def __exit__(self, *_: object) -> None:
        self._process.communicate(timeout=10)


def show(report: dict[str, Any]) -> None:
    """Print the table."""
    console = Console()
    where = f"Python {report['python']}, {report['machine']}, load {report['load_1min']}"
    table = Table(title=f"One turn of an agent ({where})")
    columns = (
        "framework",
        "version",
        "bare µs",
        "instrumented µs",
        "added µs",
        "quartiles",
        "added CPU µs",
        "quartiles",
        "empty hooks CPU µs",
        "own µs",
        "own CPU µs",
        "added calls",
        "empty hooks calls",
    )
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:2] else "right")
    for name, row in report["frameworks"].items():
        cells = (
            row["bare_us"],
            row["instrumented_us"],
            row["added_us"],
            "{} to {}".format(*row["added_quartiles_us"]),
            row["added_cpu_us"],
            "{} to {}".format(*row["added_cpu_quartiles_us"]),
            row.get("empty_added_cpu_us", ""),
            row.get("own_us", ""),
            row.get("own_cpu_us", ""),
            row["added_calls"],
            row.get("empty_added_calls", ""),
        )
        table.add_row(name, row["version"], *map(str, cells))
    console.print(table)
    verdict = "[green]met[/]" if report["passed"] else "[red]missed[/]"
    console.print(f"target: ≤ {TARGET_TURN_US:.0f} µs a turn beyond the bare framework: {verdict}")


if __name__ == "__main__":
    main()
