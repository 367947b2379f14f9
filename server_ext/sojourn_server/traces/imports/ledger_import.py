"""Import of sojourn's turn ledgers, the answers of ``GET /sojourn/v1/programs/{id}``.

A ledger names one of several parallel tools. It lasted for the time in the gap with a tool, if known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..trace_file import read_records
from ..trace_schema import TraceError
from .recorded_calls import ImportResult, RecordedCall, RecordedProgram, RecordedTool, TokenUsage, to_trace

_USABLE_OUTCOMES = ("stopped", "length")
"""Outcomes of turns with an answer. An aborted turn is not part of the agent's loop."""


class _Tokens(msgspec.Struct, kw_only=True):
    prompt: int
    device: int = 0
    host: int = 0
    new: int = 0
    lost: dict[str, int] = {}


class _LedgerTurn(msgspec.Struct, kw_only=True):
    """One turn, as ``metrics.turn_ledger.TurnRecord.as_dict`` writes it."""

    turn: int
    outcome: str
    arrived_s: float
    output_tokens: int
    seconds: dict[str, float]
    tool_before: str | None = None
    tool_s: float | None = None
    tokens: _Tokens | None = None


class _LedgerProgram(msgspec.Struct, kw_only=True):
    program_id: str
    ledger: list[_LedgerTurn]
    agent_type: str | None = None
    parent_program_id: str | None = None
    tenant: str | None = None


def read_ledgers(paths: Sequence[str | Path]) -> ImportResult:
    """Return the programs in files with ledgers of one engine, one per file, per line or per element of an
    array. Raises ``TraceError``, which names file and line."""
    found: dict[str, RecordedProgram] = {}
    parents: list[tuple[RecordedProgram, str | None]] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        for line, record in read_records(path):
            program = _program(record, f"{path}, line {line}")
            turns = _usable_turns(program, left_out)
            if program.program_id in found and turns:
                raise TraceError(f"{path}, line {line}: program {program.program_id!r} occurs twice")
            if turns:
                recorded = found[program.program_id] = _recorded(program, turns)
                parents.append((recorded, program.parent_program_id))
    for recorded, parent_id in parents:
        recorded.parent = found.get(parent_id or "")
    return to_trace(found.values(), "sojourn", left_out, paths)


def _usable_turns(program: _LedgerProgram, left_out: Counter[str]) -> list[_LedgerTurn]:
    """Return the turns with an answer and token counts, in order of arrival."""
    answered = [record for record in program.ledger if record.outcome in _USABLE_OUTCOMES]
    good = [record for record in answered if record.tokens is not None and record.tokens.prompt > 0]
    left_out["programs without any finished turn left out"] += not good
    left_out["turns that were aborted or failed left out"] += len(program.ledger) - len(answered)
    left_out["turns without token counts in the ledger left out"] += len(answered) - len(good)
    if good and good[0].turn > 1:
        left_out["programs begin with a later turn: the ledger has forgotten their first ones"] += 1
    return sorted(good, key=lambda record: record.arrived_s)


def _program(record: Any, where: str) -> _LedgerProgram:
    try:
        return msgspec.convert(record, _LedgerProgram)
    except (msgspec.ValidationError, UnicodeError) as error:
        expected = "expected what GET /sojourn/v1/programs/{id} of an engine answers"
        raise TraceError(f"{where}: {error}; {expected}") from None


def _recorded(program: _LedgerProgram, turns: list[_LedgerTurn]) -> RecordedProgram:
    kind = program.agent_type
    made = RecordedProgram(program.program_id, group=kind, agent_type=kind, tenant=program.tenant)
    for record in turns:
        tokens = record.tokens
        assert tokens is not None
        usage = TokenUsage(tokens.prompt, record.output_tokens, tokens.device + tokens.host)
        ended_s = record.arrived_s + max(0.0, record.seconds.get("wall", 0.0))
        call = RecordedCall(record.arrived_s, ended_s, usage)
        if made.calls:
            previous, changed = made.calls[-1], tokens.lost.get("changed", 0)
            if changed or tokens.prompt < previous.usage.prompt + previous.usage.output:
                call.kept_tokens = max(0, tokens.prompt - tokens.new - changed)
            if record.tool_before:  # ``bash:pytest`` is the command ``pytest`` of the tool ``bash``
                start_s, end_s = previous.end_s, max(previous.end_s, record.arrived_s)
                if record.tool_s is not None:
                    end_s = min(start_s + max(0.0, record.tool_s), end_s)
                name, _, command = record.tool_before.partition(":")
                made.tools.append(RecordedTool(name, start_s, end_s, command or None))
        made.calls.append(call)
    return made
