"""Tasks side by side, each in a process of its own.

Not ``concurrent.futures``: an interrupted pool waits for what is running, and
what is running here may take minutes; and its option of a fresh process for
every task is new in Python 3.11.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

Task = TypeVar("Task")
ReportCallback = Callable[[Any], None]
"""Sends something on its way from a task to ``on_report``."""

_ENVIRONMENT = {
    # Libraries would otherwise start a thread a core each, and two workers fight for two cores.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_REPORTED, _RETURNED, _RAISED = "reported", "returned", "raised"


class WorkerDiedError(RuntimeError):
    """A process ended without an answer; the text says of which task and how."""


class _RemoteTraceback(Exception):
    """Shows the traceback of the other process as the cause of what it raised."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


class _RunningProcess(NamedTuple):
    number: int
    process: BaseProcess


def run_in_processes(
    work: Callable[[Task, ReportCallback], Any],
    tasks: Sequence[Task],
    processes: int,
    *,
    name: Callable[[Task], str] = str,
    on_start: Callable[[int, Task], None] = lambda number, task: None,
    on_report: Callable[[int, Any], None] = lambda number, what: None,
    on_done: Callable[[int, Any], None] = lambda number, answer: None,
    preload: Sequence[str] = (),
) -> list[Any]:
    """``work(task, report)`` for every task, at most ``processes`` at a time; answers in the tasks' order.

    ``work`` is a function of a module; tasks, reports and answers are pickled. The callbacks run in the
    caller's thread, with the task's number; ``on_done`` is given its answer too. Each process is made anew:
    what one task loads another cannot see, and its memory is given back. Where the system can fork, it is
    forked from one that has imported ``preload`` and done nothing else, so that what takes seconds to import
    does so once for all tasks of the caller's process; the first call decides what that is.

    Raises what a task raises, and ``WorkerDiedError``; whatever the exception, the other processes are ended
    before it gets out.
    """
    context = _process_context(preload)
    answers: list[Any] = [None] * len(tasks)
    waiting = deque(enumerate(tasks))
    running: dict[Connection, _RunningProcess] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, processes):
                number, task = waiting.popleft()
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_run_task, args=(work, task, theirs), daemon=True)
                running[ours] = _RunningProcess(number, process)
                with _deferred_sigint(), _worker_environment():
                    process.start()
                theirs.close()  # else its end would never be seen
                on_start(number, task)
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                number, worker = running[connection]
                try:
                    kind, what = connection.recv()
                except EOFError:
                    worker.join()
                    raise WorkerDiedError(_exit_description(name(tasks[number]), worker.exitcode)) from None
                if kind == _REPORTED:
                    on_report(number, what)
                    continue
                if kind == _RAISED:
                    error, told = what
                    raise error from _RemoteTraceback(told)
                answers[number] = what
                del running[connection]
                connection.close()
                worker.join()
                on_done(number, what)
    finally:
        for connection, (_, worker) in running.items():
            connection.close()
            if worker.pid is not None:
                worker.terminate()
                worker.join()
    return answers


def _process_context(preload: Sequence[str]) -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    return context


@contextmanager
def _worker_environment() -> Iterator[None]:
    """What a process that is started meanwhile finds in its environment, before it imports anything."""
    before = {name: os.environ.get(name) for name in _ENVIRONMENT}
    os.environ.update(_ENVIRONMENT)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _deferred_sigint() -> Iterator[None]:
    """Ctrl-C goes to every process of the terminal, but only the parent has something to say: a process that
    is made meanwhile never hears of it, and the parent does when that is done."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The first process also starts multiprocessing's tracker, which would let the signal through again.
    resource_tracker.ensure_running()
    heard: list[int] = []
    # The mask is what the new process inherits. It is this thread's only: another one, such as that of a
    # progress bar, would still take the signal and have the handler called here.
    mine = threading.current_thread() is threading.main_thread()
    handler = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number)) if mine else None
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if mine:
            signal.signal(signal.SIGINT, handler)
        if heard:
            signal.raise_signal(signal.SIGINT)


def _run_task(work: Callable[[Any, ReportCallback], Any], task: Any, connection: Connection) -> None:
    try:
        try:
            kind, what = _RETURNED, work(task, lambda what: connection.send((_REPORTED, what)))
        except BrokenPipeError:
            raise
        except Exception as error:
            kind, what = _RAISED, (_picklable_error(error), traceback.format_exc())
        connection.send((kind, what))
    except BrokenPipeError:
        pass  # the parent is gone, and nobody else wants to know


def _picklable_error(error: Exception) -> Exception:
    """The exception, or one like it where it would not survive the way to another process."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _exit_description(name: str, exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return f"the process of {name} ended with exit code {exit_code} and no answer"
    ended = signal.Signals(-exit_code).name
    hint = "; was it short of memory?" if ended == "SIGKILL" else ""
    return f"the process of {name} was ended by {ended}{hint}"
