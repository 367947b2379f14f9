"""Tasks in processes: answers in order, failures told, nobody left behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
from sojourn_server.simulator.process_pool import WorkerDiedError, run_in_processes

Report = Callable[[Any], None]


def square(number: int, report: Report) -> tuple[int, int]:
    report(number)
    return number * number, os.getpid()


def fail(number: int, report: Report) -> None:
    if number == 1:
        raise ValueError("one is not wanted")
    time.sleep(60.0)


class Picky(Exception):
    """Cannot be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} {second}")


def fail_badly(number: int, report: Report) -> None:
    raise Picky("not", "portable")


def die(how: int, report: Report) -> None:
    if how < 0:
        os._exit(-how)
    os.kill(os.getpid(), how)


def die_with_the_parent(how: int, report: Report) -> None:
    os.kill(os.getppid(), how)
    os._exit(0)


def note_and_sleep(folder: Path, report: Report) -> None:
    (folder / str(os.getpid())).touch()
    time.sleep(60.0)


def test_answers_come_in_order_each_from_a_process_of_its_own() -> None:
    reports: list[tuple[int, Any]] = []
    begun: list[int] = []
    done: list[tuple[int, int]] = []
    answers = run_in_processes(
        square,
        [3, 4, 5],
        2,
        on_start=lambda number, task: begun.append(number),
        on_report=lambda number, what: reports.append((number, what)),
        on_done=lambda number, answer: done.append((number, answer[0])),
    )
    assert [answer for answer, _ in answers] == [9, 16, 25]
    assert len({process for _, process in answers} | {os.getpid()}) == 4
    assert begun == [0, 1, 2]
    assert sorted(done) == [(0, 9), (1, 16), (2, 25)]
    assert sorted(reports) == [(0, 3), (1, 4), (2, 5)]


def test_what_a_task_raises_ends_the_others_and_shows_where() -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match="one is not wanted") as raised:
        run_in_processes(fail, [0, 1], 2)
    assert time.monotonic() - began < 50.0
    assert "in fail" in str(raised.value.__cause__)
    with pytest.raises(RuntimeError, match="Picky: not portable"):
        run_in_processes(fail_badly, [0], 1)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        (int(signal.SIGKILL), "the process of 9 was ended by SIGKILL; was it short of memory\\?"),
        (int(signal.SIGTERM), "the process of 15 was ended by SIGTERM$"),
        (-3, "the process of -3 ended with exit code 3 and no answer"),
    ],
)
def test_a_process_that_dies_is_told_of(how: int, message: str) -> None:
    with pytest.raises(WorkerDiedError, match=message):
        run_in_processes(die, [how], 1)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere no process of its own starts the tasks")
def test_an_exit_code_that_nobody_knows_is_told_of() -> None:
    with pytest.raises(
        WorkerDiedError,
        match="or its exit code was lost with the process that started it",
    ):
        run_in_processes(die_with_the_parent, [int(signal.SIGKILL)], 1)
    # The server's pipes close a moment before it has ended. In between Python takes it for alive.
    server = forkserver._forkserver._forkserver_pid
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    assert run_in_processes(square, [3], 1)[0][0] == 9


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_an_interrupt_leaves_nobody_behind(tmp_path: Path) -> None:
    def interrupt(number: int, task: Path) -> None:
        if number == 1:
            while len(list(tmp_path.iterdir())) < 2:
                time.sleep(0.05)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_in_processes(note_and_sleep, [tmp_path, tmp_path], 2, on_start=interrupt)
    processes = [int(path.name) for path in tmp_path.iterdir()]
    assert len(processes) == 2
    assert not any(alive(process) for process in processes)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of a terminal")
def test_ctrl_c_is_the_parents_alone(tmp_path: Path) -> None:
    """A signal to a worker, as a terminal sends it to all of them, is not heard there."""

    def send(number: int, task: Path) -> None:
        while not list(tmp_path.iterdir()):
            time.sleep(0.05)
        process = int(next(tmp_path.iterdir()).name)
        os.kill(process, signal.SIGINT)
        time.sleep(0.3)
        assert alive(process)
        os.kill(process, signal.SIGTERM)

    with pytest.raises(WorkerDiedError, match="SIGTERM"):
        run_in_processes(note_and_sleep, [tmp_path], 1, on_start=send)
