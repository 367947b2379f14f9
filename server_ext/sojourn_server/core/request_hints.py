"""The program and the hint of a request, read from the request's session header and ``vllm_xargs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId, id_problem
from sojourn.wire_codec import Outcome, WireError, decode_context

CONTEXT_KEY = "agentic_context"

MAX_NAME_CHARS = 256
"""Maximum number of characters kept of a client's name (agent type, tenant, graph node, request id)."""


def clipped(name: str | None) -> str | None:
    """The kept part of a client's name; ``None`` for ``None``."""
    return name[:MAX_NAME_CHARS] if name else None


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The program that a request belongs to, and its hint."""

    program_id: ProgramId | None
    context: AgenticContext | None
    outcome: Outcome | None = None
    """How the hint was used; ``None`` without a hint."""
    reason: str = ""


NO_IDENTITY = RequestIdentity(None, None)


def read_identity(session_id: str | None, xargs: dict[str, Any] | None) -> RequestIdentity:
    """Read the program from the hint, else from the session header. Never raises.

    A malformed hint is reported and ignored; the session header is still used.
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
        # Requests of one process without a declared program. As one program they would keep its first rank
        # for ever, so a busy process would always go first.
        return RequestIdentity(None, context, Outcome.APPLIED)
    return RequestIdentity(ProgramId(context.program_id), context, Outcome.APPLIED)


def _checked_session_id(session_id: str | None) -> ProgramId | None:
    if not isinstance(session_id, str) or id_problem(session_id) is not None:
        return None
    return ProgramId(session_id)
