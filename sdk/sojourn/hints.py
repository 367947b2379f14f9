"""The hints that an LLM request carries. Field names are those of vLLM Router's ``agentic_context``.

A hint is never a command: without one, or with a late or false one, the engine keeps its default behaviour.
No hint changes an output token.
"""

from __future__ import annotations

import msgspec


class SojournContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """sojourn's own fields of the context; other routers ignore them."""

    v: int = 1
    emitter: str | None = None
    """Id of the emitter that numbered ``events``; needed to detect duplicates."""
    agent_type: str | None = None
    node: str | None = None
    """Node of the Agent Execution Graph this turn belongs to."""
    heartbeat: bool = False
    """The client sends heartbeats: its silence may end leases."""
    implicit: bool = False
    """True if the user opened no program: the id stands for a whole process, whose requests are unrelated."""
    final: bool = False
    """No further turn will follow."""
    tenant: str | None = None
    """Tenant that the client names, as in ``ProgramStart``."""
    expected_steps_left: float | None = None
    """Number of turns that the client expects after this one, learned from earlier programs of this type; ≥
    0."""
    events: list[msgspec.Raw] = []
    """Unsent events, carried because the request would overtake them."""


class AgenticContext(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Identity and advice for one turn."""

    program_id: str
    parent_program_id: str | None = None
    root_program_id: str | None = None
    blocks_parent: bool | None = None
    """The parent waits for this program."""
    expected_resume: bool | None = None
    """False: the client expects no further turn after this one."""
    request_id: str | None = None
    """Id of the logical request. Retries have the same id, so that a retry does not count as a turn."""
    step_id: str | None = None
    priority: int | None = None
    """A higher value is more important; each dialect converts it."""
    deadline_seconds: float | None = None
    expected_output_length: int | None = None
    """Expected number of output tokens."""
    kv_retention_ttl_seconds: float | None = None
    """How long the client asks to keep this turn's KV; the server clips it."""
    sojourn: SojournContext | None = None
