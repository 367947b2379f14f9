"""Plot a preemption cascade: stock, and Tetris with host memory, on the same requests.

    python benchmarks/tetris_cascade_plot.py --out docs/images/preemption-cascade.svg

Runs two simulations of 20 virtual minutes, which take about a minute. Each request is a bar, in order of
arrival from the top. The bar's colour shows whether the request runs, waits for admission or is preempted,
according to the scheduler after each step. In the default time window stock preempts often; ``--window``
selects another. Prints the counts for the window and for the whole runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from sojourn_server.simulator.report.run_metrics import cascades
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation

SPEC = RunSpec(
    policy="stock",
    workload="synthetic:reasoning-mix",
    programs=16,
    until_s=1200.0,
    pool_tokens=60_000,
    max_model_len=60_000,
)
POLICIES = {"stock": "stock vLLM", "tetris+host": "tetris, with host memory"}
RUNNING, WAITING, PREEMPTED = "runs", "waits to be let in", "preempted, waits to come back"
COLOURS = {RUNNING: "#0072B2", WAITING: "#C8C8C8", PREEMPTED: "#E69F00"}
MARK = "#B22222"


class Stretch(NamedTuple):
    """A period in which a request is in one state, in virtual seconds."""

    state: str
    begin_s: float
    end_s: float


@dataclass(slots=True)
class Timeline:
    """States of all requests in one run."""

    stretches: dict[str, list[Stretch]] = field(default_factory=dict)
    """Periods of each request, in order of arrival."""
    preemptions: list[tuple[float, str]] = field(default_factory=list)
    used: list[tuple[float, float]] = field(default_factory=list)
    """(virtual second, used share of the pool)"""
    _now: dict[str, tuple[str, float]] = field(default_factory=dict)
    _ran: set[str] = field(default_factory=set)

    def planned(self, engine: Any, planned: Any, now: float) -> None:
        """Record the scheduler's state after it has planned a step."""
        scheduler = engine.scheduler
        running = {request.request_id for request in scheduler.running}
        self.preemptions += [(now, request_id) for request_id in sorted(planned.preempted_req_ids or ())]
        self._ran |= running
        for request_id in scheduler.requests:
            state = RUNNING if request_id in running else PREEMPTED if request_id in self._ran else WAITING
            before = self._now.get(request_id)
            if before is None or before[0] != state:
                self._end(request_id, now)
                self._now[request_id] = (state, now)
        for request_id in self._now.keys() - scheduler.requests.keys():
            self._end(request_id, now)
        pool = engine.pool
        self.used.append((now, 1 - pool.get_num_free_blocks() / (pool.num_gpu_blocks - 1)))

    def over(self, now: float) -> None:
        """End all open periods at the end of the run."""
        for request_id in list(self._now):
            self._end(request_id, now)

    def _end(self, request_id: str, now: float) -> None:
        state, since_s = self._now.pop(request_id, (WAITING, now))
        stretches = self.stretches.setdefault(request_id, [])
        if now > since_s:
            stretches.append(Stretch(state, since_s, now))


@contextmanager
def watched() -> Iterator[Timeline]:
    """Yield a timeline, which records the engine of every simulation inside the ``with`` block."""
    from sojourn_server.simulator import simulated_engine

    timeline = Timeline()

    class Watched(simulated_engine.SimulatedEngine):
        def __init__(self, options: Any, clock: Any, **further: Any) -> None:
            super().__init__(options, clock, **further)
            self._clock = clock

        def plan(self) -> Any:
            planned = super().plan()
            timeline.planned(self, planned, self._clock())
            return planned

    original = simulated_engine.SimulatedEngine
    simulated_engine.SimulatedEngine = Watched  # type: ignore[misc]
    try:
        yield timeline
    finally:
        simulated_engine.SimulatedEngine = original  # type: ignore[misc]


class Panel(NamedTuple):
    """Data of one policy's panel."""

    name: str
    timeline: Timeline
    cascades: int
    """Number of cascades in the whole run. ``preemptions`` covers the whole run too."""
    preemptions: int
    output_tok_per_s: float


def play(policy: str) -> Panel:
    """Simulate one policy, and return the data of its panel."""
    with watched() as timeline:
        log = run_simulation(replace(SPEC, policy=policy)).log
    timeline.over(log.virtual_s)
    tokens = sum(turn.generated_tokens if turn.finished_s is None else turn.output_tokens
                 for program in log.programs for turn in program.turns)  # fmt: skip
    steps = log.preemption_steps
    return Panel(POLICIES[policy], timeline, cascades(steps), len(steps), tokens / log.virtual_s)


def within(panel: Panel, window: tuple[float, float]) -> dict[str, Any]:
    """Return the counts of events in the time window."""
    begin_s, end_s = window
    marks = [(at_s, name) for at_s, name in panel.timeline.preemptions if begin_s <= at_s < end_s]
    names = [name for _, name in marks]
    waited = sum(
        max(0.0, min(end_s, one.end_s) - max(begin_s, one.begin_s))
        for stretches in panel.timeline.stretches.values()
        for one in stretches
        if one.state == PREEMPTED
    )
    return {
        "preemptions": len(marks),
        "requests_preempted": len(set(names)),
        "most_of_one_request": max((names.count(name) for name in names), default=0),
        "preempted_wait_s": round(waited, 2),
    }


def draw(panels: Sequence[Panel], window: tuple[float, float], path: Path) -> None:
    """Draw both panels, one above the other."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    matplotlib.rcParams["font.size"] = 10.0
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(
        2 * len(panels), 1, figsize=(8.2, 8.4), sharex=True, height_ratios=[5, 1.1] * len(panels)
    )
    for panel, bars, pool in zip(panels, axes[::2], axes[1::2], strict=True):
        draw_bars(panel, bars, window)
        at_s, share = zip(*thinned(panel.timeline.used, window), strict=True)
        pool.plot(at_s, [100 * of for of in share], color="#333333", linewidth=1.1)
        pool.set(xlim=window, ylim=(65, 103), yticks=(70, 100), ylabel="pool, %")
        pool.grid(alpha=0.3)
    axes[-1].set_xlabel("virtual seconds")
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour, label=state) for state, colour in COLOURS.items()]
    mark = {"color": MARK, "marker": "x", "linestyle": "", "markersize": 7, "markeredgewidth": 2}
    handles.append(plt.Line2D([], [], label="preempted", **mark))
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False)
    figure.align_ylabels(axes)
    figure.tight_layout(rect=(0, 0, 1, 0.965), h_pad=0.4)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None}, facecolor="white")


def thinned(used: Sequence[tuple[float, float]], window: tuple[float, float]) -> list[tuple[float, float]]:
    """Return the samples in the window, without those that change the line by less than 0.5 % of the pool."""
    inside = [point for point in used if window[0] <= point[0] <= window[1]]
    kept = inside[:1]
    for before, point in pairwise(inside):
        if abs(point[1] - kept[-1][1]) >= 0.005:
            kept += [before, point]
    return [*kept, inside[-1]]


def draw_bars(panel: Panel, axis: Any, window: tuple[float, float]) -> None:
    """Draw the requests of the time window as bars, the earliest on top."""
    begin_s, end_s = window
    seen = [
        (name, stretches)
        for name, stretches in panel.timeline.stretches.items()
        if stretches and stretches[0].begin_s < end_s and stretches[-1].end_s > begin_s
    ]
    height = {}
    for place, (name, stretches) in enumerate(seen):
        height[name] = place
        for one in stretches:
            thick = 0.72 if one.state == RUNNING else 0.34
            axis.broken_barh(
                [(one.begin_s, one.end_s - one.begin_s)], (place - thick / 2, thick), color=COLOURS[one.state]
            )
    marks = [(at_s, height[name]) for at_s, name in panel.timeline.preemptions if begin_s <= at_s < end_s]
    if marks:
        axis.scatter(*zip(*marks, strict=True), color=MARK, marker="x", s=36, linewidths=1.8, zorder=3)
    found = within(panel, window)
    axis.set_title(
        f"{panel.name}: {found['preemptions']} preemptions of {found['requests_preempted']} requests",
        fontsize=10.5,
        loc="left",
    )
    axis.set(xlim=window, ylim=(len(seen) - 0.4, -0.6), yticks=(), ylabel="requests")
    axis.grid(axis="x", alpha=0.3)


def main() -> None:
    """Run both policies, draw the plot and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--window", type=float, nargs=2, default=(100.0, 200.0), metavar=("FROM", "TO"))
    parser.add_argument("--out", type=Path, required=True, help="the SVG")
    options = parser.parse_args()
    window = (options.window[0], options.window[1])
    panels = [play(policy) for policy in POLICIES]
    draw(panels, window, options.out)
    counted = [
        {
            **within(panel, window),
            "whole run: preemptions": panel.preemptions,
            "whole run: at most ten steps after another": panel.cascades,
            "whole run: tokens a second": round(panel.output_tok_per_s),
        }
        for panel in panels
    ]
    table = Table(f"seconds {window[0]:.0f} to {window[1]:.0f}", *(panel.name for panel in panels))
    for name in counted[0]:
        table.add_row(name, *(str(of[name]) for of in counted))
    Console().print(table)


if __name__ == "__main__":
    main()
