"""Dialects of other servers that need only a header and sometimes a body field.

Numbers are clipped to each server's bounds: a number outside them would fail the agent's request.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from sojourn.hints import AgenticContext

from .end_notifier import EndNotifier
from .event_transport import EventTransport, TransportContext

SESSION_HEADER = "X-Session-ID"
"""vLLM ≥ 0.32 copies it to ``request.session_id``; several routers use it for session affinity."""
SESSION_KEY_HEADER = "x-aibrix-session-key"
FAIRNESS_HEADER = "x-llm-d-inference-fairness-id"
"""Requests with the same value share one flow; those without it share ``default-flow``."""
I32_MAX = 2**31 - 1
U32_MAX = 2**32 - 1
I64_MAX = 2**63 - 1

_VISIBLE = "".join(chr(code) for code in range(0x21, 0x7F))

Fields = tuple[dict[str, Any], dict[str, str]]
"""Body fields and headers."""


def clip(value: int, most: int) -> int:
    """Return ``value`` clipped to ±``most``, a range in which its negation is valid too."""
    return max(-most, min(most, value))


def header_text(id: str) -> str:
    """Return ``id`` as the value of a header. Characters that HTTP does not allow there are percent-encoded
    as UTF-8.

    An id of visible ASCII stays unchanged; in an encoded id ``%`` is encoded as well.
    """
    if id.isascii() and id.isprintable() and " " not in id:
        return id
    return quote(id, safe=_VISIBLE.replace("%", ""), errors="replace")


def session_header(program_id: str) -> dict[str, str]:
    """Return the header ``X-Session-ID`` with this program's id."""
    return {SESSION_HEADER: header_text(program_id)}


class VllmDialect:
    """``X-Session-ID`` and nothing else: for stock vLLM and every unknown server.

    A body field would reach ``SamplingParams.extra_args`` without effect, and servers that refuse unknown
    fields would fail the agent's request.
    """

    name = "vllm"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> Fields:
        return {}, session_header(context.program_id)

    def event_transport(self, transport_context: TransportContext) -> EventTransport | None:
        return None


class VllmPriorityDialect(VllmDialect):
    """Sends the session header and ``priority`` to stock vLLM that was started with ``--scheduling-policy
    priority``.

    In vLLM the *lower* number goes first, so the priority is negated. The user chooses this dialect; no probe
    finds it. vLLM documents that a server without that flag rejects a priority other than zero; vLLM 0.32
    ignored it instead.
    """

    name = "vllm_priority"

    def fields(self, context: AgenticContext) -> Fields:
        body = {} if context.priority is None else {"priority": -clip(context.priority, I32_MAX)}
        return body, session_header(context.program_id)


class AibrixDialect(VllmDialect):
    """AIBrix (github.com/vllm-project/aibrix): ``x-aibrix-session-key``, by which AIBrix keeps a session on
    one pod.

    There ``x-session-id`` is the encoded address of a pod, which only AIBrix may make. An id of ours would
    misroute the request, so that header is never sent.
    """

    name = "aibrix"

    def fields(self, context: AgenticContext) -> Fields:
        return {}, {SESSION_KEY_HEADER: header_text(context.program_id)}


class LlmDDialect(VllmDialect):
    """llm-d's router (github.com/llm-d/llm-d-router): ``X-Session-ID``, and the request's flow for fairness:
    the tenant if known, else the outermost program.

    ``x-llm-d-inference-objective`` names a resource of the cluster, which no client can derive from a number;
    so no priority is sent.
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
    """SGLang (github.com/sgl-project/sglang): ``session_id`` and ``priority`` at the top level.

    ``session_id`` keeps KV only with ``--enable-session-radix-cache``; ``priority`` orders only with
    ``--enable-priority-scheduling``. Elsewhere both are ignored, except by a server started with
    ``--abort-on-priority-when-disabled``. The *higher* number goes first, as here, unless the server was
    started with ``--schedule-low-priority-values-first``.
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
    """ThunderAgent (github.com/ThunderAgent-org/ThunderAgent): ``program_id`` at the top level of the body,
    and a release call at the program's end.

    ThunderAgent removes ``program_id`` before the engine sees the request. It accepts no priority and no
    other hint. Requests without an id share one program called ``default``, so the id of a process's implicit
    program is sent too.
    """

    name = "thunderagent"

    def fields(self, context: AgenticContext) -> Fields:
        return {"program_id": context.program_id}, session_header(context.program_id)

    def event_transport(self, transport_context: TransportContext) -> EventTransport:
        return EndNotifier(transport_context, "/programs/release", "program_id")
