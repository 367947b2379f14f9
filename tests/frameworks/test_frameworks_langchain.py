"""LangChain beyond the scenarios: handler and middleware, hand-made programs, internal errors."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version

import pytest
import sojourn
from langchain.agents import create_agent
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import StructuredTool, ToolException, tool
from langchain_core.tracers import context as tracers
from recorded_programs import problems, recorded_programs
from scenarios_langchain import ASK, ToolBroke, agent, model_at, said, tools, use
from sojourn.testing import FakeServer
from sojourn.valid_ids_and_names import name_of
from sojourn.wire_codec import MAX_EVENT_NAME_BYTES
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_integrations import langchain
from sojourn_integrations.langchain import callback_handler, tool_call_middleware
from sojourn_integrations.langchain.run_tree import MAX_ROOTS, RunTree

OLD = version("langchain-core").startswith("1.0.")


@pytest.fixture(autouse=True)
def nothing_left_over():
    """Every test ends with an empty tree and no fault of ours, unless it says otherwise."""
    yield
    sojourn.shutdown()
    assert len(callback_handler.tree) == 0


def init(server: FakeServer, *script: object) -> None:
    server.script = list(script)
    sojourn.init(server.url, probe_timeout_s=5)


def recorded(server: FakeServer):
    """What arrived, checked for all that must hold."""
    assert sojourn.flush(60)
    assert sojourn.stats()["internal_error"] == 0
    assert sojourn.stats()["resolver_error"] == 0
    programs = recorded_programs(server)
    assert problems(server, programs, []) == []
    return programs


def shape(server: FakeServer):
    """Programs as (name, parent's name, status, nodes, tools)."""
    programs = recorded(server)
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


def test_middleware_sees_arguments_that_do_not_validate_and_errors(server: FakeServer) -> None:
    init(server, use("upper")._replace(arguments={"wrong": 1}), use("broken"))
    with pytest.raises(ToolBroke):
        agent(server.base_url, "m", middleware=[langchain.Middleware()]).invoke(ASK)
    ((*_, status, _, calls),) = shape(server)
    assert status == "error"
    assert calls == [("broken", "error"), ("upper", "error")]


def test_middleware_alone_reports_to_the_program_around_it(server: FakeServer) -> None:
    init(server, use("upper"), "done")
    sojourn.uninstrument("langchain", "langgraph")
    made = agent(server.base_url, "m", middleware=[langchain.Middleware()])
    with sojourn.program("mine"):
        made.invoke(ASK)
    ((name, _, _, _, calls),) = shape(server)
    assert (name, calls) == ("mine", [("upper", "ok")])


def test_middleware_cancelled(server: FakeServer) -> None:
    init(server, use("wait"))

    async def run() -> None:
        begun = asyncio.Event()

        @tool
        async def wait(text: str) -> str:
            """Waits."""
            begun.set()
            await asyncio.sleep(60)
            return text

        made = agent(server.base_url, "m", extra=(wait,), middleware=[langchain.Middleware()])
        task = asyncio.create_task(made.ainvoke(ASK))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    ((*_, status, _, calls),) = shape(server)
    assert (status, calls) == ("cancelled", [("wait", "cancelled")])


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


def test_several_handlers_report_everything_once(server: FakeServer) -> None:
    init(server, use("upper"), "done")
    handlers = [langchain.Handler(), langchain.Handler()]
    agent(server.base_url, "m").with_config({"callbacks": handlers}).invoke(
        ASK, {"callbacks": [langchain.Handler()]}
    )
    assert shape(server) == [("agent", None, "ok", ("model", "model"), [("upper", "ok")])]


def test_wrap_takes_runnables_that_can_be_agents_only(server: FakeServer) -> None:
    init(server, "one")
    sojourn.uninstrument("langchain", "langgraph")
    llm = model_at(server.base_url, "m")
    assert langchain.wrap(llm) is None
    assert langchain.wrap(tools()[0]) is None
    chain = sojourn.wrap(
        (ChatPromptTemplate.from_messages([("user", "{x}")]) | llm).with_config(run_name="mine")
    )
    assert chain.invoke({"x": "hi"}).content == "one"
    assert [each[0] for each in shape(server)] == ["mine"]


# ---- what is a program


def test_a_bare_model_and_a_nameless_chain_are_no_programs(server: FakeServer) -> None:
    init(server, "one", "two", "three", "four")
    llm = model_at(server.base_url, "m")
    chain = ChatPromptTemplate.from_messages([("user", "{x}")]) | llm
    llm.invoke("hi")
    chain.invoke({"x": "hi"})
    contexts = [request.context for request in server.requests]
    assert all(each.sojourn.implicit for each in contexts)
    server.forget()
    with sojourn.program("mine") as mine:
        llm.invoke("hi")
        chain.invoke({"x": "hi"})
    assert {request.context.program_id for request in server.requests} == {mine.id}


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


def test_agents_one_after_the_other_are_the_program_around_them(server: FakeServer) -> None:
    init(server, use("upper"), "one", "two")
    made = agent(server.base_url, "m")
    with sojourn.program("mine"):
        made.invoke(ASK)
        made.invoke(ASK)
    assert shape(server) == [("mine", None, "ok", ("model",) * 3, [("upper", "ok")])]


def test_of_agents_at_the_same_time_one_is_the_program_around_them(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "one"
    server.reply_delay_s = 0.05
    made = agent(server.base_url, "m")

    async def run() -> None:
        with sojourn.program("mine"):
            await asyncio.gather(*(made.ainvoke(ASK) for _ in range(3)))

    asyncio.run(run())
    first, *others = shape(server)
    assert first == ("mine", None, "ok", ("model",), [])
    assert others == [("agent", "mine", "ok", ("model",), [])] * 2


def test_an_agent_in_a_hand_made_tool_call_is_a_child(server: FakeServer) -> None:
    init(server, "inner")
    with sojourn.program("mine"), sojourn.tool_call("delegate", "call-7"):
        agent(server.base_url, "m").invoke(ASK)
    programs = recorded(server)
    child = next(each.start for each in programs.values() if each.start.name == "agent")
    assert child.call_id == "call-7"
    assert programs[child.parent_program_id].start.name == "mine"


def test_a_program_opened_in_a_tool_is_a_child_in_that_call(server: FakeServer) -> None:
    init(server, use("ask", "call-9"), "inner", "done")
    inner = agent(server.base_url, "m", name="inner")

    @tool
    def ask(text: str) -> str:
        """Asks."""
        with sojourn.program("by-hand"):
            return str(inner.invoke(ASK)["messages"][-1].content)

    agent(server.base_url, "m", extra=(ask,), name="outer").invoke(ASK)
    assert shape(server) == [
        ("outer", None, "ok", ("model", "model"), [("ask", "ok")]),
        ("by-hand", "outer", "ok", ("model",), []),
    ]
    child = next(e for e in server.program_events() if isinstance(e, ProgramStart) and e.name == "by-hand")
    assert child.call_id == "call-9"


def test_an_opened_program_is_the_agent_too(server: FakeServer) -> None:
    init(server, "one")
    mine = sojourn.program("notebook").make().start()
    from sojourn.program import process_programs

    process_programs.append(mine)
    try:
        agent(server.base_url, "m").invoke(ASK)
    finally:
        process_programs.remove(mine)
        mine.end()
    assert [each[0] for each in shape(server)] == ["notebook"]


# ---- tools


def test_how_tools_end(server: FakeServer) -> None:
    @tool
    def slow(text: str) -> str:
        """Takes too long."""
        raise TimeoutError(text)

    @tool
    def sorry(text: str) -> str:
        """Says that it failed."""
        raise ToolException("no")

    sorry.handle_tool_error = True
    init(server, use("sorry"), use("slow"))
    with pytest.raises(TimeoutError):
        agent(server.base_url, "m", extra=(slow, sorry)).invoke(ASK)
    ((*_, status, _, calls),) = shape(server)
    assert (status, calls) == ("error", [("slow", "timeout"), ("sorry", "error")])


@pytest.mark.parametrize("name", ["x" * 10_000, "prüfen_检查_🔧"])
def test_tools_of_any_name(server: FakeServer, name: str) -> None:
    odd = StructuredTool.from_function(lambda text: text, name=name, description="odd")
    init(server)
    with sojourn.program("mine"):
        assert odd.invoke({"text": "one"}) == "one"
    recorded(server)
    (start,) = [event for event in server.program_events() if isinstance(event, ToolStart)]
    assert start.tool == name_of(name)
    assert len(start.tool.encode()) <= MAX_EVENT_NAME_BYTES


def test_call_ids_are_the_models_in_parallel_with_equal_arguments(server: FakeServer) -> None:
    ids = [f"call-{i}" for i in range(8)]
    init(server, [use("upper", id) for id in ids], "done")
    agent(server.base_url, "m").invoke(ASK)
    recorded(server)
    starts = [event.call_id for event in server.program_events() if isinstance(event, ToolStart)]
    assert sorted(starts) == ids


def test_a_thousand_tools_at_once(server: FakeServer) -> None:
    init(server, [use("count", f"call-{i}") for i in range(1000)], "done")
    result = asyncio.run(agent(server.base_url, "m").ainvoke(ASK))
    assert len(result["messages"]) == 1003
    ((*_, status, nodes, calls),) = shape(server)
    assert (status, nodes, calls) == ("ok", ("model", "model"), [("count", "ok")] * 1000)


def test_agents_fifty_deep(server: FakeServer) -> None:
    depth = 50
    init(server, *[use("ask")] * (depth - 1), *["done"] * depth)

    def make(level: int):
        @tool
        def ask(text: str) -> str:
            """Asks the next."""
            return str(make(level + 1).invoke(ASK)["messages"][-1].content)

        return create_agent(model_at(server.base_url, "m"), [ask], name=f"level-{level}")

    make(0).invoke(ASK)
    programs = recorded(server)
    assert len(programs) == depth
    parents = {each.start.name: each.start.parent_program_id for each in programs.values()}
    ids = {each.start.name: id for id, each in programs.items()}
    assert [parents[f"level-{n}"] for n in range(1, depth)] == [ids[f"level-{n}"] for n in range(depth - 1)]
    assert all(each.nodes[0] == "model" for each in programs.values())
    assert all(each.start.call_id for each in programs.values() if each.start.parent_program_id)


@pytest.mark.skipif(OLD, reason="ToolRetryMiddleware came later")
def test_a_retried_tool_is_one_call_to_our_middleware_around_it(server: FakeServer) -> None:
    from langchain.agents.middleware import ToolRetryMiddleware

    tries = []

    @tool
    def flaky(text: str) -> str:
        """Works the third time."""
        tries.append(text)
        if len(tries) < 3:
            raise ToolBroke
        return "worked"

    init(server, use("flaky"), "done")
    retry = ToolRetryMiddleware(max_retries=3, initial_delay=0.001, jitter=False)
    agent(server.base_url, "m", extra=(flaky,), middleware=[langchain.Middleware(), retry]).invoke(ASK)
    assert len(tries) == 3
    assert shape(server)[0][4] == [("flaky", "ok")]


# ---- threads, tasks, cancellation


def test_agents_in_many_threads(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "done" if len(request.body["messages"]) > 2 else use("upper")
    made = agent(server.base_url, "m")
    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda _: said(made.invoke(ASK)), range(24)))
    assert len({str(each) for each in results}) == 1
    assert shape(server) == [("agent", None, "ok", ("model", "model"), [("upper", "ok")])] * 24


def test_agents_in_one_event_loop(server: FakeServer) -> None:
    init(server)
    server.script = lambda request: "done" if len(request.body["messages"]) > 2 else use("count")

    async def run() -> None:
        one, two = (agent(server.base_url, "m", name=name) for name in ("one", "two"))
        await asyncio.gather(*(made.ainvoke(ASK) for made in (one, two) * 4))

    asyncio.run(run())
    found = shape(server)
    assert sorted(each[0] for each in found) == ["one"] * 4 + ["two"] * 4
    assert {str(each[1:]) for each in found} == {str((None, "ok", ("model", "model"), [("count", "ok")]))}


@pytest.mark.parametrize("threads", [True, False])
def test_a_tool_with_threads_of_its_own(server: FakeServer, threads: bool) -> None:
    """LangChain's context does not reach bare threads; ``threads=True`` carries what it says."""
    server.script = [use("ask", "call-3"), "asked", "inner", "done"]
    sojourn.init(server.url, probe_timeout_s=5, threads=threads)
    llm = model_at(server.base_url, "m")

    @tool
    def ask(text: str) -> str:
        """Asks in a thread."""
        with ThreadPoolExecutor(1) as pool:
            pool.submit(llm.invoke, "hi").result()
            pool.submit(agent(server.base_url, "m", name="inner").invoke, ASK).result()
        return text

    agent(server.base_url, "m", extra=(ask,), name="outer").invoke(ASK)
    assert sojourn.flush(60)
    outer, asked, inner, last = (request.context for request in server.requests)
    assert outer.program_id == last.program_id
    assert (asked.program_id == outer.program_id) is threads
    assert asked.sojourn.implicit is not threads
    assert (inner.parent_program_id == outer.program_id) is threads
    (child,) = [e for e in server.program_events() if isinstance(e, ProgramStart) and e.name == "inner"]
    assert child.call_id == ("call-3" if threads else None)


def test_cancelled_during_the_model(server: FakeServer) -> None:
    init(server, "never")
    server.reply_delay_s = 30

    async def run() -> None:
        task = asyncio.create_task(agent(server.base_url, "m").ainvoke(ASK))
        while not server.requests:
            await asyncio.sleep(0.005)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())
    assert shape(server) == [("agent", None, "cancelled", ("model",), [])]


# ---- ours below theirs


class Recorder(BaseCallbackHandler):
    """A user's own callback."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_chain_start(self, serialized, inputs, **kwargs) -> None:
        self.seen.append(f"chain {kwargs.get('name')}")

    def on_tool_start(self, serialized, input_str, **kwargs) -> None:
        self.seen.append(f"tool {serialized['name']} {input_str}")

    def on_chat_model_start(self, serialized, messages, **kwargs) -> None:
        self.seen.append(f"model {len(messages[0])}")


def test_the_users_callbacks_see_what_they_saw(server: FakeServer) -> None:
    def seen() -> list[str]:
        server.script = [use("upper"), "done"]
        recorder = Recorder()
        agent(server.base_url, "m").invoke(ASK, {"callbacks": [recorder]})
        return recorder.seen

    before = seen()
    init(server)
    assert seen() == before
    assert any(line.startswith("tool upper") for line in before)


def test_the_users_extra_body_wins(server: FakeServer) -> None:
    init(server, "done")
    theirs = {"vllm_xargs": {"agentic_context": "mine"}, "top_k": 3}
    create_agent(model_at(server.base_url, "m", extra_body=theirs), []).invoke(ASK)
    assert server.requests[0].body["vllm_xargs"] == {"agentic_context": "mine"}
    assert server.requests[0].body["top_k"] == 3


@pytest.mark.parametrize("method", ["chain_started", "chain_ended", "tool_started", "tool_ended", "resolve"])
def test_internal_errors_never_reach_the_user(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, method: str
) -> None:
    server.script = [use("upper"), "done"] * 3
    plain = said(agent(server.base_url, "m").invoke(ASK))
    init(server, *[use("upper"), "done"] * 2)

    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("ours")

    monkeypatch.setattr(RunTree, method, broken)
    assert said(agent(server.base_url, "m", middleware=[langchain.Middleware()]).invoke(ASK)) == plain
    assert said(asyncio.run(agent(server.base_url, "m").ainvoke(ASK))) == plain
    assert sojourn.stats()["internal_error"] + sojourn.stats()["resolver_error"] > 0
    assert "ours" not in caplog.text
    monkeypatch.undo()
    for run in list(callback_handler.tree._runs.values()):
        callback_handler.tree._close(run)


def test_a_broken_middleware_scope_never_gets_out(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    init(server, use("upper"), "done")
    monkeypatch.setattr(tool_call_middleware, "_tool_call", lambda request: 1 / 0)
    made = agent(server.base_url, "m", middleware=[langchain.Middleware()])
    assert said(made.invoke(ASK))[-1] == ("ai", "done")
    assert sojourn.stats()["internal_error"] == 1


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


def test_an_unfamiliar_langchain_is_left_alone(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(tracers, "_configure_hooks")
    sojourn.init(server.url, probe_timeout_s=5)
    assert not {"langchain", "langgraph"} & set(sojourn.stats().instrumented)
    assert sojourn.stats()["attach_error"] == 2


def test_memory_is_bounded(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    from sojourn_integrations.langchain import run_tree

    init(server)
    monkeypatch.setattr(run_tree, "MAX_ROOTS", 10)
    tree = RunTree()
    for number in range(100):
        tree.chain_started(number, None, name="agent", kind=None, metadata={})
        tree.tool_started(f"t{number}", number, name="bash", call_id=f"c{number}")
    assert len(tree) == 20
    assert MAX_ROOTS > 1000
    sojourn.flush(5)
    events = server.program_events()
    assert sum(isinstance(event, ToolStop) and event.status == "cancelled" for event in events) == 90
    assert sum(isinstance(event, ProgramEnd) and event.status == "cancelled" for event in events) == 90


@tool
async def wait_long(text: str) -> str:
    """Waits."""
    await asyncio.sleep(60)
    return text


def test_a_cancelled_tool_outside_any_chain_ends_with_its_task(server: FakeServer) -> None:
    init(server)

    async def run() -> None:
        with sojourn.program("mine") as program:
            task = asyncio.create_task(wait_long.ainvoke({"text": "x"}))
            while not program.running_tools:
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (program.running_tools, len(callback_handler.tree)) == (set(), 0)

    asyncio.run(run())
    assert shape(server) == [("mine", None, "ok", (), [("wait_long", "cancelled")])]


def test_tools_outside_any_chain_are_dropped_with_their_program(server: FakeServer) -> None:
    """Their task may live as long as the process, as after ``asyncio.timeout``."""
    init(server)
    tree = callback_handler.tree

    async def run() -> None:
        with sojourn.program("other"):
            tree.tool_started("kept", None, name="bash", call_id="c0")
            with sojourn.program("mine"):
                task = asyncio.current_task()
                tree.tool_started("outer", None, name="bash", call_id="c1", task=task)
                tree.tool_started("inner", "outer", name="bash", call_id="c2")
                tree.chain_started("agent", "outer", name="agent", kind=None, metadata={})
            assert {tree.get(id) is not None for id in ("outer", "inner")} == {False}
            assert None not in (tree.get("agent"), tree.get("kept"))
            assert "_task_done" not in repr(task)
            tree.tool_ended("outer", "ok")  # the tool was alive, and no longer counts
            tree.chain_ended("agent", None)
            tree.tool_ended("kept", "ok")
        assert len(tree) == 0

    asyncio.run(run())
    assert sojourn.stats()["internal_error"] == 0


def test_a_turn_costs_less_than_the_limit(server: FakeServer) -> None:
    """Callbacks alone, without requests: 100 µs a turn is the limit for everything."""
    tree = RunTree()
    sojourn.init(server.url, probe_timeout_s=5)
    meta = {"langgraph_node": "model", "langgraph_checkpoint_ns": "model:1"}

    def turn(number: int) -> None:
        tree.chain_started((number, 1), 0, name="model", kind=None, metadata=meta)
        tree.chain_started((number, 2), (number, 1), name="RunnableSequence", kind=None, metadata=meta)
        tree.resolve((number, 2))
        tree.chain_ended((number, 2), None)
        tree.chain_ended((number, 1), None)
        tree.tool_started((number, 3), 0, name="bash", call_id=str(number))
        tree.tool_ended((number, 3), "ok")

    tree.chain_started(0, None, name="agent", kind=None, metadata={})
    best_s = 1.0
    for batch in range(20):
        started = time.perf_counter()
        for number in range(50):
            turn(batch * 50 + number)
        best_s = min(best_s, (time.perf_counter() - started) / 50)
    tree.chain_ended(0, None)
    assert best_s < 100e-6, f"{best_s * 1e6:.0f} µs"


IMPORT_ORDERS = {
    "before": "import langchain_core, langgraph.graph\nsojourn.init(url)",
    "after": "sojourn.init(url)\nimport langchain_core, langgraph.graph",
    "langgraph first": "sojourn.init(url)\nimport langgraph.graph",
    "create_agent first": "sojourn.init(url)\nfrom langchain.agents import create_agent",
    "prebuilt first": "sojourn.init(url)\nfrom langgraph.prebuilt import ToolNode",
    "between": "import langgraph.types\nsojourn.init(url)\nimport langgraph.graph",
}


@pytest.mark.parametrize("order", IMPORT_ORDERS)
def test_any_order_of_imports(server: FakeServer, order: str) -> None:
    code = (
        "import sys, sojourn\n"
        "assert not {'langchain_core', 'langgraph', 'langchain'} & set(sys.modules)\n"
        f"url = {server.url!r}\n{IMPORT_ORDERS[order]}\n"
        "assert {'langchain', 'langgraph'} <= set(sojourn.stats().instrumented)\n"
        "from langgraph.pregel import Pregel\n"
        "assert Pregel.stream.__wrapped__ and Pregel.batch.__wrapped__\n"
        "assert sojourn.stats()['attach_error'] == 0\n"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error::ImportWarning", "-c", code], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_langchain_core_alone_does_not_load_langgraph(server: FakeServer) -> None:
    code = (
        f"import sys, sojourn\nsojourn.init({server.url!r})\nimport langchain_core.runnables\n"
        "assert 'langgraph.pregel' not in sys.modules and 'langchain.agents' not in sys.modules\n"
        "assert 'langchain' in sojourn.stats().instrumented\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
