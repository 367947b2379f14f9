"""Merges the answers of several engines behind one server into one answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from sojourn.wire_codec import EventOutcome, Outcome, OutcomeBatch


class EventAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to the operation ``event_batches``."""

    batches: list[OutcomeBatch]
    wait_s: float
    """Seconds to wait before the next call: events may take only a part of the engine's time."""


_event_answers = msgspec.json.Decoder(EventAnswer)


def merge_event_answers(answers: Sequence[str]) -> tuple[list[list[EventOutcome]], float]:
    """Outcomes of each batch, and the longest wait that an engine asks for.

    An event's outcome is the first one that is not ``missing``: it comes from the engine that has the
    program.
    """
    decoded = [_event_answers.decode(answer) for answer in answers]
    merged = [
        [_first_outcome(outcomes) for outcomes in zip(*(batch.outcomes for batch in batches), strict=True)]
        for batches in zip(*(answer.batches for answer in decoded), strict=True)
    ]
    return merged, max(answer.wait_s for answer in decoded)


def _first_outcome(outcomes: Sequence[EventOutcome]) -> EventOutcome:
    return next((outcome for outcome in outcomes if outcome.outcome is not Outcome.MISSING), outcomes[0])


def merge_programs(answers: Sequence[Any], limit: int) -> dict[str, Any]:
    """One list of at most ``limit`` programs without duplicates. Of duplicates the entry with the most turns
    is kept."""
    if len(answers) == 1:
        return dict(answers[0])
    best: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for program in answer["programs"]:
            known = best.get(program["program_id"])
            if known is None or program.get("turns", 0) > known.get("turns", 0):
                best[program["program_id"]] = program
    shown = list(best.values())[:limit]
    # Programs beyond the engines' limits cannot be deduplicated; the largest count is a safe lower bound.
    total = max(len(best), *(answer["total"] for answer in answers))
    forgotten = max(answer.get("forgotten", 0) for answer in answers)
    return {"programs": shown, "total": total, "shown": len(shown), "forgotten": forgotten}


def merge_program(answers: Sequence[Any]) -> dict[str, Any] | None:
    """The answer of the engine that ran most of the program's turns."""
    known = [answer for answer in answers if answer is not None]
    return max(known, key=lambda program: program.get("turns", 0)) if known else None


def merge_persisted(answers: Sequence[Any]) -> dict[str, Any] | None:
    """Like ``merge_program``, without the field ``turns``."""
    best = merge_program(answers)
    return {name: value for name, value in best.items() if name != "turns"} if best is not None else None


def merge_graphs(answers: Sequence[Any]) -> dict[str, Any]:
    """One list without duplicates. Each engine gets every graph report, and may have forgotten some."""
    if len(answers) == 1:
        return dict(answers[0])
    known: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for graph in answer["graphs"]:
            known.setdefault(graph["graph_hash"], graph)
    return {
        "graphs": list(known.values()),
        "total": len(known),
        "bytes": max(answer["bytes"] for answer in answers),
        "forgotten": max(answer["forgotten"] for answer in answers),
    }


def merge_capabilities(answers: Sequence[Any]) -> dict[str, Any]:
    """The capabilities of the first engine, since all engines have the same options, plus the tiers that any
    engine has turned off."""
    all_tiers = [answer.get("tiers") for answer in answers]
    off = next((tiers for tiers in all_tiers if isinstance(tiers, dict) and not tiers.get("on", True)), None)
    return {**answers[0], **({"tiers": off} if off is not None else {})}


def merge_stats(answers: Sequence[Any], engine_ids: Sequence[str]) -> dict[str, Any]:
    """Statistics of one engine, or those of several side by side under ``engines``.

    They are not added up, because a sum of means, sizes or limits has no meaning.
    """
    if len(answers) == 1:
        return dict(answers[0])
    return {"engines": dict(zip(engine_ids, answers, strict=True))}


def decode_json(answer: str) -> Any:
    """The data in an engine's JSON text."""
    return msgspec.json.decode(answer)


def encode_json(document: Any) -> str:
    """``document`` as JSON text."""
    return json.dumps(document, separators=(",", ":"))
