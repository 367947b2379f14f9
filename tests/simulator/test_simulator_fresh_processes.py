"""Calls in processes of their own: results, reports and errors come back, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.context import ForkServerProcess
from typing import Any

import pytest
from sojourn_server.simulator import fresh_processes as module
from sojourn_server.simulator.fresh_processes import in_fresh_processes, report


@pytest.fixture(autouse=True)
def no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """These calls need no vLLM, whose import takes long."""
    monkeypatch.setattr(module, "PRELOAD_MODULES", ())


def double(number: int) -> tuple[int, int]:
    report(number, "half")
    return 2 * number, os.getpid()


def report_much(_: int) -> None:
    for number in range(20_000):
        report(number)


def fail(_: int) -> None:
    raise ValueError("no")


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def refuse(*values: object) -> None:
    raise LookupError("refused")


def test_each_call_has_a_process_and_its_reports_come_back() -> None:
    told: list[tuple[Any, ...]] = []
    ended = in_fresh_processes(double, [3, 4, 5, 6], 2, lambda *values: told.append(values))
    results = dict(ended)
    assert {number: doubled for number, (doubled, _) in results.items()} == {0: 6, 1: 8, 2: 10, 3: 12}
    assert len({process for _, process in results.values()} - {os.getpid()}) == 4
    assert sorted(told) == [(number, number + 3, "half") for number in range(4)]


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (fail, ValueError, "no"),
        (die, BrokenProcessPool, "die ended without a result"),
        (report_much, LookupError, "refused"),  # the pipe is full, and nobody reads it any more
    ],
)
def test_an_error_ends_all_calls(call: Callable[[int], None], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        list(in_fresh_processes(call, [0] * 5, 2, refuse))
    assert not multiprocessing.active_children()


def test_an_interrupt_while_a_process_starts_ends_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    start = ForkServerProcess.start

    def interrupted(process: ForkServerProcess) -> None:
        start(process)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.1)

    monkeypatch.setattr(ForkServerProcess, "start", interrupted)
    ended = threading.Event()
    other = threading.Thread(target=ended.wait)  # takes the signal if the main thread blocks it
    other.start()
    with pytest.raises(KeyboardInterrupt):
        next(in_fresh_processes(time.sleep, [600.0], 1))
    ended.set()
    assert not multiprocessing.active_children()


def test_an_interrupt_ends_what_runs_and_what_waits() -> None:
    """Python's own pool left a thread that waited for ever, so that the interpreter hung at its exit."""
    started_s = time.monotonic()
    ended = in_fresh_processes(time.sleep, [0.0, *[600.0] * 3], 1)
    assert next(ended) == (0, None)
    ended.close()
    assert not multiprocessing.active_children()
    assert time.monotonic() - started_s < 60
