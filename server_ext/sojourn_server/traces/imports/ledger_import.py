"""Import of sojourn's turn ledgers, the answers of ``GET /sojourn/v1/programs/{id}``.

For every finished turn, a ledger has times, token counts, the cached and changed parts of the prompt, and one
tool call before the turn. It lacks tools that ran in parallel with that call, so the trace lacks them too.
The call's duration is the time in the gap with a tool; ledgers without that time count the whole gap.

A decision log cannot be imported, because it lacks the lengths of prompts and outputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..trace_schema import TraceError, TraceProgram, TraceToolRun, TraceTurn, check_program
from .import_records import ImportResult, read_records, with_shared_prefixes

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
    gap_s: float | None = None
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
    """Return the programs in files with ledgers. A file has one ledger, one per line, or an array of them.
    All times must be on the clock of one engine. Raises ``TraceError``, which names file and line."""
    found: dict[str, tuple[_LedgerProgram, list[_LedgerTurn]]] = {}
    skipped: Counter[str] = Counter()
    for path in paths:
        for line, record in read_records(path):
            for program in _programs(record, f"{path}, line {line}"):
                good = _usable_turns(program, skipped)
                if program.program_id in found and good:
                    raise TraceError(f"{path}, line {line}: program {program.program_id!r} occurs twice")
                if good:
                    found[program.program_id] = program, good
    names = ", ".join(str(path) for path in paths)
    if not found:
        raise TraceError(
            f"{names}: holds no finished turn; expected what GET /sojourn/v1/programs/{{id}} answers"
        )
    first_s = min(turns[0].arrived_s for _, turns in found.values())
    programs = [_trace(program, turns, found, first_s) for program, turns in found.values()]
    programs = with_shared_prefixes(programs)
    for one in programs:
        try:
            check_program(one)
        except TraceError as error:
            raise TraceError(f"{names}: program {one.program_id!r}, {error}") from None
    return ImportResult(programs, [f"{count} {what}" for what, count in skipped.items() if count])


def _usable_turns(program: _LedgerProgram, skipped: Counter[str]) -> list[_LedgerTurn]:
    """Return the program's turns with an answer and token counts, in order of arrival. Count what is left out
    in ``skipped``."""
    answered = [record for record in program.ledger if record.outcome in _USABLE_OUTCOMES]
    good = [record for record in answered if record.tokens is not None and record.tokens.prompt > 0]
    skipped["programs without any finished turn left out"] += not good
    skipped["turns that were aborted or failed left out"] += len(program.ledger) - len(answered)
    skipped["turns without token counts in the ledger left out"] += len(answered) - len(good)
    if good and good[0].turn > 1:
        skipped["programs begin with a later turn: the ledger has forgotten their first ones"] += 1
    return sorted(good, key=lambda record: record.arrived_s)


def _programs(record: Any, where: str) -> Iterator[_LedgerProgram]:
    if isinstance(record, dict) and "decisions" in record and "ledger" not in record:
        raise TraceError(
            f"{where}: this is a decision log, which has no lengths of prompts and outputs; "
            "expected the answer of GET /sojourn/v1/programs/{id}"
        )
    if isinstance(record, dict) and isinstance(record.get("programs"), list):
        for inner in record["programs"]:
            yield from _programs(inner, where)
        return
    if isinstance(record, dict) and "program_id" in record and "ledger" not in record:
        raise TraceError(
            f"{where}: program {record['program_id']!r} has no ledger, as in the list of programs and "
            "from a gateway; expected what GET /sojourn/v1/programs/{id} of an engine answers"
        )
    try:
        yield msgspec.convert(record, _LedgerProgram)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise TraceError(f"{where}: {error}") from None


def _trace(
    program: _LedgerProgram,
    turns: list[_LedgerTurn],
    found: dict[str, tuple[_LedgerProgram, list[_LedgerTurn]]],
    first_s: float,
) -> TraceProgram:
    started_s = turns[0].arrived_s
    parent = parent_turn = offset_s = None
    if program.parent_program_id in found and program.parent_program_id != program.program_id:
        parent = program.parent_program_id
        before = found[parent][1]
        offset_s = round(max(0.0, started_s - before[0].arrived_s), 6)
        ended = sum(record.arrived_s + record.seconds.get("wall", 0.0) <= started_s for record in before)
        parent_turn = ended - 1 if ended else None
    return TraceProgram(
        program_id=program.program_id,
        turns=tuple(_turn(turns, index) for index in range(len(turns))),
        source="sojourn",
        group=program.agent_type,
        agent_type=program.agent_type,
        tenant=program.tenant,
        arrival_s=round(started_s - first_s, 6),
        parent=parent,
        parent_turn=parent_turn,
        start_offset_s=offset_s,
    )


def _turn(records: list[_LedgerTurn], index: int) -> TraceTurn:
    record = records[index]
    tokens = record.tokens
    assert tokens is not None
    wall_s = max(0.0, record.seconds.get("wall", 0.0))
    following = records[index + 1] if index + 1 < len(records) else None
    append, reset, prefix = tokens.prompt, False, None
    if index:
        before = records[index - 1]
        assert before.tokens is not None
        append = max(0, tokens.prompt - before.tokens.prompt - before.output_tokens)
        changed = tokens.lost.get("changed", 0)
        shrunk = tokens.prompt < before.tokens.prompt + before.output_tokens
        if changed or shrunk:
            reset, prefix = True, max(0, tokens.prompt - tokens.new - changed)
    gap_s, run = None, None
    if following is not None:
        gap_s = following.gap_s
        if gap_s is None:
            gap_s = max(0.0, following.arrived_s - record.arrived_s - wall_s)
        tool_s = gap_s if following.tool_s is None else min(max(0.0, following.tool_s), gap_s)
        run = _tool(following.tool_before, tool_s)
    return TraceTurn(
        prompt_tokens=tokens.prompt,
        output_tokens=record.output_tokens,
        append_tokens=append,
        reset=reset,
        prefix_tokens=prefix,
        cached_tokens=tokens.device + tokens.host,
        tool=run.name if run is not None else None,
        tools=(run,) if run is not None else None,
        gap_s=None if gap_s is None else round(gap_s, 6),
        gap_kind="tool" if run is not None else None,
        t=round(record.arrived_s - records[0].arrived_s, 6),
        llm_s=round(wall_s, 6),
    )


def _tool(key: str | None, duration_s: float) -> TraceToolRun | None:
    """Return the tool call of ``key``: ``bash:pytest`` means the command ``pytest`` of the tool ``bash``."""
    if not key:
        return None
    name, _, command = key.partition(":")
    return TraceToolRun(name=name, cmd=command or None, s=round(duration_s, 6))
