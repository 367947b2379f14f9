"""Calls in processes of their own: results, reports and errors come back, and nothing stays behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import pytest
from sojourn_server.simulator import fresh_processes as module
from sojourn_server.simulator.fresh_processes import fresh_processes, report


@pytest.fixture(autouse=True)
def no_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """These calls need no vLLM, whose import takes long."""
    monkeypatch.setattr(module, "PRELOAD_MODULES", ())


def double(number: int) -> tuple[int, int]:
    report(number, "half")
    return 2 * number, os.getpid()


def report_much() -> None:
    for number in range(20_000):
        report(number)


def fail() -> None:
    raise ValueError("no")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_call_has_a_process_and_its_reports_and_errors_come_back() -> None:
    told: list[tuple[int, str]] = []
    with fresh_processes(2) as submit:
        calls = [submit(lambda *values: told.append(values), double, number) for number in range(4)]
        failed, died = submit(print, fail), submit(print, die)
        results = [call.result(60) for call in calls]
        with pytest.raises(ValueError, match="no"):
            failed.result(60)
        with pytest.raises(BrokenProcessPool, match="die ended without a result"):
            died.result(60)
    assert [doubled for doubled, _ in results] == [0, 2, 4, 6]
    assert len({process for _, process in results} - {os.getpid()}) == 4
    assert sorted(told) == [(number, "half") for number in range(4)]


def test_a_report_that_fails_ends_its_call() -> None:
    """The pipe is full, and nobody reads it any more."""

    def refuse(*values: object) -> None:
        raise LookupError("no")

    with fresh_processes(1) as submit, pytest.raises(LookupError):
        submit(refuse, report_much).result(30)


def test_an_interrupt_ends_what_runs_and_what_waits() -> None:
    """Python's own pool left a thread that waited for ever, so that the interpreter hung at its exit."""
    threads, started_s = threading.active_count(), time.monotonic()
    with fresh_processes(1) as submit:
        first, *others = [submit(print, double, 1), *(submit(print, time.sleep, 600.0) for _ in range(3))]
        first.result(60)
    assert all(other.done() for other in others)
    assert threading.active_count() == threads
    assert not multiprocessing.active_children()
    assert time.monotonic() - started_s < 60
