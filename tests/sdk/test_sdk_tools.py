"""Tool calls: times, statuses, and never in the way."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import functools
import subprocess
import time

import pytest
import sojourn
from sdk_records import told
from sojourn.program import current_context
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop


def calls(server):
    return told(server, ToolStart, ToolStop)


def test_a_call_is_timed_and_named(online):
    with (
        sojourn.program() as p,
        sojourn.tool_call("bash", "call-1", tool_class="pytest", expected_s=2) as call,
    ):
        assert p.running_tools == {"call-1"}
        time.sleep(0.02)
    assert call.program is p
    assert not p.running_tools
    start, stop = calls(online)
    assert (start.tool, start.tool_class, start.expected_s) == ("bash", "pytest", 2.0)
    assert (start.call_id, stop.call_id, stop.status) == ("call-1", "call-1", "ok")
    assert 0.02 <= stop.duration_s < 5


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("x"), "error"),
        (TimeoutError(), "timeout"),
        (subprocess.TimeoutExpired("x", 1), "timeout"),
        (asyncio.CancelledError(), "cancelled"),
        (KeyboardInterrupt(), "cancelled"),
        (SystemExit("mine"), "error"),
        (SystemExit(1), "error"),
        (SystemExit(0), "ok"),  # as click and typer end each command
        (SystemExit(), "ok"),
        # Control flow of LangGraph, CrewAI and mini-swe-agent: by name, and the base classes count.
        (type("NodeInterrupt", (type("GraphInterrupt", (Exception,), {}),), {})(), "cancelled"),
        (type("HumanFeedbackPending", (Exception,), {})(), "cancelled"),
        (type("ParentCommand", (Exception,), {})(), "ok"),
        (type("Submitted", (type("InterruptAgentFlow", (Exception,), {}),), {})(), "ok"),
    ],
)
def test_the_exception_sets_how_the_call_and_the_program_ended(online, error, status):
    with pytest.raises(type(error)) as caught, sojourn.program(), sojourn.tool_call("t"):
        raise error
    assert caught.value is error
    assert ends(online) == [status, "error" if status == "timeout" else status]


def test_a_call_may_run_again_and_inside_itself(online):
    call = sojourn.tool_call("bash", "c1", tool_class="pytest", expected_s=2.0)
    with sojourn.program() as p:
        with call as first:
            with call as twin:
                assert p.running_tools == {"c1", twin.call_id}
            assert p.running_tools == {"c1"}
        assert first is call
        assert not p.running_tools
        with call:
            assert p.running_tools == {"c1"}
        assert sojourn.current_program() is p
    starts = told(online, ToolStart)
    assert [e.call_id for e in starts] == ["c1", twin.call_id, "c1"]
    assert {(e.tool, e.tool_class, e.expected_s) for e in starts} == {("bash", "pytest", 2.0)}
    assert len(calls(online)) == 6


def test_a_status_set_by_hand_wins(online):
    with sojourn.program():
        with sojourn.tool_call("t") as call:
            call.status = "nonzero"
        with contextlib.suppress(RuntimeError), sojourn.tool_call("t") as call:
            call.status = "ok"  # e.g. an exception that means "done"
            raise RuntimeError
        with sojourn.tool_call("t") as call:
            call.status = "splendid"
    assert [e.status for e in told(online, ToolStop)] == ["nonzero", "ok", "ok"]
    assert sojourn.stats()["hint_invalid"] == 1


@pytest.mark.parametrize("expected_s", [-1, float("nan"), float("inf"), "soon"])
def test_a_senseless_estimate_is_dropped_and_counted(online, expected_s):
    with sojourn.program(), sojourn.tool_call("t", expected_s=expected_s):
        pass
    assert calls(online)[0].expected_s is None
    assert sojourn.stats()["hint_invalid"] == 1


def test_functions_of_every_kind_can_be_tools(online):
    @sojourn.tool
    def plain(a, *, b):
        "Doc."
        return a + b

    @sojourn.tool(name="search", tool_class="web")
    async def coroutine(a):
        await asyncio.sleep(0)
        return a

    @sojourn.tool()
    def generator():
        yield 1
        yield 2

    @sojourn.tool
    async def agenerator():
        yield 1

    async def drain():
        return [item async for item in agenerator()]

    with sojourn.program():
        assert (plain(1, b=2), plain.__name__, plain.__doc__) == (3, "plain", "Doc.")
        assert asyncio.run(coroutine(4)) == 4
        assert list(generator()) == [1, 2]
        assert asyncio.run(drain()) == [1]
    starts = told(online, ToolStart)
    assert [(e.tool, e.tool_class) for e in starts] == [
        ("plain", None), ("search", "web"), ("generator", None), ("agenerator", None),
    ]  # fmt: skip
    assert len(calls(online)) == 8


def test_ids_beyond_the_wire_become_their_hash_on_both_ends(online):
    with sojourn.program(), sojourn.tool_call("t", "x" * 257), sojourn.tool_call("t", ""):
        pass
    ids = [e.call_id for e in calls(online)]
    assert ids[0] == ids[3]
    assert ids[0].startswith("h-")
    assert ids[1] == ids[2]


# -- Decorated functions whose result still runs after they have returned: coroutines, generators and
# futures. And async generators that an event loop closes when it ends.


def passed_on(function):
    """As a decorator that retries or logs does it: a plain function around any kind of function."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def ends(server):
    return [e.status for e in told(server, ProgramEnd, ToolStop)]


def test_a_program_lasts_as_long_as_the_coroutine_that_a_plain_function_returns(online):
    @sojourn.program
    @passed_on
    async def agent():
        inside = sojourn.current_program()

        @sojourn.tool
        @passed_on
        async def work(n):
            await asyncio.sleep(0)
            return n, len(inside.running_tools), sojourn.current_program() is inside

        assert await work(7) == (7, 1, True)
        assert sojourn.current_program() is inside
        return inside.is_open, len(inside.running_tools)

    assert asyncio.run(agent()) == (True, 0)
    assert [type(event) for event in told(online)] == [ProgramStart, ToolStart, ToolStop, ProgramEnd]
    assert ends(online) == ["ok", "ok"]
    assert sojourn.current_program() is None
    assert sojourn.stats()["context_reset_failed"] == 0


def test_generators_that_a_plain_function_returns(online):
    @passed_on
    def items():
        sent = yield sojourn.current_program()
        yield sent

    @passed_on
    async def async_items():
        sent = yield sojourn.current_program()
        yield sent

    running = sojourn.program(items)()
    p = next(running)
    assert p.is_open
    assert sojourn.current_program() is None, "the consumer is outside"
    assert running.send("x") == "x"
    assert list(running) == []
    assert not p.is_open

    async def main():
        running = sojourn.program(async_items)()
        p = await anext(running)
        assert p.is_open
        assert sojourn.current_program() is None
        assert await running.asend("x") == "x"
        await running.aclose()
        assert not p.is_open

    asyncio.run(main())
    assert ends(online) == ["ok", "cancelled"]
    assert sojourn.stats()["context_reset_failed"] == 0


# ---- async generators and the end of their loop


@pytest.mark.parametrize("wrap", [lambda f: f, passed_on], ids=["function", "passed on"])
def test_the_end_of_the_loop_closes_a_decorated_async_generator_once(online, caplog, wrap):
    closed = []

    @sojourn.tool
    @wrap
    async def items():
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.append(1)

    kept = []

    async def main():
        kept.append(items())
        async for _ in kept[0]:
            break

    with sojourn.program():
        asyncio.run(main())
    assert closed == [1]
    assert caplog.messages == []
    assert ends(online) == ["cancelled", "ok"]


@pytest.mark.parametrize(
    ("error", "status"), [(None, "ok"), (ValueError("x"), "error"), (TimeoutError(), "timeout")]
)
def test_a_tool_lasts_as_long_as_the_future_that_it_returns(online, error, status):
    """As a plain function around ``run_in_executor`` or ``create_task`` returns it."""

    def finish(future):
        future.set_result(7) if error is None else future.set_exception(error)

    async def main():
        made = asyncio.get_running_loop().create_future
        with sojourn.program() as p:
            for future in (made(), concurrent.futures.Future()):
                returned = sojourn.tool(lambda future=future: future)()
                assert returned is future
                assert len(p.running_tools) == 1
                assert current_context.get().tool_call is None, "the consumer is outside"
                await asyncio.sleep(0)
                assert len(p.running_tools) == 1
                finish(future)
                while p.running_tools:
                    await asyncio.sleep(0)
                assert future.exception() is error

            async def work():
                await asyncio.sleep(0)
                if error is not None:
                    raise error

            assert await asyncio.gather(
                sojourn.tool(lambda: asyncio.create_task(work()))(), return_exceptions=True
            )
            assert not p.running_tools

    asyncio.run(main())
    assert ends(online)[:-1] == [status] * 3
    assert sojourn.stats()["context_reset_failed"] == 0
