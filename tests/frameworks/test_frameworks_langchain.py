"""LangChain beyond the scenarios: handler and middleware, hand-made programs, internal errors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import sojourn
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_core.tracers import context as tracers
from recorded_programs import checked_programs
from scenarios_langchain import ASK, agent, model_at, said, use
from sojourn.testing import FakeServer
from sojourn_integrations import langchain


def init(server: FakeServer, *script: object) -> None:
    server.script = list(script)
    sojourn.init(server.url, probe_timeout_s=5)


def shape(server: FakeServer):
    """Programs as (name, parent's name, status, nodes, tools)."""
    programs = checked_programs(server)
    names = {id: each.start.name for id, each in programs.items()}
    return [
        (
            each.start.name,
            names.get(each.start.parent_program_id),
            each.status,
            each.nodes,
            [(fact.tool, fact.status) for fact in each.tools],
        )
        for each in programs.values()
    ]


# ---- handler and middleware


@pytest.mark.parametrize("sync", [True, False])
def test_handler_and_middleware_report_each_call_once(server: FakeServer, sync: bool) -> None:
    init(server, [use("upper"), use("upper"), use("nope")], "done")
    made = agent(server.base_url, "m", middleware=[langchain.Middleware()])
    result = made.invoke(ASK) if sync else asyncio.run(made.ainvoke(ASK))
    assert said(result)[-1] == ("ai", "done")
    ((name, parent, status, nodes, calls),) = shape(server)
    assert (name, parent, status, nodes) == ("agent", None, "ok", ("model", "model"))
    assert calls == [("nope", "error"), ("upper", "ok"), ("upper", "ok")]  # callbacks alone miss the first


def test_a_handler_given_by_hand_needs_no_patch(server: FakeServer) -> None:
    init(server, use("ask"), use("upper"), "inner", "done")
    sojourn.uninstrument("langchain", "langgraph")
    assert not {"langchain", "langgraph"} & set(sojourn.stats().instrumented)
    inner = agent(server.base_url, "m", name="inner")

    @tool
    def ask(text: str) -> str:
        """Asks."""
        return str(inner.invoke(ASK)["messages"][-1].content)

    made = agent(server.base_url, "m", extra=(ask,), name="outer")
    made.with_config({"callbacks": [langchain.Handler()]}).invoke(ASK)
    assert shape(server) == [
        ("outer", None, "ok", ("model", "model"), [("ask", "ok")]),
        ("inner", "outer", "ok", ("model", "model"), [("upper", "ok")]),
    ]


# ---- what is a program


def test_a_chain_with_a_name_is_a_program(server: FakeServer) -> None:
    init(server, "one", "two")
    llm = model_at(server.base_url, "m")
    chain = (ChatPromptTemplate.from_messages([("user", "{x}")]) | llm).with_config(run_name="summary")
    chain.invoke({"x": "hi"})
    with sojourn.program("mine"):
        chain.invoke({"x": "hi"})
    assert [(name, nodes) for name, _, _, nodes, _ in shape(server)] == [
        ("summary", (None,)),
        ("mine", (None,)),
    ]


X = [{"x": "a"}, {"x": "b"}]
BATCHES = {
    "batch of one": lambda chain: [chain.with_config(run_name="chain").batch([each]) for each in X],
    "abatch": lambda chain: asyncio.run(chain.with_config(run_name="chain").abatch(X)),
    "fallbacks": lambda chain: chain.with_fallbacks([chain]).with_config(run_name="chain").batch(X),
    "named in fallbacks": lambda chain: chain.with_config(run_name="chain").with_fallbacks([chain]).batch(X),
    "retry": lambda chain: asyncio.run(chain.with_retry().with_config(run_name="chain").abatch(X)),
    "map": lambda chain: chain.with_config(run_name="chain").map().invoke(X),
}


@pytest.mark.parametrize("ask", BATCHES.values(), ids=BATCHES)
def test_each_input_of_a_batch_is_a_program_with_its_request(server: FakeServer, ask: Any) -> None:
    init(server, "one", "two")
    ask(ChatPromptTemplate.from_template("{x}") | model_at(server.base_url, "m"))
    assert shape(server) == [("chain", None, "ok", (None,), [])] * 2


# ---- ours below theirs


def test_uninstrument_puts_everything_back(server: FakeServer) -> None:
    hooks = list(tracers._configure_hooks)
    init(server, "done", "done")
    assert len(tracers._configure_hooks) == len(hooks) + 1
    sojourn.uninstrument("langgraph")
    assert len(tracers._configure_hooks) == len(hooks) + 1  # langchain still wants it
    sojourn.uninstrument("langchain")
    assert tracers._configure_hooks == hooks
    agent(server.base_url, "m").invoke(ASK)
    assert server.requests[0].context.sojourn.implicit
    sojourn.instrument("langchain")
    sojourn.instrument("langchain")
    assert len(tracers._configure_hooks) == len(hooks) + 1
