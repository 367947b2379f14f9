"""How many programs of SAGA's ten tenants can finish in time, by order and placement, in a model of replicas.

    python benchmarks/cluster_tenants_bound.py --out benchmarks/results

vLLM's scheduler takes minutes for 48 programs (``cluster_simulation.py --only tenants``). Here a replica is
only the same roofline latency model. All its requests decode in one step, whose seconds grow with the KV that
the step reads. While a prompt is computed, decoding stops. Memory is not bounded, and nothing is computed
twice. Programs, arrivals and deadlines are those of the simulator. The arms:

share        a new program goes to the replica with the fewest programs, and stays; all requests run
moves        each turn goes to the replica that reads the least KV; a move costs nothing
slack-place  a new program goes to the replica on which the fewest programs would then be late
slack-admit  slack-place; and a new program waits while its coming would leave programs late on every replica,
             until its own slack is 1.25; the one with the least slack comes first
slack-order  share; and while a program would be late at the step's speed, those with the most slack pause

The last three know all lengths. Slack is the time to the deadline ÷ the time that the rest of the program
takes alone. Writes cluster_tenants_bound.json and .md into ``--out``. Text between the marks of the .md is
kept.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import sys
import time
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec
from result_pages import made_by, marked, write_result
from sojourn_server.simulator.latency.latency_profiles import load_hardware_profile, load_model_shape
from sojourn_server.simulator.latency.latency_protocol import StepWork
from sojourn_server.simulator.latency.roofline_latency import RooflineLatency
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_row import OVERALL
from sojourn_server.simulator.simulated_gateway import SLO_FACTOR, isolated_completion_s
from sojourn_server.simulator.workloads.arrival_processes import OpenLoop
from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlanner
from sojourn_server.simulator.workloads.synthetic_workloads import synthetic_programs

NAME = "cluster_tenants_bound"
REPLICAS = 3
POOL_TOKENS = 504_640
"""KV pool of a replica in the simulator: four A100 with Llama-3-70B."""
CHUNK_TOKENS = 8192
PAGE_RATE_PER_S = 0.014662
"""80 % of the best, in cluster_tenants.md, for the 48 programs of seed 0."""
ARMS = ("share", "moves", "slack-place", "slack-admit", "slack-order")
ENOUGH = 1.25
"""Minimum slack of a program that waits or pauses."""
TICK_S = 2.0
"""Seconds between two checks of programs that wait or pause."""
LATENCY = RooflineLatency(load_hardware_profile("a100-80gb"), load_model_shape("llama-3.1-70b"), 4)


def step_s(requests: int, kv_tokens: float) -> float:
    """Seconds of a decode step."""
    kv = int(kv_tokens)
    return LATENCY.step_s(StepWork(requests, requests, kv, kv, requests))


def prefill_s(found: int, prompt: int) -> float:
    """Seconds to compute a prompt alone if ``found`` of its tokens are cached."""
    total_s = 0.0
    while found < prompt:
        new = min(prompt - found, CHUNK_TOKENS)
        pairs = new * found + new * (new + 1) // 2
        total_s += LATENCY.step_s(StepWork(1, new, pairs, found + new, 1))
        found += new
    return total_s


@dataclass(frozen=True, slots=True)
class Turn:
    prefill_s: float
    kv_tokens: float
    """Mean context in tokens while the turn decodes."""
    steps: int
    step_s: float
    """Seconds of a decode step alone."""
    gap_s: float


@dataclass(eq=False, slots=True)
class Program:
    kind: str
    at: float
    """Arrival time at a rate of one program per second."""
    alone_s: float
    """Completion time alone, as the simulator computes it."""
    turns: list[Turn]
    rest_s: list[float]
    """Seconds that the program takes alone, from each turn to the end."""
    arrived_s: float = 0.0
    ended_s: float = 0.0
    turn: int = 0
    steps_left: float = 0.0
    home: Replica | None = None
    waited: bool = False
    """Whether the program has been in the queue of new programs."""

    @property
    def now(self) -> Turn:
        return self.turns[self.turn]

    @property
    def slowdown(self) -> float:
        return (self.ended_s - self.arrived_s) / self.alone_s

    def first_slack(self, now: float) -> float:
        """Time to the deadline ÷ completion time alone, before the first turn."""
        return (self.arrived_s + SLO_FACTOR * self.alone_s - now) / self.alone_s

    def slack(self, now: float) -> float:
        """Time to the deadline ÷ time that the rest takes alone, while the program decodes."""
        left_s = self.rest_s[self.turn + 1] + self.now.gap_s + self.steps_left * self.now.step_s
        return (self.arrived_s + SLO_FACTOR * self.alone_s - now) / max(left_s, 1e-9)


@dataclass(eq=False, slots=True)
class Replica:
    programs: int = 0
    decoding: list[Program] = field(default_factory=list)
    running: list[Program] = field(default_factory=list)
    stalled_until_s: float = 0.0
    """Time until which the replica computes prompts and does not decode."""
    step_s: float = math.inf

    def kv_tokens(self) -> float:
        return sum(program.now.kv_tokens for program in self.decoding)

    def pressed(self, now: float) -> int:
        """Number of decoding programs that would be late if another one came, with as much KV as the mean of
        them."""
        count = len(self.decoding)
        kv = self.kv_tokens()
        speed_s = step_s(count + 1, kv * (count + 1) / count) if count else 0.0
        return sum(1 <= each.slack(now) < speed_s / each.now.step_s for each in self.decoding)

    def choose(self, arm: str, now: float) -> None:
        """Choose the requests that run."""
        running = list(self.decoding)
        if arm == "slack-order":
            running = self._without_calm(running, now)
        self.running = running
        kv = sum(program.now.kv_tokens for program in running)
        self.step_s = step_s(len(running), kv) if running else math.inf

    def _without_calm(self, running: list[Program], now: float) -> list[Program]:
        slack = {program: program.slack(now) for program in running}
        while True:
            speed_s = step_s(len(running), sum(program.now.kv_tokens for program in running))
            pressed = {each for each in running if 1 <= slack[each] < 1.05 * speed_s / each.now.step_s}
            if not pressed:
                return running
            calm = [each for each in running if each not in pressed and slack[each] > ENOUGH]
            if not calm:
                return list(self.decoding)  # pausing others does not save the late programs
            running.remove(max(calm, key=slack.__getitem__))

    def advance(self, now: float, to: float) -> None:
        begin = max(now, self.stalled_until_s)
        if self.running and to > begin:
            steps = (to - begin) / self.step_s
            for program in self.running:
                program.steps_left -= steps

    def next_s(self, now: float, arm: str) -> float:
        """Time of the replica's next event."""
        due = math.inf
        if self.running:
            left = max(0.0, min(program.steps_left for program in self.running))
            due = max(now, self.stalled_until_s) + left * self.step_s
        if arm == "slack-order" and len(self.running) < len(self.decoding):
            due = min(due, now + TICK_S)
        return due


def load_programs(count: int, seed: int) -> list[Program]:
    """The programs of a simulator run, with arrival times at a rate of one program per second."""
    planner = ProgramPlanner(
        synthetic_programs("saga-ten-tenants", seed=seed), PlaybackOptions(max_context_tokens=131_072)
    )
    programs = []
    for at, plan in OpenLoop(planner, 1.0, count, seed).initial():
        turns = []
        for number, lengths in enumerate(plan.plans):
            prompt, output = lengths.prompt_tokens, lengths.output_tokens
            kv = prompt + output // 2
            gap_s = plan.gap_s(number) if number + 1 < len(plan.plans) else 0.0
            computed_s = prefill_s(min(lengths.reused_tokens, prompt - 1), prompt)
            turns.append(Turn(computed_s, kv, output - 1, step_s(1, kv), gap_s))
        alone = [turn.prefill_s + turn.steps * turn.step_s + turn.gap_s for turn in turns]
        rest_s = [*list(accumulate(reversed(alone)))[::-1], 0.0]
        kind = (plan.tenant or "").split("-")[0]
        programs.append(Program(kind, at, isolated_completion_s(plan, LATENCY, CHUNK_TOKENS), turns, rest_s))
    return programs


def run(programs: list[Program], arm: str, rate_per_s: float) -> None:
    """Run all programs to their end. Sets ``ended_s``."""
    replicas = [Replica() for _ in range(REPLICAS)]
    events: list[tuple[float, int, bool, Program]] = []
    for number, program in enumerate(programs):
        program.arrived_s = program.at / rate_per_s
        program.turn, program.home, program.steps_left, program.waited = 0, None, 0.0, False
        events.append((program.arrived_s, number, False, program))
    heapq.heapify(events)
    number, now = len(programs), 0.0
    line: list[Program] = []
    while True:
        due = [replica.next_s(now, arm) for replica in replicas]
        to = min(events[0][0] if events else math.inf, now + TICK_S if line else math.inf, *due)
        if to == math.inf:
            return
        for replica in replicas:
            replica.advance(now, to)
        now = to
        changed = [replica for replica, at in zip(replicas, due, strict=True) if at <= now]
        for replica in changed:
            for program in [each for each in replica.running if each.steps_left <= 1e-6]:
                replica.decoding.remove(program)
                gap_s = program.now.gap_s
                program.turn += 1
                if program.turn == len(program.turns):
                    program.ended_s = now
                    replica.programs -= 1
                else:
                    number += 1
                    heapq.heappush(events, (now + gap_s, number, False, program))
        for program in sorted(line, key=lambda program: program.first_slack(now)):
            if program.first_slack(now) > ENOUGH and all(replica.pressed(now) for replica in replicas):
                break
            line.remove(program)
            number += 1
            heapq.heappush(events, (now, number, False, program))
        while events and events[0][0] <= now:
            _, _, computed, program = heapq.heappop(events)
            if arm == "slack-admit" and not program.turn and not computed and not program.waited:
                program.waited = True
                line.append(program)
            elif not computed:
                home = _place(program, replicas, arm, now)
                home.stalled_until_s = max(now, home.stalled_until_s) + program.now.prefill_s
                number += 1
                heapq.heappush(events, (home.stalled_until_s, number, True, program))
            else:
                assert program.home is not None
                program.steps_left = program.now.steps
                program.home.decoding.append(program)
                changed.append(program.home)
        for replica in changed:
            replica.choose(arm, now)


def _place(program: Program, replicas: list[Replica], arm: str, now: float) -> Replica:
    if program.home is not None:
        if arm != "moves":
            return program.home
        program.home.programs -= 1
    if arm == "moves":
        home = min(replicas, key=lambda replica: replica.kv_tokens())
    elif arm in ("slack-place", "slack-admit"):
        home = min(replicas, key=lambda replica: (replica.pressed(now), replica.programs))
    else:
        home = min(replicas, key=lambda replica: (replica.programs, replica.kv_tokens()))
    program.home = home
    home.programs += 1
    return home


def read_per_program(programs: list[Program]) -> tuple[float, float]:
    """Mean over programs of (KV tokens read by all decode steps, seconds of prefill)."""
    read = fmean(sum(turn.kv_tokens * turn.steps for turn in each.turns) for each in programs)
    return read, fmean(sum(turn.prefill_s for turn in each.turns) for each in programs)


def seconds_per_program(programs: list[Program], kv_tokens: float) -> float:
    """Seconds of one replica for a program, if the replica's steps always read ``kv_tokens``."""
    read, computed_s = read_per_program(programs)
    requests = max(1, round(kv_tokens / mean_kv(programs)))
    return read / kv_tokens * step_s(requests, kv_tokens) + computed_s


def mean_kv(programs: list[Program]) -> float:
    """Mean context over all decode steps."""
    turns = [turn for program in programs for turn in program.turns]
    return sum(turn.kv_tokens * turn.steps for turn in turns) / sum(turn.steps for turn in turns)


def most_even_rate(programs: list[Program]) -> tuple[float, float]:
    """Maximum programs per hour that evenly loaded replicas finish in time, and KV tokens that each step then
    reads.

    A program is slowed down by longer steps, and because decoding stops while other prompts are computed.
    """
    _, computed_s = read_per_program(programs)
    alone_s = step_s(1, mean_kv(programs))
    best = 0.0, 0.0
    for kv in range(20_000, POOL_TOKENS, 5_000):
        took_s = seconds_per_program(programs, kv)
        slowdown = step_s(max(1, round(kv / mean_kv(programs))), kv) / alone_s / (1 - computed_s / took_s)
        if slowdown <= SLO_FACTOR:
            best = max(best, (REPLICAS * 3600 / took_s, float(kv)))
    return best


def summary(programs: list[Program]) -> dict[str, Any]:
    late = [program.slowdown > SLO_FACTOR for program in programs]
    slow = sorted(program.slowdown for program in programs)
    kinds = {kind: [each for each in programs if each.kind == kind] for kind in ("heavy", "medium", "light")}
    return {
        "in_time": 1 - fmean(late),
        **{kind: fmean(each.slowdown <= SLO_FACTOR for each in some) for kind, some in kinds.items()},
        "slowdown_mean": fmean(slow),
        "slowdown_p99": slow[int(0.99 * len(slow))],
        "completion_s": fmean(program.ended_s - program.arrived_s for program in programs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--shares", type=float, nargs="+", default=[1.0, 0.85, 0.7, 0.5], help="of the page's load"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    options = parser.parse_args()
    tenants = json.loads((options.out / "cluster_tenants.json").read_text())
    simulated = next(row for row in tenants["under_load"] if row["policy"] == "sojourn/saga")
    began = time.monotonic()
    page = load_programs(48, 0)
    run(page, "share", PAGE_RATE_PER_S)
    check = summary(page)
    busy_s = seconds_per_program(page, POOL_TOKENS)
    even, kv = most_even_rate(page)
    load = PAGE_RATE_PER_S * busy_s / REPLICAS
    sets = {seed: load_programs(options.programs, seed) for seed in options.seeds}
    rows: list[dict[str, Any]] = []
    for share in options.shares:
        for arm in ARMS if share == options.shares[0] else ARMS[:1]:
            for seed, programs in sets.items():
                rate = share * load * REPLICAS / seconds_per_program(programs, POOL_TOKENS)
                run(programs, arm, rate)
                found = {"arm": arm, "seed": seed, "share": share, "rate_per_s": rate, **summary(programs)}
                rows.append(found)
                print(found, file=sys.stderr, flush=True)
    made = made_with(sys.argv)
    table = []
    for share in options.shares:
        for arm in ARMS:
            some = [row for row in rows if (row["arm"], row["share"]) == (arm, share)]
            if some:
                mean = {name: fmean(row[name] for row in some) for name in check}
                each = ", ".join(f"{100 * row['in_time']:.1f}" for row in some)
                kinds = ", ".join(f"{100 * mean[kind]:.0f}" for kind in ("heavy", "medium", "light"))
                slow = f"{mean['slowdown_mean']:.2f}, {mean['slowdown_p99']:.2f}"
                table.append([f"{share:.0%}", arm, f"{mean['in_time']:.1%}", each, kinds, slow])
    text = "\n".join(
        [
            "# What can be in time: SAGA's ten tenants",
            "",
            "Generated by the command below, but for what is between the marks.",
            "",
            made_by(made, time.monotonic() - began),
            "",
            "## The model against the simulator",
            "",
            f"48 programs of seed 0 at {PAGE_RATE_PER_S} a second: {check['in_time']:.1%} in time, "
            f"completion {check['completion_s']:,.0f} s. [The simulator](cluster_tenants.md), "
            f"`sojourn/saga`: {simulated['slo_attainment'][OVERALL]:.1%} and "
            f"{simulated['completion_s']['mean']:,.0f} s.",
            "",
            "## An even load",
            "",
            f"A decode step takes {1000 * step_s(1, mean_kv(page)):.1f} ms for one request of the mean "
            f"context, {mean_kv(page):,.0f} tokens, and {1000 * step_s(7, POOL_TOKENS):.1f} ms for a full "
            f"pool. Full pools would finish {REPLICAS * 3600 / busy_s:.1f} programs an hour. Without any "
            f"bursts, at most {even:.1f} are in time, with {kv:,.0f} tokens in each step. The page's load is "
            f"{3600 * PAGE_RATE_PER_S:.1f}.",
            "",
            f"## {options.programs} programs, seeds {', '.join(map(str, options.seeds))}",
            "",
            "Rates are so that the work an hour is the page's, or a share of it.",
            "",
            marked(
                [
                    "load",
                    "arm",
                    "in time, mean",
                    "each seed, %",
                    "heavy, medium, light, %",
                    "slowdown: mean, P99",
                ],
                table,
            ),
            "",
            "## Summary",
            "",
            "{by hand}",
            "",
        ]
    )
    write_result(options.out, NAME, made, {"check": check, "rows": rows, "even_per_h": even}, text)
    print(msgspec.json.encode(check).decode())


if __name__ == "__main__":
    main()
