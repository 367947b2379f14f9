"""Programs: their life, their family, and all the ways to open one."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import sys
import threading
import weakref

import pytest
import sojourn
from sojourn import runtime
from sojourn.outgoing_request import LogicalRequest
from sojourn.program import current_context
from sojourn.request import Turn
from sojourn.wire_codec import decode_context
from sojourn.wire_events import ProgramEnd, ProgramStart, ToolStart, ToolStop


def told(server, count):
    """Events in the order of their numbers, program by program."""
    assert sojourn.flush(60)
    events = server.wait_for_events(count)
    assert len(events) == count
    return events


def test_a_program_starts_and_ends(online):
    with sojourn.program("fix", agent_type="coder") as p:
        assert sojourn.current_program() is p
    start, end = told(online, 2)
    assert isinstance(start, ProgramStart)
    assert (start.program_id, start.name, start.agent_type, start.heartbeat) == (p.id, "fix", "coder", True)
    assert (start.parent_program_id, start.root_program_id, start.call_id) == (None, None, None)
    assert isinstance(end, ProgramEnd)
    assert (end.program_id, end.status) == (p.id, "ok")
    assert [start.seq, end.seq] == [0, 1]


def test_children_know_parent_root_and_the_tool_call_they_run_in(online):
    with sojourn.program() as top, sojourn.tool_call("delegate", "call-7"):
        with sojourn.program() as child, sojourn.program() as grandchild:
            pass
        with sojourn.program(parent=None) as stranger:
            pass
        with sojourn.program(parent="elsewhere") as adopted:
            pass
    starts = {e.program_id: e for e in told(online, 12) if isinstance(e, ProgramStart)}
    assert (starts[child.id].parent_program_id, starts[child.id].root_program_id) == (top.id, top.id)
    assert starts[child.id].call_id == "call-7"
    assert (starts[grandchild.id].parent_program_id, starts[grandchild.id].root_program_id) == (
        child.id,
        top.id,
    )
    assert starts[grandchild.id].call_id is None  # the tool call is its grandparent's
    assert starts[stranger.id].parent_program_id is None
    assert starts[adopted.id].parent_program_id == starts[adopted.id].root_program_id == "elsewhere"
    assert (top.depth, child.depth, grandchild.depth, stranger.depth, adopted.depth) == (0, 1, 2, 0, 1)


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError, "error"),
        (KeyboardInterrupt, "cancelled"),
        (asyncio.CancelledError, "cancelled"),
        (SystemExit, "error"),
        (lambda _: SystemExit(1), "error"),
        (lambda _: SystemExit(0), "ok"),  # as click and typer end each command
        (lambda _: SystemExit(), "ok"),
    ],
)
def test_the_end_says_how_and_the_exception_is_the_users_own(online, error, status):
    mine = error("mine")
    with pytest.raises(type(mine)) as caught, sojourn.program():
        raise mine
    assert caught.value is mine
    assert told(online, 2)[-1].status == status


def test_an_explicit_id_is_kept_and_may_come_back(online):
    for _ in range(2):
        with sojourn.program(id="issue-42") as p:
            assert p.id == "issue-42"
    assert [e.program_id for e in told(online, 4)] == ["issue-42"] * 4


@pytest.mark.parametrize(
    "arguments",
    [
        {"id": ""},
        {"id": "x" * 257},
        {"id": "é" * 129},
        {"id": "\ud800"},
        {"id": 7},
        {"parent": ""},
        {"parent": 7},
        {"priority": "high"},
        {"priority": True},
        {"priority": 2**63},
        {"deadline_s": -1},
        {"deadline_s": float("inf")},
        {"kv_retention_ttl_s": float("nan")},
        {"expected_output_length": -5},
        {"blocks_parent": "yes"},
    ],
)
def test_wrong_arguments_raise_before_anything_runs(arguments):
    with pytest.raises(sojourn.ArgumentError):
        sojourn.program("p", **arguments)


def test_a_scope_may_run_again_and_inside_itself(online):
    scope = sojourn.program("p")
    with scope as first:
        with scope as inner:
            assert sojourn.current_program() is inner
            assert inner.parent_id == first.id
        assert (inner.is_open, first.is_open) == (False, True)
        assert sojourn.current_program() is first
    with scope as second:
        assert len({first.id, inner.id, second.id}) == 3
    assert not second.is_open


def test_tasks_that_share_a_scope_have_programs_of_their_own(online):
    async def main():
        scope, together = sojourn.program("p"), asyncio.Event()

        async def worker(n):
            async with scope as p:
                opened.append(p)
                if len(opened) == 3:
                    together.set()
                await together.wait()
                assert sojourn.current_program() is p
            assert not p.is_open
            assert [q.is_open for q in opened].count(True) == 2 - len(closed)
            closed.append(p)

        await asyncio.gather(*map(worker, range(3)))

    opened, closed = [], []
    asyncio.run(main())
    assert len({p.id for p in opened}) == 3
    assert sojourn.stats()["context_reset_failed"] == 0


def test_threads_that_enter_a_scope_at_once_have_programs_of_their_own(online):
    """Each thread makes its program while the other one is in ``__enter__`` too."""
    scope, opened = sojourn.program("p"), []
    making, together = threading.Barrier(2), threading.Barrier(2)
    make = scope.make

    def make_at_once():
        making.wait(60)
        return make()

    def worker():
        with scope as p:
            opened.append(p)
            together.wait(60)
            assert sojourn.current_program() is p
            together.wait(60)
        seen.append((p.is_open, sojourn.current_program()))

    seen = []
    scope.make = make_at_once
    threads = [threading.Thread(target=worker) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({p.id for p in opened}) == 2
    assert seen == [(False, None)] * 2
    assert sojourn.stats()["context_reset_failed"] == 0


def test_a_generator_left_early_in_a_shared_scope_leaves_the_other_tasks_programs_open(online):
    """The generator's program stays current in its task after the ``break``."""

    async def items():
        with sojourn.program("inner"):
            yield 1
            yield 2

    async def main():
        scope = sojourn.program("p")
        entered, left = [], asyncio.Event()

        async def first():
            with scope as p:
                entered.append(p)
                while len(entered) < 2:
                    await asyncio.sleep(0)
                async for _ in items():
                    break
                assert sojourn.current_program() is not p
            left.set()

        async def second():
            with scope as p:
                entered.append(p)
                await left.wait()
                seen.extend(each.is_open for each in entered)

        await asyncio.gather(*(asyncio.create_task(each()) for each in (first, second)))
        seen.extend(each.is_open for each in entered)

    seen = []
    asyncio.run(main())
    assert seen == [False, True, False, False]


def test_a_shared_scope_that_another_context_leaves_ends_every_program(online):
    def running():
        with scope as p:
            yield p

    scope = sojourn.program("p")
    generators = [running() for _ in range(3)]
    programs = [contextvars.copy_context().run(next, each) for each in generators]
    for each in generators:
        each.close()
    assert not any(p.is_open for p in programs)


def test_functions_of_every_kind_can_be_programs(online):
    ids = []

    @sojourn.program
    def bare(x):
        "Doc."
        ids.append(sojourn.current_program().id)
        return x + 1

    @sojourn.program("named", agent_type="t")
    async def coroutine(x):
        await asyncio.sleep(0)
        ids.append(sojourn.current_program().id)
        return x + 1

    assert bare(1) == 2
    assert bare.__name__ == "bare"
    assert bare.__doc__ == "Doc."
    assert asyncio.run(coroutine(1)) == 2
    assert bare(1) == 2
    assert len(set(ids)) == 3
    names = [e.name for e in told(online, 6) if isinstance(e, ProgramStart)]
    assert names == ["bare", "named", "bare"]


def test_async_with_and_concurrent_tasks_keep_apart(online):
    async def agent(name):
        async with sojourn.program(name) as p:
            await asyncio.sleep(0.001)
            assert sojourn.current_program() is p
            async with sojourn.tool_call("t") as call:
                await asyncio.sleep(0.001)
                assert call.program is p
            return sojourn.headers()["X-Session-ID"] == p.id

    async def main():
        return await asyncio.gather(*(agent(f"a{n}") for n in range(20)))

    assert all(asyncio.run(main()))
    assert sojourn.flush(60)
    everything = online.events()
    assert len({e.program_id for e in everything if isinstance(e, ProgramStart)}) == 20


def test_a_cancelled_task_ends_as_cancelled(online):
    async def main():
        async def agent():
            async with sojourn.program("p"), sojourn.tool_call("t"):
                await asyncio.sleep(60)

        task = asyncio.create_task(agent())
        await asyncio.sleep(0)  # the task runs until its sleep
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    _, _, stop, end = told(online, 4)
    assert (stop.status, end.status) == ("cancelled", "cancelled")


def test_a_decorated_generator_does_not_leak_into_its_consumer(online):
    @sojourn.program("gen")
    def numbers(n):
        total = 0
        for i in range(n):
            assert sojourn.current_program() is not None
            total += (yield i) or 0
        return total

    running = numbers(3)
    assert next(running) == 0
    assert sojourn.current_program() is None
    assert running.send(5) == 1
    assert running.send(6) == 2
    with pytest.raises(StopIteration) as stop:
        running.send(7)
    assert stop.value.value == 18
    assert [type(e) for e in told(online, 2)] == [ProgramStart, ProgramEnd]


def test_exceptions_thrown_into_a_generator_reach_it(online):
    @sojourn.program
    def stubborn():
        try:
            yield 1
        except ValueError:
            yield 2

    running = stubborn()
    next(running)
    assert running.throw(ValueError()) == 2
    with pytest.raises(KeyError):
        running.throw(KeyError())
    assert told(online, 2)[-1].status == "error"


def test_an_abandoned_generator_ends_its_program_as_cancelled(online):
    @sojourn.program
    def endless():
        while True:
            yield

    for _ in endless():
        break
    gc.collect()
    assert told(online, 2)[-1].status == "cancelled"
    assert sojourn.stats()["context_reset_failed"] == 0


def test_async_generators_keep_their_program_between_items_and_end_it(online):
    seen = []

    @sojourn.program("agen")
    async def events():
        try:
            for i in range(3):
                seen.append(sojourn.current_program().id)
                got = yield i
                seen.append(got)
        finally:
            seen.append("closed")

    async def main():
        running = events()
        assert await anext(running) == 0
        assert sojourn.current_program() is None
        assert await running.asend("x") == 1
        await running.aclose()

    asyncio.run(main())
    assert seen[1] == "x"
    assert seen[0] == seen[2]
    assert seen[-1] == "closed"
    assert told(online, 2)[-1].status == "cancelled"


@pytest.mark.filterwarnings("ignore")  # that nobody can close it is the point
def test_an_async_generator_destroyed_without_its_loop_leaves_nothing_behind(online, monkeypatch):
    monkeypatch.setattr("sys.unraisablehook", lambda _: None)

    @sojourn.program
    async def agent():
        try:
            yield 1
        finally:
            await asyncio.sleep(0)

    loop, items = asyncio.new_event_loop(), agent()
    loop.run_until_complete(anext(items))
    loop.close()
    del items
    gc.collect()
    assert sojourn.current_program() is None


def test_a_program_left_by_a_generator_in_another_context_is_counted_not_raised(online):
    async def leaky():
        with sojourn.program("inner"):
            yield 1
            yield 2

    async def main():
        running = leaky()

        async def first():
            await anext(running)

        await asyncio.create_task(first())  # its context is gone when the generator is closed
        await running.aclose()

    asyncio.run(main())
    assert sojourn.stats()["context_reset_failed"] == 1
    assert told(online, 2)[-1].status == "cancelled"


def test_requests_outside_any_program_belong_to_a_flagged_one_of_the_process(online):
    body, headers = sojourn.request_parts()
    assert headers == sojourn.headers()
    assert decode_context(body["vllm_xargs"]["agentic_context"]).sojourn.implicit
    with sojourn.program() as p:
        assert p.parent_id is None
        assert sojourn.headers()["X-Session-ID"] == p.id != headers["X-Session-ID"]
    with sojourn.tool_call("t"):
        assert sojourn.current_program() is None
        with sojourn.program() as q:
            assert q.parent_id is None
    sojourn.shutdown()
    assert {e.program_id for e in online.events()} == {p.id, q.id}, "the server has no such program"


def test_a_process_of_one_loop_is_one_program_until_its_code_opens_one(server, monkeypatch):
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    monkeypatch.setattr("sys.argv", ["/home/me/my_agent.py", "--task", "secret"])
    sojourn.init(server.url)
    with sojourn.tool_call("set-up"):
        pass
    first, second = asked(), asked()
    assert first.program_id == second.program_id
    assert not second.sojourn.implicit
    assert second.sojourn.heartbeat
    with sojourn.program() as p:
        pass
    assert asked().sojourn.implicit
    sojourn.shutdown()
    kinds = [ProgramStart, ToolStart, ToolStop, ProgramEnd]
    events = {type(e): e for e in server.events() if e.program_id == first.program_id}
    assert list(events) == kinds
    assert events[ProgramStart].name == "my_agent.py"
    assert events[ProgramEnd].status == "cancelled", "its length is no whole run's and must not be learned"
    assert [type(e) for e in server.events() if e.program_id == p.id] == [ProgramStart, ProgramEnd]


def asked():
    """What a request outside ``program()`` carries, without the events that wait."""
    return decode_context(sojourn.request_fields()["vllm_xargs"]["agentic_context"])


def test_requests_that_overlap_are_not_one_loop(server, monkeypatch, caplog):
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    sojourn.init(server.url)
    first = asked()
    session = runtime.session()
    left_unread = LogicalRequest(session.counters, session.program)
    left_unread.got_bytes()
    assert asked().program_id == first.program_id, "a stream that is not read on is no second loop"
    waiting = LogicalRequest(session.counters, session.program)
    assert asked().sojourn.implicit
    assert "requests of this process overlap" in caplog.text
    waiting.end()
    assert asked().sojourn.implicit, "it stays so"
    assert len(caplog.records) == 1


@pytest.fixture
def session(server, monkeypatch):
    """A session of a process that is one loop and has sent a request."""
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    sojourn.init(server.url)
    asked()
    return runtime.session()


def test_requests_that_begin_at_once_are_not_one_loop(session, caplog):
    """Two threads look for a request in progress before either has begun its own."""
    turns = [Turn(session), Turn(session)]
    assert turns[0].program is turns[1].program is session.program
    for turn in turns:
        LogicalRequest(session.counters, turn.program, turn.id)
    assert "requests of this process overlap" in caplog.text
    assert asked().sojourn.implicit
    assert len(caplog.records) == 1


def test_the_processs_own_program_ends_after_its_requests(server, session):
    """SGLang and ThunderAgent end the session of a running request with its program."""
    own = session.program
    first, second = (LogicalRequest(session.counters, own) for _ in range(2))
    assert asked().sojourn.implicit
    first.end()
    assert own.is_open
    second.end()
    assert not own.is_open
    assert told(server, 2)[-1].status == "cancelled"


def test_the_processs_own_program_ends_with_the_process(server, session):
    own = session.program
    kept = [LogicalRequest(session.counters, own) for _ in range(2)]
    assert own.is_open
    sojourn.shutdown()
    assert server.events()[-1].status == "cancelled"
    kept.clear()


def test_streams_that_are_read_at_once_are_not_one_loop(server, monkeypatch, caplog):
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    sojourn.init(server.url)
    first = asked()
    session = runtime.session()
    times = iter(range(1, 9))
    monkeypatch.setattr(runtime, "clock", lambda: float(next(times, 9)))
    older = LogicalRequest(session.counters, session.program)
    older.got_bytes()
    newer = LogicalRequest(session.counters, session.program)
    for _ in range(2):
        newer.got_bytes()
    assert asked().program_id == first.program_id, "the older stream may have been left unread"
    older.got_bytes()
    assert asked().sojourn.implicit
    assert "requests of this process overlap" in caplog.text
    newer.got_bytes()
    older.got_bytes()
    assert len(caplog.records) == 1


def test_a_program_opened_while_the_processs_own_begins_ends_it(server, monkeypatch):
    """Another thread opens a program after this one has seen that the process is one loop."""
    monkeypatch.setenv("SOJOURN_OWN_PROGRAM", "1")
    sojourn.init(server.url)
    opened = threading.Thread(target=sojourn.program("other").make().start)

    def name():
        opened.start()
        opened.join(0.2)  # it waits until the own program is complete

    monkeypatch.setattr(sys.modules["sojourn.program"], "process_name", name)
    assert not asked().sojourn.implicit
    opened.join()
    assert asked().sojourn.implicit, "the program of the process is over"


def test_the_process_can_be_named_from_outside(server, monkeypatch):
    monkeypatch.setenv("SOJOURN_PROGRAM_ID", "run-7")
    sojourn.init(server.url)
    body, headers = sojourn.request_parts()
    assert headers == {"X-Session-ID": "run-7"}
    assert not decode_context(body["vllm_xargs"]["agentic_context"]).sojourn.implicit


def test_adapters_can_start_and_end_without_a_block(online):
    p = sojourn.program("x", id="by-hand").make()
    assert p.start() is p.start()
    p.end("error")
    p.end()
    start, end = told(online, 2)
    assert (start.program_id, end.status) == ("by-hand", "error")


def test_names_too_long_for_the_wire_are_cut_not_refused(online):
    with sojourn.program("ü" * 300, agent_type="x" * 1000), sojourn.tool_call("\ud800" * 400, "c" * 5000):
        pass
    start, tool, stop, _ = told(online, 4)
    assert len(start.name.encode()) == 256
    assert len(start.agent_type) == 256
    assert tool.tool == "?" * 256
    assert tool.call_id == stop.call_id
    assert current_context.get().program is None


def test_a_task_that_outlives_its_program_is_outside_of_it(online):
    """Its context still names the program, whose end the server knows."""
    over = None

    async def worker():
        await over.wait()
        found = context_of()
        with sojourn.tool_call("t") as call, sojourn.step("s", priority=2):
            late = context_of()
        with sojourn.program("job") as job:
            own = context_of()
        return found, call.program, late, own, job

    async def main():
        nonlocal over
        over = asyncio.Event()
        with (
            sojourn.program("run", priority=7) as p,
            sojourn.step("plan", final=True),
            sojourn.tool_call("x"),
        ):
            task = asyncio.create_task(worker())
        over.set()
        return p, *await task

    p, found, called_in, late, own, job = asyncio.run(main())
    assert found.sojourn.implicit
    assert (found.sojourn.node, found.sojourn.final, found.priority) == (None, False, None)
    assert called_in is not p
    assert late.program_id == found.program_id != p.id
    assert (late.sojourn.node, late.priority, late.sojourn.final) == ("s", 2, False)
    assert (own.program_id, job.parent_id, job.call_id) == (job.id, None, None)
    assert sojourn.flush(60)
    told = [type(e) for e in online.program_events() if e.program_id == p.id]
    assert told == [ProgramStart, ToolStart, ToolStop, ProgramEnd]


def test_a_task_that_outlives_its_program_is_in_the_one_around_it(online):
    """A sub-agent returns a task, which the open parent awaits."""
    over = None

    async def late():
        await over.wait()
        with sojourn.tool_call("t") as call, sojourn.program("own") as own:
            pass
        return call.program, context_of(), own

    async def main():
        nonlocal over
        over = asyncio.Event()
        with sojourn.program("top") as top, sojourn.step("plan"):
            with sojourn.program("middle"), sojourn.program("child"):
                task = asyncio.create_task(late())
            over.set()
            return top, *await task

    top, called_in, found, own = asyncio.run(main())
    assert called_in is top
    assert (found.program_id, found.sojourn.node) == (top.id, "plan")
    assert own.parent_id == top.id


def test_a_chain_of_programs_keeps_none_that_has_ended(online):
    """Each task opens its own program inside its predecessor's, which ends before it."""

    async def link(n):
        with sojourn.program() as p:
            kept.append(weakref.ref(p))
            return asyncio.create_task(link(n - 1)) if n else None

    async def main():
        following = link(20)
        while following is not None:
            following = await following
            gc.collect()
            assert sum(reference() is not None for reference in kept) <= 3

    kept = []
    asyncio.run(main())
    assert len(kept) == 21


def test_code_that_names_an_ended_program_is_in_it_but_promises_no_heartbeats(online):
    with sojourn.program() as p:
        assert context_of().sojourn.heartbeat
    with p.here(), sojourn.step("s"):
        assert sojourn.current_program() is p
        late = context_of()
    assert (late.program_id, late.sojourn.node, late.sojourn.heartbeat) == (p.id, "s", False)
    named = decode_context(sojourn.request_parts(p)[0]["vllm_xargs"]["agentic_context"])
    assert (named.program_id, named.sojourn.heartbeat) == (p.id, False)


def context_of():
    return decode_context(sojourn.request_fields()["vllm_xargs"]["agentic_context"])
