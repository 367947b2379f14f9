"""Workloads without text. A trajectory has the lengths of all turns of an agent. Sections are DualPath's."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from sojourn_server.policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceTurn

from ..workloads.synthetic_workloads import SYNTHETIC_PREFIX, synthetic_programs


class TurnShape(NamedTuple):
    """Lengths of one turn of a trajectory."""

    hit_blocks: int
    """Number of the prompt's leading Full Blocks (64 tokens each) that earlier turns have stored."""
    prompt_tokens: int
    output_tokens: int
    gap_s: float
    """Client-side seconds until the next turn."""


Trajectory = tuple[TurnShape, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryShaping:
    """Changes to the lengths of a workload's turns. Raises ``ValueError`` for an invalid scale or limit."""

    append_scale: float = 1.0
    """Factor of the new prompt tokens of each turn after the first (§7.3). ``max_context_tokens`` is not
    scaled."""
    output_scale: float = 1.0
    """Factor of the output tokens of each turn."""
    max_context_tokens: int | None = None
    """A trajectory ends before its first turn with more prompt and output tokens. ``None`` means no limit."""
    max_gap_s: float | None = None
    """Upper limit of the gaps between turns, in seconds; ``None`` means no limit."""

    def __post_init__(self) -> None:
        if not (self.append_scale > 0 and self.output_scale > 0):
            raise ValueError(
                f"append_scale {self.append_scale}, output_scale {self.output_scale}; expected above 0"
            )
        if self.max_context_tokens is not None and self.max_context_tokens < 2:
            raise ValueError(f"max_context_tokens is {self.max_context_tokens}; expected at least 2")
        if self.max_gap_s is not None and not self.max_gap_s >= 0:
            raise ValueError(f"max_gap_s is {self.max_gap_s}; expected ≥ 0")


def load_trajectories(workload: str, shaping: TrajectoryShaping, seed: int = 0) -> list[Trajectory]:
    """Trajectories of ``workload``, which is a trace file or ``synthetic:NAME``.

    A synthetic workload has 500 programs, as in DualPath's experiments, drawn with ``seed``. Raises
    ``TraceError`` if the file is unreadable, or if no trajectory fits the maximum context.
    """
    if workload.startswith(SYNTHETIC_PREFIX):
        found = list(_synthetic_trajectories(workload[len(SYNTHETIC_PREFIX) :], shaping, seed))
    else:
        found = _shaped_trajectories(read_trace(Path(workload)), shaping)
    if not found:
        raise TraceError(f"{workload}: no first turn fits a context of {shaping.max_context_tokens:,} tokens")
    return found


@lru_cache(maxsize=4)
def _synthetic_trajectories(name: str, shaping: TrajectoryShaping, seed: int) -> tuple[Trajectory, ...]:
    """Synthetic trajectories, cached because all compared systems replay the same ones."""
    return tuple(_shaped_trajectories(synthetic_programs(name, seed=seed), shaping))


def _shaped_trajectories(programs: Iterable[TraceProgram], shaping: TrajectoryShaping) -> list[Trajectory]:
    return [trajectory for program in programs if (trajectory := shape_trajectory(program, shaping))]


def shape_trajectory(program: TraceProgram, shaping: TrajectoryShaping) -> Trajectory:
    """Make the trajectory of one program, with the lengths changed by ``shaping``. The result is empty if the
    first turn does not fit the maximum context.

    A turn's cache hit is the prefix that it shares with the program's previous turn, rounded down to Full
    Blocks (A.4). A sub-agent is a program of its own. Programs share nothing.
    """
    turns: list[TurnShape] = []
    context = recorded = 0  # tokens after the previous turn: as shaped, and as recorded
    before: TraceTurn | None = None
    for turn in program.turns:
        common = _common_prefix_tokens(turn, before)
        reused = round(context * common / recorded) if recorded else 0
        new = turn.prompt_tokens - common
        if turns:
            new = round(new * shaping.append_scale)
        prompt = max(1, reused + new)
        output = max(1, round(turn.output_tokens * shaping.output_scale))
        if shaping.max_context_tokens is not None and prompt + output > shaping.max_context_tokens:
            break
        # The last token of a prompt is always computed.
        hit_blocks = min(reused, prompt - 1) // FULL_BLOCK_TOKENS
        gap_s = turn.idle_s if shaping.max_gap_s is None else min(turn.idle_s, shaping.max_gap_s)
        turns.append(TurnShape(hit_blocks, prompt, output, gap_s))
        context = prompt + output
        recorded = turn.prompt_tokens + turn.output_tokens
        before = turn
    return tuple(turns)


def _common_prefix_tokens(turn: TraceTurn, before: TraceTurn | None) -> int:
    """Number of recorded prompt tokens that ``turn`` shares with the context at the end of the turn
    ``before``."""
    if before is None:
        return 0
    if turn.reset:
        return min(turn.prefix_tokens or 0, turn.prompt_tokens, before.prompt_tokens)
    # If the output's thinking was dropped, all later tokens have moved, and their KV is invalid.
    written = 0 if before.out_dropped else before.output_tokens
    return min(before.prompt_tokens + written, turn.prompt_tokens)


class WorkloadMeans(NamedTuple):
    """Mean token counts of a workload's turns."""

    turns: float
    """Mean number of turns of an agent."""
    prompt_tokens: float
    hit_tokens: float
    new_tokens: float
    output_tokens: float


def workload_means(trajectories: Sequence[Trajectory]) -> WorkloadMeans:
    """Means over all turns of all agents; ``trajectories`` has one entry for each agent."""
    # Thousands of agents replay hundreds of trajectories, so each trajectory is summed once.
    times = Counter(map(id, trajectories))
    count = prompt = hit_blocks = output = 0
    for trajectory in {id(each): each for each in trajectories}.values():
        workload_agents = times[id(trajectory)]
        count += workload_agents * len(trajectory)
        prompt += workload_agents * sum(turn.prompt_tokens for turn in trajectory)
        hit_blocks += workload_agents * sum(turn.hit_blocks for turn in trajectory)
        output += workload_agents * sum(turn.output_tokens for turn in trajectory)
    prompt_tokens, hit_tokens = prompt / count, hit_blocks * FULL_BLOCK_TOKENS / count
    return WorkloadMeans(
        count / len(trajectories), prompt_tokens, hit_tokens, prompt_tokens - hit_tokens, output / count
    )


def sample_agents(trajectories: Sequence[Trajectory], count: int, seed: int) -> list[Trajectory]:
    """Return ``count`` trajectories, one for each agent, in random order. All trajectories are drawn once
    before any is drawn again. Further draws are with replacement, as in the paper (A.3)."""
    rng = random.Random(f"pd agents/{seed}")
    order = list(trajectories)
    rng.shuffle(order)
    if count <= len(order):
        return order[:count]
    return order + [rng.choice(order) for _ in range(count - len(order))]
