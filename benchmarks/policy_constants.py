"""Halve and double each constant of the policy ``sojourn`` and leave out each part, in the simulator.

    python benchmarks/policy_constants.py --cache constants-cache

The page shows whether a constant needs tuning, and what a part is worth. Each variant runs on small loads in
which programs wait for memory, beside the policy as it is. Finished runs are kept in the cache folder, so
that an interrupted run continues. ``--only`` takes some of the constants and parts; the page then has only
these. Sizes of windows and of look-ahead are left out. With ``--traces`` the loads are recorded agents; the
files are then policy_constants_recorded.json and .md, else policy_constants.json and .md. They are written
into benchmarks/results. The means of recorded agents move by a tenth from seed to seed: ``--seeds 3`` runs
each three times. About half an hour on two cores; for the parts alone (``--only parts``) and recorded agents
40 minutes a seed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from result_pages import made_by, marked, write_result
from rich.console import Console
from sojourn_server.core import placed_programs
from sojourn_server.core.placed_programs import PlacedProgramViews
from sojourn_server.policies.costs import step_time_estimator
from sojourn_server.policies.forecasting import context_growth
from sojourn_server.policies.placement import gittins_index, residency_price, residency_price_plan
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement
from sojourn_server.policies.placement.residency_price_plan import ResidencyPricePlan
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
        return getattr(ResidencyPricePlacement(), self.name)

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
    Constant("SHARE_WINDOW_S", step_time_estimator),
    Constant("MIN_TURNS_SEEN", context_growth),
    Constant("PRIOR_TURNS", context_growth),
    Constant("PRIOR_GROWTH", context_growth),
)


class Change(NamedTuple):
    """What a variant changes: an attribute of a module or class, or a key of the preset.

    For a key, ``owner`` is ``None``, and ``value`` is TOML."""

    owner: Any
    name: str
    value: Any


def _setting(text: str) -> Change:
    return Change(None, "placement", f'{{ policy = "residency-price", {text} }}')


PARTS: dict[str, Change] = {
    "exchanges": Change(ResidencyPricePlan, "_victims_for", lambda *_: []),
    "drops for a new program": Change(ResidencyPricePlan, "_acting_by_drop_value", lambda _: ()),
    "room to grow on the device": Change(ResidencyPricePlan, "_reserve", lambda _: 0.0),
    "room to grow in all tiers": Change(ResidencyPricePlan, "_share_in_all_tiers", 0.0),
    "room in all tiers": Change(ResidencyPricePlan, "_below_blocks", 0),
    "rule on a full device": Change(ResidencyPricePlan, "_device_has_spare_share", lambda *_: True),
    "worth (all programs alike)": Change(residency_price, "program_worth", lambda _: 1.0),
    "headroom (1)": Change(ResidencyPricePlan, "_headroom", 1.0),
    "number of delayed programs (1)": Change(ResidencyPricePlan, "_delayed_programs", 1.0),
    "durations of each tool (those of all)": Change(placed_programs, "MIN_CALLS_SEEN", 10**9),
    "all durations of tools": Change(PlacedProgramViews, "_gap_durations_s", lambda *_: ()),
    "overdue programs": _setting("patience_s = inf"),
    "the smallest new program first": _setting('order = "arrival"'),
    "saved contexts before dropped ones": Change(residency_price, "_SAVED", residency_price._RETURNING),
    "typed labels of blocks": Change(None, "eviction", '"lru"'),
}
"""Parts of the policy, each with the change that leaves it out."""

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

_TRAE = replace(
    _SMALL, workload="isobench_trae", programs=32, rate_per_s=0.06, pool_tokens=200_000,
    max_context_tokens=110_000,
)  # fmt: skip
RECORDED_LOADS = {
    "trae, no host memory": replace(_TRAE, cpu_ratio=0.0),
    "trae, host memory 1": _TRAE,
    "claude code, host memory 1": replace(
        _TRAE, workload="entire_claude_code", programs=20, rate_per_s=0.05, pool_tokens=250_000,
        max_context_tokens=150_000,
    ),
    "mini-swe-agent, host memory 1": replace(
        _SMALL, workload="lmcache_miniswe", programs=60, max_context_tokens=30_000
    ),
}  # fmt: skip
"""Open loops of recorded agents in which programs wait for memory; ``workload`` is the trace's name."""


def loads_of(traces: Path | None) -> dict[str, RunSpec]:
    """The loads by name: the small ones, or those of recorded agents if there is a folder of traces."""
    if traces is None:
        return LOADS
    return {
        name: replace(spec, workload=str(traces / f"{spec.workload}.jsonl.gz"))
        for name, spec in RECORDED_LOADS.items()
    }


@contextlib.contextmanager
def changed(change: Change, folder: Path, label: str) -> Iterator[str]:
    """Make a change for the time of a run. Yields the policy to run, as a preset name or file."""
    if change.owner is None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{OURS}-{re.sub('[^a-z0-9_.]+', '-', label.lower())}.toml"
        file.write_text(
            f'extends = "{OURS}"\nname = "{file.stem}"\npaper = "one thing changed"\n'
            f"{change.name} = {change.value}\n"
        )
        yield str(file)
        return
    usual = vars(change.owner)[change.name]
    setattr(change.owner, change.name, change.value)
    try:
        yield OURS
    finally:
        setattr(change.owner, change.name, usual)


def run(spec: RunSpec, folder: Path, variant: str) -> RunRow:
    """The row of a run, from the cache if the run is there. ``variant`` names what is changed."""
    kept = RunCache(folder, code=f"{code_digest(policy=find_policy(OURS))} {variant}")
    outcome = kept.get(spec)
    if outcome is None:
        outcome = RunOutcome(log=run_simulation(spec).log)
        kept.put(spec, outcome)
    return summarize_run(outcome.log)


Found = dict[tuple[str, float, str], list[RunRow]]
"""Rows by constant or part, factor and load, one for each seed. A part left out has the factor 0; the policy
as it is has the name ``""`` and the factor 1."""


class Variant(NamedTuple):
    """A run to make: a load, and a constant times a factor or a part times 0; ``""`` changes nothing."""

    load: str
    spec: RunSpec
    name: str = ""
    factor: float = 1.0
    cache: Path = Path()

    def __str__(self) -> str:
        where = f"{self.load}, seed {self.spec.seed}"
        return f"{where}, {self.name} · {self.factor:g}" if self.name else f"{where}, as it is"

    @property
    def change(self) -> Change:
        if self.name in PARTS:
            return PARTS[self.name]
        (constant,) = (constant for constant in CONSTANTS if constant.name == self.name)
        value = constant.times(self.factor)
        if constant.module is None:
            return _setting(f"{constant.name} = {float(value)}")
        return Change(constant.module, constant.name, value)


def run_variant(variant: Variant, report: ReportCallback) -> RunRow:
    """Make one run, in a process of its own."""
    spec = variant.spec
    if not variant.name:
        return run(spec, variant.cache, "")
    label = f"{variant.name} {variant.factor:g}"
    with changed(variant.change, variant.cache, label) as policy:
        return run(replace(spec, policy=policy), variant.cache, label)


def measure(
    loads: Mapping[str, RunSpec],
    names: Sequence[str],
    seeds: int,
    folder: Path,
    jobs: int,
    console: Console,
) -> Found:
    """Run the policy as it is and the variants of all constants and parts in ``names`` on all loads."""
    changes = [("", 1.0)]
    for name in names:
        changes += [(name, 0.0)] if name in PARTS else [(name, factor) for factor in FACTORS]
    variants = [
        Variant(load, replace(spec, seed=seed), *change, folder)
        for seed in range(seeds)
        for load, spec in loads.items()
        for change in changes
    ]
    ended: set[int] = set()

    def on_done(number: int, row: RunRow) -> None:
        ended.add(number)
        console.print(
            f"{len(ended)} of {len(variants)}: {variants[number]}: {_mean(row):.1f} s", highlight=False
        )

    rows = run_in_processes(run_variant, variants, jobs, on_done=on_done, preload=PRELOAD_MODULES)
    found: Found = {}
    for variant, row in zip(variants, rows, strict=True):
        found.setdefault((variant.name, variant.factor, variant.load), []).append(row)
    return found


def page(found: Found, names: Sequence[str], made: str) -> str:
    """The page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    usual = {load: rows for (name, _, load), rows in found.items() if not name}
    change = {key: geometric_mean(_ratios(rows, usual[key[2]])) for key, rows in found.items()}
    halved_or_doubled = [value for (name, factor, _), value in change.items() if name and factor]
    noted = sum(abs(value - 1) >= NOTED for value in halved_or_doubled)
    constants = [constant for constant in CONSTANTS if constant.name in names]
    of_constants = [
        [
            f"`{constant.name}`",
            f"{constant.value:g}",
            *(
                " / ".join(f"{change[constant.name, factor, load]:.3f}" for factor in FACTORS)
                for load in usual
            ),
        ]
        for constant in constants
    ]
    of_parts = [
        [name, *(_cell(_ratios(found[name, 0.0, load], usual[load])) for load in usual)]
        for name in PARTS
        if name in names
    ]
    loads = ", ".join(
        f"{load} {fmean(map(_mean, rows)):.1f} s ({rows[0].programs_finished} programs)"
        for load, rows in usual.items()
    )
    constants_section = (
        "## Each constant halved / doubled",
        "",
        f"{noted} of {len(halved_or_doubled)} changes make {NOTED:.0%} or more of difference.",
        "",
        marked(("constant", "value", *usual), of_constants),
        "",
    )
    parts_section = ("## Each part left out", "", marked(("left out", *usual), of_parts), "")
    return "\n".join([
        "# The constants and parts of the policy",
        "",
        made,
        "",
        f"Mean completion time over that of the policy as it is; below 1 is better. As it is: {loads}.",
        *(
            ("Geometric means over the seeds; in parentheses the smallest and largest ratio of one seed.",)
            if len(next(iter(usual.values()))) > 1
            else ()
        ),
        "",
        "{by hand}",
        "",
        *(constants_section if of_constants else ()),
        *(parts_section if of_parts else ()),
    ])  # fmt: skip


def _ratios(rows: Sequence[RunRow], usual: Sequence[RunRow]) -> list[float]:
    """The mean completion time over that of the policy as it is, for each seed."""
    return [_mean(row) / _mean(same_seed) for row, same_seed in zip(rows, usual, strict=True)]


def _cell(ratios: Sequence[float]) -> str:
    """The geometric mean of ratios, with the smallest and the largest if there are several."""
    several = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
    return f"{geometric_mean(ratios):.3f}{several}"


def _mean(row: RunRow) -> float:
    assert row.completion_s.mean is not None, "an open loop runs until all have finished"
    return row.completion_s.mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="constants and parts to change, commas between, or 'parts'")
    parser.add_argument("--traces", type=Path, help="folder of the recorded traces; default: small loads")
    parser.add_argument("--seeds", type=int, default=1, help="seeds of each run, from 0; default: 1")
    parser.add_argument("--cache", type=Path, required=True, help="folder in which finished runs are kept")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, help="processes; default: one per core"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    known = [*(constant.name for constant in CONSTANTS), *PARTS]
    named = {None: known, "parts": list(PARTS)}
    names = named[options.only] if options.only in named else options.only.split(",")
    if unknown := set(names) - set(known):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; expected some of {', '.join(known)}")
    began = time.monotonic()
    if options.seeds < 1:
        parser.error(f"--seeds is {options.seeds}; expected 1 or more")
    found = measure(
        loads_of(options.traces), names, options.seeds, options.cache, options.jobs, Console(stderr=True)
    )
    made = made_with(sys.argv)
    text = page(found, names, made_by(made, time.monotonic() - began))
    runs = [
        {"changed": name, "factor": factor, "load": load, "seed": seed, "completion_mean_s": _mean(row)}
        for (name, factor, load), rows in found.items()
        for seed, row in enumerate(rows)
    ]
    name = "policy_constants" if options.traces is None else "policy_constants_recorded"
    write_result(options.out, name, made, {"runs": runs}, text)


if __name__ == "__main__":
    main()
