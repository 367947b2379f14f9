"""Programs that outlive one call of their framework: conversations, and runs that wait for a person.

While one is kept, its heartbeats go on and the server may keep its KV. What is kept is bounded, and does not
outlive a fork or another ``sojourn.init()``: whoever comes back after that begins anew.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ReferenceType, finalize, ref

from sojourn.program import Program
from sojourn.runtime import Session, clock, session

MAX_KEPT = 1024


class _Kept:
    """A program between two runs of it."""

    __slots__ = ("holders", "program", "session", "status")

    def __init__(self, program: Program) -> None:
        self.program = program
        self.session: ReferenceType[Session] = ref(session())
        self.holders: set[int] = set()
        """``id`` of every living object that stands for it."""
        self.status = "ok"
        """How its last run went."""

    @property
    def usable(self) -> bool:
        return self.program.is_open and self.session() is session()


class Conversations:
    """Programs by whatever their framework knows them by. Safe with threads and in finalizers."""

    def __init__(self, *, status: str | None = None) -> None:
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        # A finalizer may run inside any of these methods, on the same thread.
        self._lock = threading.RLock()
        self._status = status
        """What to report where one is given up; ``None`` means as its last run went."""
        self._hooked = False
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._after_fork)

    def find(self, key: Hashable) -> Program | None:
        """The program kept under ``key``, if it can go on."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is None:
                return None
            if not kept.usable:
                del self._kept[key]
                return None
            self._kept.move_to_end(key)
            return kept.program

    def take(self, key: Hashable) -> Program | None:
        """``find``, and keep it no more."""
        program = self.find(key)
        with self._lock:
            self._kept.pop(key, None)
        return program

    def like(self, matches: Callable[[Any], bool]) -> Hashable | None:
        """The only key for which ``matches`` holds; ``None`` where it is none or not the only one."""
        with self._lock:
            keys = [key for key in self._kept if matches(key)]
        return keys[0] if len(keys) == 1 else None

    def keep(self, key: Hashable, program: Program) -> None:
        """Keep it under ``key``. One that was kept there ends, and so does the least recently used one where
        there are too many."""
        given_up: list[_Kept] = []
        with self._lock:
            if not self._hooked:
                # Registered after the sender's own, and so run before it closes.
                self._hooked = True
                atexit.register(self.clear)
            before = self._kept.get(key)
            if before is not None and before.program is not program:
                given_up.append(before)
            self._kept[key] = _Kept(program)
            while len(self._kept) > MAX_KEPT:
                given_up.append(self._kept.popitem(last=False)[1])
        for kept in given_up:
            self._end(kept)

    def held_by(self, key: Hashable, holder: object, *, ends: bool) -> None:
        """When ``holder`` and all others like it are gone the program ends or, without ``ends``, falls silent
        so that the server's lease decides. Raises ``TypeError`` for an object that takes no weak reference.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or id(holder) in kept.holders:
                return
            finalize(holder, self._let_go, key, kept, id(holder), ends).atexit = False
            if not kept.holders and self._rests(kept):
                session().heartbeats.opened(kept.program, clock())
            kept.holders.add(id(holder))

    def note(self, key: Hashable, status: str) -> None:
        """A run of it is over."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.status = status

    def end_children(self, program: Program) -> None:
        """End what is kept and can go on no more, since ``program`` is over."""
        with self._lock:
            keys = [key for key, kept in self._kept.items() if kept.program.parent_id == program.id]
            given_up = [self._kept.pop(key) for key in keys]
        for kept in given_up:
            self._end(kept)

    def clear(self) -> None:
        """End everything that is kept."""
        with self._lock:
            given_up = list(self._kept.values())
            self._kept.clear()
        for kept in given_up:
            self._end(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _after_fork(self) -> None:
        # Another thread may have held the lock, which the child does not have; the programs are the parent's.
        self._lock = threading.RLock()
        self._kept = OrderedDict()

    def _let_go(self, key: Hashable, kept: _Kept, holder: int, ends: bool) -> None:
        with self._lock:
            kept.holders.discard(holder)
            if kept.holders or self._kept.get(key) is not kept:
                return
            if ends:
                del self._kept[key]
        if ends:
            self._end(kept)
        elif self._rests(kept):
            session().heartbeats.closed(kept.program)

    @staticmethod
    def _rests(kept: _Kept) -> bool:
        return kept.usable and kept.program.heartbeat

    def _end(self, kept: _Kept) -> None:
        if kept.usable:
            kept.program.end(self._status or kept.status)
