"""Where the seconds of a simulated program went, turn by turn: for Perfetto, and as a turn ledger."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

from ...traces.perfetto_trace import PerfettoTrace, Slice
from ..run_log import ProgramLog, RunLog, TurnLog

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


def turn_phases(program: ProgramLog, run_end_s: float) -> Iterator[tuple[TurnLog, list[TurnPhase]]]:
    """Each turn with its phases, in order. They begin when the turn is sent, and end when the next one is
    sent; those of the last turn end with the program, or with the run if the program is unfinished."""
    program_end_s = run_end_s if program.finished_s is None else program.finished_s
    for turn, following in zip_longest(program.turns, program.turns[1:]):
        yield turn, _phases(turn, program_end_s if following is None else following.submitted_s)


def _phases(turn: TurnLog, end_s: float) -> list[TurnPhase]:
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
    sums = _seconds_by_kind(one for _, phases in turn_phases(program, run_end_s) for one in phases)
    if program.turns:
        sums["tools"] += program.turns[0].submitted_s - program.arrived_s
    return sums


def _seconds_by_kind(phases: Iterable[TurnPhase]) -> dict[str, float]:
    sums = dict.fromkeys(PHASE_KINDS, 0.0)
    for phase in phases:
        sums[phase.kind] += phase.end_s - phase.start_s
    return sums


def ledger(program: ProgramLog, run_end_s: float) -> dict[str, Any]:
    """The program as an engine answers to ``GET /sojourn/v1/programs/{id}``: what
    ``cli.explain.turn_table`` shows. Time at a router counts as queued."""
    records: list[dict[str, Any]] = []
    before: TurnLog | None = None
    for turn, phases in turn_phases(program, run_end_s):
        seconds = _seconds_by_kind(phases)
        queued_s = seconds["held back"] + seconds["queued"] + seconds["preempted"]
        tokens = {"prompt": turn.prompt_tokens, "device": turn.device_tokens, "host": turn.host_tokens}
        records.append(
            {
                "turn": turn.turn,
                "replica": turn.replica,
                "seconds": {
                    "queued": queued_s, "prefilling": seconds["prefill"], "decoding": seconds["decode"],
                },
                "tokens": {**tokens, "lost": turn.regenerated},
                "evictor": turn.evictor,
                "preemptions": turn.preemptions,
                "gap_s": None if before is None else before.gap_s,
                "tool_before": None if before is None else before.tool,
            }
        )  # fmt: skip
        before = turn
    seconds_s = (run_end_s if program.finished_s is None else program.finished_s) - program.arrived_s
    cut = ", cut before a turn that would not have fitted" if program.cut else ""
    return {
        "outcome": f"{'un' if program.finished_s is None else ''}finished after {seconds_s:,.1f} s{cut}",
        "turns": f"{len(records)} of {program.turns_total}",
        "context_tokens": program.turns[-1].prompt_tokens if program.turns else 0,
        "ledger": records,
    }


def add_run(trace: PerfettoTrace, log: RunLog, name: str) -> None:
    """Add the programs of a run to ``trace``, as the process ``name``. The slices of tools have the argument
    ``inferred`` false, because simulated tool times are exact."""
    pid = trace.process(name)
    for program in sorted(log.programs, key=lambda one: one.arrived_s):
        trace.add_program(pid, program.program_id, _slices(program, log.virtual_s))


_SHOWN = (
    "prompt_tokens", "output_tokens", "device_tokens", "host_tokens", "computed_tokens", "preemptions",
    "regenerated", "goes_on", "evictor", "evicted_score", "replica",
)  # fmt: skip
"""Fields of a turn that its slice has as arguments."""


def _slices(program: ProgramLog, run_end_s: float) -> list[Slice]:
    slices = []
    for turn, phases in turn_phases(program, run_end_s):
        inside = [(one.kind, one.start_s, one.end_s) for one in phases if one.kind != "tools"]
        if inside:
            told = ((name, getattr(turn, name)) for name in _SHOWN)
            known = {name: value for name, value in told if value is not None}
            slices.append(Slice(f"turn {turn.turn}", inside[0][1], inside[-1][2], known, inside))
        slices += [
            Slice(turn.tool or "gap", one.start_s, one.end_s, {"inferred": False})
            for one in phases
            if one.kind == "tools" and one.end_s > one.start_s
        ]
    return slices
