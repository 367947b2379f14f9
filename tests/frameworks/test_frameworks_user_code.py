"""Adapters with user code: kinds of functions, runs within runs, retained references."""

from __future__ import annotations

import asyncio
import gc
import inspect
import operator
import os
import subprocess
import sys
from typing import Annotated, Any, TypedDict

import pytest
import sojourn
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from recorded_programs import recorded_programs
from scenarios_langchain import model_at
from sojourn.testing import FakeServer

KINDS = (inspect.isgeneratorfunction, inspect.isasyncgenfunction, inspect.iscoroutinefunction)


def kinds(owner: object) -> list[tuple[bool, ...]]:
    methods = ("stream", "astream", "batch", "abatch")
    return [tuple(kind(getattr(owner, name)) for kind in KINDS) for name in methods]


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


# ---- forks while another thread holds a lock


FORKS = {
    "langgraph": (
        "from sojourn_integrations.program_cache import ProgramCache\n"
        "kept = ProgramCache()\n"
        "program = sojourn.program('a').make().start()\n"
        "kept.keep(program.id, program)\n"
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


# ---- threads of LangGraph's, from threads of Python's
