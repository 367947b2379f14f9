"""Threads that know their program, on request."""

from __future__ import annotations

import functools
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


def test_a_patch_of_another_library_stays_and_ours_beneath_it_ends(server, monkeypatch):
    monkeypatch.setattr(threading.Thread, "start", threading.Thread.start)  # restored after the test
    sojourn.init(server.url, threads=True)
    ours = threading.Thread.start
    theirs = threading.Thread.start = functools.wraps(ours)(lambda self: ours(self))
    sojourn.init(server.url, threads=True, dialect="sojourn")
    assert threading.Thread.start is theirs
    with sojourn.program() as p:
        assert in_thread(sojourn.current_program) is p
        sojourn.shutdown()
        assert in_thread(sojourn.current_program) is None
