"""Compare the policy ``sojourn`` with all others over a grid of loads, in the simulator.

    python benchmarks/judge.py --traces traces --cache judge-cache --share 0.1

The grid has every trace and four synthetic workloads, closed loops of 20, 40 and 80 programs, open loops at
0.5 to 1.1 of the capacity and in bursts, host memory of 0, 1 and 2 times the device's, and two kinds of
hardware. ``--share 0.1`` takes every tenth cell, so that each value of each dimension occurs. Finished runs
are kept in the cache folder; empty it after a change of code. The page has the worst cells first. ``--onto``
takes over the cells of an earlier result, whose runs are not compared with the code. After a change of the
policy, ``--renew`` repeats those of the policy and of the oracle, or of ``--policies``, in the cells of
``--only``. With ``--kept`` it takes the new runs that are finished, and keeps the others.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import msgspec
from judge_page import LIMITS, ORACLE, OURS, STOCK, Cell, Figures, page
from kept_runs import kept_file, run_arguments, run_kept, traces_of
from oracle_policies import oracle_row
from result_pages import Result
from rich.console import Console
from sojourn_server.core.scheduler_state import SchedulerLimits
from sojourn_server.simulator.report.run_metrics import trace_name
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.simulator_policies import find_policy
from sojourn_server.simulator.workloads.arrival_processes import load_programs

PRESETS = ("admit", "continuum", "saga", "mori", "tetris", "autellix", "thunderagent")
"""Policies that can run without host memory."""
HOST_PRESETS = ("lru-offload", "thunderagent-offload", "continuum+host", "saga+host", "mori")
"""Further policies for engines with host memory. A variant with host memory replaces the one without."""

SYNTHETIC = ("continuum-swe-bench", "continuum-bfcl", "saga-ten-tenants", "reasoning-agent")
CLOSED = (20, 40, 80)
OPEN = (0.5, 0.8, 0.95, 1.1)
"""Arrival rates as shares of the rate that ``unlimited`` sustains."""
BURST_RATE, BURST = 0.8, 10
"""Arrival rate of a load with bursts, and programs per burst."""
HOST = (0.0, 1.0, 2.0)
HARDWARE = (("a100-80gb", "llama-3.1-8b"), ("h200", "qwen3-30b-a3b"))
ASYNC = True
"""Engines plan each step ahead, as vLLM does on CUDA and as ``sojourn simulate`` does for a GPU."""
CLOSED_S = 1800.0
"""Virtual seconds of a closed loop. An open loop ends when all programs have."""
OPEN_PROGRAMS = 80
CAPACITY_PROGRAMS = 80
"""Concurrent programs of the closed loop that measures the capacity."""


class Load(NamedTuple):
    """One point of the grid's load dimension."""

    name: str
    programs: int
    capacity_share: float | None = None
    """Arrival rate of an open loop as a share of the capacity; ``None`` for a closed loop."""
    burst: int = 1


LOADS = (
    *(Load(f"closed {programs}", programs) for programs in CLOSED),
    *(Load(f"open {share:g}", OPEN_PROGRAMS, share) for share in OPEN),
    Load("bursts", OPEN_PROGRAMS, BURST_RATE, BURST),
)


Machine = tuple[str, str, str]
"""Workload, hardware and model."""


@dataclass(frozen=True)
class Point:
    """One cell of the grid, before its arrival rate is known."""

    workload: str
    load: Load
    host: float
    hardware: str
    model: str

    @property
    def name(self) -> str:
        workload = trace_name(self.workload)
        return f"{workload}, {self.load.name}, host {self.host:g}, {self.hardware}"

    @property
    def without_load(self) -> Machine:
        return (self.workload, self.hardware, self.model)


def grid(workloads: Sequence[str]) -> list[Point]:
    """All cells, ordered so that the values of a dimension are about equally frequent in any first part of
    the list."""
    points = [
        Point(workload, load, host, hardware, model)
        for hardware, model in HARDWARE
        for host in HOST
        for load in LOADS
        for workload in workloads
    ]
    random.Random(0).shuffle(points)
    # The next cell is always one whose values are rare so far, so that every first part is balanced.
    seen: Counter[object] = Counter()
    ordered = []
    while points:
        point = min(points, key=lambda p: sum(seen[value] for value in _values(p)))
        points.remove(point)
        seen.update(_values(point))
        ordered.append(point)
    return ordered


def _values(point: Point) -> tuple[object, ...]:
    return (point.workload, point.load, point.host, point.hardware, (point.load, point.host))


def specs_of(point: Point, policies: Sequence[str], rate_per_s: float | None, seed: int) -> list[RunSpec]:
    """The runs of a cell. Runs of policies without host memory are the same for all its sizes."""
    specs = []
    for name in policies:
        spec = RunSpec(
            policy=name, workload=point.workload, hardware=point.hardware, model=point.model,
            async_scheduling=ASYNC, programs=point.load.programs, rate_per_s=rate_per_s,
            burst=point.load.burst, cpu_ratio=point.host, until_s=CLOSED_S if rate_per_s is None else None,
            hold_timeout_s=SchedulerLimits().hold_timeout_s, seed=seed,
        )  # fmt: skip
        uses = name == ORACLE or find_policy(name).uses_cpu_ratio
        specs.append(spec if uses else replace(spec, cpu_ratio=1.0))
    return specs


def policies_of(host: float, wanted: Sequence[str] | None, is_open: bool = False) -> list[str]:
    """Policies to compare with ``host`` times the device's memory, in an open loop or a closed one."""
    below = HOST_PRESETS if host else ()
    names = [*LIMITS, STOCK, *(name for name in PRESETS if host == 0 or f"{name}+host" not in below), *below]
    names = [name for name in dict.fromkeys(names) if host or name != "mori"]
    taken = [name for name in names if not wanted or name in wanted or name == STOCK]
    return [OURS, *([ORACLE] if is_open else ()), *taken]


def capacity(row: RunRow, spec: RunSpec) -> float:
    """Programs per second that the ``unlimited`` run ``row`` of a closed loop computes.

    Its output tokens per second over the mean output tokens of a program, since few programs end in a run."""
    programs = load_programs(spec.workload, spec.seed)
    tops = sum(program.parent is None for program in programs)
    tokens = sum(turn.output_tokens for program in programs for turn in program.turns)
    return (row.output_tok_per_s or 0.0) * tops / tokens


def capacity_spec(machine: Machine, seed: int) -> RunSpec:
    """The run that measures the capacity of ``machine``."""
    workload, hardware, model = machine
    return RunSpec(
        policy="unlimited", workload=workload, hardware=hardware, model=model, seed=seed,
        async_scheduling=ASYNC, programs=CAPACITY_PROGRAMS, until_s=CLOSED_S,
    )  # fmt: skip


def is_kept(spec: RunSpec, options: argparse.Namespace) -> bool:
    return kept_file(options.cache, oracle_row, spec).exists()


def run(specs: Sequence[RunSpec], options: argparse.Namespace) -> list[RunRow]:
    return run_kept(specs, options.cache, options.jobs, oracle_row)


def _wanted(options: argparse.Namespace) -> list[str] | None:
    return options.policies.split(",") if options.policies else None


def _rate(point: Point, rates: dict[Machine, float]) -> float | None:
    """Arrivals per second of an open loop; ``None`` for a closed loop."""
    share = point.load.capacity_share
    return None if share is None else round(share * rates[point.without_load], 9)


def measured_capacities(points: Sequence[Point], options: argparse.Namespace) -> dict[Machine, float]:
    """Capacity in programs per second by ``Point.without_load``, of the points with open loops."""
    wanted = list(dict.fromkeys(p.without_load for p in points if p.load.capacity_share is not None))
    specs = [capacity_spec(machine, options.seed) for machine in wanted]
    rows = run(specs, options)
    return {machine: capacity(row, spec) for machine, row, spec in zip(wanted, rows, specs, strict=True)}


def cells(
    points: Sequence[Point],
    rates: dict[Machine, float],
    options: argparse.Namespace,
    console: Console,
) -> Iterator[Cell]:
    """Run every cell and yield it."""
    for number, point in enumerate(points, 1):
        rate = _rate(point, rates)
        policies = policies_of(point.host, _wanted(options), rate is not None)
        specs = specs_of(point, policies, rate, options.seed)
        rows = run(specs, options)
        figures = {row.policy: Figures.of(row) for row in rows}
        cell = Cell(point.name, point.load.name, point.host, figures)
        console.print(f"{number} of {len(points)}: {cell.summary()}", highlight=False, soft_wrap=True)
        yield cell


def renewed(
    earlier: Sequence[Cell],
    points: Sequence[Point],
    options: argparse.Namespace,
    console: Console,
) -> Iterator[Cell]:
    """The cells of an earlier result that ``--only`` names, with new runs of ``OURS`` and ``ORACLE``, or of
    ``--policies``. The other cells, and arrival rates, stay as they were."""
    point_of = {point.name: point for point in points}
    for number, cell in enumerate(earlier, 1):
        point, rate = point_of.get(cell.name), cell.rows[STOCK].rate_per_s
        if point is None:
            raise SystemExit(
                f"{cell.name} is no cell of this grid; expected the traces of the earlier result"
            )
        if not _is_chosen(point, options):
            yield cell
            continue
        wanted = _wanted(options) or (OURS, ORACLE)
        names = [name for name in policies_of(point.host, wanted, rate is not None) if name in wanted]
        specs = specs_of(point, names, rate, options.seed)
        if options.kept:
            specs = [spec for spec in specs if is_kept(spec, options)]
        rows = run(specs, options)
        cell = replace(cell, rows={**cell.rows, **{row.policy: Figures.of(row) for row in rows}})
        console.print(f"{number} of {len(earlier)}: {cell.summary()}", highlight=False, soft_wrap=True)
        yield cell


def chosen_points(points: Sequence[Point], options: argparse.Namespace) -> list[Point]:
    """The points of ``--only`` and ``--share``."""
    some = [p for p in points if _is_chosen(p, options)]
    if not some:
        raise SystemExit(
            f"--only {options.only}: no cell is named so; expected parts such as 'closed 40,host1'"
        )
    return some[: max(1, round(options.share * len(some)))]


def earlier_cells(path: Path) -> list[Cell]:
    """The cells of an earlier result. Raises ``SystemExit`` if the file has none."""
    try:
        return [Cell.read(cell) for cell in msgspec.json.decode(path.read_bytes())["cells"]]
    except (OSError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise SystemExit(f"--onto {path}: {error!r}; expected judge.json of an earlier run") from None


def arguments() -> argparse.Namespace:
    parser = run_arguments(__doc__)
    parser.add_argument("--traces", type=Path, help="folder of .jsonl and .jsonl.gz traces")
    parser.add_argument("--only", help="cells whose names hold all of these, commas between")
    parser.add_argument("--share", type=float, default=1.0, help="share of the grid's cells")
    parser.add_argument("--policies", help=f"compare with these alone; {OURS} and {STOCK} always run")
    parser.add_argument("--kept", action="store_true", help="with --renew: run nothing, as above")
    parser.add_argument(
        "--onto", type=Path, metavar="FILE", help="judge.json of an earlier run; its cells are not run again"
    )
    parser.add_argument("--renew", action="store_true", help="repeat runs in the cells of --onto, as above")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.share <= 1:
        parser.error(f"--share is {options.share:g}; expected a share above 0 and up to 1")
    if options.renew and not options.onto:
        parser.error("--renew needs --onto; expected judge.json of an earlier run")
    if options.kept and not (options.renew and options.cache):
        parser.error("--kept needs --renew and --cache; expected the folder of runs to take")
    return options


def main() -> None:
    options = arguments()
    result = Result("judge", "The judge: one policy against all presets")
    console = Console(stderr=True)
    traces = [str(path) for path in traces_of(options.traces)] if options.traces else []
    points = grid([*traces, *(f"synthetic:{name}" for name in SYNTHETIC)])
    found = earlier_cells(options.onto) if options.onto else []
    if options.renew:
        found = list(renewed(found, points, options, console))
    else:
        known = {cell.name for cell in found}
        points = [point for point in chosen_points(points, options) if point.name not in known]
        rates = measured_capacities(points, options)
        found += cells(points, rates, options, console)
    result.write(options.out, {"cells": [cell.document() for cell in found]}, *page(found))
    console.print(f"wrote judge.md and judge.json in {options.out}", highlight=False)


def _is_chosen(point: Point, options: argparse.Namespace) -> bool:
    text = f"{point.workload} {point.load.name} host{point.host:g} {point.hardware} {point.model}"
    return all(part in text for part in (options.only or "").split(","))


if __name__ == "__main__":
    main()
