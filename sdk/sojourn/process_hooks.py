"""Calls the methods ``after_fork`` and ``exit`` of SDK sessions when the process forks or ends."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

_observers: WeakSet[Any] = WeakSet()
"""The sessions of this process."""
_hooked = False


def register_at_fork(**hooks: Callable[[], object]) -> None:
    """Register hooks as ``os.register_at_fork`` does; does nothing on platforms that cannot fork."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(**hooks)


def observe_process(session: Any) -> None:
    """Arrange that ``after_fork`` and ``exit`` of ``session`` are called. ``session`` is held weakly."""
    global _hooked
    _observers.add(session)
    if _hooked:
        return
    _hooked = True
    register_at_fork(after_in_child=_after_fork)
    atexit.register(_close)
    from multiprocessing import process, util

    # Workers of multiprocessing leave through os._exit, where only multiprocessing's own finalizers run.
    util.register_after_fork(_observers, _close_with_worker)
    if process.parent_process() is not None:  # this process is such a worker
        _close_with_worker(_observers)


def _after_fork() -> None:
    for session in list(_observers):
        session.after_fork()


def _close_with_worker(_: object) -> None:
    from multiprocessing import util

    util.Finalize(None, _close, exitpriority=1)


def _close() -> None:
    for session in list(_observers):
        session.exit()
