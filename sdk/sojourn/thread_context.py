"""Carries the current program into threads and thread pools. Opt-in: ``init(url, threads=True)``.

``asyncio`` tasks and ``asyncio.to_thread`` carry the program without this module. A new thread gets the SDK's
own context variable and no other context variable. If only a framework's context names the program, that
program is passed on too.

Some threads get no program when they start. The internal threads of ``concurrent.futures`` and
``multiprocessing`` (workers, the manager of a process pool, the feeders of queues) would keep the program for
life. A thread whose class has a property ``run`` cannot be wrapped.

A thread gets its program once, when it starts. A long-lived worker that takes jobs from a queue keeps the
program that started the worker. So pass to each job its program ``p``, and run the job's code in
``with p.here(): ...``.

Jobs of a process pool run in other processes, and jobs of an interpreter pool in other interpreters. There
the SDK knows only the program in ``SOJOURN_PROGRAM_ID``. In a forked worker it also knows the program that
started the worker, and does not learn of its end. Pass ``p`` to these jobs as an argument too; a ``Program``
can be pickled. The job's code uses ``p.here()``, or opens a child with ``program(parent=p)``. Do not use
``program(id=p.id)`` in a job, since the end of its block would end the program.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .monkey_patches import Patches
from .program import NO_CONTEXT, ExecutionContext, current_context, find_context
from .runtime import session

_patches = Patches()


def install() -> None:
    """Patch ``Thread.start`` and ``ThreadPoolExecutor.submit``. Repeating it is harmless."""
    _patches.put(threading.Thread, "start", _carrying_start)
    _patches.put(ThreadPoolExecutor, "submit", _carrying_submit)


def remove() -> None:
    """Undo ``install``. A method that another library has patched since then stays as it is."""
    _patches.undo()


def _carrying_start(start: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    @functools.wraps(start)
    def carrying_start(self: threading.Thread) -> None:
        counters = session().counters
        here = find_context(counters, of_process=False)[0] if _patches.active else NO_CONTEXT
        restore = None
        if here is not NO_CONTEXT:
            try:
                if not _is_pool_thread(self):
                    restore = _carry_into(self, here)
            except Exception:  # a class of the user may forbid it
                counters.add("internal_error")
        try:
            start(self)
        except BaseException:
            if restore is not None:
                restore()
            raise

    return carrying_start


def _carrying_submit(submit: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(submit)
    def carrying_submit(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        here = find_context(session().counters, of_process=False)[0] if _patches.active else NO_CONTEXT
        plain = here is NO_CONTEXT or _pickles_jobs(self)
        return submit(self, fn if plain else _run_inside(here, fn), *args, **kwargs)

    return carrying_submit


def _run_inside(here: ExecutionContext, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = current_context.set(here)
        try:
            return function(*args, **kwargs)
        finally:
            current_context.reset(token)

    return run


def _carry_into(thread: threading.Thread, here: ExecutionContext) -> Callable[[], None] | None:
    """Replace the thread's method ``run`` by one that runs inside ``here``. Returns a function that undoes
    this, or ``None`` if the thread's class forbids it.

    The new method undoes the replacement as soon as it runs. It refers to the thread, so it would otherwise
    keep the thread alive until a garbage collection.
    """
    if hasattr(type(thread).run, "__set__"):
        return None  # a property, which hides the attribute set below
    attributes = vars(thread)  # the class may guard ``__setattr__``
    own = attributes.get("run")
    inside = _run_inside(here, thread.run)

    def restore() -> None:
        if own is None:
            attributes.pop("run", None)
        else:
            attributes["run"] = own

    @functools.wraps(inside)
    def run() -> None:
        restore()
        inside()

    attributes["run"] = run
    return restore


def _pickles_jobs(pool: ThreadPoolExecutor) -> bool:
    """Return whether the pool's jobs run in other interpreters (Python 3.14). Such a job is pickled; our
    wrapper cannot be pickled."""
    return any(kind.__name__ == "InterpreterPoolExecutor" for kind in type(pool).__mro__)


def _is_pool_thread(thread: threading.Thread) -> bool:
    """Return whether the thread is an internal one of ``concurrent.futures`` or ``multiprocessing``. Such a
    thread has its target function in one of these packages. A thread without a target has its class there."""
    target = getattr(thread, "_target", None)
    code = type(thread).run if target is None else target
    module = getattr(code, "__module__", None) or ""
    return module.startswith(("concurrent.futures.", "multiprocessing."))
