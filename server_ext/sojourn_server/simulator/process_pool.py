"""Runs tasks in parallel, each in a process of its own.

``concurrent.futures`` is unsuitable for two reasons. An interrupted pool waits for running tasks, which may
take minutes. And it can give each task a fresh process only from Python 3.11.
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
from typing import Any, TypeVar

Task = TypeVar("Task")
ReportCallback = Callable[[Any], None]
"""Function that a task calls to send a progress report. The caller of ``run_in_processes`` gets the report in
``on_report``."""

_ENVIRONMENT = {
    # Libraries would otherwise start one thread per core in each worker.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}

_EXIT_CODE_LOST = 255
"""Exit code that ``multiprocessing`` reports if the real one is lost, because the server process that forks
the workers has ended."""

_REPORTED, _RETURNED, _RAISED = "reported", "returned", "raised"


class WorkerDiedError(RuntimeError):
    """A process ended without an answer; the message names the task and the exit status."""


class _RemoteTraceback(Exception):
    """Shows the worker's traceback as the cause of its exception."""

    def __str__(self) -> str:
        return f'\n"""\n{self.args[0]}"""'


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
    """Run ``work(task, report)`` for every task, at most ``processes`` at a time. Returns the answers in the
    order of tasks.

    ``work`` is a module-level function; tasks, reports and answers are pickled. Callbacks run in the caller's
    thread. Their first argument is the index of the task. The second is the task (``on_start``), the report
    (``on_report``) or the answer (``on_done``). ``name`` returns the name of a task for errors.

    Each task has a fresh process, so modules that one task loads are invisible to other tasks, and the task's
    memory is freed at its end. If the system can fork, processes fork from a server that has imported only
    the modules ``preload``, so slow imports happen once for all tasks. The server starts at the first call
    and keeps running, so ``preload`` of later calls has no effect.

    Raises the exception of a task, or ``WorkerDiedError`` for a process that ended without an answer. Before
    that, all other processes are ended.
    """
    context = _process_context(preload)
    answers: list[Any] = [None] * len(tasks)
    waiting = deque(enumerate(tasks))
    running: dict[Connection, tuple[int, BaseProcess]] = {}
    """Connection to a process → (number of its task, the process)."""
    try:
        while waiting or running:
            while waiting and len(running) < max(1, processes):
                number, task = waiting.popleft()
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_run_task, args=(work, task, sender), daemon=True)
                running[receiver] = number, process
                with _deferred_sigint(), _worker_environment():
                    process.start()
                sender.close()  # else the parent would not see the end of the worker as EOF
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
                    error, remote_traceback = what
                    raise error from _RemoteTraceback(remote_traceback)
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
    """Context that sets the worker processes' environment variables before they import anything."""
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
    """Context that defers Ctrl-C while a new process starts. The terminal sends SIGINT to the parent and to
    the new process. The new process ignores it, and the parent handles it at the end of the context."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    # The first process also starts multiprocessing's tracker, which would unblock the signal again.
    resource_tracker.ensure_running()
    pending: list[int] = []
    # The new process inherits the mask. The mask covers this thread only. Another thread, such as that of a
    # progress bar, would still receive the signal and run the handler here.
    in_main_thread = threading.current_thread() is threading.main_thread()
    handler = None
    if in_main_thread:
        handler = signal.signal(signal.SIGINT, lambda number, frame: pending.append(number))
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        if in_main_thread:
            signal.signal(signal.SIGINT, handler)
        if pending:
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
        pass  # the parent has ended


def _picklable_error(error: Exception) -> Exception:
    """The exception or, if the exception cannot be pickled, a ``RuntimeError`` with its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _exit_description(name: str, exit_code: int | None) -> str:
    if exit_code == _EXIT_CODE_LOST:
        return (
            f"the process of {name} ended with exit code 255, or its exit code was lost with the process "
            "that started it; was the machine short of memory?"
        )
    if exit_code is None or exit_code >= 0:
        return f"the process of {name} ended with exit code {exit_code} and no answer"
    ended = signal.Signals(-exit_code).name
    hint = "; was it short of memory?" if ended == "SIGKILL" else ""
    return f"the process of {name} was ended by {ended}{hint}"
