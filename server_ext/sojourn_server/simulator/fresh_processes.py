"""Calls in processes of their own, several at a time.

Modules that one simulation loads, such as a KV connector, do not affect others. Python's own pool hangs at
exit if it gives each task a process and is interrupted: a task in its queue never finds a process. So each
call has a thread here, which starts the process and waits for its answer.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from typing import Any

PRELOAD_MODULES = (
    "sojourn_server.simulator.quiet_vllm_logging",
    "sojourn_server.simulator.simulated_engine",
    "sojourn_server.simulator.simulation",
)
"""Modules that import vLLM and torch, which is slow. Processes fork from a server that has imported only
these. Sojourn's adapter is not among them, because runs of ``stock`` must not load it."""

_results: Any = None
"""In a process of ``fresh_processes``: its connection to the caller."""


def report(*values: Any) -> None:
    """In a process of ``fresh_processes``: call the caller's ``on_report`` with ``values``."""
    _results.send(("report", values))


@contextmanager
def fresh_processes(at_once: int | None = None) -> Iterator[Callable[..., Future[Any]]]:
    """Yield ``submit(on_report, call, *arguments)``: it calls a picklable function in a process of its own,
    and returns a future. ``at_once``: most processes at a time (default: one per core). ``on_report`` is
    called by one thread at a time. If a process dies, its future raises ``BrokenProcessPool``. The end of the
    context ends the processes that still run."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD_MODULES))
    _start_server()
    lock, ended = threading.Lock(), threading.Event()
    running: set[Any] = set()

    def run(on_report: Callable[..., None], call: Callable[..., Any], *arguments: Any) -> Any:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_main, args=(sender, call, arguments), daemon=True)
        with lock:
            if ended.is_set():
                raise BrokenProcessPool("the calls were ended")
            process.start()
            running.add(process)
        sender.close()  # else the end of the process would not end the pipe
        try:
            while True:
                kind, content = receiver.recv()
                if kind == "result":
                    return content
                if kind == "error":
                    raise content
                with lock:
                    on_report(*content)
        except EOFError:
            raise BrokenProcessPool(f"the process of {call.__name__} ended without a result") from None
        finally:
            receiver.close()  # else a process that still reports would wait for ever
            process.join()
            with lock:
                running.discard(process)

    threads = ThreadPoolExecutor(at_once or os.cpu_count() or 1)
    try:
        yield lambda *arguments: threads.submit(run, *arguments)
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        with lock:
            ended.set()
            for process in running:
                process.terminate()
        threads.shutdown()


def _start_server() -> None:
    """Start the server from which processes fork, so that none of them gets the terminal's SIGINT: they
    inherit its mask."""
    resource_tracker.ensure_running()  # it would clear the mask if it started later
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _main(results: Any, call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    global _results
    _results = results
    try:
        results.send(("result", call(*arguments)))
    except Exception as error:
        results.send(("error", error))
