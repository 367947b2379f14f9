"""Theory of operation of a program's status: every transition is in this file, and nothing else is.

A program is one agent run. It is REASONING while at least one of its LLM
requests is in the engine, ACTING while it runs tools or thinks between turns,
GATED while its request waits because its KV has no place, ENDED when the client
said so, EXPIRED when it was silent for so long that its state was given up.
ENDED and EXPIRED are left again only by a new request: a client may be late,
resumed, or have been declared dead too early, and must never be refused for it.

A (status, signal) pair that is absent changes nothing and is not an error:
signals come from networks, twice, late or not at all.
"""

from __future__ import annotations

from enum import Enum


class ProgramStatus(str, Enum):
    """Where a program stands."""

    REASONING = "reasoning"
    ACTING = "acting"
    GATED = "gated"
    ENDED = "ended"
    EXPIRED = "expired"


class ProgramSignal(str, Enum):
    """What can move a program from one status to another."""

    REQUEST_ARRIVED = "request_arrived"
    TURN_OVER = "turn_over"
    """Its last request in the engine finished or was aborted."""
    GATE = "gate"
    UNGATE = "ungate"
    CONTACT = "contact"
    """The client said something that proves it is alive."""
    END = "end"
    SILENCE = "silence"


STATUS_TRANSITIONS: dict[tuple[ProgramStatus, ProgramSignal], ProgramStatus] = {
    (ProgramStatus.ACTING, ProgramSignal.REQUEST_ARRIVED): ProgramStatus.REASONING,
    (ProgramStatus.ENDED, ProgramSignal.REQUEST_ARRIVED): ProgramStatus.REASONING,
    (ProgramStatus.EXPIRED, ProgramSignal.REQUEST_ARRIVED): ProgramStatus.REASONING,
    (ProgramStatus.REASONING, ProgramSignal.TURN_OVER): ProgramStatus.ACTING,
    (ProgramStatus.GATED, ProgramSignal.TURN_OVER): ProgramStatus.ACTING,
    (ProgramStatus.REASONING, ProgramSignal.GATE): ProgramStatus.GATED,
    (ProgramStatus.GATED, ProgramSignal.UNGATE): ProgramStatus.REASONING,
    (ProgramStatus.REASONING, ProgramSignal.END): ProgramStatus.ENDED,
    (ProgramStatus.ACTING, ProgramSignal.END): ProgramStatus.ENDED,
    (ProgramStatus.GATED, ProgramSignal.END): ProgramStatus.ENDED,
    (ProgramStatus.EXPIRED, ProgramSignal.END): ProgramStatus.ENDED,
    (ProgramStatus.ACTING, ProgramSignal.SILENCE): ProgramStatus.EXPIRED,
    (ProgramStatus.EXPIRED, ProgramSignal.CONTACT): ProgramStatus.ACTING,
}

OVER_STATUSES = frozenset({ProgramStatus.ENDED, ProgramStatus.EXPIRED})
"""Statuses in which a program may be forgotten."""


def next_status(status: ProgramStatus, signal: ProgramSignal) -> ProgramStatus:
    """The status that follows ``signal``; the same one where the table is silent."""
    return STATUS_TRANSITIONS.get((status, signal), status)
