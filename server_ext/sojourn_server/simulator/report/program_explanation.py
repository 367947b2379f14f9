"""Timeline of one program in a run, turn by turn: waits, cache hits, losses and their causes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from ..run_log import ProgramLog, RunLog, TurnLog
from .results_table import WrappedColumn, WrappedTable

STAGES = ("held back", "queued", "prefill", "decode", "tools")
"""Stages of a turn, in order."""
PHASE_KINDS = (*STAGES[:-1], "preempted", STAGES[-1])
"""All kinds of phases: the stages, and ``preempted``."""


class TurnPhase(NamedTuple):
    """One phase of a turn, in virtual seconds."""

    kind: str
    """One of ``PHASE_KINDS``:

    - ``held back``: the request waits at a router in front of the engine, or is on its way to the engine.
    - ``queued``: the request waits in the engine's queue.
    - ``prefill``: from the allocation of the first blocks to the first token, including loads of KV.
    - ``decode``: from the first token to the last.
    - ``preempted``: the request waits to resume. This phase is shown at the end of the interrupted stage.
    - ``tools``: from the last token to the next request, or to the end of the program or run."""
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def turn_phases(
    program: ProgramLog, turn: TurnLog, next_turn: TurnLog | None, run_end_s: float
) -> list[TurnPhase]:
    """Phases of a turn, in order. They begin when ``turn`` is sent, and end when ``next_turn`` is sent. If
    ``next_turn`` is ``None``, they end with the program, or with the run if the program is unfinished."""
    if next_turn is not None:
        end_s = next_turn.submitted_s
    else:
        end_s = run_end_s if program.finished_s is None else program.finished_s
    # An admitted turn without an entry time passed no router, so it was in the engine's queue from the start.
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
    """Seconds of the program by kind of phase. The time before the first turn counts as ``tools``."""
    sums = dict.fromkeys(PHASE_KINDS, 0.0)
    for turn, next_turn in turn_pairs(program.turns):
        for span in turn_phases(program, turn, next_turn, run_end_s):
            sums[span.kind] += span.seconds
    if program.turns:
        sums["tools"] += program.turns[0].submitted_s - program.arrived_s
    return sums


def turn_pairs(turns: list[TurnLog]) -> Iterator[tuple[TurnLog, TurnLog | None]]:
    """Yield pairs: each turn, and the turn after it or, for the last turn, ``None``."""
    for place, turn in enumerate(turns):
        yield turn, turns[place + 1] if place + 1 < len(turns) else None


CAUSES = {
    "evicted": "evicted: others took its blocks while it was away",
    "preempted": "preempted: its blocks were taken while it ran",
    "expired": "expired: its lease had run out before it came back",
    "pressure": "pressure: its lease was reclaimed for a request that needed the blocks",
    "silent": "silent: its lease ended because the client was silent",
    "moved": "moved: it had been computed, but on another replica",
    "changed": "changed: the prompt differs from the turn before",
    "dropped": "dropped on purpose",
    "unknown": "cause unknown",
}
"""Explanations of causes in ``TurnLog.regenerated``. Causes that are missing here are shown by name only."""


def explain_program(run: RunLog, program: ProgramLog) -> RenderableType:
    """Return a program's timeline for printing: a heading, a line per turn, why tokens were computed again,
    and a summary (``verdict``)."""
    parts: list[RenderableType] = [Text(_heading(run, program), style="bold"), _table(run, program)]
    parts += [Text(CAUSES[c], style="dim") for c in _causes(program) if c in CAUSES]
    parts.append(Text(verdict(run, program)))
    return Group(*parts)


def verdict(run: RunLog, program: ProgramLog) -> str:
    """Summary of a program in one line: completion time, shares of the phases in %, recomputed tokens."""
    if program.completion_s is not None:
        seconds = program.completion_s
        first = f"finished after {_seconds(seconds)} s"
        if program.cut:
            first += " (cut: its next turn would not have fitted)"
    else:
        seconds = run.virtual_s - program.arrived_s
        done = sum(turn.finished_s is not None for turn in program.turns)
        first = f"unfinished after {_seconds(seconds)} s, with {done} of {program.turns_total} turns done"
    sums = totals(program, run.virtual_s)
    if not program.turns:
        return f"{first}: it never sent a turn"
    # Rounded by largest remainders, so that the percentages add up to 100.
    shares = ", ".join(f"{kind} {percent} %" for kind, percent in _percentages(sums).items())
    computed = sum(turn.computed_tokens for turn in program.turns)
    again = sum(turn.regenerated_tokens for turn in program.turns)
    if not again:
        last = "nothing was computed again"
    else:
        worst = max(program.turns, key=lambda turn: turn.regenerated_tokens)
        by = {
            cause: sum(turn.regenerated.get(cause, 0) for turn in program.turns) for cause in _causes(program)
        }
        last = (
            f"of {computed:,} tokens computed {again:,} were computed again "
            f"({', '.join(f'{cause} {tokens:,}' for cause, tokens in by.items())}), most at turn {worst.turn}"
        )
    return f"{first}: {shares}; {last}"


def _heading(run: RunLog, program: ProgramLog) -> str:
    parts = [f"{program.program_id} under {run.policy}", f"plays {program.trace_id}"]
    if program.parent is not None:
        parts.append(f"sub-agent of {program.parent}")
    parts += [f"arrived at {_seconds(program.arrived_s)} s", f"{program.turns_total} turns"]
    children = [other.program_id for other in run.programs if other.parent == program.program_id]
    if children:
        parts.append(f"sub-agents: {', '.join(children)}")
    return " · ".join(parts)


def _table(run: RunLog, program: ProgramLog) -> WrappedTable:
    held = any(t.entered_s is not None and t.entered_s > t.submitted_s for t in program.turns)
    held = held or any(t.entered_s is None and t.admitted_s is None for t in program.turns)
    host = any(turn.host_tokens for turn in program.turns)
    preempted = any(t.preempted_before_first_token_s or t.preempted_after_s for t in program.turns)
    several = len(run.replicas) > 1
    hidden = {"held back": not held, "preempted": not preempted}
    kinds = [kind for kind in PHASE_KINDS[:-1] if not hidden.get(kind)]
    names = [
        ("sent", "at s"),
        *((kind, "s") for kind in kinds),
        ("prompt", "tokens"),
        ("on device", "tokens"),
    ]
    names += [("from host", "tokens")] if host else []
    names += [("computed", "tokens"), ("again", "tokens")]
    names += [("replica", "")] if several else []
    names += [("why", ""), ("then", "tool, s")]
    lines = []
    for turn, next_turn in turn_pairs(program.turns):
        lasted = turn_phases(program, turn, next_turn, run.virtual_s)
        by_kind: dict[str, TurnPhase] = {}
        for span in lasted:
            before = by_kind.get(span.kind)
            start_s = span.start_s - (before.seconds if before is not None else 0.0)
            by_kind[span.kind] = span._replace(start_s=start_s)
        unadmitted = turn.admitted_s is None
        line = [
            _seconds(turn.submitted_s),
            *(_duration_text(by_kind.get(kind), lasted, turn) for kind in kinds),
        ]
        line += [f"{turn.prompt_tokens:,}", "–" if unadmitted else f"{turn.device_tokens:,}"]
        line += [f"{turn.host_tokens:,}" if turn.host_tokens else "–"] if host else []
        line += ["–" if unadmitted else f"{turn.computed_tokens:,}"]
        line += [f"{turn.regenerated_tokens:,}" if turn.regenerated_tokens else "–"]
        line += [turn.replica or "–"] if several else []
        line += [_hit_text(turn)]
        line += [_gap_text(turn, by_kind.get("tools"), next_turn, ended=program.finished_s is not None)]
        lines.append(line)
    columns = [
        WrappedColumn(
            Text(name, style="bold").append(f"\n{unit}", style="not bold dim"),
            [Text(line[place]) for line in lines],
            "left" if name in ("why", "then") else "right",
        )
        for place, (name, unit) in enumerate(names)
    ]
    numbers = [Text(str(turn.turn)) for turn in program.turns]
    return WrappedTable([WrappedColumn(Text("turn", style="bold"), numbers)], columns)


def _duration_text(span: TurnPhase | None, lasted: list[TurnPhase], turn: TurnLog) -> str:
    if span is None:
        return "–"
    # A phase cut off by the end of the run is a lower bound.
    cut = turn.finished_s is None and span.kind == lasted[-1].kind
    return f"{'≥' if cut else ''}{_seconds(span.seconds)}"


def _hit_text(turn: TurnLog) -> str:
    """Table text on a turn's cache hit or miss, with the causes of a miss."""
    if turn.admitted_s is None:
        return "never got blocks"
    if turn.regenerated:
        causes = sorted(turn.regenerated.items(), key=lambda item: (-item[1], item[0]))
        text = ", ".join(f"{cause} {tokens:,}" for cause, tokens in causes)
        if turn.evictor is not None:
            text += f" by {turn.evictor}"
        if turn.evicted_score is not None:
            text += f" at score {', '.join(f'{number:.3g}' for number in turn.evicted_score)}"
        return f"{text}; {turn.preemptions} preemptions" if turn.preemptions > 1 else text
    text = f"preempted {turn.preemptions}×, nothing lost" if turn.preemptions else ""
    if not turn.known_tokens:
        return text or "all new"
    return text or "hit"


def _gap_text(turn: TurnLog, gap: TurnPhase | None, next_turn: TurnLog | None, *, ended: bool) -> str:
    if turn.finished_s is None or gap is None:
        return "cut off by the run's end"
    if next_turn is None and ended and gap.seconds <= 0:
        return "end"
    at_least = "≥" if next_turn is None and not ended else ""
    foreseen = f", {turn.goes_on:.0%} to go on" if turn.goes_on is not None else ""
    return f"{turn.tool or 'gap'} {at_least}{_seconds(gap.seconds)}{foreseen}"


def _causes(program: ProgramLog) -> list[str]:
    """Causes of the program's recomputed tokens, most tokens first."""
    by: dict[str, int] = {}
    for turn in program.turns:
        for cause, tokens in turn.regenerated.items():
            by[cause] = by.get(cause, 0) + tokens
    return sorted(by, key=lambda cause: (-by[cause], cause))


def _percentages(sums: dict[str, float]) -> dict[str, int]:
    """Integer percentages of the phases that took time, adding up to 100; all 0 if no phase took time."""
    whole = sum(sums.values())
    if whole <= 0:
        return dict.fromkeys(sums, 0)
    exact = {kind: 100.0 * seconds / whole for kind, seconds in sums.items() if seconds > 0}
    floors = {kind: int(percent) for kind, percent in exact.items()}
    # With equal remainders round up the larger share. Rounding removes floating-point noise.
    order = sorted(exact, key=lambda kind: (round(floors[kind] - exact[kind], 9), -exact[kind], kind))
    for kind in order[: 100 - sum(floors.values())]:
        floors[kind] += 1
    return floors


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.2f}"
