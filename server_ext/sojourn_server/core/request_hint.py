"""The hint of one request: what its client advises, taken in within bounds."""

from __future__ import annotations

import math

from sojourn.hints import AgenticContext
from sojourn.ids import ProgramId

from ..programs.program_table import ProgramTable
from .scheduler_state import RequestState, SchedulerLimits

MAX_NAME_CHARS = 256
"""Longest agent type, tenant, graph node or client's request id kept of a hint, in characters."""


def clipped(name: str | None) -> str | None:
    """As much of a client's name as is kept; ``None`` for none."""
    return name[:MAX_NAME_CHARS] if name else None


def apply_hint(
    context: AgenticContext | None,
    request_state: RequestState,
    *,
    table: ProgramTable,
    limits: SchedulerLimits,
) -> bool:
    """Note what the hint says on the request's ticket and its program; of no program nothing is noted.

    Returns whether the time-to-live it asks for was clipped.
    """
    program = request_state.program
    if context is None or program is None:
        return False
    if context.parent_program_id:
        program.parent_id = ProgramId(context.parent_program_id)
    if context.root_program_id:
        program.root_id = ProgramId(context.root_program_id)
    was_clipped = False
    ttl_s = context.kv_retention_ttl_seconds
    if ttl_s is not None:
        request_state.hinted_ttl_s = min(max(0.0, ttl_s), limits.max_hinted_ttl_s)
        was_clipped = request_state.hinted_ttl_s != ttl_s
    request_state.final = context.expected_resume is False
    if context.expected_output_length is not None and context.expected_output_length > 0:
        request_state.hinted_tokens = context.expected_output_length
    ours = context.sojourn
    if ours is not None:
        if ours.heartbeat:
            table.promise_heartbeats(program)
        # Kept for as long as the program is: a context may hold a name of 16 KiB.
        program.agent_type = clipped(ours.agent_type) or program.agent_type
        program.node = clipped(ours.node) or program.node
        program.tenant = clipped(ours.tenant) or program.tenant
        left = ours.expected_steps_left
        program.expected_steps_left = left if left is not None and 0 <= left < math.inf else None
        request_state.steps_left = program.expected_steps_left
        request_state.node = clipped(ours.node)
        request_state.final = request_state.final or ours.final
    return was_clipped
