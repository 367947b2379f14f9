"""What a session has to do when its process forks or ends."""

from __future__ import annotations

import atexit
import os
from typing import Protocol
from weakref import WeakSet


class Watched(Protocol):
    """A session, as seen from here."""

    def after_fork(self) -> None:
        """Runs in the child, first thing."""

    def exit(self) -> None:
        """Runs when the process ends; bounded by itself."""


_watched: WeakSet[Watched] = WeakSet()
_hooked = False


def watch(session: Watched) -> None:
    """Tell ``session`` of forks and of the end, as long as it lives."""
    global _hooked
    _watched.add(session)
    if _hooked:
        return
    _hooked = True
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_after_fork)
    atexit.register(_close)
    from multiprocessing import process, util

    # Workers of multiprocessing leave through os._exit: only its own finalizers run there.
    util.register_after_fork(_watched, _close_with_worker)
    if process.parent_process() is not None:  # this is one already, set up by itself
        _close_with_worker(_watched)


def _after_fork() -> None:
    for session in list(_watched):
        session.after_fork()


def _close_with_worker(_: object) -> None:
    from multiprocessing import util

    util.Finalize(None, _close, exitpriority=1)


def _close() -> None:
    for session in list(_watched):
        session.exit()
