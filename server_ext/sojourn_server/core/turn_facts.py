"""Collects what an engine knows about a program's turns, for ``metrics.turn_explanation``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..metrics.turn_ledger import TurnRecord
from ..programs.program_state import ProgramState
from .scheduler_state import SchedulerState


def collect_turn_facts(state: SchedulerState, program: ProgramState, now: float) -> dict[str, Any]:
    """Return the program's turns, oldest first and with those that have not ended, and the decisions about
    the program. Each turn has two estimates of the engine's prefill costs in addition."""
    records = state.ledger.of_program(program.id)
    live = [
        replace(request.record, finished_s=now, outcome="running")
        for name in program.live_requests
        if (request := state.requests.states.get(name)) is not None and request.record is not None
    ]
    records += sorted(live, key=lambda record: record.arrived_s)
    return {
        "program_id": program.id,
        "turns": program.turns,
        "ledger": [_with_estimates(state, record) for record in records],
        "decisions": [decision.as_dict() for decision in state.decisions.of_program(program.id)],
        "decisions_since_s": state.decisions.oldest_s,
    }


def _with_estimates(state: SchedulerState, record: TurnRecord) -> dict[str, Any]:
    tokens = record.tokens
    known = tokens is not None and state.reload.known
    reused = tokens.device + tokens.host if tokens is not None else 0
    lost = sum(tokens.lost.values()) if tokens is not None else 0
    return {
        **record.as_dict(),
        "recompute_estimate_s": round(state.reload.seconds(lost), 6) if known else None,
        "saved_estimate_s": round(state.reload.seconds(reused), 6) if known else None,
    }
