"""Loads and arms of ``engine.py``, the order of its runs, and what fits a budget of seconds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceProgram, TraceTurn

SHORT_TOOLS, LONG_TOOLS = "short tools", "long tools"
LONG_GAP_S = 10.0
"""A program with long tools has a gap of at least this length. Programs with short tools have none, and no
person answers in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Sizes of a machine's servers and programs. Those of ``H200`` unless stated otherwise."""

    block_tokens: int = 16
    pool_tokens: int = 49_152
    """Device memory for KV."""
    max_model_len: int = 16_384
    kv_bytes_per_token: int = 131_072
    """KV of Llama 3.1 8B in bfloat16."""
    turns: int = 5
    first_prompt_tokens: tuple[int, int] = (3_000, 8_000)
    """Range of first prompts. The lengths of a program with a longer first prompt are scaled down to a length
    drawn from the range."""
    max_context_tokens: int = 14_000
    max_output_tokens: int = 150
    max_gap_s: dict[str, float] = field(default_factory=lambda: {SHORT_TOOLS: 4.0, LONG_TOOLS: 6.0})
    max_programs: int = 64
    stagger_s: float = 0.1
    limit_s: float = 100.0
    """End of one run."""
    start_s: float = 60.0
    """Expected seconds until all servers of a group answer."""
    prefill_tokens_per_s: float = 25_000.0
    decode_s: float = 0.012
    """Expected seconds of an output token, at the usual number of requests."""


H200 = Setup()
EXPECTATIONS = ("start_s", "prefill_tokens_per_s", "decode_s")
"""Settings that plan the runs and change none."""
SMALL = Setup(
    block_tokens=32,
    pool_tokens=1_024,
    max_model_len=1_024,
    kv_bytes_per_token=512,
    turns=3,
    first_prompt_tokens=(300, 500),
    max_context_tokens=800,
    max_output_tokens=8,
    max_gap_s={SHORT_TOOLS: 0.1, LONG_TOOLS: 0.3},
    max_programs=4,
    stagger_s=0.05,
    start_s=15.0,
)
"""For a CPU: shows that the script runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """A server. ``host`` and ``disk`` are multiples of the device's KV memory."""

    name: str
    about: str
    policy: str = "stock"
    host: float = 0
    disk: float = 0
    importance: int
    """0 for what every load needs. A higher number runs later."""
    simulated: str | None = None
    """The simulator's name of the arm; ``None`` if it has none."""

    @property
    def server(self) -> tuple[str, float, float]:
        """Arms with equal values use the same server."""
        return self.policy, self.host, self.disk

    @property
    def group(self) -> int:
        """Servers of one group run at the same time. Together, all do not fit on the device."""
        return int(self.host > 1 or self.disk > 0)


_OFFLOAD = "vLLM with its own OffloadingConnector; outputs go to host memory as well as prompts"
ARMS = (
    Arm(name="vLLM", about="vLLM alone", importance=0, simulated="stock"),
    Arm(name="sojourn + 1x", about="sojourn and host memory", policy="sojourn", host=1, importance=0,
        simulated="sojourn"),
    Arm(name="vLLM + 1x", about=_OFFLOAD, host=1, importance=0, simulated="lru-offload"),
    Arm(name="sojourn", about="sojourn on the device alone", policy="sojourn", importance=0,
        simulated="sojourn"),
    Arm(name="sojourn + 4x", about="sojourn and host memory", policy="sojourn", host=4, importance=1,
        simulated="sojourn"),
    Arm(name="vLLM + 4x", about=_OFFLOAD, host=4, importance=1, simulated="lru-offload"),
    Arm(name="sojourn + 1x + disk", about="sojourn, host memory, and a disk of 4 times the device's memory",
        policy="sojourn", host=1, disk=4, importance=4, simulated="sojourn"),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Programs whose final contexts together are ``ratio`` times the device's KV memory."""

    ratio: float
    tools: str
    forced: bool = True
    """Whether outputs are forced. If not, the model decodes, and prompts repeat what it said."""
    importance: int

    @property
    def name(self) -> str:
        return f"contexts {self.ratio:g}x, {self.tools}" + ("" if self.forced else ", real decode")


LOADS = (
    Load(ratio=4, tools=LONG_TOOLS, importance=0),
    Load(ratio=4, tools=SHORT_TOOLS, importance=1),
    Load(ratio=2, tools=LONG_TOOLS, importance=2),
    Load(ratio=2, tools=SHORT_TOOLS, importance=3),
    Load(ratio=2, tools=LONG_TOOLS, forced=False, importance=4),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRun:
    """One arm on one load with one seed. ``left_out`` says why it does not run; empty if it does."""

    arm: Arm
    load: Load
    seed: int
    expected_s: float
    left_out: str = ""

    def row(self) -> dict[str, Any]:
        """Return the row of a table."""
        return {"load": self.load.name, "arm": self.arm.name, "seed": self.seed} | {
            "expected s": round(self.expected_s),
            "left out": self.left_out,
        }


def read_programs(folder: Path) -> list[TraceProgram]:
    """Return the programs of all trace files in a directory, or of one file. Raises ``ValueError`` without
    any."""
    files = sorted(folder.glob("*.jsonl*")) if folder.is_dir() else [folder]
    programs = [program for file in files for program in read_trace(file)]
    if not programs:
        raise ValueError(f"no trace file (*.jsonl, *.jsonl.gz) in {folder}; expected at least one program")
    return programs


def draw_programs(
    traces: Sequence[TraceProgram], load: Load, setup: Setup, seed: int
) -> tuple[list[TraceProgram], float]:
    """Return the programs of a load, and the share of gaps that were shortened.

    A program is a run of consecutive turns of a recorded one, from a place drawn at random, with its lengths
    and gaps up to the limits of ``setup``. Raises ``ValueError`` if the traces have too few.
    """
    draw = random.Random(f"{seed} {load.ratio} {load.tools}")
    candidates = draw.sample(traces, len(traces))
    programs: list[TraceProgram] = []
    tokens = gaps = shortened = 0
    for recorded in candidates:
        starts = list(range(len(recorded.turns) - setup.turns + 1))
        draw.shuffle(starts)
        for start in starts:
            window = recorded.turns[start : start + setup.turns]
            name = f"{load.tools[0]}{load.ratio:g}-{len(programs)}"
            program = _program(window, load, setup, name, draw.randint(*setup.first_prompt_tokens))
            if program is not None:
                break
        else:
            continue
        programs.append(program)
        tokens += program.max_context_tokens
        gaps += setup.turns - 1
        shortened += sum(turn.idle_s > setup.max_gap_s[load.tools] for turn in window[:-1])
        if tokens >= load.ratio * setup.pool_tokens or len(programs) == setup.max_programs:
            return programs, shortened / gaps
    raise ValueError(
        f"the traces have {len(programs)} programs for the load '{load.name}', with {tokens} tokens; "
        f"expected {load.ratio * setup.pool_tokens:.0f} tokens: name a directory with more traces"
    )


def _program(
    window: Sequence[TraceTurn], load: Load, setup: Setup, program_id: str, first_tokens: int
) -> TraceProgram | None:
    """Return the program of these turns; ``None`` if they do not suit the load."""
    longest_s, recorded_tokens = setup.max_gap_s[load.tools], window[0].prompt_tokens
    scale = min(1.0, first_tokens / recorded_tokens)
    plans = plan_turns(TraceProgram(program_id=program_id, turns=tuple(window)), scale)
    prompts = [plan.prompt_tokens for plan in plans]
    outputs = [max(2, min(plan.output_tokens, setup.max_output_tokens)) for plan in plans]
    if prompts[0] < setup.first_prompt_tokens[0] or any(turn.reset for turn in window[1:]):
        return None
    waits = [turn.idle_s for turn in window[:-1]]
    has_long = any(turn.gap_kind == "human" or turn.idle_s >= LONG_GAP_S for turn in window[:-1])
    if has_long != (load.tools == LONG_TOOLS):
        return None
    turns, prompt = [], prompts[0]
    for index, output in enumerate(outputs):
        gap_s = min(waits[index], longest_s) if index < len(waits) else None
        turns.append(
            TraceTurn(
                prompt_tokens=prompt,
                output_tokens=output,
                tool=None if gap_s is None else "tool",
                tool_seconds=gap_s,
                gap_s=gap_s,
                gap_kind=None if gap_s is None else "tool",
            )
        )
        if index + 1 < len(prompts):
            added = prompts[index + 1] - prompts[index] - plans[index].output_tokens
            prompt += output + max(1, added)
    if prompt + outputs[-1] > setup.max_context_tokens:
        return None
    return TraceProgram(program_id=program_id, turns=tuple(turns), agent_type=load.tools.replace(" ", "-"))


def renamed(programs: Sequence[TraceProgram], prefix: str) -> list[TraceProgram]:
    """Return the programs with other ids, and so with other tokens: a run must find nothing of an earlier
    one in a cache."""
    return [msgspec.structs.replace(p, program_id=f"{prefix}-{p.program_id}") for p in programs]


def expected_s(programs: Sequence[TraceProgram], arm: Arm, load: Load, setup: Setup) -> float:
    """Return a rough estimate of a run's seconds: the device's work, or the longest program if it is longer.

    Memory for all contexts means that no token is computed twice; with less, a growing share of each prompt.
    """
    plans = [plan_turns(program) for program in programs]
    lacking = max(0.0, 1 - (1 + arm.host + arm.disk) / load.ratio)
    computed = sum(t.new_tokens + lacking * t.reused_tokens for plan in plans for t in plan)
    outputs = max(sum(turn.output_tokens for turn in p.turns) for p in programs)
    waits = max(sum(turn.idle_s for turn in p.turns) for p in programs)
    alone_s = waits + outputs * setup.decode_s + len(programs) * setup.stagger_s
    busy_s = computed / setup.prefill_tokens_per_s + outputs * setup.decode_s
    return min(setup.limit_s, max(alone_s, busy_s) + 2)


def plan_runs(
    budget_s: float,
    arms: Sequence[Arm],
    loads: Sequence[Load],
    costs: dict[tuple[str, str], float],
    seeds: Sequence[int],
    setup: Setup,
    done: Collection[tuple[str, str, int]] = (),
) -> list[PlannedRun]:
    """Return all runs that are not ``done``. Those that fit the budget come first, in the order in which they
    run.

    The most important are chosen first. A group of servers costs its start. Within a group and a load, every
    other seed has the arms in opposite order. ``costs``: expected seconds by arm and load. ``done``: names of
    arm and load, and seed.
    """
    every = [
        PlannedRun(arm=arm, load=load, seed=seed, expected_s=costs[arm.name, load.name])
        for seed in seeds
        for load in loads
        for arm in arms
        if (load.forced or arm.importance == 0) and (arm.name, load.name, seed) not in done
    ]
    # 3 to 2: the main arms have the second load before other arms have the first, but not the third.
    # 8: a second seed of the main arms comes after all their loads (4 steps), and before the disk (12).
    every.sort(key=lambda run: 2 * run.load.importance + 3 * run.arm.importance + 8 * run.seed)
    left_s = budget_s
    started: set[int] = set()
    chosen, left_out = [], []
    for run in every:
        needed_s = run.expected_s + (0 if run.arm.group in started else setup.start_s)
        if needed_s <= left_s:
            left_s -= needed_s
            started.add(run.arm.group)
            chosen.append(run)
        else:
            left_out.append(replace(run, left_out="does not fit the budget"))
    # One arm alone compares nothing.
    together = Counter((run.load, run.seed) for run in chosen)
    kept = [run for run in chosen if together[run.load, run.seed] > 1 or done or len(arms) == 1]
    left_out += [replace(run, left_out="nothing to compare with") for run in chosen if run not in kept]
    order = {arm.name: number for number, arm in enumerate(arms)}

    def place(run: PlannedRun) -> tuple[int, int, int, int]:
        turned = -1 if run.seed % 2 else 1
        return run.arm.group, run.seed, run.load.importance, turned * order[run.arm.name]

    return sorted(kept, key=place) + left_out
