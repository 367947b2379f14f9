"""Timeline of one program in a run, turn by turn: waits, cache hits, losses and their causes."""

from __future__ import annotations

from collections import Counter
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
    whole_s = sum(sums.values())
    shares = ", ".join(
        f"{kind} {100 * took_s / whole_s:.0f} %" for kind, took_s in sums.items() if took_s > 0
    )
    computed = sum(turn.computed_tokens for turn in program.turns)
    causes = _causes(program)
    again = sum(causes.values())
    if not again:
        last = "nothing was computed again"
    else:
        by_cause = ", ".join(f"{cause} {tokens:,}" for cause, tokens in causes.items())
        worst = max(program.turns, key=lambda turn: turn.regenerated_tokens)
        last = (
            f"of {computed:,} tokens computed {again:,} were computed again "
            f"({by_cause}), most at turn {worst.turn}"
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
    turns = program.turns
    phases = [turn_phases(program, *pair, run.virtual_s) for pair in turn_pairs(turns)]
    columns = {("sent", "at s"): [_seconds(turn.submitted_s) for turn in turns]}
    for kind in PHASE_KINDS[:-1]:
        if kind not in ("held back", "preempted") or any(_seconds_of(kind, found) for found in phases):
            columns[kind, "s"] = [
                _duration_text(kind, found, turn) for turn, found in zip(turns, phases, strict=True)
            ]
    admitted = [turn.admitted_s is not None for turn in turns]
    columns["prompt", "tokens"] = [f"{turn.prompt_tokens:,}" for turn in turns]
    columns["on device", "tokens"] = [
        f"{turn.device_tokens:,}" if got else "–" for turn, got in zip(turns, admitted, strict=True)
    ]
    if any(turn.host_tokens for turn in turns):
        columns["from host", "tokens"] = [_count(turn.host_tokens) for turn in turns]
    columns["computed", "tokens"] = [
        f"{turn.computed_tokens:,}" if got else "–" for turn, got in zip(turns, admitted, strict=True)
    ]
    columns["again", "tokens"] = [_count(turn.regenerated_tokens) for turn in turns]
    if len(run.replicas) > 1:
        columns["replica", ""] = [turn.replica or "–" for turn in turns]
    columns["why", ""] = [_hit_text(turn) for turn in turns]
    ended = program.finished_s is not None
    columns["then", "tool, s"] = [
        _gap_text(turn, _seconds_of("tools", found), next_turn, ended=ended)
        for (turn, next_turn), found in zip(turn_pairs(turns), phases, strict=True)
    ]
    return WrappedTable(
        [WrappedColumn(Text("turn", style="bold"), [Text(str(turn.turn)) for turn in turns])],
        [
            WrappedColumn(
                Text(name, style="bold").append(f"\n{unit}", style="not bold dim"),
                [Text(text) for text in texts],
                "left" if name in ("why", "then") else "right",
            )
            for (name, unit), texts in columns.items()
        ],
    )


def _seconds_of(kind: str, phases: list[TurnPhase]) -> float | None:
    """Seconds of all phases of ``kind``; ``None`` if there are none."""
    found = [phase.seconds for phase in phases if phase.kind == kind]
    return sum(found) if found else None


def _duration_text(kind: str, phases: list[TurnPhase], turn: TurnLog) -> str:
    seconds = _seconds_of(kind, phases)
    if seconds is None:
        return "–"
    # A phase cut off by the end of the run is a lower bound.
    cut = turn.finished_s is None and kind == phases[-1].kind
    return f"{'≥' if cut else ''}{_seconds(seconds)}"


def _count(tokens: int) -> str:
    return f"{tokens:,}" if tokens else "–"


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


def _gap_text(turn: TurnLog, gap_s: float | None, next_turn: TurnLog | None, *, ended: bool) -> str:
    if turn.finished_s is None or gap_s is None:
        return "cut off by the run's end"
    if next_turn is None and ended and gap_s <= 0:
        return "end"
    at_least = "≥" if next_turn is None and not ended else ""
    foreseen = f", {turn.goes_on:.0%} to go on" if turn.goes_on is not None else ""
    return f"{turn.tool or 'gap'} {at_least}{_seconds(gap_s)}{foreseen}"


def _causes(program: ProgramLog) -> dict[str, int]:
    """The program's recomputed tokens by cause, most tokens first."""
    by: Counter[str] = Counter()
    for turn in program.turns:
        by.update(turn.regenerated)
    return dict(sorted(by.items(), key=lambda item: (-item[1], item[0])))


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f}" if seconds >= 10 else f"{seconds:.2f}"
