"""Run logs made by hand, and tables as text, for tests of code that only reads logs."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from sojourn_server.simulator.parameter_sweep import ParameterSweep
from sojourn_server.simulator.report.results_table import render
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_log import ProgramLog, RunLog, TurnLog


def turn_log(
    program_id: str, turn: int, *times_s: float, prompt_tokens: int, output_tokens: int, **more: Any
) -> TurnLog:
    """A turn. ``times_s``: submitted, entered, admitted, first token, finished; as many as have occurred."""
    names = ("submitted_s", "entered_s", "admitted_s", "first_token_s", "finished_s")
    more |= zip(names, times_s, strict=False)
    return TurnLog(
        program_id=program_id, turn=turn, prompt_tokens=prompt_tokens, output_tokens=output_tokens, **more
    )


def program_log(program_id: str, turns: list[TurnLog], *, arrived_s: float = 0.0, **more: Any) -> ProgramLog:
    """A program of these turns."""
    told = {"trace_id": program_id, "turns_total": len(turns), "turns": turns, **more}
    return ProgramLog(program_id=program_id, arrived_s=arrived_s, **told)


def run_log(*programs: ProgramLog, **more: Any) -> RunLog:
    """A run of these programs, by default a closed loop of 100 s under ``stock``."""
    told = {
        "policy": "stock", "programs_wanted": len(programs), "hardware": "h", "model": "m", "trace": "t",
        "seed": 0, "virtual_s": 100.0, **more,
    }  # fmt: skip
    return RunLog(programs=list(programs), **told)


def small_run(loop: str = "closed") -> RunLog:
    """Two programs in 100 s: one of two turns that finishes, one whose only turn is cut off in decode."""
    turns = [
        turn_log(
            "a", 0, 0.0, 1.0, 2.0, 3.0, 13.0,
            prompt_tokens=100, output_tokens=11, computed_tokens=100, gap_s=7.0,
        ),
        turn_log(
            "a", 1, 20.0, 20.0, 24.0, 27.0, 30.0,
            prompt_tokens=160, output_tokens=4, known_tokens=96, device_tokens=32, host_tokens=16,
            computed_tokens=132, regenerated={"preempted": 20, "evicted": 48}, preemptions=1,
        ),
        turn_log(
            "b", 0, 40.0, 40.0, 50.0, 60.0,
            prompt_tokens=200, output_tokens=500, generated_tokens=85, computed_tokens=200,
        ),
    ]  # fmt: skip
    return run_log(
        program_log("a", turns[:2], finished_s=30.0),
        program_log("b", turns[2:], arrived_s=40.0, turns_total=3),
        trace="../traces/t.jsonl.gz",
        loop=loop,
        preemption_steps=[5, 15, 16, 40],
        steps=200,
        busy_s=50.0,
        scheduler_s=0.1,
        wall_s=2.0,
    )


def rendered(rows: list[RunRow], width: int, sweep: ParameterSweep | None = None) -> str:
    """The table of these rows on a console of ``width`` characters."""
    text = io.StringIO()
    Console(width=width, file=text, color_system=None).print(render(rows, sweep))
    return text.getvalue()
