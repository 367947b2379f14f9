"""Where a program's time went: every second from its arrival on is in exactly one span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..lives import ProgramLife, TurnLife

STAGES = ("held back", "queued", "prefill", "decode", "tools")
"""What a turn goes through, in this order."""
KINDS = (*STAGES[:-1], "preempted", STAGES[-1])
"""What a program can be doing."""


class Span(NamedTuple):
    """One stretch of a turn, in virtual seconds."""

    kind: str
    """One of ``KINDS``. ``held back`` is at a router, before the engine; ``prefill`` runs from the first
    blocks to the first token, reloads included. ``preempted`` is the wait to be taken up again; it stands
    at the end of the stage it fell into, wherever in it that was."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def spans(program: ProgramLife, turn: TurnLife, next_turn: TurnLife | None, run_end_s: float) -> list[Span]:
    """What happened from the turn's sending to the next one's, or to the program's or the run's end."""
    if next_turn is not None:
        end_s = next_turn.submitted_s
    else:
        end_s = run_end_s if program.finished_s is None else program.finished_s
    # A turn that never passed a router has no time of entry: it was in the engine's queue from the start.
    entered_s = turn.entered_s
    if entered_s is None:
        entered_s = turn.submitted_s if turn.admitted_s is not None else None
    marks = [turn.submitted_s, entered_s, turn.admitted_s, turn.first_token_s, turn.finished_s]
    made = []
    lost_s = {"prefill": turn.preempted_before_first_token_s, "decode": turn.preempted_after_s}
    for stage, start_s, until_s in zip(STAGES, marks, [*marks[1:], end_s], strict=True):
        if start_s is None:
            break
        over_s = end_s if until_s is None else until_s
        from_s = max(start_s, over_s - lost_s.get(stage, 0.0))
        if from_s > start_s or from_s == over_s:
            made.append(Span(stage, start_s, from_s))
        if from_s < over_s:
            made.append(Span("preempted", from_s, over_s))
        if until_s is None:
            break
    return made


def totals(program: ProgramLife, run_end_s: float) -> dict[str, float]:
    """Seconds by kind over the whole program; those before its first turn count as tools."""
    sums = dict.fromkeys(KINDS, 0.0)
    for turn, next_turn in with_next(program.turns):
        for span in spans(program, turn, next_turn, run_end_s):
            sums[span.kind] += span.seconds
    if program.turns:
        sums["tools"] += program.turns[0].submitted_s - program.arrived_s
    return sums


def with_next(turns: list[TurnLife]) -> Iterator[tuple[TurnLife, TurnLife | None]]:
    """Each turn with the one after it."""
    for place, turn in enumerate(turns):
        yield turn, turns[place + 1] if place + 1 < len(turns) else None
