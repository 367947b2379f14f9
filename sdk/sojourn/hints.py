"""The hints that an LLM request carries. Field names are those of vLLM Router's ``agentic_context``.

A hint is advice, never a command. If hints are missing, late or false, the engine falls back to its default
behaviour. No hint changes an output token.
"""

from __future__ import annotations

import msgspec


class SojournContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The part of an ``AgenticContext`` that only sojourn reads; other routers ignore it."""

    v: int = 1
    emitter: str | None = None
    """Id of the client's event sender, which numbered ``events``; needed to detect duplicates."""
    agent_type: str | None = None
    node: str | None = None
    """Node of the Agent Execution Graph this turn belongs to."""
    heartbeat: bool = False
    """True if the client sends heartbeats; the server may then end leases when the client is silent."""
    implicit: bool = False
    """True if the user opened no program. The id then stands for a whole process with unrelated requests."""
    final: bool = False
    """True if no further turn will follow."""
    tenant: str | None = None
    """Tenant that the client names. It is advice only; fairness uses the authenticated identity."""
    expected_steps_left: float | None = None
    """Number of turns that the client expects after the current turn; ≥ 0."""
    events: list[msgspec.Raw] = []
    """Unsent events of the program, encoded as JSON. The server applies these events before the request."""


class AgenticContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Program id and hints that one LLM request carries."""

    program_id: str
    parent_program_id: str | None = None
    root_program_id: str | None = None
    blocks_parent: bool | None = None
    """True if the parent program waits for this program; ``None`` if unknown."""
    expected_resume: bool | None = None
    """Whether the client expects a further turn after the current turn; ``None`` if unknown."""
    request_id: str | None = None
    """Id of the logical request. Retries have the same id, so that a retry does not count as a turn."""
    step_id: str | None = None
    priority: int | None = None
    """A higher value is more important; each dialect converts it."""
    deadline_seconds: float | None = None
    """Seconds from the sending of the request to its deadline; 0 if the deadline has passed."""
    expected_output_length: int | None = None
    """Expected number of output tokens."""
    kv_retention_ttl_seconds: float | None = None
    """Seconds for which the server should keep this turn's KV; the server clips the value."""
    sojourn: SojournContext | None = None
