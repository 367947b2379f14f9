"""The events that an agent reports about its program and tools. They hold no arguments and no outputs.

Every event names its program and carries a sequence number. The number grows from event to event of one
program and one emitter (the event sender of one client process). ``age_s`` is the time from the event to its
sending, on the client's monotonic clock. The server subtracts ``age_s`` from its own time, so the two
machines need not agree on the time of day.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="type"):
    """The fields of every event."""

    program_id: str
    seq: int
    age_s: float = 0.0
    """Seconds between the event and its sending; ≥ 0."""


class ProgramStart(Event, frozen=True, kw_only=True, omit_defaults=True, tag="program_start"):
    """A program began. Repeating this event for a known id is harmless."""

    name: str | None = None
    agent_type: str | None = None
    parent_program_id: str | None = None
    root_program_id: str | None = None
    call_id: str | None = None
    """Id of the parent's tool call in which this sub-program runs. No policy of our server uses it."""
    heartbeat: bool = False
    """True if the client sends heartbeats; the server then ends leases when the client is silent."""
    tenant: str | None = None
    """The tenant that the client names. It is advice only; fairness uses the authenticated identity."""


class ToolStart(Event, frozen=True, kw_only=True, omit_defaults=True, tag="tool_start"):
    """A tool began to run between two turns."""

    call_id: str
    tool: str
    """The tool's name as the framework knows it, e.g. ``bash``."""
    tool_class: str | None = None
    """A finer class that the client knows, e.g. the command head ``pytest``."""
    expected_s: float | None = None
    """The caller's estimate of the duration, in seconds."""
    expected_p95_s: float | None = None
    """The client's estimate of the duration's 95th percentile, in seconds."""


class ToolStop(Event, frozen=True, kw_only=True, omit_defaults=True, tag="tool_stop"):
    """The tool call ended."""

    call_id: str
    duration_s: float | None = None
    """Duration in seconds, measured on the client's monotonic clock. ``None``: a client that keeps no clock
    between two events; the server takes the time between the start and this event."""
    status: str = "ok"
    """``ok``, ``error``, ``timeout``, ``nonzero`` or ``cancelled``."""


class Heartbeat(Event, frozen=True, kw_only=True, omit_defaults=True, tag="heartbeat"):
    """The client is alive and will send another request."""


class AegNode(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step of an agent."""

    id: str
    tools: list[str] = []
    """Names of the tools that the step may call."""


class AegEdge(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``target`` may follow ``source``. ``__start__`` and ``__end__`` stand for the start and end of a
    run."""

    source: str
    target: str
    probability: float | None = None
    """Probability of this edge among all edges from ``source``; absent if the client does not know it."""


class AegGraph(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An Agent Execution Graph (SAGA §3.2)."""

    nodes: list[AegNode]
    edges: list[AegEdge]
    complete: bool = True
    """If False, the graph may have edges that are not listed."""


class AegReport(Event, frozen=True, kw_only=True, omit_defaults=True, tag="aeg"):
    """Reports the graph of the program. A client process sends a graph in full once, and again if the server
    may have lost it. Its other reports of this graph have only the hash."""

    graph_hash: str
    agent_type: str | None = None
    graph: AegGraph | None = None
    """The graph in full; absent if the report has only the hash."""


class ProgramEnd(Event, frozen=True, kw_only=True, omit_defaults=True, tag="program_end"):
    """The program will send no further request; its KV may be evicted."""

    status: str = "ok"
    """``ok``, ``error`` or ``cancelled``."""


AnyEvent = ProgramStart | ToolStart | ToolStop | Heartbeat | AegReport | ProgramEnd
"""Any event; the field ``type`` says which."""
