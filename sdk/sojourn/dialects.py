"""Dialects: how each kind of server reads program, session, priority and hints from a request.

A *dialect* is a row of the table at the end. ``docs/dialects.md`` describes the servers. The events that go
to a server outside of requests are in ``event_transport``.

Numbers are clipped to each server's bounds, since a number outside them would fail the agent's request.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote

from .hints import AgenticContext
from .ids import MAX_ID_BYTES
from .wire_codec import MAX_CONTEXT_BYTES, WireError, encode

SESSION_HEADER = "X-Session-ID"
"""Header with the program's id. vLLM ≥ 0.32 copies it to ``request.session_id``; several routers use it for
session affinity."""
MAX_DEADLINE_S = 30 * 86400.0
"""Longest deadline sent to vLLM Router. Longer ones have no further effect, and some overflow its
durations."""
MAX_RETENTION_S = 300.0
"""Longest KV retention sent to vLLM Router. The router obeys this hint, and other programs cannot use the
memory meanwhile. The limit equals its ``force_resume_timeout_seconds``, for which it lets other programs
wait."""

_I32, _U32, _I64 = 2**31 - 1, 2**32 - 1, 2**63 - 1
_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))

Body = dict[str, Any]
Headers = dict[str, str]


@lru_cache(maxsize=256)
def header_text(id: str) -> str:
    """Return ``id`` as the value of a header. An id of visible ASCII characters stays unchanged. In any other
    id, spaces, ``%`` and all characters beyond visible ASCII are percent-encoded as UTF-8."""
    if id.isascii() and id.isprintable() and " " not in id:
        return id
    return quote(id, safe=_VISIBLE.replace("%", ""), errors="replace")


def sojourn_fields(program_id: str, context: str) -> tuple[Body, Headers]:
    """Return body and headers for a sojourn server. ``context``: the ``AgenticContext`` as JSON. It is sent
    as a *string*, since vLLM allows only flat values there. Raises ``WireError`` if it is too long."""
    size = len(context) if context.isascii() else len(context.encode())
    if size > MAX_CONTEXT_BYTES:
        raise WireError(f"agentic_context of {size} bytes; at most {MAX_CONTEXT_BYTES} are accepted")
    plain = program_id.isascii() and program_id.isprintable() and " " not in program_id
    id = program_id if plain else header_text(program_id)
    return {"vllm_xargs": {"agentic_context": context}}, {SESSION_HEADER: id}


def _session(context: AgenticContext) -> Headers:
    return {SESSION_HEADER: header_text(context.program_id)}


def _given(**fields: Any) -> Body:
    return {name: value for name, value in fields.items() if value is not None}


def _is_run(context: AgenticContext) -> bool:
    """Return whether the program is one run. An implicit program is a whole process, whose requests a server
    must not treat as one session."""
    return context.sojourn is None or not context.sojourn.implicit


def _number(value: int | None, most: int, sign: int = 1) -> int | None:
    """Return ``sign * value``, clipped to the range from ``-most`` to ``most``."""
    return None if value is None else sign * max(-most, min(most, value))


def _seconds(value: float | None, longest: float) -> float | None:
    return None if value is None or not math.isfinite(value) else min(max(0.0, value), longest)


# ---- vLLM Router (vllm-project/router), which answers 400 to a known field with a bad value


def _router_id(id: str | None) -> str | None:
    """Return the id in a form that the router keeps unchanged. It would strip spaces at the ends, so such an
    id, or one with unprintable characters, is percent-encoded. An id that is then too long is hashed."""
    if id is None:
        return None
    return _short(id if id == id.strip() and id.isprintable() else header_text(id))


def _short(id: str) -> str:
    data = id.encode("utf-8", "replace")
    return id if len(data) <= MAX_ID_BYTES else f"sha256-{hashlib.sha256(data).hexdigest()}"


def _router_body(context: AgenticContext) -> Body:
    if not _is_run(context):
        return {}  # requests without an identity are routed one by one
    program_id, parent_id = _router_id(context.program_id), _router_id(context.parent_program_id)
    if parent_id == program_id:
        parent_id = None  # the router refuses a program as its own parent
    step = context.step_id or ""
    fields = _given(
        program_id=program_id,
        parent_program_id=parent_id,
        root_program_id=_router_id(context.root_program_id),
        blocks_parent=context.blocks_parent if parent_id else None,  # refused without a parent
        expected_resume=context.expected_resume,
        request_id=_router_id(context.request_id),
        step_id=int(step) if step.isascii() and step.isdigit() and len(step) <= 18 else None,
        priority=_number(context.priority, _I64),
        deadline_seconds=_seconds(context.deadline_seconds, MAX_DEADLINE_S),
        expected_output_length=_number(context.expected_output_length, _I64),
        kv_retention_ttl_seconds=_seconds(context.kv_retention_ttl_seconds, MAX_RETENTION_S),
    )
    # A string. The router would read an object too, but passes the field on to vLLM, which refuses one.
    return {"vllm_xargs": {"agentic_context": encode(fields).decode()}}


# ---- Dynamo (ai-dynamo/dynamo), which answers 400 to an unknown field and to a number out of range


def _dynamo_body(context: AgenticContext) -> Body:
    # ``strict_priority`` is never sent, since only the operator may put a request above all others.
    hints = _given(
        priority=_number(context.priority, _I32),
        osl=_number(context.expected_output_length, _U32),
        speculative_prefill=True if context.expected_resume else None,
    )
    return {"nvext": {"agent_hints": hints}} if hints else {}


def _dynamo_headers(context: AgenticContext) -> Headers:
    if not _is_run(context):
        return {}  # session affinity would pin all requests of the process to one worker
    headers = {"X-Dynamo-Session-ID": header_text(context.program_id)}
    if context.parent_program_id:
        headers["X-Dynamo-Parent-Session-ID"] = header_text(context.parent_program_id)
    if context.sojourn is not None and context.sojourn.final:
        headers["X-Dynamo-Session-Final"] = "true"
    return headers


# ---- llm-d's router (llm-d/llm-d-router)


def _llm_d_headers(context: AgenticContext) -> Headers:
    """Return the session and the fairness flow: the tenant if known, else the outermost program. Requests
    without a flow share the flow ``default-flow``."""
    flow = context.sojourn.tenant if context.sojourn is not None else None
    if flow is None and _is_run(context):
        flow = context.root_program_id or context.program_id
    return {**_session(context), **({"x-llm-d-inference-fairness-id": header_text(flow)} if flow else {})}


class Dialect(NamedTuple):
    """The form in which one kind of server takes the hints and the program id of a request."""

    name: str
    body: Callable[[AgenticContext], Body] = lambda context: {}
    headers: Callable[[AgenticContext], Headers] = _session
    yields_to: frozenset[str] = frozenset()
    """Body fields that the server does not accept together with this dialect's fields. If the user's body has
    one of these fields, only headers are added."""
    end: tuple[str, str] | None = None
    """Path of the POST that reports a program's end, and its field with the program id. Such a server has no
    leases and keeps a program until its end is reported."""
    takes_implicit: bool = False
    """Whether the server gets the end of an implicit program."""

    @property
    def carries_events(self) -> bool:
        """Whether the body of a request can carry unsent events."""
        return self.name == "sojourn"

    def fields(self, context: AgenticContext) -> tuple[Body, Headers]:
        """Return the body fields and headers of one request; the caller may change both. Raises ``WireError``
        if ``context`` is too long, for instance because of its events."""
        if self.carries_events:
            return sojourn_fields(context.program_id, encode(context).decode())
        return self.body(context), self.headers(context)


_TABLE = (
    Dialect("sojourn"),
    # Stock vLLM and every unknown server. A body field would have no effect, and others may refuse it.
    Dialect("vllm"),
    # vLLM with ``--scheduling-policy priority``, where the *lower* number goes first. Chosen, never detected.
    Dialect("vllm_priority", lambda context: _given(priority=_number(context.priority, _I32, -1))),
    Dialect(
        "vllm_router", _router_body, lambda context: {SESSION_HEADER: _short(header_text(context.program_id))}
    ),
    Dialect("dynamo", _dynamo_body, _dynamo_headers),
    # Requests without an id share one program called ``default``, so an implicit program's id is sent too.
    Dialect(
        "thunderagent",
        lambda context: {"program_id": context.program_id},
        end=("/programs/release", "program_id"),
        takes_implicit=True,
    ),
    Dialect(
        "sglang",
        lambda context: _given(
            session_id=context.program_id if _is_run(context) else None,
            priority=_number(context.priority, _I32),
        ),
        yields_to=frozenset({"session_params"}),  # refused together with ``session_id``
        end=("/close_session", "session_id"),
    ),
    Dialect("llm_d", headers=_llm_d_headers),
    # AIBrix reads ``x-session-id`` as the encoded address of a pod, so that header would misroute the
    # request.
    Dialect("aibrix", headers=lambda context: {"x-aibrix-session-key": header_text(context.program_id)}),
)

DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in _TABLE}
"""Dialects by name."""
