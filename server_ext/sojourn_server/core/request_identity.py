"""Who sends a request, read from what the engine carries of it; and what became of the hint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.hints import AgenticContext
from sojourn.ids import MAX_ID_BYTES, ProgramId
from sojourn.wire import Outcome, WireError, decode_context

CONTEXT_KEY = "agentic_context"


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The program a request belongs to, and the advice that came with it."""

    program_id: ProgramId | None
    context: AgenticContext | None
    outcome: Outcome | None = None
    """What became of the hint; None where there was none."""
    reason: str = ""


NO_IDENTITY = RequestIdentity(None, None)


def read_identity(session_id: str | None, xargs: dict[str, Any] | None) -> RequestIdentity:
    """Read the program from the hint, else from the session header. Never raises.

    A malformed hint is reported and ignored; the session header then still counts.
    """
    session = _checked_session_id(session_id)
    text = xargs.get(CONTEXT_KEY) if xargs else None
    if text is None:
        return RequestIdentity(session, None) if session else NO_IDENTITY
    if not isinstance(text, str):
        return RequestIdentity(session, None, Outcome.REJECTED, "agentic_context is not a JSON string")
    try:
        context = decode_context(text)
    except WireError as error:
        return RequestIdentity(session, None, Outcome.REJECTED, str(error))
    if context.sojourn is not None and context.sojourn.implicit:
        # Requests of one process that nobody called a program: to treat them as one would let a busy
        # process jump the queue for ever.
        return RequestIdentity(None, context, Outcome.APPLIED)
    return RequestIdentity(ProgramId(context.program_id), context, Outcome.APPLIED)


def _checked_session_id(session_id: str | None) -> ProgramId | None:
    if not isinstance(session_id, str) or not 0 < len(session_id.encode("utf-8", "replace")) <= MAX_ID_BYTES:
        return None
    return ProgramId(session_id)
