"""Dialects that need only headers and sometimes a body field, for servers without the sojourn plugin.

Numbers are clipped to each server's bounds, since a number outside them would fail the agent's request.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any
from urllib.parse import quote

from sojourn.hints import AgenticContext

from .end_notifier import EndNotifier
from .event_transport import EventTransport, TransportContext

SESSION_HEADER = "X-Session-ID"
"""Header with the program's id. vLLM ≥ 0.32 copies it to ``request.session_id``; several routers use it for
session affinity."""
SESSION_KEY_HEADER = "x-aibrix-session-key"
FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
"""Header with llm-d's fairness flow. Requests with the same value share one flow. Requests without this
header share the flow ``default-flow``."""
I32_MAX = 2**31 - 1
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))

Fields = tuple[dict[str, Any], dict[str, str]]
"""Body fields and headers."""


def clip(value: int, most: int) -> int:
    """Return ``value`` clipped to the range from ``-most`` to ``most``. The range is symmetric, so the
    negated value is valid too."""
    return max(-most, min(most, value))


@lru_cache(maxsize=256)
def header_text(id: str) -> str:
    """Return ``id`` as the value of a header. An id of visible ASCII characters stays unchanged.

    In any other id, spaces, ``%`` and all characters beyond visible ASCII are percent-encoded as UTF-8.
    """
    if id.isascii() and id.isprintable() and " " not in id:
        return id
    return quote(id, safe=_VISIBLE.replace("%", ""), errors="replace")


def session_header(program_id: str) -> dict[str, str]:
    """Return the header ``X-Session-ID`` with this program's id."""
    return {SESSION_HEADER: header_text(program_id)}


class VllmDialect:
    """Sends only the header ``X-Session-ID``. Used for stock vLLM and for every unknown server.

    In stock vLLM a body field would have no effect (it ends in ``SamplingParams.extra_args``). Servers that
    refuse unknown fields would fail the agent's request.
    """

    name = "vllm"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> Fields:
        return {}, session_header(context.program_id)

    def text_fields(self, program_id: str, context: str) -> Fields:
        raise NotImplementedError("this server takes no events with a request")

    def event_transport(self, transport_context: TransportContext) -> EventTransport | None:
        return None


class VllmPriorityDialect(VllmDialect):
    """Sends the session header and ``priority`` to stock vLLM that was started with ``--scheduling-policy
    priority``.

    In vLLM the *lower* number goes first, so the priority is negated. The user chooses this dialect; it is
    never detected. According to vLLM's documentation, a server without that flag rejects a priority other
    than zero. vLLM 0.32 ignores the priority instead.
    """

    name = "vllm_priority"

    def fields(self, context: AgenticContext) -> Fields:
        body = {} if context.priority is None else {"priority": -clip(context.priority, I32_MAX)}
        return body, session_header(context.program_id)


class AibrixDialect(VllmDialect):
    """AIBrix (github.com/vllm-project/aibrix): sends ``x-aibrix-session-key``, by which AIBrix keeps a
    session on one pod.

    AIBrix reads ``x-session-id`` as the encoded address of a pod. A program id in ``x-session-id`` would
    misroute the request, so this header is never sent.
    """

    name = "aibrix"

    def fields(self, context: AgenticContext) -> Fields:
        return {}, {SESSION_KEY_HEADER: header_text(context.program_id)}


class LlmDDialect(VllmDialect):
    """llm-d's router (github.com/llm-d/llm-d-router): sends ``X-Session-ID`` and the request's fairness flow.
    The flow is the tenant if known, else the outermost program. An implicit program without a tenant sends no
    flow.

    No priority is sent. ``x-llm-d-inference-objective`` expects the name of a cluster resource, not a number.
    """

    name = "llm_d"

    def fields(self, context: AgenticContext) -> Fields:
        headers = session_header(context.program_id)
        ours = context.sojourn
        flow = None if ours is None else ours.tenant
        if flow is None and not (ours is not None and ours.implicit):
            flow = context.root_program_id or context.program_id
        if flow:
            headers[FAIRNESS_HEADER] = header_text(flow)
        return {}, headers


class SglangDialect(VllmDialect):
    """SGLang (github.com/sgl-project/sglang): sends the session header, and ``session_id`` and ``priority``
    in the body. Closes the session at the program's end. An implicit program sends no ``session_id``.

    ``session_id`` keeps KV only with the server's flag ``--enable-session-radix-cache``. ``priority`` has an
    effect only with ``--enable-priority-scheduling``. Without these flags, a server ignores the fields. One
    exception: with ``--abort-on-priority-when-disabled`` a server aborts requests that have a priority. The
    *higher* number goes first, as in sojourn. With ``--schedule-low-priority-values-first`` the lower one
    does.
    """

    name = "sglang"
    yields_to = frozenset({"session_params"})
    """SGLang refuses a request that has both ``session_params`` and ``session_id``."""

    def fields(self, context: AgenticContext) -> Fields:
        body: dict[str, Any] = {}
        if context.sojourn is None or not context.sojourn.implicit:
            body["session_id"] = context.program_id
        if context.priority is not None:
            body["priority"] = clip(context.priority, I32_MAX)
        return body, session_header(context.program_id)

    def event_transport(self, transport_context: TransportContext) -> EventTransport:
        return EndNotifier(transport_context, "/close_session", "session_id")


class ThunderAgentDialect(VllmDialect):
    """ThunderAgent (github.com/ThunderAgent-org/ThunderAgent): sends the session header,
    ``program_id`` at the top level of the body, and a release call at the program's end.

    ThunderAgent removes ``program_id`` before the engine sees the request. It accepts no priority and no
    other hint. Requests without an id share one program called ``default``, so the id of a process's implicit
    program is sent too.
    """

    name = "thunderagent"

    def fields(self, context: AgenticContext) -> Fields:
        return {"program_id": context.program_id}, session_header(context.program_id)

    def event_transport(self, transport_context: TransportContext) -> EventTransport:
        return EndNotifier(transport_context, "/programs/release", "program_id", takes_implicit=True)
