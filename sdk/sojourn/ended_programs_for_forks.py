"""Tells forked children which programs of their parent have ended.

A child gets a copy of each program that is open at the fork. The parent's ``end()`` does not change that
copy, and a worker of a process pool lives on and takes jobs of other programs. So the parent records the ends
in memory that it shares with its children.
"""

from __future__ import annotations

import itertools
import os
from types import ModuleType
from typing import Final

mmap: ModuleType | None
try:
    import mmap
except ImportError:  # pragma: no cover
    mmap = None

SLOTS: Final = 4096
"""Number of slots in the shared memory. Program number n uses slot n modulo ``SLOTS``. So the end of program
n + ``SLOTS`` marks program n as ended in the children too, even if n is still open."""


class SharedEndedPrograms:
    """The numbers of ended programs, in memory that the process shares with its forked children. Raises
    ``OSError`` if there is no such memory."""

    def __init__(self) -> None:
        if mmap is None:
            raise OSError("this Python has no mmap")
        self._slots = memoryview(mmap.mmap(-1, 8 * SLOTS)).cast("Q")
        self._numbers = itertools.count(1)

    def new_number(self) -> int:
        """Return the number for a program that begins."""
        return next(self._numbers)

    def add(self, number: int) -> None:
        """Record that the program with this number has ended."""
        slot = number % SLOTS
        self._slots[slot] = max(self._slots[slot], number)  # an earlier program of the slot may end later

    def has(self, number: int) -> bool:
        """Return whether the program with this number has ended."""
        return self._slots[number % SLOTS] >= number


_ends_here: list[SharedEndedPrograms] = []
"""Holds the ``SharedEndedPrograms`` of this process; empty until the first call of ``of_process``."""
_can_share = hasattr(os, "register_at_fork")
"""False if the process cannot fork or is known to have no shared memory."""


def of_process() -> SharedEndedPrograms | None:
    """Return the ``SharedEndedPrograms`` of this process, made at the first call; ``None`` if the process
    cannot fork or has no shared memory."""
    global _can_share
    if not _ends_here and _can_share:
        try:
            _ends_here.append(SharedEndedPrograms())
        except OSError:
            _can_share = False
    return _ends_here[0] if _ends_here else None


def forget_parent() -> None:
    """In a forked child, drop the parent's ``SharedEndedPrograms``. The child makes its own for its own
    programs."""
    _ends_here.clear()
