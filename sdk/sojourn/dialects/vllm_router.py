"""vLLM Router (github.com/vllm-project/router) with program scheduling.

The router (``src/program_scheduling/identity.rs``; tried with vllm-router 0.1.17) answers 400 to a known
field with a bad value. So values are converted to the router's types and bounds, and a value that does not
fit is left out.
"""

from __future__ import annotations

import hashlib
import math
from typing import Any

from sojourn.hints import AgenticContext
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire_codec import encode

from .server_dialects import I64_MAX, SESSION_HEADER, VllmDialect, clip, header_text

MAX_DEADLINE_S = 30 * 86400.0
"""Longest deadline sent. Longer deadlines have no further effect, and some overflow the router's
durations."""
MAX_RETENTION_S = 300.0
"""Longest KV retention sent. The router obeys this hint, and other programs cannot use the memory meanwhile.
The limit equals the router's ``force_resume_timeout_seconds``, the longest time for which it lets other
programs wait."""


class VllmRouterDialect(VllmDialect):
    """Sends ``vllm_xargs.agentic_context`` with the router's field names. The router resumes programs with
    *larger* priorities first.

    The value is a JSON string. The router would also read an object, but it passes the field on to vLLM,
    which refuses an object there. sojourn's own fields are left out.
    """

    name = "vllm_router"

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        headers = {SESSION_HEADER: _short(header_text(context.program_id))}
        if context.sojourn is not None and context.sojourn.implicit:
            return {}, headers  # requests without an identity are routed one by one
        program_id, parent_id = _id(context.program_id), _id(context.parent_program_id)
        if parent_id == program_id:
            parent_id = None  # the router refuses a program as its own parent
        fields = {
            "program_id": program_id,
            "parent_program_id": parent_id,
            "root_program_id": _id(context.root_program_id),
            # The router refuses this field without a parent.
            "blocks_parent": context.blocks_parent if parent_id else None,
            "expected_resume": context.expected_resume,
            "request_id": _id(context.request_id),
            "step_id": _step(context.step_id),
            "priority": None if context.priority is None else clip(context.priority, I64_MAX),
            "deadline_seconds": _seconds(context.deadline_seconds, MAX_DEADLINE_S),
            "expected_output_length": _count(context.expected_output_length),
            "kv_retention_ttl_seconds": _seconds(context.kv_retention_ttl_seconds, MAX_RETENTION_S),
        }
        fields = {name: value for name, value in fields.items() if value is not None}
        return {"vllm_xargs": {"agentic_context": encode(fields).decode()}}, headers


def _id(id: str | None) -> str | None:
    """Return the id in a form that the router keeps unchanged. The router would strip spaces at the ends of
    an id. So an id with such spaces, or with unprintable characters, is percent-encoded. An id that is then
    too long is hashed."""
    if id is None:
        return None
    return _short(id if id == id.strip() and id.isprintable() else header_text(id))


def _short(id: str) -> str:
    """Return ``id``, or its hash if ``id`` has more than 256 bytes, e.g. after percent-encoding."""
    data = id.encode("utf-8", "replace")
    return id if len(data) <= MAX_ID_BYTES else f"sha256-{hashlib.sha256(data).hexdigest()}"


def _step(step_id: str | None) -> int | None:
    """Return the step as a number, or ``None`` for a named step, since the router accepts only numbers."""
    if step_id is None or not (step_id.isascii() and step_id.isdigit()) or len(step_id) > 18:
        return None
    return int(step_id)


def _count(value: int | None) -> int | None:
    return None if value is None or value < 0 else min(value, I64_MAX)


def _seconds(value: float | None, longest: float) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return min(max(0.0, value), longest)
