"""Threads that know their program, on request."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import sojourn


def in_thread(function):
    result = []
    thread = threading.Thread(target=lambda: result.append(function()))
    thread.start()
    thread.join()
    return result[0]


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
