"""Which threads know their program: asyncio's always, others on request."""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.pool
import threading
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import sojourn


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
