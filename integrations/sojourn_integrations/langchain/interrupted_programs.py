"""Keeps programs that wait for a person, from an interrupt until the graph is resumed."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple
from weakref import ReferenceType, ref

from sojourn.process_hooks import register_at_fork
from sojourn.program import Program
from sojourn.runtime import Session, session
from sojourn.tools import ToolCall

MAX_INTERRUPTED = 1024
HUMAN = "human"
"""Name and class of the tool call that stands for the time in which a program waits for a person."""


class _InterruptedProgram(NamedTuple):
    program: Program
    call: ToolCall
    pid: int
    session: ReferenceType[Session]

    @property
    def usable(self) -> bool:
        return self.program.is_open and self.pid == os.getpid() and self.session() is session()


class InterruptedPrograms:
    """The programs that wait for a person, by id. A wait is reported as a tool call of class ``human``, so
    that the server learns how long people take. A wait may last for days. So a waiting program sends no
    heartbeats, and the server ends its lease. The program's next request continues the program."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, _InterruptedProgram] = OrderedDict()
        # Re-entrant, since a generator's finalizer may call one of these methods inside another.
        self._lock = threading.RLock()
        register_at_fork(after_in_child=self._after_fork)

    def __len__(self) -> int:
        return len(self._kept)

    def _after_fork(self) -> None:
        # A thread that the child lacks may hold the lock; the programs belong to the parent.
        self._lock = threading.RLock()
        self._kept = OrderedDict()

    def keep(self, program: Program, interrupts: Sequence[str | None]) -> None:
        """Add a program that stopped for a person, report the wait as a tool call, and stop heartbeats.
        ``interrupts`` holds the ids of the interrupts at which the program stopped, if known. Beyond
        ``MAX_INTERRUPTED`` programs the oldest program ends as ``cancelled``."""
        mark = next((each for each in interrupts if each), None)
        call = ToolCall(HUMAN, f"{HUMAN}-{mark}" if mark else None, tool_class=HUMAN, program=program).start()
        program.pause_heartbeats()
        given_up: list[_InterruptedProgram] = []
        with self._lock:
            self._kept[program.id] = _InterruptedProgram(program, call, os.getpid(), ref(session()))
            while len(self._kept) > MAX_INTERRUPTED:
                given_up.append(self._kept.popitem(last=False)[1])
        for each in given_up:
            if each.usable:
                each.call.stop("cancelled")
                each.program.end("cancelled")

    def take(self, id: str) -> Program | None:
        """Remove and return the waiting program with this id; its wait ends and its heartbeats start again.
        Returns ``None`` if no such program waits in this process and session."""
        with self._lock:
            kept = self._kept.pop(id, None)
        if kept is None or not kept.usable:
            return None
        kept.call.stop("ok")
        kept.program.resume_heartbeats()
        return kept.program
