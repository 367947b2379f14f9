"""Merges the answers of several engines behind one server into one answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, zip_longest
from typing import Any

import msgspec
from sojourn.wire_codec import EventOutcome, Outcome, OutcomeBatch


class EventAnswer(msgspec.Struct, frozen=True):
    """An engine's answer to the operation ``event_batches``."""

    batches: list[OutcomeBatch]
    wait_s: float
    """Seconds to wait before the next call, because events may take only a part of the engine's time."""


_event_answers = msgspec.json.Decoder(EventAnswer)


def merge_event_answers(answers: Sequence[str]) -> tuple[list[list[EventOutcome]], float]:
    """Return the outcomes of each batch, and the longest wait in seconds that an engine asks for.

    Each engine answers each event. The merged outcome is that of the engine that has the program: the first
    that is not ``missing``. If all are ``missing``, so is the merged outcome.
    """
    decoded = [_event_answers.decode(answer) for answer in answers]
    merged = [
        [
            next((one for one in outcomes if one.outcome is not Outcome.MISSING), outcomes[0])
            for outcomes in zip(*(batch.outcomes for batch in batches), strict=True)
        ]
        for batches in zip(*(answer.batches for answer in decoded), strict=True)
    ]
    return merged, max(answer.wait_s for answer in decoded)


def merge_programs(answers: Sequence[Any], limit: int) -> dict[str, Any]:
    """Return one answer with at most ``limit`` programs: of each engine the newest, which it lists first. If
    several engines list a program, the entry with the most turns is kept. ``total`` is a lower bound."""
    if len(answers) == 1:
        return dict(answers[0])
    best: dict[str, dict[str, Any]] = {}
    in_turn = zip_longest(*(answer["programs"] for answer in answers))
    for program in filter(None, chain.from_iterable(in_turn)):
        known = best.get(program["program_id"])
        if known is None or program.get("turns", 0) > known.get("turns", 0):
            best[program["program_id"]] = program
    shown = list(best.values())[:limit]
    # Engines list only some programs, so duplicates among the others stay unknown. The largest count is a
    # safe lower bound.
    total = max(len(best), *(answer["total"] for answer in answers))
    return {**answers[0], "programs": shown, "total": total, "shown": len(shown)}


def merge_program(answers: Sequence[Any]) -> dict[str, Any] | None:
    """Return the answer of the engine that ran the most turns of the program; ``None`` if no engine knows the
    program."""
    return max(filter(None, answers), key=lambda program: program.get("turns", 0), default=None)


def merge_capabilities(answers: Sequence[Any]) -> dict[str, Any]:
    """Return the capabilities of the first engine, because all engines have the same options. Only the entry
    ``tiers`` may differ: if an engine has turned its tiers off, its entry is returned."""
    all_tiers = [answer.get("tiers") for answer in answers]
    off = next((tiers for tiers in all_tiers if isinstance(tiers, dict) and not tiers.get("on", True)), None)
    return {**answers[0], **({"tiers": off} if off is not None else {})}


def merge_stats(answers: Sequence[Any], engine_ids: Sequence[str]) -> dict[str, Any]:
    """Return the statistics of a single engine, or those of each of several engines under ``engines``.

    The statistics are not added up, because a sum of means, sizes or limits has no meaning.
    """
    if len(answers) == 1:
        return dict(answers[0])
    return {"engines": dict(zip(engine_ids, answers, strict=True))}
