"""Carry the current place into threads and thread pools. Opt-in: ``init(url, threads=True)``.

``asyncio`` tasks and ``asyncio.to_thread`` carry it anyway. Only our own context
variable is handed on, with what a framework's own context says of the program. The
threads that ``concurrent.futures`` and ``multiprocessing`` keep for themselves (workers,
the manager of a process pool, the feeders of queues) get none at their start, else they
would keep their first program for life.

The limit: a thread is told once, when it starts. A long-lived worker of somebody's
own that takes jobs from a queue stays with the program that happened to start it;
such jobs come with their program and say ``with p.here(): ...``. Jobs of a process pool
run in other processes, which know no program but the one in ``SOJOURN_PROGRAM_ID``:
they take theirs as an argument (a ``Program`` can be pickled) and do the same, or open a
child with ``program(parent=p)``. Not ``program(id=p.id)``: its end would be the program's.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from .context import NOWHERE, Place, deepest, place
from .runtime import session

_originals: dict[str, Any] = {}


def install() -> None:
    """Patch ``Thread.start`` and ``ThreadPoolExecutor.submit``. Repeatable."""
    if _originals:
        return
    start: Any = threading.Thread.start
    submit: Any = ThreadPoolExecutor.submit
    _originals.update(start=start, submit=submit)

    @functools.wraps(start)
    def carrying_start(self: threading.Thread) -> None:
        here = deepest(session().counters)[0]
        if here is not NOWHERE and not _serves_a_pool(self):
            self.run = _inside(here, self.run)  # type: ignore[method-assign]
        start(self)

    @functools.wraps(submit)
    def carrying_submit(
        self: ThreadPoolExecutor, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        here = deepest(session().counters)[0]
        return submit(self, fn if here is NOWHERE else _inside(here, fn), *args, **kwargs)

    _originals.update(our_start=carrying_start, our_submit=carrying_submit)
    threading.Thread.start = carrying_start  # type: ignore[method-assign]
    ThreadPoolExecutor.submit = carrying_submit  # type: ignore[method-assign, assignment]


def remove() -> None:
    """Undo ``install``, unless somebody patched on top of us."""
    if not _originals:
        return
    if threading.Thread.start is _originals["our_start"]:
        threading.Thread.start = _originals["start"]  # type: ignore[method-assign]
    if ThreadPoolExecutor.submit is _originals["our_submit"]:
        ThreadPoolExecutor.submit = _originals["submit"]  # type: ignore[method-assign]
    _originals.clear()


def _inside(here: Place, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        token = place.set(here)
        try:
            return function(*args, **kwargs)
        finally:
            place.reset(token)

    return run


def _serves_a_pool(thread: threading.Thread) -> bool:
    """A thread of the standard library's own, by what it runs: its class, or the target it was given."""
    target = getattr(thread, "_target", None)
    code = type(thread).run if target is None else target
    module = getattr(code, "__module__", None) or ""
    return module.startswith(("concurrent.futures.", "multiprocessing."))
