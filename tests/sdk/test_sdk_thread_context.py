"""Which threads know their program: asyncio's always, others on request."""

from __future__ import annotations

import asyncio
import contextvars
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import sojourn
from sojourn.wire_events import ProgramEnd, ProgramStart


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
