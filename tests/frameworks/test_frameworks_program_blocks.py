"""``with sojourn.program()`` and ``with p.here()`` in user code that a framework runs: the innermost wins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypedDict

import openai
import pytest
import sojourn
from langchain_core.tools import tool
from langgraph.graph import StateGraph
from sojourn.testing import FakeServer, ToolUse

pytestmark = pytest.mark.timeout(120)


class Plain(TypedDict):
    """A state."""

    x: str


def one_node(name: str, node: Callable[[Plain], Any]) -> Any:
    builder = StateGraph(Plain)
    builder.add_node("only", node)
    builder.set_entry_point("only")
    builder.set_finish_point("only")
    return builder.compile(name=name)


class UserCode:
    """Code that opens programs of its own and asks a model inside and after them."""

    def __init__(self, server: FakeServer) -> None:
        self.server = server
        self.opened: list[str] = []

    @contextmanager
    def blocks(self, kind: str) -> Iterator[None]:
        if kind == "program":
            with sojourn.program("mine", parent=None) as mine:
                self.opened.append(mine.id)
                yield
            return
        job = sojourn.program("job", parent=None).make().start()
        with job.here():
            self.opened.append(job.id)
            yield
        job.end()

    def run(self) -> str:
        with openai.OpenAI(base_url=self.server.base_url, api_key="none") as client:
            for kind in ("program", "here"):
                with self.blocks(kind):
                    client.chat.completions.create(model="tiny", messages=[])
                    one_node("third", lambda state: self.ask(client)).invoke({"x": ""})
                client.chat.completions.create(model="tiny", messages=[])
        return "ok"

    async def arun(self) -> str:
        return self.run()

    def ask(self, client: openai.OpenAI) -> dict[str, str]:
        client.chat.completions.create(model="tiny", messages=[])
        return {"x": ""}

    def check(self, child: str) -> None:
        """Check that requests in a block belong to its program, and requests after it to ``child``."""
        asked = [request.context for request in self.server.requests if not request.body["messages"]]
        mine, job = self.opened
        ours = [each.program_id for each in asked if each.parent_program_id != mine]
        assert sojourn.flush(60)
        names = {
            start.program_id: start.name for start in self.server.program_events() if hasattr(start, "name")
        }
        assert [names.get(each) for each in ours] == ["mine", "mine", child, "job", "job", child]
        assert [ours[0], ours[3]] == [mine, job]
        assert sojourn.stats()["resolver_error"] == 0


@pytest.fixture
def code(server: FakeServer) -> UserCode:
    sojourn.init(server.url, probe_timeout_s=5)
    return UserCode(server)


@pytest.mark.parametrize("around", [False, True])
def test_in_a_graph_inside_a_tool(code: UserCode, around: bool) -> None:
    @tool
    def research(question: str) -> str:
        """Looks."""
        return one_node("inner", lambda state: {"x": code.run()}).invoke({"x": question})["x"]

    outer = one_node("outer", lambda state: {"x": research.invoke({"question": "why"})})
    if around:
        with sojourn.program("all"):
            assert outer.invoke({"x": ""}) == {"x": "ok"}
    else:
        assert outer.invoke({"x": ""}) == {"x": "ok"}
    code.check("inner")


async def test_in_an_agent_of_openai_used_as_a_tool(server: FakeServer, code: UserCode) -> None:
    agents = pytest.importorskip("agents")
    from openai_agents_fixtures import OpenAIAgents

    server.script = lambda request: answers.pop(0) if request.body["messages"] else "hi"
    answers: list[Any] = [ToolUse("ask", {"input": "go"}), ToolUse("look"), "found", "done"]
    factory = OpenAIAgents(server.base_url, "tiny")
    look = agents.function_tool(code.arun, name_override="look", description_override="Looks.")
    expert = factory.agent("expert", look)
    desk = factory.agent("desk", expert.as_tool(tool_name="ask", tool_description="Asks."))
    async with factory.client:
        await agents.Runner.run(desk, "Go.")
    code.check("expert")
