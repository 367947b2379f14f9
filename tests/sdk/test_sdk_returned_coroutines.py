"""Decorated functions whose result still runs after they have returned: coroutines, generators and futures.
And async generators that an event loop closes when it ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import gc
import inspect
import sys
import types
import warnings
from unittest.mock import MagicMock

import pytest
import sojourn
from sojourn.program import current_context
from sojourn.scoped_functions import without_asyncgen_hooks
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


def test_what_is_returned_is_of_the_same_kind_and_name(online):
    async def coroutine():
        return 1

    def generator():
        yield 1

    async def async_generator():
        yield 1

    made = [sojourn.tool(passed_on(each))() for each in (coroutine, generator, async_generator)]
    assert [type(each) for each in made] == [
        types.CoroutineType, types.GeneratorType, types.AsyncGeneratorType,
    ]  # fmt: skip
    assert [each.__name__ for each in made] == ["coroutine", "generator", "async_generator"]
    assert all("test_what_is_returned" in each.__qualname__ for each in made)
    assert inspect.isawaitable(made[0])
    assert asyncio.run(made[0]) == 1
    assert list(made[1]) == [1]


def test_other_results_are_returned_as_they_are(online):
    @types.coroutine
    def awaitable_generator():
        yield
        return "done"

    async def main():
        future = asyncio.get_running_loop().create_future()
        future.set_result("done")
        for result in (future, iter([1]), 3, None):
            assert sojourn.tool(lambda result=result: result)() is result
        made = awaitable_generator()
        assert sojourn.tool(lambda: made)() is made
        return await made

    with sojourn.program():
        assert asyncio.run(main()) == "done"
    assert ends(online) == ["ok"] * 6


def test_tasks_made_of_what_is_returned_have_their_own_programs(online):
    @sojourn.program
    @passed_on
    async def agent():
        for _ in range(3):
            await asyncio.sleep(0)
            assert sojourn.current_program().is_open
        return sojourn.current_program()

    async def main():
        found = await asyncio.gather(agent(), asyncio.create_task(agent()), agent())
        assert sojourn.current_program() is None
        assert not any(p.is_open for p in found)
        return found

    assert len({p.id for p in asyncio.run(main())}) == 3
    assert ends(online) == ["ok"] * 3
    assert sojourn.stats()["context_reset_failed"] == 0


def test_errors_of_the_function_and_of_what_it_returns_pass_and_end_the_scope(online):
    @passed_on
    async def fails():
        await asyncio.sleep(0)
        raise LookupError("theirs")

    def fails_at_once():
        raise LookupError("theirs")

    with pytest.raises(LookupError, match="theirs"):
        asyncio.run(sojourn.program(fails)())
    with pytest.raises(LookupError, match="theirs"):
        sojourn.program(fails_at_once)()
    assert ends(online) == ["error", "error"]
    assert sojourn.current_program() is None


@pytest.mark.parametrize("way", ["dropped", "cancelled"])
def test_a_coroutine_that_never_begins_ends_its_program(online, way):
    @sojourn.program
    @passed_on
    async def agent():
        raise AssertionError

    async def main():
        made = agent()
        if way == "cancelled":
            task = asyncio.create_task(made)
            task.cancel()
            await asyncio.wait([task])

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(main())
        gc.collect()
    assert ends(online) == ["cancelled"]
    assert [str(each.message) for each in warned if each.category is RuntimeWarning] == (
        [f"coroutine '{test_a_coroutine_that_never_begins_ends_its_program.__qualname__}.<locals>.agent' "
         "was never awaited"] if way == "dropped" else []
    )  # fmt: skip
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


def test_the_hooks_of_the_loop_are_restored():
    hooks = (lambda _: None, lambda _: None)
    before = sys.get_asyncgen_hooks()
    sys.set_asyncgen_hooks(*hooks)
    try:
        with without_asyncgen_hooks():
            inside = tuple(sys.get_asyncgen_hooks())
        after = tuple(sys.get_asyncgen_hooks())
        with pytest.raises(LookupError), without_asyncgen_hooks():
            raise LookupError
        after_error = tuple(sys.get_asyncgen_hooks())
    finally:
        sys.set_asyncgen_hooks(*before)
    assert inside == (None, hooks[1])
    assert after == after_error == hooks


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


def test_a_future_that_is_cancelled_or_was_done_before(online):
    async def main():
        future = asyncio.get_running_loop().create_future()
        done = concurrent.futures.Future()
        done.set_result(1)
        with sojourn.program() as p:
            sojourn.tool(lambda: future)()
            future.cancel()
            assert sojourn.tool(lambda: done)() is done
            while p.running_tools:
                await asyncio.sleep(0)

    asyncio.run(main())
    assert sorted(ends(online)) == ["cancelled", "ok", "ok"]


@pytest.mark.parametrize("make", ["concurrent", "running loop", "closed loop"])
def test_a_future_that_is_thrown_away_before_it_is_done_ends_its_scope(online, make):
    class Slotted:
        """A future that cannot be referenced weakly."""

        __slots__ = ("called",)

        def add_done_callback(self, call):
            self.called = call

    def made():
        if make == "concurrent":
            return concurrent.futures.Future()
        loop = asyncio.new_event_loop() if make == "closed loop" else asyncio.get_running_loop()
        future = loop.create_future()
        if make == "closed loop":
            loop.close()
        return future

    @sojourn.program
    def agent():
        opened.append(sojourn.current_program())
        return sojourn.tool(made)()

    async def main():
        future = agent()
        (p,) = opened
        assert p.is_open
        assert len(p.running_tools) == 1
        del future
        gc.collect()
        assert not p.is_open
        assert not p.running_tools

    opened = []
    asyncio.run(main())
    assert ends(online) == ["cancelled"] * 2
    with sojourn.program() as p:
        slotted = sojourn.tool(Slotted)()
        assert len(p.running_tools) == 1
        slotted.called(slotted)
        assert not p.running_tools


def test_an_exception_of_a_future_that_nobody_reads_is_still_logged(online, caplog):
    async def main():
        with sojourn.program() as p:
            future = asyncio.get_running_loop().create_future()
            sojourn.tool(lambda: future)()
            future.set_exception(ValueError("nobody reads it"))
            while p.running_tools:
                await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    assert "exception was never retrieved" in caplog.text


def test_an_object_that_only_looks_like_a_future_is_returned_at_once(online):
    class Odd:
        def add_done_callback(self, *args):
            raise LookupError

    odd, mock = Odd(), MagicMock()
    with sojourn.program() as p:
        assert sojourn.tool(lambda: odd)() is odd
        assert sojourn.tool(lambda: mock)() is mock
        assert not p.running_tools
    assert not mock.mock_calls
    assert ends(online) == ["ok"] * 3
