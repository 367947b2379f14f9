"""Calls in processes of their own, several at a time.

Modules that one simulation loads, such as a KV connector, do not affect others. Python's own pool hangs at
exit if it gives each task a process and is interrupted: a task in its queue never finds a process.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from typing import Any

PRELOAD_MODULES = (
    "sojourn_server.simulator.quiet_vllm_logging",
    "sojourn_server.simulator.simulated_engine",
    "sojourn_server.simulator.simulation",
)
"""Modules that import vLLM and torch, which is slow. Processes fork from a server that has imported only
these. Sojourn's adapter is not among them, because runs of ``stock`` must not load it."""

_results: Connection | None = None
"""In a process of ``in_fresh_processes``: its connection to the caller."""


def report(*values: Any) -> None:
    """In a process of ``in_fresh_processes``: call the caller's ``on_report`` with ``values``."""
    assert _results is not None
    _results.send(("report", values))


def in_fresh_processes(
    call: Callable[[Any], Any],
    arguments: Sequence[Any],
    at_once: int | None = None,
    on_report: Callable[..., None] = lambda number, *values: None,
) -> Generator[tuple[int, Any], None, None]:
    """Call a picklable function for each of ``arguments`` in a process of its own, and yield (index of the
    argument, result) as the calls end. ``at_once``: most processes at a time (default: one per core).
    ``on_report`` gets the index before the reported values. Raises the error of a call, and
    ``BrokenProcessPool`` if a process dies. The end of the iterator ends the processes that still run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD_MODULES))
    # The processes inherit the mask of the server from which they fork: none gets the terminal's SIGINT.
    resource_tracker.ensure_running()  # it would clear the mask if it started later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    waiting = iter(enumerate(arguments))
    running: dict[Any, tuple[int, Any]] = {}
    """Connection → (index of the argument, process)."""

    def start_next() -> None:
        for number, argument in waiting:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_main, args=(sender, call, argument), daemon=True)
            with _delayed_interrupt():  # else a process might start and never be ended
                process.start()
                running[receiver] = number, process
            sender.close()  # else the end of the process would not end the pipe
            return

    try:
        for _ in range(at_once or os.cpu_count() or 1):
            start_next()
        while running:
            ready: list[Any] = wait(list(running))
            for receiver in ready:
                number, process = running[receiver]
                try:
                    kind, content = receiver.recv()
                except EOFError:
                    text = f"the process of {call.__name__} ended without a result"
                    raise BrokenProcessPool(text) from None
                if kind == "error":
                    raise content
                if kind == "report":
                    on_report(number, *content)
                    continue
                del running[receiver]
                process.join()
                start_next()
                yield number, content
    finally:
        for _, process in running.values():
            process.terminate()
        for _, process in running.values():
            process.join()


@contextmanager
def _delayed_interrupt() -> Iterator[None]:
    """Let SIGINT wait for the end of the context. A mask would not do, since any other thread takes it."""
    came: list[int] = []
    handler = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        for number in came:
            signal.raise_signal(number)


def _main(results: Connection, call: Callable[[Any], Any], argument: Any) -> None:
    global _results
    _results = results
    try:
        results.send(("result", call(argument)))
    except Exception as error:
        results.send(("error", error))
