"""Halve and double each constant of the policy ``sojourn`` in the simulator, to see whether it needs tuning.

    python benchmarks/policy_constants.py --cache constants-cache

Each variant runs on small loads in which programs wait for memory, beside the policy as it is. Finished runs
are kept in the cache folder, so that an interrupted run continues. ``--only`` takes some of the constants;
the page then has only these. Sizes of windows and of look-ahead are left out. Writes policy_constants.json
and .md into benchmarks/results. About 20 minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from result_pages import made_by, marked, write_result
from rich.console import Console
from sojourn_server.core import placed_programs
from sojourn_server.policies.costs import reload_estimate
from sojourn_server.policies.forecasting import context_growth
from sojourn_server.policies.placement import gittins_index, residency_price, residency_price_plan
from sojourn_server.simulator.process_pool import ReportCallback, run_in_processes
from sojourn_server.simulator.report.results_file import made_with
from sojourn_server.simulator.report.run_metrics import summarize_run
from sojourn_server.simulator.report.run_row import RunRow
from sojourn_server.simulator.run_cache import RunCache, RunOutcome, code_digest
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.simulator.simulation_suite import PRELOAD_MODULES
from sojourn_server.simulator.simulator_policies import find_policy

OURS = "sojourn"
FACTORS = (0.5, 2.0)
NOTED = 0.02
"""Minimum change of the mean completion time for which a change is counted on the page."""


class Constant(NamedTuple):
    """A constant of a module, or a setting of the policy (``module`` is ``None``)."""

    name: str
    module: Any = None

    @property
    def value(self) -> float:
        if self.module is not None:
            return getattr(self.module, self.name)
        return getattr(residency_price.ResidencyPricePlacement(), self.name)

    def times(self, factor: float) -> float:
        """The constant times ``factor``, within its bounds."""
        value = self.value * factor
        if self.name == "reserve":
            return min(1.0, value)
        return round(value) if isinstance(self.value, int) else value


CONSTANTS = (
    *map(Constant, ("reserve", "relax_s", "patience_s", "overdue_gap_s", "tick_s", "idle_tick_s")),
    Constant("UNKNOWN_GAP_S", gittins_index),
    Constant("MIN_SPENT_S", gittins_index),
    Constant("MIN_HEADROOM", residency_price_plan),
    Constant("MAX_WORTH", residency_price),
    Constant("BEGIN_WORTH", residency_price_plan),
    Constant("BEGIN_PATIENCE", residency_price_plan),
    Constant("GAP_SAMPLES", placed_programs),
    Constant("RETURN_S", placed_programs),
    Constant("MIN_PROGRAMS_SEEN", placed_programs),
    Constant("MIN_CALLS_SEEN", placed_programs),
    Constant("SHARE_WINDOW_S", reload_estimate),
    Constant("MIN_TURNS_SEEN", context_growth),
    Constant("PRIOR_TURNS", context_growth),
    Constant("PRIOR_GROWTH", context_growth),
)

_SMALL = RunSpec(
    policy=OURS, workload="synthetic:continuum-bfcl", hardware="a100-80gb", model="llama-3.1-8b", programs=40,
    rate_per_s=0.5, until_s=None, pool_tokens=60_000, max_context_tokens=16_000,
)  # fmt: skip
_LONGER = replace(
    _SMALL, workload="synthetic:continuum-swe-bench", rate_per_s=0.15, pool_tokens=100_000,
    max_context_tokens=30_000,
)  # fmt: skip
LOADS = {
    "bfcl, no host memory": replace(_SMALL, cpu_ratio=0.0),
    "bfcl, host memory 1": _SMALL,
    "ten tenants, host memory 1": replace(_SMALL, workload="synthetic:saga-ten-tenants", rate_per_s=0.2),
    "swe-bench, no host memory": replace(_LONGER, cpu_ratio=0.0),
    "swe-bench, host memory 1": _LONGER,
}
"""Open loops in which programs wait for memory. Their contexts are short, so that a run takes little time."""


@contextlib.contextmanager
def changed(constant: Constant, value: float, folder: Path) -> Iterator[str]:
    """Change a constant for the time of a run. Yields the policy to run, as a preset name or file."""
    if constant.module is None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{OURS}-{constant.name}-{value:g}.toml"
        file.write_text(
            f'extends = "{OURS}"\nname = "{file.stem}"\npaper = "one constant changed"\n'
            f'placement = {{ policy = "residency-price", {constant.name} = {float(value)} }}\n'
        )
        yield str(file)
        return
    usual = constant.value
    setattr(constant.module, constant.name, value)
    try:
        yield OURS
    finally:
        setattr(constant.module, constant.name, usual)


def run(spec: RunSpec, folder: Path, variant: str) -> RunRow:
    """The row of a run, from the cache if the run is there. ``variant`` names what is changed."""
    kept = RunCache(folder, code=f"{code_digest(policy=find_policy(OURS))} {variant}")
    outcome = kept.get(spec)
    if outcome is None:
        outcome = RunOutcome(log=run_simulation(spec).log)
        kept.put(spec, outcome)
    return summarize_run(outcome.log)


Found = dict[tuple[str, float, str], RunRow]
"""Rows by constant, factor and load; the policy as it is has the constant ``""`` and the factor 1."""


class Variant(NamedTuple):
    """A run to make: a load, and a constant times a factor; the constant ``""`` changes nothing."""

    load: str
    name: str = ""
    factor: float = 1.0
    cache: Path = Path()

    def __str__(self) -> str:
        return f"{self.load}, {self.name or 'unchanged'} · {self.factor:g}"


def run_variant(variant: Variant, report: ReportCallback) -> RunRow:
    """Make one run, in a process of its own."""
    spec = LOADS[variant.load]
    if not variant.name:
        return run(spec, variant.cache, "")
    (constant,) = (constant for constant in CONSTANTS if constant.name == variant.name)
    value = constant.times(variant.factor)
    with changed(constant, value, variant.cache) as policy:
        return run(replace(spec, policy=policy), variant.cache, f"{constant.name}={value:g}")


def measure(constants: Sequence[Constant], folder: Path, jobs: int, console: Console) -> Found:
    """Run the policy as it is and all variants of ``constants`` on all loads."""
    changes = [("", 1.0), *((constant.name, factor) for constant in constants for factor in FACTORS)]
    variants = [Variant(load, *change, folder) for load in LOADS for change in changes]
    ended: set[int] = set()

    def on_done(number: int, row: RunRow) -> None:
        ended.add(number)
        console.print(
            f"{len(ended)} of {len(variants)}: {variants[number]}: {_mean(row):.1f} s", highlight=False
        )

    rows = run_in_processes(run_variant, variants, jobs, on_done=on_done, preload=PRELOAD_MODULES)
    return {(v.name, v.factor, v.load): row for v, row in zip(variants, rows, strict=True)}


def page(found: Found, constants: Sequence[Constant], made: str) -> str:
    """The page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    changes = [_mean(row) / _mean(found["", 1.0, load]) for (name, _, load), row in found.items() if name]
    noted = sum(abs(change - 1) >= NOTED for change in changes)
    lines = []
    for constant in constants:
        cells = [
            " / ".join(
                f"{_mean(found[constant.name, factor, load]) / _mean(found['', 1.0, load]):.3f}"
                for factor in FACTORS
            )
            for load in LOADS
        ]
        lines.append([f"`{constant.name}`", f"{constant.value:g}", *cells])
    loads = ", ".join(
        f"{load} {_mean(found['', 1.0, load]):.1f} s ({found['', 1.0, load].programs_finished} programs)"
        for load in LOADS
    )
    return "\n".join([
        "# Each constant of the policy halved and doubled",
        "",
        made,
        "",
        f"Mean completion time over that of the policy as it is, halved / doubled; below 1 is better. As it "
        f"is: {loads}. {noted} of {len(changes)} changes make {NOTED:.0%} or more of difference.",
        "",
        "{by hand}",
        "",
        marked(("constant", "value", *LOADS), lines),
        "",
    ])  # fmt: skip


def _mean(row: RunRow) -> float:
    assert row.completion_s.mean is not None, "an open loop runs until all have finished"
    return row.completion_s.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="constants to change, commas between; default: all")
    parser.add_argument("--cache", type=Path, required=True, help="folder in which finished runs are kept")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one per core"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    wanted = options.only.split(",") if options.only else [constant.name for constant in CONSTANTS]
    unknown = set(wanted) - {constant.name for constant in CONSTANTS}
    if unknown:
        parser.error(f"unknown constants {', '.join(sorted(unknown))}")
    constants = [constant for constant in CONSTANTS if constant.name in wanted]
    began = time.monotonic()
    found = measure(constants, options.cache, options.jobs, Console(stderr=True))
    made = made_with(sys.argv)
    text = page(found, constants, made_by(made, time.monotonic() - began))
    runs = [
        {"constant": name, "factor": factor, "load": load, "completion_mean_s": _mean(row)}
        for (name, factor, load), row in found.items()
    ]
    write_result(options.out, "policy_constants", made, {"runs": runs}, text)


if __name__ == "__main__":
    main()
