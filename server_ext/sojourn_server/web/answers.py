"""Several engines behind one server: their answers to one question, as one answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
from sojourn.wire import EventOutcome, Outcome, OutcomeBatch, decode_outcomes, encode


def merge_outcomes(answers: Sequence[str]) -> bytes:
    """Per event the first outcome that is not ``missing``: it concerns the engine that has its program."""
    if len(answers) == 1:
        return answers[0].encode("utf-8")
    batches = [decode_outcomes(answer.encode("utf-8")).outcomes for answer in answers]
    merged = [_first_known(outcomes) for outcomes in zip(*batches, strict=True)]
    return encode(OutcomeBatch(outcomes=merged))


def _first_known(outcomes: Sequence[EventOutcome]) -> EventOutcome:
    return next((outcome for outcome in outcomes if outcome.outcome is not Outcome.MISSING), outcomes[0])


def merge_programs(answers: Sequence[Any], limit: int) -> dict[str, Any]:
    """One list without repeats. Engines hear every event, so the one with most turns knows a program best."""
    if len(answers) == 1:
        return dict(answers[0])
    best: dict[str, dict[str, Any]] = {}
    for answer in answers:
        for program in answer["programs"]:
            known = best.get(program["program_id"])
            if known is None or program.get("turns", 0) > known.get("turns", 0):
                best[program["program_id"]] = program
    shown = list(best.values())[:limit]
    # Programs beyond the engines' limits cannot be told apart; the largest count is the safe one to name.
    total = max(len(best), *(answer["total"] for answer in answers))
    forgotten = max(answer.get("forgotten", 0) for answer in answers)
    return {"programs": shown, "total": total, "shown": len(shown), "forgotten": forgotten}


def merge_program(answers: Sequence[Any]) -> dict[str, Any] | None:
    """The answer of the engine that ran most of the program's turns."""
    known = [answer for answer in answers if answer is not None]
    return max(known, key=lambda program: program.get("turns", 0)) if known else None


def merge_persisted(answers: Sequence[Any]) -> dict[str, Any] | None:
    """As ``merge_program``, and without what it was chosen by."""
    best = merge_program(answers)
    return {name: value for name, value in best.items() if name != "turns"} if best is not None else None


def merge_graphs(answers: Sequence[Any]) -> dict[str, Any]:
    """One list without repeats; with several engines each hears every report, and may have forgotten some."""
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
    """The first engine's, since all are started alike; but one whose tiers are off is not passed over."""
    told = [answer.get("tiers") for answer in answers]
    off = next((tiers for tiers in told if isinstance(tiers, dict) and not tiers.get("on", True)), None)
    return {**answers[0], **({"tiers": off} if off is not None else {})}


def merge_stats(answers: Sequence[Any], engine_ids: Sequence[str]) -> dict[str, Any]:
    """One engine's numbers as they are; several engines' side by side under ``engines``.

    They are not added up: among the counts are means, sizes and limits, whose sum says nothing.
    """
    if len(answers) == 1:
        return dict(answers[0])
    return {"engines": dict(zip(engine_ids, answers, strict=True))}


def read(answer: str) -> Any:
    """An engine's JSON text as data."""
    return msgspec.json.decode(answer)


def write(document: Any) -> str:
    """Data as JSON text."""
    return json.dumps(document, separators=(",", ":"))
