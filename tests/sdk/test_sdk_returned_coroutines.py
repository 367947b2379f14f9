"""Decorated functions whose result still runs after they have returned: coroutines, generators and futures.
And async generators that an event loop closes when it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools

import pytest
import sojourn
from sojourn.program import current_context
from sojourn.wire_events import ProgramEnd, ToolStop


def passed_on(function):
    """As a decorator that retries or logs does it: a plain function around any kind of function."""

    @functools.wraps(function)
    def inner(*args, **kwargs):
        return function(*args, **kwargs)

    return inner


def recorded(server):
    assert sojourn.flush(60)
    return [type(event).__name__ for event in server.program_events()]


def ends(server):
    assert sojourn.flush(60)
    return [e.status for e in server.program_events() if isinstance(e, (ProgramEnd, ToolStop))]


ALL = ["ProgramStart", "ToolStart", "ToolStop", "ProgramEnd"]


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
    assert recorded(online) == ALL
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
