"""Adapters with user code: kinds of functions, runs within runs, retained references."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import threading
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, TypedDict

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
        patch.setattr("sojourn_integrations.langgraph.graph_of", slow_graph)
        config = {"configurable": {"thread_id": "1"}}
        list(pool.map(lambda x: graph.invoke({"x": x}, config), range(2)))
    assert sojourn.flush(60)
    programs = recorded_programs(server).values()
    assert [(each.status, each.late) for each in programs] == [("ok", [])] * 2
    assert len(callback_handler.tree) == 0
    assert not callback_handler.tree._open_ids
