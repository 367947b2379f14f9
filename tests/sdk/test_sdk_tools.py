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
from sojourn.program import NO_CONTEXT, current_context
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


WRAPPED = pytest.mark.parametrize("wrap", [lambda f: f, passed_on], ids=["function", "passed on"])


@WRAPPED
def test_a_function_of_any_kind_is_a_program_and_a_tool_until_its_result_is_over(online, wrap):
    def state():
        """The program around the code, and the number of its running tools."""
        return sojourn.current_program(), len(sojourn.current_program().running_tools)

    def plain(a, *, b):
        "Doc."
        return a + b, *state()

    async def coroutine(a):
        await asyncio.sleep(0)
        return a, *state()

    def generator():
        yield (yield state())

    async def async_generator():
        yield (yield state())

    def decorated(tool, function):
        return sojourn.program(tool(wrap(function)))

    def assert_runs(p, running):
        assert (running, len(p.running_tools), p.is_open) == (1, 1, True)
        assert current_context.get() is NO_CONTEXT, "the consumer is outside"

    both = decorated(sojourn.tool, plain)
    assert (both.__name__, both.__doc__) == ("plain", "Doc.")
    result, p, running = both(1, b=2)
    assert (result, running, p.is_open) == (3, 1, False)
    items = decorated(sojourn.tool(), generator)()
    p, running = next(items)
    assert_runs(p, running)
    assert items.send("x") == "x"
    assert list(items) == []
    assert not p.is_open

    async def main():
        result, p, running = await decorated(sojourn.tool(name="search", tool_class="web"), coroutine)(4)
        assert (result, running, p.is_open) == (4, 1, False)
        assert current_context.get() is NO_CONTEXT
        items = decorated(sojourn.tool, async_generator)()
        p, running = await anext(items)
        assert_runs(p, running)
        assert await items.asend("x") == "x"
        await items.aclose()
        assert not p.is_open

    asyncio.run(main())
    assert [type(event) for event in told(online)] == [ProgramStart, ToolStart, ToolStop, ProgramEnd] * 4
    assert [(e.tool, e.tool_class) for e in told(online, ToolStart)] == [
        ("plain", None), ("generator", None), ("search", "web"), ("async_generator", None),
    ]  # fmt: skip
    assert ends(online) == ["ok"] * 6 + ["cancelled"] * 2
    assert sojourn.stats()["context_reset_failed"] == 0


# ---- async generators and the end of their loop


@WRAPPED
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
