"""Where a program's time went: every second from its arrival on is in exactly one span."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..run_log import ProgramLog, TurnLog

STAGES = ("held back", "queued", "prefill", "decode", "tools")
"""What a turn goes through, in this order."""
PHASE_KINDS = (*STAGES[:-1], "preempted", STAGES[-1])
"""What a program can be doing."""


class TurnPhase(NamedTuple):
    """One stretch of a turn, in virtual seconds."""

    kind: str
    """One of ``PHASE_KINDS``. ``held back`` is at a router, before the engine; ``prefill`` is from the first
    blocks to the first token, reloads included. ``preempted`` is the wait to be taken up again; it stands
    at the end of the stage it fell into, wherever in it that was."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def turn_phases(
    program: ProgramLog, turn: TurnLog, next_turn: TurnLog | None, run_end_s: float
) -> list[TurnPhase]:
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
            made.append(TurnPhase(stage, start_s, from_s))
        if from_s < over_s:
            made.append(TurnPhase("preempted", from_s, over_s))
        if until_s is None:
            break
    return made


def totals(program: ProgramLog, run_end_s: float) -> dict[str, float]:
    """Seconds by kind over the whole program; those before its first turn count as tools."""
    sums = dict.fromkeys(PHASE_KINDS, 0.0)
    for turn, next_turn in turn_pairs(program.turns):
        for span in turn_phases(program, turn, next_turn, run_end_s):
            sums[span.kind] += span.seconds
    if program.turns:
        sums["tools"] += program.turns[0].submitted_s - program.arrived_s
    return sums


def turn_pairs(turns: list[TurnLog]) -> Iterator[tuple[TurnLog, TurnLog | None]]:
    """Each turn with the one after it."""
    for place, turn in enumerate(turns):
        yield turn, turns[place + 1] if place + 1 < len(turns) else None
