"""Adapters with user code: kinds of functions, runs within runs, retained references."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import operator
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict

import pytest
import sojourn
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from recorded_programs import recorded_programs
from scenarios_langchain import model_at
from sojourn.monkey_patches import first_anext
from sojourn.testing import FakeServer
from sojourn_integrations import langchain
from sojourn_integrations.autogen import run_scopes as autogen_runs
from sojourn_integrations.autogen import tool_calls as autogen_tools
from sojourn_integrations.langchain import callback_handler
from sojourn_integrations.langchain.thread_program_ids import thread_program_id

KINDS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction)


class Plain(TypedDict):
    """A state."""

    x: int


def counting(saver: Any = None) -> Pregel:
    builder = StateGraph(Plain)
    builder.add_node("count", lambda state: {"x": state["x"] + 1})
    builder.set_entry_point("count")
    builder.set_finish_point("count")
    return builder.compile(checkpointer=saver)


def kinds(owner: object) -> list[tuple[bool, ...]]:
    methods = ("stream", "astream", "batch", "abatch")
    return [tuple(kind(getattr(owner, name)) for kind in KINDS) for name in methods]


@pytest.mark.parametrize("one_object", [False, True])
def test_a_graphs_methods_stay_functions_of_their_kind(server: FakeServer, one_object: bool) -> None:
    before = kinds(Pregel)
    sojourn.init(server.url, probe_timeout_s=5)
    if one_object:
        sojourn.uninstrument("langgraph")
    graph = sojourn.wrap(counting()) if one_object else counting()
    assert kinds(graph) == before
    # LangChain asks: what is no coroutine function is not awaited.
    assert asyncio.run(RunnableLambda(graph.abatch).ainvoke([{"x": 1}])) == [{"x": 2}]


# ---- runs that callbacks of other kinds stand around


def test_a_chain_inside_a_retriever_belongs_to_the_program(server: FakeServer) -> None:
    class Asking(BaseRetriever):
        """As LangChain's multi-query retriever: a chain phrases the question anew."""

        chain: Any

        def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
            said = self.chain.invoke(query, config={"callbacks": run_manager.get_child()})
            return [Document(said.content)]

    server.script = ["found"]
    sojourn.init(server.url, probe_timeout_s=5)
    retriever = Asking(chain=RunnableLambda(str.strip) | model_at(server.base_url, "tiny"))

    def looks(question: str) -> str:
        return retriever.invoke(question)[0].page_content

    assert RunnableLambda(looks).invoke(" why? ") == "found"
    assert sojourn.flush(60)
    (program,) = recorded_programs(server).values()
    assert (program.start.name, program.status, len(program.requests)) == ("looks", "ok", 1)


# ---- streams whose event loop is gone


def first_item(stream: AsyncGenerator[Any, None]) -> None:
    """As a worker that makes a loop for each job, and leaves what the job broke off."""
    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(anext(stream))
    finally:
        loop.close()


def streams_of(framework: str, server: FakeServer) -> AsyncGenerator[Any, None]:
    if framework == "langgraph":
        return counting().astream({"x": 1}, stream_mode=["values", "updates"])
    from autogen_agentchat.agents import AssistantAgent
    from autogen_agentchat.teams import RoundRobinGroupChat
    from autogen_ext.models.openai import OpenAIChatCompletionClient
    from scenarios_autogen import INFO

    client = OpenAIChatCompletionClient(
        model="tiny", base_url=server.base_url, api_key="none", model_info=INFO
    )
    alice = AssistantAgent("alice", client)
    return (alice if framework == "agent" else RoundRobinGroupChat([alice])).run_stream(task="Go.")


@pytest.mark.filterwarnings("ignore")  # that Python has nobody to close them by is the point
@pytest.mark.parametrize("framework", ["langgraph", "agent", "team"])
def test_a_stream_left_with_its_loop_ends_its_program(
    server: FakeServer, framework: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)  # pytest's own keeps what Python complains of
    sojourn.init(server.url, probe_timeout_s=5)
    stream = streams_of(framework, server)
    first_item(stream)
    del stream
    gc.collect()
    assert sojourn.current_program() is None, "whoever runs meanwhile is no part of it"
    assert sojourn.flush(60)
    (program,) = recorded_programs(server).values()
    assert program.status == "cancelled"
    assert not sojourn.runtime.session().heartbeats.promised
    assert len(callback_handler.tree) == 0
    assert not autogen_runs._teams


class Steps(TypedDict):
    """A state."""

    said: Annotated[list[str], operator.add]


def two_steps(wrapped: bool) -> Pregel:
    async def say(state: Steps) -> dict[str, list[str]]:
        return {"said": ["hi"]}

    builder = StateGraph(Steps)
    builder.add_node("one", say)
    builder.add_node("two", say)
    builder.set_entry_point("one")
    builder.add_edge("one", "two")
    builder.set_finish_point("two")
    return sojourn.wrap(builder.compile()) if wrapped else builder.compile()


@pytest.mark.parametrize("patched", [False, True])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("held", [False, True])
def test_a_stream_left_at_the_end_of_its_loop_says_nothing(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, held: bool, wrapped: bool, patched: bool
) -> None:
    said: list[Any] = []
    monkeypatch.setattr("sys.unraisablehook", said.append)
    sojourn.init(server.url, probe_timeout_s=5)
    if not patched:
        sojourn.uninstrument("langgraph", "langchain")
    graph, streams = two_steps(wrapped), []

    async def leave_early() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: said.append(context))
        if held:
            streams.append(graph.astream({"said": []}))
            await anext(streams[0])
            return
        async for _ in graph.astream({"said": []}):
            break

    asyncio.run(leave_early())
    streams.clear()
    gc.collect()
    assert said == []
    assert sojourn.flush(60)
    assert [each.status for each in recorded_programs(server).values()] == ["cancelled"] * (
        wrapped or patched
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_stream_of_a_graph_is_an_async_generator(server: FakeServer, wrapped: bool) -> None:
    sojourn.init(server.url, probe_timeout_s=5)

    async def read() -> list[Any]:
        stream = two_steps(wrapped).astream({"said": []}, interrupt_after=["two"])
        assert inspect.isasyncgen(stream)
        async with contextlib.aclosing(stream) as chunks:
            return [chunk async for chunk in chunks]

    assert [list(chunk) for chunk in asyncio.run(read())][:2] == [["one"], ["two"]]


def test_the_first_step_of_an_inner_generator_leaves_the_loops_hooks() -> None:
    async def numbers() -> AsyncGenerator[int, None]:
        yield 1

    async def read() -> None:
        before = sys.get_asyncgen_hooks()
        inner = numbers()
        assert await first_anext(inner) == 1
        assert sys.get_asyncgen_hooks() == before
        assert inner not in asyncio.get_running_loop()._asyncgens
        assert await first_anext(aiter(inner), None) is None

    asyncio.run(read())


# ---- forks while another thread holds a lock


FORKS = {
    "langgraph": (
        "from sojourn_integrations.langchain.interrupted_programs import InterruptedPrograms\n"
        "kept = InterruptedPrograms()\n"
        "program = sojourn.program('a').make().start()\n"
        "kept.keep(program, [])\n"
        "lock, use = kept._lock, lambda: kept.take(program.id) is None and len(kept) == 0\n"
    ),
    "autogen": (
        "from sojourn_integrations import autogen\n"
        "lock, use = autogen._lock, lambda: autogen.unpatch() is None\n"
    ),
}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("framework", FORKS)
def test_a_forked_child_waits_for_no_lock_of_a_thread_it_lacks(framework: str) -> None:
    code = (
        "import os, signal, threading, sojourn\n"
        f"{FORKS[framework]}"
        "held, over = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with lock:\n"
        "        held.set()\n"
        "        over.wait()\n"
        "threading.Thread(target=hold, daemon=True).start()\n"
        "held.wait()\n"
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    signal.alarm(10)\n"
        "    os._exit(0 if use() else 1)\n"
        "assert os.waitpid(pid, 0)[1] == 0\n"
        "over.set()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# ---- results of the user's own making


class Odd(dict):
    """A result that cannot be asked anything."""

    def __getattribute__(self, name: str) -> Any:
        raise LookupError(name)


def by_middleware(odd: Odd) -> Any:
    request = SimpleNamespace(tool_call={"name": "look", "id": "c1"})
    return langchain.Middleware().wrap_tool_call(request, lambda _: odd)


def by_async_middleware(odd: Odd) -> Any:
    async def handler(_: Any) -> Odd:
        return odd

    request = SimpleNamespace(tool_call={"name": "look", "id": "c1"})
    return asyncio.run(langchain.Middleware().awrap_tool_call(request, handler))


def by_code_executor(odd: Odd) -> Any:
    async def execute(agent: Any, blocks: Any) -> Odd:
        return odd

    return asyncio.run(autogen_tools.execute_code_block(execute, lambda: True)(None, []))


@pytest.mark.parametrize("play", [by_middleware, by_async_middleware, by_code_executor])
def test_what_cannot_be_read_of_a_result_is_not_raised(server: FakeServer, play: Any) -> None:
    sojourn.init(server.url, probe_timeout_s=5)
    odd = Odd()
    with sojourn.program():
        assert play(odd) is odd
    assert sojourn.flush(60)
    (program,) = recorded_programs(server).values()
    assert [stop.status for stop in program.tool_stops] == ["ok"]
    assert sojourn.stats()["internal_error"] == 1


# ---- threads of LangGraph's, from threads of Python's


def test_a_checkpointer_used_by_two_threads_at_first_has_one_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    saver, random, meanwhile = InMemorySaver(), os.urandom, []

    def urandom(count: int) -> bytes:
        if not meanwhile:
            meanwhile.append(None)
            meanwhile[0] = thread_program_id("graph", saver, "1", "")
        return random(count)

    monkeypatch.setattr("os.urandom", urandom)
    ids = {thread_program_id("graph", saver, "1", "") for _ in range(2)}
    assert ids == set(meanwhile)


def test_two_runs_of_a_thread_that_begin_at_once_are_two_programs(server: FakeServer) -> None:
    sojourn.init(server.url, probe_timeout_s=5)
    saver = InMemorySaver()
    graph = counting(saver)
    both = threading.Barrier(2)

    def slow_graph(*_: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(1)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(2) as pool:
        patch.setattr("sojourn_integrations.langgraph.graph_runs.graph_of", slow_graph)
        config = {"configurable": {"thread_id": "1"}}
        list(pool.map(lambda x: graph.invoke({"x": x}, config), range(2)))
    assert sojourn.flush(60)
    programs = recorded_programs(server).values()
    assert [(each.status, each.late) for each in programs] == [("ok", [])] * 2
    assert len(callback_handler.tree) == 0
    assert not callback_handler.tree._open_ids
