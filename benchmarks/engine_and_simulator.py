"""The same programs on an engine and in the simulator, measured alike: both give the tally of a replay."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from sojourn_server.replay.completions_client import Completion, CompletionsClient
from sojourn_server.replay.replay_driver import Replay, ReplayOptions, reporting
from sojourn_server.replay.replay_report import ReplayedProgram, ReplayedTurn, ReplayTally
from sojourn_server.traces.prompt_builder import plan_turns, recomputed_tokens
from sojourn_server.traces.trace_schema import TraceProgram

if TYPE_CHECKING:
    from sojourn_server.simulator.run_log import RunLog, TurnLog
    from sojourn_server.simulator.simulation_run import RunSpec


async def replay(
    url: str, programs: Sequence[TraceProgram], options: ReplayOptions, limit_s: float | None = None
) -> ReplayTally:
    """Replay the programs on a server, for at most ``limit_s`` seconds."""
    async with CompletionsClient(url) as client:
        served = await client.discover(None)
        made = Replay(programs, client, served, options)
        with reporting(url if served.speaks_sojourn else None):
            running, began_s = asyncio.ensure_future(made.run()), time.monotonic()
            try:
                ended, _ = await asyncio.wait({running}, timeout=limit_s)
                if ended:
                    running.result()
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
    # A run that reaches its limit sets no duration.
    made.tally.wall_s = made.tally.wall_s or time.monotonic() - began_s
    return made.tally


def simulate(
    spec: RunSpec,
    programs: Sequence[TraceProgram],
    options: ReplayOptions,
    prepare: Callable[[Any], None] | None = None,
) -> tuple[RunLog, ReplayTally]:
    """Run the programs in virtual time, each once, as ``replay`` does with these options. Return the log, and
    the tally of the programs that ended."""
    from sojourn_server.simulator.simulation_run import run_simulation
    from sojourn_server.simulator.workloads.arrival_processes import finite_closed_loop
    from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlanner

    planner = ProgramPlanner(programs, PlaybackOptions(token_scale=options.token_scale))
    arrivals = finite_closed_loop(planner, options.concurrency, stagger_s=options.stagger_s)
    log = run_simulation(spec, arrivals=arrivals, prepare=prepare)
    plans = {program.program_id: plan_turns(program, options.token_scale) for program in programs}
    tally = ReplayTally()
    for program in log.programs:
        if program.finished_s is None:
            continue
        tally.wall_s = max(tally.wall_s, program.finished_s)
        tally.programs.append(ReplayedProgram(program.trace_id, True, program.completion_s))
        for turn in program.turns:
            again = recomputed_tokens(
                plans[program.trace_id], turn.turn, turn.device_tokens, options.block_size or 1
            )
            tally.turns.append(ReplayedTurn(completion_of(turn), again))
    return log, tally


def completion_of(turn: TurnLog) -> Completion:
    """Return what a client of the simulated engine measures. Cached tokens are those found on the device."""
    return Completion(
        ttft_s=turn.first_token_s - turn.submitted_s,
        latency_s=turn.finished_s - turn.submitted_s,
        prompt_tokens=turn.prompt_tokens,
        output_tokens=turn.output_tokens,
        cached_tokens=turn.device_tokens,
    )
