"""One program as text: its state, and one line for each of its latest turns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .top_view import count, cut, duration, printable

_STATUS_WORDS = {
    "reasoning": "thinking, or waiting in the queue",
    "acting": "its tool runs, or it is idle",
    "gated": "its request is not admitted yet",
    "expired": "silent: the client reports nothing more",
}
"""Status of ``/sojourn/v1/programs`` → meaning, with the state that ``sojourn top`` shows."""
_TURN_HEADING = "TURN QUEUED PREFILL DECODE PROMPT REUSED  LOST WHY, AND BEFORE IT"


def engine_detail(program: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the engine's part of a program. ``program``: the answer of ``/sojourn/v1/programs/{id}`` of an
    engine or a gateway."""
    at_engine = program.get("engine")
    return at_engine if isinstance(at_engine, Mapping) else program


def program_state(program: Mapping[str, Any]) -> str:
    """Return how a program ended, or its status with the words that ``sojourn top`` uses for it. ``program``:
    the answer of ``/sojourn/v1/programs/{id}`` of an engine or a gateway."""
    program = engine_detail(program)
    if program.get("outcome"):
        return printable(str(program["outcome"]))
    status = str(program.get("status"))
    return f"{printable(status)} ({words})" if (words := _STATUS_WORDS.get(status)) else printable(status)


def turn_table(program: Mapping[str, Any], last: int = 40) -> str:
    """Return the ``last`` turns of a program as text, one line per turn, newest first. ``program``: the
    answer of ``/sojourn/v1/programs/{id}`` of an engine or a gateway."""
    program = engine_detail(program)
    turns = [turn for turn in program.get("ledger") or () if isinstance(turn, Mapping)]
    lines = [
        f"{program_state(program)}, {program.get('turns')} turns, context of "
        f"{count(program.get('context_tokens') or 0)} tokens",
        "times and tokens of each turn:",
        "",
        _TURN_HEADING,
    ]
    lines += [_turn_line(turn) for turn in turns[: -last - 1 : -1]]
    if not turns:
        lines.append("no turn has finished yet, or the ledger has forgotten them")
    return "\n".join(lines)


def _turn_line(turn: Mapping[str, Any]) -> str:
    seconds, tokens = turn.get("seconds") or {}, turn.get("tokens") or {}
    lost = tokens.get("lost") or {}
    why = [f"{cause} {count(number)}" for cause, number in lost.items() if number]
    if turn.get("evictor"):
        why.append(f"taken by {cut(str(turn['evictor']), 24)}")
    if turn.get("preemptions"):
        why.append(f"{turn['preemptions']} preemptions")
    if turn.get("gap_s") is not None:
        why.append(f"{cut(str(turn.get('tool_before') or 'gap'), 16)} {duration(turn['gap_s'])}")
    reused = (tokens.get("device") or 0) + (tokens.get("host") or 0)
    return (
        f"{turn.get('turn', '?'):>4} {duration(seconds.get('queued', 0)):>6}"
        f" {duration(seconds.get('prefilling', 0)):>7} {duration(seconds.get('decoding', 0)):>6}"
        f" {count(tokens.get('prompt') or 0):>6} {count(reused):>6} {count(sum(lost.values())):>5}"
        f" {', '.join(why)}"
    )
