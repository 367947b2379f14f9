"""Which threads know their program: asyncio's always, others on request."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import multiprocessing
import multiprocessing.pool
import queue
import sys
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import pytest
import sojourn
from sojourn.wire_events import ProgramEnd, ProgramStart
from waiting import wait_until


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


def test_a_bare_thread_does_not_know_unless_asked_for(server):
    sojourn.init(server.url)
    with sojourn.program():
        assert in_thread(sojourn.current_program) is None
        assert asyncio.run(asyncio.to_thread(sojourn.current_program)) is not None


def test_threads_and_pools_carry_the_place_when_asked_for(server):
    start, submit = threading.Thread.start, ThreadPoolExecutor.submit
    sojourn.init(server.url, threads=True)
    with ThreadPoolExecutor(1) as pool:
        with sojourn.program() as first, sojourn.tool_call("t") as call:
            assert in_thread(sojourn.current_program) is first
            assert pool.submit(sojourn.current_program).result() is first
            assert pool.submit(lambda: sojourn.program().make().call_id).result() == call.call_id
            assert list(pool.map(lambda _: sojourn.current_program(), range(3))) == [first] * 3
        # the worker, started inside the first program, must not keep it
        assert pool.submit(sojourn.current_program).result() is None
        with sojourn.program() as second:
            assert pool.submit(sojourn.current_program).result() is second
    assert in_thread(sojourn.current_program) is None
    sojourn.shutdown()
    assert (threading.Thread.start, ThreadPoolExecutor.submit) == (start, submit)


def test_subclasses_with_their_own_run_are_carried_too(server):
    sojourn.init(server.url, threads=True)
    seen = []

    class Mine(threading.Thread):
        def run(self):
            seen.append(sojourn.current_program())

    with sojourn.program() as p:
        thread = Mine()
        thread.start()
    thread.join()
    assert seen == [p]


def test_threads_whose_run_cannot_be_set_start_all_the_same(server):
    class Property(threading.Thread):
        @property
        def run(self):
            return lambda: seen.append(("property", sojourn.current_program()))

    class Guarded(threading.Thread):
        def __setattr__(self, name, value):
            if name == "run":
                raise AttributeError("run is fixed")
            super().__setattr__(name, value)

        def run(self):
            seen.append(("guarded", sojourn.current_program()))

    class Raising(threading.Thread):
        def __getattribute__(self, name):
            if name == "__dict__":
                raise RuntimeError("no attributes")
            return super().__getattribute__(name)

        def run(self):
            seen.append(("raising", sojourn.current_program()))

    sojourn.init(server.url, threads=True)
    seen = []
    with sojourn.program() as p:
        for kind in (Property, Guarded, Raising):
            thread = kind()
            thread.start()
            thread.join()
    assert seen == [("property", None), ("guarded", p), ("raising", None)]
    assert sojourn.stats()["internal_error"] == 1


def test_a_thread_that_ran_in_a_program_is_no_cycle(server):
    sojourn.init(server.url, threads=True)
    seen = []

    def work():
        seen.append(("run" in vars(threading.current_thread()), sojourn.current_program()))

    gc.disable()
    try:
        with sojourn.program() as p:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            gone = weakref.ref(thread)
            del thread
            wait_until(lambda: gone() is None)
    finally:
        gc.enable()
    assert seen == [(False, p)]


def test_a_thread_that_cannot_start_stays_as_it_was(server, monkeypatch):
    def refused(*arguments, **settings):
        raise RuntimeError("can't start new thread")

    names = [name for name in ("_start_new_thread", "_start_joinable_thread") if hasattr(threading, name)]
    sojourn.init(server.url, threads=True)
    thread, replaced = threading.Thread(target=int), threading.Thread()
    replaced.run = mine = lambda: seen.append(sojourn.current_program())
    seen = []
    with sojourn.program() as p:
        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(threading, name, refused)
            for each in (thread, replaced):
                with pytest.raises(RuntimeError, match="can't start"):
                    each.start()
        assert "run" not in vars(thread)
        assert replaced.run is mine
        replaced.start()
        replaced.join()
    assert seen == [p]
    assert replaced.run is mine


def test_threads_that_serve_a_pool_belong_to_no_program(server):
    """They outlive the program that happened to start them, and so would their share of it."""
    sojourn.init(server.url, threads=True)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    with sojourn.program():
        before = set(threading.enumerate())
        with ProcessPoolExecutor(1, mp_context=context) as pool:
            pool.submit(int, "1").result()
            served = set(threading.enumerate()) - before
            assert any("ExecutorManagerThread" in type(thread).__name__ for thread in served)
            assert not any("run" in vars(thread) for thread in served)
        with multiprocessing.pool.ThreadPool(2) as threads:
            assert not any("run" in vars(t) for t in set(threading.enumerate()) - before)
            assert threads.apply(sojourn.current_program) is None
        queue.put(1)
        assert not any("run" in vars(t) for t in set(threading.enumerate()) - before)
        queue.close()
        queue.join_thread()


def test_jobs_of_interpreter_pools_are_left_as_they_are(server):
    """``InterpreterPoolExecutor`` of Python 3.14 inherits ``submit``, and pickles each job."""

    class InterpreterPoolExecutor(ThreadPoolExecutor):
        pass

    class Mine(InterpreterPoolExecutor):
        pass

    sojourn.init(server.url, threads=True)
    for kind in (InterpreterPoolExecutor, Mine):
        with kind(1) as pool, sojourn.program():
            assert pool.submit(sojourn.current_program).result() is None, "a function of ours around the job"


def test_a_worker_that_takes_jobs_from_a_queue_is_where_each_job_says(online):
    jobs = queue.Queue()
    seen = []

    def worker():
        while (job := jobs.get()) is not None:
            with job.here() as p, sojourn.tool_call("t") as call:
                seen.append((sojourn.current_program(), p, call.program))
            seen.append(sojourn.current_program())

    thread = threading.Thread(target=worker)
    thread.start()
    with sojourn.program() as first, sojourn.program() as second:
        for job in (first, second, first):
            jobs.put(job)
        jobs.put(None)
        thread.join()
    assert seen == [(first,) * 3, None, (second,) * 3, None, (first,) * 3, None]
    assert sojourn.flush(60)
    kinds = [type(e) for e in online.program_events() if isinstance(e, (ProgramStart, ProgramEnd))]
    assert kinds == [ProgramStart] * 2 + [ProgramEnd] * 2, "being there starts and ends nothing"


def test_here_nests_and_can_be_entered_again(online):
    with sojourn.program() as p:
        scope = p.here()
        with sojourn.program() as other, scope, other.here(), scope:
            assert sojourn.current_program() is p
        assert sojourn.current_program() is p
    with pytest.raises(LookupError), p.here():
        raise LookupError
    assert sojourn.current_program() is None


def test_threads_in_one_block_at_the_same_time_each_leave_it(online):
    barrier = threading.Barrier(2)
    first_left = threading.Event()
    seen = {}

    def worker(first):
        with block:
            barrier.wait(60)
            seen["in", first] = sojourn.current_program()
            assert first or first_left.wait(60)
        seen["after", first] = sojourn.current_program()
        first_left.set()

    with sojourn.program() as p:
        block = p.here()
        threads = [threading.Thread(target=worker, args=(first,)) for first in (True, False)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == {("in", True): p, ("in", False): p, ("after", True): None, ("after", False): None}
    assert sojourn.stats()["context_reset_failed"] == 0


def test_tasks_in_one_block_at_the_same_time_each_leave_it(online):
    async def worker(block, n):
        with block:
            for _ in range(3 - n):
                await asyncio.sleep(0)
            with block:
                await asyncio.sleep(0)
            inside = sojourn.current_program()
        return inside, sojourn.current_program()

    async def main(block):
        return await asyncio.gather(*(worker(block, n) for n in range(3)))

    with sojourn.program() as p:
        block = p.here()
        with sojourn.program() as other, block:
            assert asyncio.run(main(block)) == [(p, p)] * 3
        assert sojourn.current_program() is p
    assert asyncio.run(main(block)) == [(p, None)] * 3
    assert other is not p
    assert sojourn.stats()["context_reset_failed"] == 0


def test_a_chain_of_tasks_keeps_no_block_that_was_left(online):
    """Each task begins inside its predecessor's block, and so inherits what its context holds."""
    from sojourn.program import _entered

    async def link(n):
        with p.here():
            held.append(len(_entered.get()))
            return asyncio.create_task(link(n - 1)) if n else None

    async def main():
        following = link(20)
        while following is not None:
            following = await following

    held = []
    with sojourn.program() as p:
        asyncio.run(main())
    assert held == [1] * 21


def test_a_block_that_another_context_leaves_is_counted_not_raised(online):
    def running():
        with p.here():
            yield

    with sojourn.program() as p:
        generator = running()
        contextvars.copy_context().run(next, generator)
        generator.close()
        assert sojourn.current_program() is p
    assert sojourn.stats()["context_reset_failed"] == 1


def test_generators_that_other_contexts_leave_keep_no_blocks(online):
    """As of a server that begins each stream in one context and lets another one end it."""
    from sojourn.program import MAX_ENTERED, _entered

    def running(block):
        with block() if callable(block) else block:
            yield

    def begin_here_and_end_elsewhere(block):
        generator = running(block)
        next(generator)
        elsewhere.run(generator.close)

    def streams():
        for block in (lambda: sojourn.step("s"), p.here):
            for _ in range(20):
                begin_here_and_end_elsewhere(block)
                assert len(_entered.get()) <= 2
        shared = sojourn.step("shared")
        for _ in range(MAX_ENTERED + 20):
            begin_here_and_end_elsewhere(shared)
        assert len(_entered.get()) == MAX_ENTERED

    elsewhere = contextvars.copy_context()
    with sojourn.program() as p:
        contextvars.copy_context().run(streams)
        assert sojourn.current_program() is p


def test_every_way_of_asyncio_to_run_something_knows_its_program(online):
    async def job(n):
        await asyncio.sleep(0)
        return sojourn.current_program()

    async def agent(name):
        async with sojourn.program(name) as p:
            found = [
                *await asyncio.gather(job(1), asyncio.create_task(job(2))),
                await asyncio.wait_for(job(3), 60),
                await asyncio.shield(asyncio.ensure_future(job(4))),
                await asyncio.to_thread(sojourn.current_program),
                await asyncio.get_running_loop().create_task(job(5)),
            ]
            if sys.version_info >= (3, 11):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(job(n)) for n in range(3)]
                found += [task.result() for task in tasks]
            called = asyncio.Event()
            asyncio.get_running_loop().call_soon(
                lambda: (found.append(sojourn.current_program()), called.set())
            )
            await called.wait()
            assert set(found) == {p}
        return await job(0)

    async def main():
        return await asyncio.gather(*(agent(f"a{n}") for n in range(5)))

    assert asyncio.run(main()) == [None] * 5


def test_the_executor_of_a_loop_knows_only_when_asked_for(online):
    async def ask():
        with sojourn.program() as p:
            inside = contextvars.copy_context()
            loop = asyncio.get_running_loop()
            bare = await loop.run_in_executor(None, sojourn.current_program)
            carried = await loop.run_in_executor(None, inside.run, sojourn.current_program)
            return bare, carried is p

    assert asyncio.run(ask()) == (None, True)
    sojourn.init(online.url, threads=True)
    bare, carried = asyncio.run(ask())
    assert bare is not None
    assert carried
