"""Computes when each open program's next heartbeat is due. Heartbeats keep a lease alive while an agent is
silent."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol
from weakref import ref


class OpenProgram(Protocol):
    """The part of ``Program`` that the session and the event sender use."""

    @property
    def id(self) -> str: ...

    @property
    def implicit(self) -> bool:
        """True if the program stands for a whole process, which may hold several runs."""

    @property
    def is_open(self) -> bool:
        """Whether the program has started and not ended."""

    @property
    def running_tools(self) -> Sized:
        """Tool calls in progress."""

    @property
    def open_requests(self) -> Sized:
        """LLM requests in progress."""

    def join(self, session: Any) -> None:
        """Report the program's start to the session and begin heartbeats there."""

    def report_graph(self) -> None:
        """Report the program's graph to the server. Never raises."""

    def end(self, status: str = "ok") -> None:
        """Report the program's end. Never raises."""

    def end_after_requests(self, status: str) -> None:
        """Report the program's end once its requests in progress have ended."""


class _LastBeat:
    """When an open program's last heartbeat was due, in monotonic seconds. Before the first heartbeat this is
    the time at which heartbeats began."""

    __slots__ = ("last_s", "left_out")

    def __init__(self, now: float) -> None:
        self.last_s = now
        self.left_out = False
        """True if the last heartbeat was due but not sent (see ``take_due``)."""


class Heartbeats:
    """The open programs, each with the time of its last heartbeat. This class has no thread and no clock; the
    sender calls ``take_due``.

    Programs are referenced weakly, so that heartbeats stop when a program without an end is
    garbage-collected. There is no lock, since each access is one atomic dict operation. A heartbeat too many
    or too few at a program's end is harmless.
    """

    def __init__(self, interval_s: float = 3.0) -> None:
        self.interval_s = interval_s
        # Keyed by object, not by id: the end of one program must not stop another with the same id.
        self._open: dict[ref[OpenProgram], _LastBeat] = {}

    @property
    def promised(self) -> bool:
        """True while a program that sends heartbeats is open."""
        return bool(self._open)

    def opened(self, program: OpenProgram, now: float) -> None:
        """Schedule the first heartbeat of ``program`` one interval after ``now`` (monotonic seconds)."""
        # The callback removes garbage-collected programs, since ``take_due`` does not run without a server.
        self._open[ref(program, lambda gone: self._open.pop(gone, None))] = _LastBeat(now)

    def closed(self, program: OpenProgram) -> None:
        """Stop the heartbeats of ``program``."""
        self._open.pop(ref(program), None)

    def programs(self) -> list[OpenProgram]:
        """Return the programs that send heartbeats."""
        found = (reference() for reference in self._open.copy())
        return [program for program in found if program is not None and program.is_open]

    def find(self, program_id: str) -> OpenProgram | None:
        """Return the open program with this id. Only programs that send heartbeats are found; otherwise
        ``None``."""
        return next((program for program in self.programs() if program.id == program_id), None)

    def take_due(self, now: float) -> tuple[list[OpenProgram], float | None]:
        """Return the programs whose heartbeat is due at ``now``, and the seconds until the next heartbeat.

        The caller sends these heartbeats. Each program's next heartbeat is due one interval after ``now``. If
        a program only waits for LLM requests, every second heartbeat is left out. The seconds are ``None`` if
        no program is open.
        """
        beating: list[OpenProgram] = []
        wait_s: float | None = None
        for reference, watch in self._open.copy().items():
            program = reference()
            if program is None:
                self._open.pop(reference, None)
                continue
            left_s = watch.last_s + self.interval_s - now
            if left_s <= 0:
                watch.last_s = now
                left_s = self.interval_s
                # The server usually sees the request. But the request may wait for a connection or for a
                # retry, be at another server, or be a stream that was left early; then only heartbeats show
                # that the client lives. Every second one is enough: the server allows 10 s of silence.
                watch.left_out = not (watch.left_out or program.running_tools or not program.open_requests)
                if not watch.left_out:
                    beating.append(program)
            wait_s = left_s if wait_s is None else min(wait_s, left_s)
        return beating, wait_s

    def after_fork(self) -> None:
        """Forget the parent's programs. The child sends no heartbeats for them."""
        self._open = {}
