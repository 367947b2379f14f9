"""Reads the program and the hint of a request from its session header and ``vllm_xargs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId, id_problem
from sojourn.wire_codec import Outcome, WireError, read_context

from ..policies.preset import Preset

CONTEXT_KEY = "agentic_context"

MAX_NAME_CHARS = 256
"""Maximum number of characters that are kept of a name from a client, such as an agent type or a tenant."""


def clipped(name: str | None) -> str | None:
    """Return the first ``MAX_NAME_CHARS`` characters of a name; ``None`` if the name is empty or ``None``."""
    return name[:MAX_NAME_CHARS] if name else None


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """The program and the hint of a request."""

    program_id: ProgramId | None
    """``None``: the request names no program, or an implicit one (see ``read_identity``)."""
    context: AgenticContext | None
    """The hint; ``None``: the request has none, or the hint was rejected."""
    outcome: Outcome | None = None
    """Whether the hint was applied, clipped (applied without invalid fields) or rejected; ``None`` without a
    hint."""
    reason: str = ""


NO_IDENTITY = RequestIdentity(None, None)

HINTED_TTL = "kv_retention_ttl_seconds"


def unused_fields(preset: Preset) -> list[str]:
    """Return the names of the fields of hints and events that an engine with this preset does not use. A
    field of an event is named ``event.field``. No preset uses the three that are listed first below."""
    hints, events = ["blocks_parent", "step_id"], ["program_start.call_id"]
    if not preset.placement.reads_costs:
        hints += ["deadline_seconds", "priority"]
        events += ["tool_start.expected_s", "tool_start.expected_p95_s"]
        if not getattr(preset.retention, "reads_hinted_ttl", False):
            hints.append(HINTED_TTL)
    if not getattr(preset.output_length, "hints", False):
        hints.append("expected_output_length")
    if not preset.workflow_prediction.is_used:
        hints += ["expected_resume", "sojourn.expected_steps_left"]
        events += ["aeg.graph_hash", "aeg.graph"]
    return sorted(hints) + events


def read_identity(session_id: str | None, xargs: dict[str, Any] | None) -> RequestIdentity:
    """Read a request's program from its hint, or from its session header if there is no valid hint. An
    implicit program (``SojournContext.implicit``) counts as none. Never raises. If the hint or a field of it
    is malformed, the result names the reason."""
    is_valid = isinstance(session_id, str) and id_problem(session_id) is None
    session = ProgramId(session_id) if is_valid and session_id is not None else None
    text = xargs.get(CONTEXT_KEY) if xargs else None
    if text is None:
        return RequestIdentity(session, None) if session else NO_IDENTITY
    try:
        if not isinstance(text, str):
            raise WireError("agentic_context is not a JSON string")
        context, problems = read_context(text)
    except WireError as error:
        return RequestIdentity(session, None, Outcome.REJECTED, str(error))
    # An implicit id stands for a process that declares no program. If its requests were one program, they
    # would keep the rank of the first request for ever, so a busy process would always go first.
    is_implicit = context.sojourn is not None and context.sojourn.implicit
    program_id = None if is_implicit else ProgramId(context.program_id)
    outcome = Outcome.CLIPPED if problems else Outcome.APPLIED
    return RequestIdentity(program_id, context, outcome, "; ".join(problems))
