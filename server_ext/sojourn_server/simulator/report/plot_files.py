"""Writes the simulator's plots as PNG and SVG files, either all of them or none.

matplotlib is imported only when a plot is drawn. Its global state, including the backend, stays unchanged.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sojourn.errors import install_command

from sojourn_server.traces.atomic_files import write_atomically

from ..run_log import OccupancySample, RunLog
from .comparison_plots import (
    P95,
    THROUGHPUT,
    draw_legend,
    draw_metric,
    load_text,
    load_value,
    metric_value,
    plot_completion_cdf,
    plot_load,
    plot_pareto,
    plot_regenerated,
    set_plain_log_scale,
    workload_text,
)
from .plot_styles import PlotStyle, styles_by_policy
from .results_table import workloads
from .run_metrics import trace_name
from .run_row import RunRow
from .sweep_results import SweepRuns

FORMATS = ("png", "svg")
_SETTINGS: dict[Any, Any] = {
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "svg.hashsalt": "sojourn",  # else the ids of an SVG differ each time
    "svg.fonttype": "none",
    "hatch.linewidth": 0.5,
}


class PlotError(RuntimeError):
    """Plots cannot be drawn; the message says what to do."""


def write_plots(runs: Sequence[RunLog], rows: Sequence[RunRow], folder: str | Path) -> list[Path]:
    """Draw runs into files in ``folder``. Return the paths of the files, in a fixed order. ``runs`` are the
    logs, ``rows`` the metrics. The row of a bound that was not simulated has no log.

    Each combination of trace, hardware, model, loop and seed has these plots:

    - ``completion_cdf``: share of finished programs over time; needs logs
    - ``load``: throughput, finished programs, TTFT and completion time against load
    - ``regenerated``: recomputed tokens by cause
    - ``pareto``: throughput against P95 completion time
    - ``occupancy-LOAD`` for each load: KV memory and programs over time; needs logs

    With several combinations, each has its own folder in ``folder``. All plots are drawn before the first
    file is written. Raises ``PlotError`` without matplotlib, ``ValueError`` without rows.
    """
    if not rows:
        raise ValueError("no runs to draw")
    drawn = _draw(runs, rows)
    files = {Path(folder) / name: data for name, data in drawn.items()}
    write_atomically(files)
    return list(files)


def write_sweep_plot(swept: SweepRuns, rows: Sequence[RunRow], folder: str | Path) -> list[Path]:
    """Draw throughput and P95 completion time against the swept value, into the files ``sweep.png`` and
    ``sweep.svg`` in ``folder``. Return their paths.

    ``rows``: all rows of the suite. Raises ``PlotError`` without matplotlib, ``ValueError`` if no row was
    simulated.
    """
    with plot_settings():
        figure = plot_sweep(swept, rows, _styles(rows))
        files = {Path(folder) / f"sweep.{form}": _bytes(figure, form) for form in FORMATS}
    write_atomically(files)
    return list(files)


def _draw(runs: Sequence[RunLog], rows: Sequence[RunRow]) -> dict[str, bytes]:
    scenarios: dict[tuple[object, ...], list[RunRow]] = {}
    for group in workloads(rows):
        scenarios.setdefault(_scenario(group[0]), []).extend(group)
    styles = _styles(rows)
    drawn: dict[str, bytes] = {}
    with plot_settings():
        for key, same in scenarios.items():
            place = f"{_slug('-'.join(str(part) for part in key))}/" if len(scenarios) > 1 else ""
            logs = [run for run in runs if _scenario(run) == key]
            for name, figure in _figures(logs, same, styles):
                for form in FORMATS:
                    drawn[f"{place}{name}.{form}"] = _bytes(figure, form)
    return drawn


@contextmanager
def plot_settings() -> Iterator[None]:
    """Context in which matplotlib uses the settings of sojourn's plots instead of the user's. Raises
    ``PlotError`` without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise PlotError(f"plots need matplotlib: {install_command('demo')}, or leave out --plot") from None
    with matplotlib.rc_context():
        # The user's settings and style sheets would change the plots.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _styles(rows: Sequence[RunRow]) -> dict[str, PlotStyle]:
    limits = {row.policy for row in rows if row.limit}
    return styles_by_policy((row.policy for row in [*(r for r in rows if not r.limit), *rows]), limits)


def _figures(
    logs: Sequence[RunLog], rows: Sequence[RunRow], styles: Mapping[str, PlotStyle]
) -> Iterator[tuple[str, Any]]:
    """Name and figure of every plot that has data."""
    if logs:
        yield "completion_cdf", plot_completion_cdf(logs, styles, rows[0].since_s)
    if any(row.output_tok_per_s is not None for row in rows):
        yield "load", plot_load(rows, styles)
    yield "regenerated", plot_regenerated(rows)
    if any(row.output_tok_per_s is not None and row.completion_estimate_s.p95 is not None for row in rows):
        yield "pareto", plot_pareto(rows, styles)
    sampled = [run for run in logs if run.occupancy]
    for at in sorted({load_value(run) for run in sampled}):
        yield f"occupancy-{at:g}", plot_occupancy([run for run in sampled if load_value(run) == at])


def _bytes(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    # Without date and version, the same run gives the same bytes.
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(buffer, format=form, dpi=130, metadata=metadata)
    return buffer.getvalue()


def _scenario(run: RunLog | RunRow) -> tuple[object, ...]:
    return (trace_name(run.trace), run.hardware, run.model, run.loop, f"seed{run.seed}")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "run"


_BINS = 300
"""Maximum number of points drawn per run; more would only enlarge the files."""
_RUNNING, _TOOL, _OTHER, _WAITING, _HOST = "#0072B2", "#E69F00", "#BDBDBD", "#CC79A7", "#000000"


def plot_occupancy(runs: Sequence[RunLog]) -> Any:
    """Plot each run's occupancy over time. Left: device KV in % of the pool, and host KV in % of host memory.
    Right: number of programs in each state."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11.0, 1.5 + 1.15 * len(runs)), layout="constrained")
    axes = figure.subplots(len(runs), 2, sharex=True, squeeze=False)
    longest_s = max(run.virtual_s for run in runs)
    unit_s, unit = (60.0, "min") if longest_s > 300.0 else (1.0, "s")
    most = max(
        (s.programs_running + s.programs_acting + s.programs_waiting for run in runs for s in run.occupancy),
        default=1,
    )
    for (memory, programs), run in zip(axes, runs, strict=True):
        times, samples = binned_samples(run)
        at = [time_s / unit_s for time_s in times]
        _stack(memory, at, samples, run.pool_blocks,
               (lambda s: s.running, lambda s: s.idle, lambda s: s.other),
               (_RUNNING, _TOOL, _OTHER))  # fmt: skip
        if run.host_blocks:
            host = [100.0 * _mean(held, lambda s: s.host) / run.host_blocks for held in samples]
            memory.plot(at, host, color=_HOST, linewidth=1.2, linestyle=(0, (4, 1.5)))
        memory.set_ylim(0, 104)  # keeps the line of a full host memory visible
        memory.set_yticks([0, 50, 100])
        _stack(programs, at, samples, 0,
               (lambda s: s.programs_running, lambda s: s.programs_acting, lambda s: s.programs_waiting),
               (_RUNNING, _TOOL, _WAITING))  # fmt: skip
        programs.set_ylim(0, max(1, most))
        programs.yaxis.get_major_locator().set_params(integer=True, nbins=4)
        memory.set_ylabel(run.policy, rotation=0, ha="right", va="center", labelpad=8)
        for axis in (memory, programs):
            axis.set_xlim(0, longest_s / unit_s)
    first = runs[0]
    figure.suptitle(f"{workload_text(first)} · {load_text(first)}")
    axes[0][0].set_title("device KV memory, % of the pool")
    axes[0][1].set_title("programs")
    for axis in axes[-1]:
        axis.set_xlabel(f"virtual time, {unit}")
    handles: list[Any] = [
        Patch(color=_RUNNING, label="running"),
        Patch(color=_TOOL, label="in a tool (memory: kept for it)"),
        Patch(color=_OTHER, label="memory: cached, of programs that wait or are over"),
        Patch(color=_WAITING, label="programs: waiting for the engine"),
    ]
    if any(run.host_blocks for run in runs):
        handles.append(Line2D([], [], color=_HOST, linewidth=1.2, linestyle=(0, (4, 1.5)),
                              label="host memory, % of it"))  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def binned_samples(run: RunLog) -> tuple[list[float], list[list[OccupancySample]]]:
    """Group the occupancy samples of a run into at most ``_BINS`` bins of equal duration. Returns two lists:
    the mean time of each bin's samples, in virtual seconds, and its samples. Empty bins are left out."""
    samples = run.occupancy
    if len(samples) <= _BINS:
        return [sample.at_s for sample in samples], [[sample] for sample in samples]
    groups: dict[int, list[OccupancySample]] = {}
    first_s, last_s = samples[0].at_s, samples[-1].at_s
    for sample in samples:
        place = int((sample.at_s - first_s) / (last_s - first_s) * _BINS) if last_s > first_s else 0
        groups.setdefault(min(place, _BINS - 1), []).append(sample)
    ordered = [groups[place] for place in sorted(groups)]
    return [_mean(held, lambda s: s.at_s) for held in ordered], ordered


def _stack(
    axis: Any,
    at: Sequence[float],
    samples: Sequence[Sequence[OccupancySample]],
    whole: int,
    reads: Sequence[Callable[[OccupancySample], float]],
    colours: Sequence[str],
) -> None:
    """Draw one stacked area for each function in ``reads``. Its height is the function's mean over each bin
    of ``samples``, in % of ``whole``, or the mean itself if ``whole`` is 0."""
    scale = 100.0 / whole if whole else 1.0
    heights = [[scale * _mean(held, read) for held in samples] for read in reads]
    axis.stackplot(at, heights, colors=colours, linewidth=0)


def _mean(samples: Sequence[OccupancySample], read: Callable[[OccupancySample], float]) -> float:
    return sum(read(sample) for sample in samples) / len(samples)


_WIDE = 8
"""An axis is logarithmic if its largest value exceeds its smallest one by more than this factor."""


def plot_sweep(swept: SweepRuns, rows: Sequence[RunRow], styles: Mapping[str, PlotStyle]) -> Any:
    """Plot throughput and P95 completion time against the swept value. Returns a figure of matplotlib, with
    one line per policy.

    The line of a policy is level if the swept field has no effect on the policy. Skips rows without a
    throughput, such as those of a bound (a theoretical limit, e.g. Belady's) that was computed from an access
    log and not simulated. Raises ``ValueError`` if no row is left.
    """
    placed = [
        (value.value, row)
        for value in swept.values
        for row in swept.rows_of(value, rows)
        if row.output_tok_per_s is not None
    ]
    if not placed:
        raise ValueError("no runs to draw")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11.5, 4.6), layout="constrained")
    axes = list(figure.subplots(1, 2))
    for axis, metric in zip(axes, (THROUGHPUT, P95), strict=True):
        draw_metric(axis, metric, placed, styles)
        _place_values(axis, swept)
        found = [number for _, row in placed if (number := metric_value(row, metric))]
        if metric.log and found and max(found) / min(found) > _WIDE:
            set_plain_log_scale(axis)
        else:
            # The axis begins at 0, because otherwise a small gain would look large.
            axis.set_ylim(0, 1.08 * max(found, default=1.0))
        axis.set_xlabel(swept.meaning)
    draw_legend(figure, axes)
    figure.suptitle(_heading([row for _, row in placed]))
    return figure


def _place_values(axis: Any, swept: SweepRuns) -> None:
    numbers = sorted(value.value for value in swept.values)
    least = next((number for number in numbers if number > 0), 0.0)
    if least and numbers[-1] / least > _WIDE:
        if numbers[0] > 0:
            axis.set_xscale("log")
        else:
            axis.set_xscale("symlog", linthresh=least, linscale=0.5)
    texts = [f"{value.text}\n{value.host_text}" if value.host_text else value.text for value in swept.values]
    axis.set_xticks([value.value for value in swept.values], texts)
    axis.set_xticks([], minor=True)


def _heading(rows: Sequence[RunRow]) -> str:
    """Title of a sweep plot: trace, hardware, model and load. Properties that differ between rows are left
    out."""
    properties: tuple[set[str], ...] = (
        {row.trace for row in rows},
        {row.hardware for row in rows},
        {row.model for row in rows},
        {load_text(row) for row in rows},
    )
    return " · ".join(same.pop() for same in properties if len(same) == 1)
