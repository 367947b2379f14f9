"""Adapters with user code: kinds of functions, runs within runs, retained references."""

from __future__ import annotations

import asyncio
import gc
import operator
from typing import Annotated, Any, TypedDict

import pytest
import sojourn
from langgraph.graph import StateGraph
from langgraph.pregel import Pregel
from recorded_programs import recorded_programs
from sojourn.testing import FakeServer

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
