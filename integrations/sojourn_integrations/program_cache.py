"""Programs that outlive one call of their framework: conversations, and runs that wait for a person.

The program of a conversation sends heartbeats while the framework's session object lives, so that the server
may keep the program's KV. A program that waits for a person sends no heartbeats. The cache is bounded.
After a fork or another ``sojourn.init()``, cached programs are not used again, and each conversation
starts a new program. ``openai_agents`` keeps conversations and runs, ``langchain`` keeps interrupted graphs.
"""

from __future__ import annotations

import atexit
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import ReferenceType, finalize, ref

from sojourn.process_hooks import register_at_fork
from sojourn.program import Program
from sojourn.runtime import Session, session
from sojourn.tools import ToolCall

MAX_CACHED_PROGRAMS = 1024


class _CachedProgram:
    """A program in the cache, with the objects that represent it and the status of its last run."""

    __slots__ = ("ends", "holders", "key", "program", "session", "status", "wait")

    def __init__(self, key: Hashable, program: Program, wait: ToolCall | None) -> None:
        self.key = key
        self.program = program
        self.wait = wait
        """The tool call as which the wait for a person is reported, if any."""
        self.session: ReferenceType[Session] = ref(session())
        self.holders: set[int] = set()
        """``id()`` of every live object that represents the program, such as a session."""
        self.ends = False
        """True if the program ends with its last holder."""
        self.status = "ok"
        """Status of the program's last run."""

    @property
    def usable(self) -> bool:
        return self.program.is_open and self.session() is session()


class ProgramCache:
    """Programs by a key that is made of the framework's own ids. Safe to use in threads and finalizers."""

    def __init__(self, *, status: str | None = None, ends_at_exit: bool = True) -> None:
        self._kept: OrderedDict[Hashable, _CachedProgram] = OrderedDict()
        # Re-entrant, since a finalizer may call one of these methods inside another.
        self._lock = threading.RLock()
        self._status = status
        """Status with which dropped programs end. ``None``: they end with the status of their last run."""
        self._hooked = not ends_at_exit
        register_at_fork(after_in_child=self._after_fork)

    def find(self, key: Hashable) -> Program | None:
        """Return the program under ``key``. Returns ``None`` unless the program is open and belongs to the
        current session of the SDK."""
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
        """Remove the program under ``key`` and return it; its wait ends. Returns ``None`` in the same cases
        as ``find``."""
        with self._lock:
            kept = self._kept.pop(key, None)
        if kept is None or not kept.usable:
            return None
        if kept.wait is not None:
            kept.wait.stop("ok")
        return kept.program

    def find_key(self, matches: Callable[[Any], bool]) -> Hashable | None:
        """Return the key for which ``matches(key)`` is true; ``None`` if no key matches or several do."""
        with self._lock:
            keys = [key for key in self._kept if matches(key)]
        return keys[0] if len(keys) == 1 else None

    def keep(self, key: Hashable, program: Program, wait: ToolCall | None = None) -> None:
        """Store a program under ``key``. A different program that was under ``key`` ends. Beyond
        ``MAX_CACHED_PROGRAMS`` the least recently used program ends. ``wait``: the tool call as which its
        wait for a person is reported, if any."""
        given_up: list[_CachedProgram] = []
        with self._lock:
            if not self._hooked:
                # Registered after the sender's hook, so it runs before the sender closes.
                self._hooked = True
                atexit.register(self.clear)
            before = self._kept.get(key)
            if before is not None and before.program is not program:
                given_up.append(before)
            self._kept[key] = _CachedProgram(key, program, wait)
            while len(self._kept) > MAX_CACHED_PROGRAMS:
                given_up.append(self._kept.popitem(last=False)[1])
        for kept in given_up:
            self._end(kept)

    def add_holder(self, key: Hashable, holder: object, *, ends: bool) -> None:
        """Tie the program under ``key``, if any, to the object ``holder``, such as a session.

        If the program has no other holder, its heartbeats start again. When the last holder is
        garbage-collected, the heartbeats stop; with ``ends``, the program ends. Raises ``TypeError`` for an
        object that is not weakly referable.
        """
        with self._lock:
            kept = self._kept.get(key)
            if kept is None or id(holder) in kept.holders:
                return
            finalize(holder, self._holder_gone, kept, id(holder)).atexit = False
            kept.ends = ends
            resumes = not kept.holders and kept.usable
            kept.holders.add(id(holder))
        # Outside of the lock. The event sender's lock is taken here, and a finalizer that runs while another
        # thread holds that lock waits for ours.
        if resumes:
            kept.program.resume_heartbeats()

    def rename(self, old: Hashable, new: Hashable) -> None:
        """Move the program under ``old`` to the key ``new``, with its holders. It no longer ends with
        its last holder. If ``new`` already has an open program of this session, that program stays there, and
        the program under ``old`` ends."""
        with self._lock:
            kept = self._kept.pop(old, None)
            if kept is None:
                return
            if self.find(new) is None:
                kept.key, kept.ends = new, False
                self._kept[new] = kept
                return
        self._end(kept)

    def set_run_status(self, key: Hashable, status: str) -> None:
        """Record that a run of the program under ``key`` ended, with its status."""
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                kept.status = status

    def end_children(self, program: Program) -> None:
        """End the cached child programs of ``program``, which has ended."""
        with self._lock:
            keys = [key for key, kept in self._kept.items() if kept.program.parent_id == program.id]
            given_up = [self._kept.pop(key) for key in keys]
        for kept in given_up:
            self._end(kept)

    def clear(self) -> None:
        """End all cached programs."""
        with self._lock:
            given_up = list(self._kept.values())
            self._kept.clear()
        for kept in given_up:
            self._end(kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _after_fork(self) -> None:
        # A thread that the child lacks may hold the lock; the programs belong to the parent.
        self._lock = threading.RLock()
        self._kept = OrderedDict()

    def _holder_gone(self, kept: _CachedProgram, holder: int) -> None:
        with self._lock:
            kept.holders.discard(holder)
            if kept.holders or self._kept.get(kept.key) is not kept:
                return
            ends = kept.ends
            if ends:
                del self._kept[kept.key]
            elif kept.usable:
                # Takes no lock. Done here, so that it cannot follow the resumption for a new holder.
                kept.program.pause_heartbeats()
        if ends:
            self._end(kept)

    def _end(self, kept: _CachedProgram) -> None:
        if kept.usable:
            if kept.wait is not None:
                kept.wait.stop("cancelled")
            kept.program.end(self._status or kept.status)
