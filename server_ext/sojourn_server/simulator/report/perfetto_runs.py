"""Adds simulated runs to a Perfetto trace. The slices of tools have the argument ``inferred`` false, because
simulated tool times are exact."""

from __future__ import annotations

from ...traces.perfetto_trace import PerfettoTrace, Slice
from ..run_log import ProgramLog, RunLog
from .program_explanation import turn_pairs, turn_phases


def add_run(trace: PerfettoTrace, log: RunLog, name: str) -> None:
    """Add the programs of a run to ``trace``, as the process ``name``."""
    pid = trace.process(name)
    for program in sorted(log.programs, key=lambda one: one.arrived_s):
        trace.add_program(pid, program.program_id, _slices(program, log.virtual_s))


def _slices(program: ProgramLog, run_end_s: float) -> list[Slice]:
    slices = []
    for turn, following in turn_pairs(program.turns):
        phases = turn_phases(program, turn, following, run_end_s)
        inside = [(one.kind, one.start_s, one.end_s) for one in phases if one.kind != "tools"]
        arguments = {
            "prompt_tokens": turn.prompt_tokens,
            "output_tokens": turn.output_tokens,
            "device_tokens": turn.device_tokens,
            "host_tokens": turn.host_tokens,
            "computed_tokens": turn.computed_tokens,
            "preemptions": turn.preemptions,
            "regenerated": turn.regenerated,
            **({"evictor": turn.evictor} if turn.evictor else {}),
            **({"replica": turn.replica} if turn.replica else {}),
        }
        if inside:
            slices.append(Slice(f"turn {turn.turn}", inside[0][1], inside[-1][2], arguments, inside))
        slices += [
            Slice(turn.tool or "gap", one.start_s, one.end_s, {"inferred": False})
            for one in phases
            if one.kind == "tools" and one.end_s > one.start_s
        ]
    return slices
