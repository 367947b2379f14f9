"""The status of a program, and all transitions between statuses.

A program is one agent run. It is REASONING while one of its LLM requests is in the engine, and ACTING between
its turns. A REASONING program is reported as GATED while a request of it waits for admission or placement
(``ProgramScheduler.status``). It is ENDED after the client reported its end, and EXPIRED after a long
silence. A new request makes an ENDED or EXPIRED program REASONING again, since clients may be late or
resumed.

A signal for which the current status has no transition is ignored, since signals may be repeated, late or
lost.
"""

from __future__ import annotations

from enum import Enum


class ProgramStatus(str, Enum):
    """Status of a program."""

    REASONING = "reasoning"
    ACTING = "acting"
    GATED = "gated"
    ENDED = "ended"
    EXPIRED = "expired"


class ProgramOutcome(str, Enum):
    """How a program ended. Without a report from the client, the outcome follows from the client's last
    action before it fell silent."""

    OK = "ok"
    ERROR = "error"
    """An error ended the agent, and its client reported that."""
    CANCELLED = "cancelled"
    FINAL = "final"
    """The last request was announced as the final one."""
    DISCONNECTED = "disconnected"
    """The client closed the connection of its last request before the answer's end."""
    LOST = "lost"
    """Heartbeats stopped between two requests. The client was killed, or cannot reach the server."""
    IDLE = "idle"
    """A client without heartbeats sent nothing more."""


REPORTED_OUTCOMES = (ProgramOutcome.OK, ProgramOutcome.ERROR, ProgramOutcome.CANCELLED)
"""Outcomes that a ``program_end`` event may report."""


class ProgramSignal(str, Enum):
    """Cause of a transition between two statuses."""

    REQUEST_ARRIVED = "request_arrived"
    TURN_OVER = "turn_over"
    """The program's last request in the engine finished or was aborted."""
    CONTACT = "contact"
    """The client sent an event."""
    END = "end"
    SILENCE = "silence"


_REASONING, _ACTING, _GATED, _ENDED, _EXPIRED = ProgramStatus
TRANSITIONS = {
    ProgramSignal.REQUEST_ARRIVED: ({_ACTING, _ENDED, _EXPIRED}, _REASONING),
    ProgramSignal.TURN_OVER: ({_REASONING}, _ACTING),
    ProgramSignal.CONTACT: ({_EXPIRED}, _ACTING),
    ProgramSignal.END: ({_REASONING, _ACTING, _EXPIRED}, _ENDED),
    ProgramSignal.SILENCE: ({_ACTING}, _EXPIRED),
}
"""Signal → the statuses that it ends, and the status that follows."""

OVER_STATUSES = frozenset({_ENDED, _EXPIRED})
"""Statuses of programs that are over. Such programs are the first to be removed from the table."""
