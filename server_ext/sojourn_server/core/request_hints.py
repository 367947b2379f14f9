"""Reads the program and the hint of a request from its session header and ``vllm_xargs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId, id_problem
from sojourn.wire_codec import Outcome, WireError, decode_context

CONTEXT_KEY = "agentic_context"

MAX_NAME_CHARS = 256
"""Maximum number of characters that are kept of a name from a client, such as an agent type or a tenant."""


def clipped(name: str | None) -> str | None:
    """Return the first ``MAX_NAME_CHARS`` characters of a name; ``None`` for ``None`` or "" ."""
    return name[:MAX_NAME_CHARS] if name else None


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The program and the hint that a request names; each is ``None`` if the request names none."""

    program_id: ProgramId | None
    context: AgenticContext | None
    outcome: Outcome | None = None
    """Whether the hint was applied or rejected; ``None`` without a hint."""
    reason: str = ""


NO_IDENTITY = RequestIdentity(None, None)


def read_identity(session_id: str | None, xargs: dict[str, Any] | None) -> RequestIdentity:
    """Read a request's program from its hint, or else from its session header. Never raises.

    A malformed hint is ignored, and the result names the reason. The session header is still used.
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
        # All requests of a process that declares no program. If they were one program, they would keep the
        # rank of the first request for ever, so a busy process would always go first.
        return RequestIdentity(None, context, Outcome.APPLIED)
    return RequestIdentity(ProgramId(context.program_id), context, Outcome.APPLIED)


def _checked_session_id(session_id: str | None) -> ProgramId | None:
    if not isinstance(session_id, str) or id_problem(session_id) is not None:
        return None
    return ProgramId(session_id)
