"""Completion, load, recomputation and Pareto plots of runs. Each ``plot_…`` function returns a figure of
matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ..run_log import RunLog
from .kaplan_meier import finished_share
from .plot_styles import PlotStyle, cause_colours, place_labels
from .run_metrics import trace_name
from .run_row import RunRow, SummaryStatistics

_COLUMNS = 3
_PANEL_INCHES = (4.2, 3.6)


class PlotMetric(NamedTuple):
    """The metric that a panel shows."""

    title: str
    log: bool
    """Whether the axis is logarithmic."""
    value: str
    """Field of ``RunRow``, or ``field.statistic`` for a field with statistics."""


THROUGHPUT = PlotMetric("output throughput, tokens/s", False, "output_tok_per_s")
P95 = PlotMetric("program completion, P95, est. of all, s", True, "completion_estimate_s.p95")
_METRICS = (
    THROUGHPUT,
    PlotMetric("programs finished per hour", False, "programs_per_hour"),
    PlotMetric("time to first token, mean, s", True, "ttft_s.mean"),
    P95,
)


def load_value(run: RunLog | RunRow) -> float:
    """The load of a run: concurrent programs, or arrivals per second."""
    if run.loop == "open" and run.rate_per_s is not None:
        return run.rate_per_s
    return float(run.programs_wanted if isinstance(run, RunLog) else run.programs)


def plot_completion_cdf(runs: Sequence[RunLog], styles: Mapping[str, PlotStyle], since_s: float = 0.0) -> Any:
    """Plot, for each run, the Kaplan-Meier share of finished programs over the completion time, up to the
    longest observed time. Programs that arrived before ``since_s`` virtual seconds do not count."""
    loads = sorted({load_value(run) for run in runs})
    figure, axes = _panels(len(loads))
    for axis, load in zip(axes, loads, strict=True):
        at_load = [run for run in runs if load_value(run) == load]
        longest_s = 0.0
        for run in at_load:
            arrived = [program for program in run.programs if program.arrived_s >= since_s]
            exact = [seconds for program in arrived if (seconds := program.completion_s) is not None]
            cut_off = [run.virtual_s - program.arrived_s for program in arrived if program.finished_s is None]
            points = finished_share(exact, cut_off)
            longest_seen_s = max([*exact, *cut_off], default=0.0)
            longest_s = max(longest_s, longest_seen_s)
            style = styles[run.policy]
            counts = f" ({len(exact)} of {len(arrived)})" if len(loads) == 1 else ""
            axis.step(
                [0.0, *(seconds for seconds, _ in points), longest_seen_s],
                [0.0, *(share for _, share in points), points[-1][1] if points else 0.0],
                where="post", color=style.colour, linestyle=style.dash, linewidth=style.width,
                label=run.policy + counts,
            )  # fmt: skip
        axis.set_title(load_text(at_load[0]))
        axis.set_xlim(0, 1.02 * longest_s or 1.0)
        axis.set_ylim(0, 1.01)
        axis.set_xlabel("program completion, virtual s")
    _label_left(axes, "share finished (Kaplan-Meier)")
    draw_legend(figure, axes, "finished of arrived" if len(loads) == 1 else None)
    figure.suptitle(workload_text(runs[0]))
    return figure


def plot_load(rows: Sequence[RunRow], styles: Mapping[str, PlotStyle]) -> Any:
    """Plot throughput, finished programs, TTFT and completion time against load. Rows of a single load give
    bars instead."""
    timed = [row for row in rows if row.output_tok_per_s is not None]
    loads = sorted({load_value(row) for row in timed})
    if len(loads) == 1:
        return _bars(timed, styles)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 7.0), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True).flat
    placed = [(load_value(row), row) for row in timed]
    for axis, metric in zip(axes, _METRICS, strict=True):
        draw_metric(axis, metric, placed, styles)
        if loads[0] > 0 and loads[-1] / loads[0] > 8:
            axis.set_xscale("log")
        axis.set_xticks(loads, [f"{load:g}" for load in loads])
        axis.set_xticks([], minor=True)
        if metric.log:
            set_plain_log_scale(axis)
        else:
            axis.set_ylim(bottom=0)
        axis.set_xlabel("programs at once" if rows[0].loop == "closed" else "programs arriving a second")
        axis.xaxis.set_tick_params(labelbottom=True)
    draw_legend(figure, figure.axes)
    figure.suptitle(workload_text(rows[0]))
    return figure


def draw_metric(
    axis: Any, metric: PlotMetric, placed: Sequence[tuple[float, RunRow]], styles: Mapping[str, PlotStyle]
) -> None:
    """Draw the title of ``metric`` and one line per policy. ``placed`` has an (x, row) pair for each point.

    A point's y value is the row's value of ``metric``. Rows without a value are skipped. Hollow points are
    lower bounds.
    """
    for name in dict.fromkeys(row.policy for _, row in placed):
        points = [(x, value) for x, row in placed
                  if row.policy == name and (value := metric_value(row, metric)) is not None]  # fmt: skip
        style = styles[name]
        axis.plot(
            [x for x, _ in sorted(points)], [y for _, y in sorted(points)],
            color=style.colour, linestyle=style.dash, linewidth=style.width, label=name,
            marker=style.marker, markersize=5,
        )  # fmt: skip
        bounds = [
            (x, row.completion_estimate_s.p95)
            for x, row in placed
            if row.policy == name and metric is P95 and "p95" in row.completion_estimate_s.at_least
        ]
        axis.plot([x for x, _ in bounds], [y for _, y in bounds], marker=style.marker, markersize=5,
                  color=style.colour, markerfacecolor="white", linestyle="none")  # fmt: skip
    axis.set_title(metric.title + (" (hollow: at least)" if metric is P95 else ""))


def plot_regenerated(rows: Sequence[RunRow]) -> Any:
    """Plot recomputed tokens as bars, one per row, stacked by cause, in % of the row's prompt tokens. The
    number of recomputed tokens is beside each bar."""
    from matplotlib.patches import Patch

    causes = sorted(
        {cause for row in rows for cause in row.regenerated_by},
        key=lambda cause: (-sum(row.regenerated_by.get(cause, 0) for row in rows), cause),
    )
    colours = cause_colours(causes)
    loads = sorted({load_value(row) for row in rows})
    bars = max(sum(load_value(row) == load for row in rows) for load in loads)
    figure, axes = _panels(len(loads), height=1.2 + 0.27 * bars)
    most = max((_percent(row, row.regenerated_tokens) for row in rows), default=0.0) or 1.0
    for axis, load in zip(axes, loads, strict=True):
        at_load = [row for row in rows if load_value(row) == load]
        for place, row in enumerate(at_load):
            left = 0.0
            for cause in causes:
                width = _percent(row, row.regenerated_by.get(cause, 0))
                colour, hatch = colours[cause]
                if width:
                    axis.barh(place, width, left=left, height=0.7,
                              color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)  # fmt: skip
                left += width
            axis.text(
                left + most * 0.015, place, _short_count(row.regenerated_tokens), va="center", fontsize=7
            )
        axis.set_yticks(range(len(at_load)), [row.policy for row in at_load])
        axis.invert_yaxis()
        axis.set_xlim(0, most * 1.17)
        axis.grid(axis="y", visible=False)
        axis.set_title(load_text(at_load[0]))
        axis.set_xlabel("tokens computed again, % of prompt tokens")
    if causes:
        handles = [
            Patch(facecolor=colours[c][0], hatch=colours[c][1], edgecolor="white", label=c) for c in causes
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(6, len(causes)))
    figure.suptitle(workload_text(rows[0]))
    return figure


def plot_pareto(rows: Sequence[RunRow], styles: Mapping[str, PlotStyle]) -> Any:
    """Plot output throughput against P95 completion time. A hollow point means that the P95 is only a lower
    bound. If all P95 values are exact, a line joins the Pareto-optimal policies."""
    timed = [
        row for row in rows if row.output_tok_per_s is not None and row.completion_estimate_s.p95 is not None
    ]
    loads = sorted({load_value(row) for row in timed})
    figure, axes = _panels(len(loads), height=4.2, width=6.5 if len(loads) == 1 else 4.8)
    labelled = []
    for axis, load in zip(axes, loads, strict=True):
        at_load = [row for row in timed if load_value(row) == load]
        points = []
        for row in at_load:
            x, y = row.completion_estimate_s.p95 or 0.0, row.output_tok_per_s or 0.0
            style = styles[row.policy]
            bound = "p95" in row.completion_estimate_s.at_least
            axis.plot([x], [y], marker=style.marker, markersize=8, color=style.colour, linestyle="none",
                      markerfacecolor="none" if bound else style.colour)  # fmt: skip
            points.append((x, y, f"≥ {row.policy}" if bound else row.policy, style.colour))
        exact = all("p95" not in row.completion_estimate_s.at_least for row in at_load)
        # With a lower bound among the P95 values the Pareto frontier is unknown.
        front = pareto_frontier(
            [(x, y) for row, (x, y, *_) in zip(at_load, points, strict=True) if exact and not row.limit]
        )
        axis.plot([x for x, _ in front], [y for _, y in front], color="#8A8A8A", linewidth=1, zorder=0)
        axis.set_xlim(*_padded_limits([x for x, *_ in points]))
        axis.set_ylim(*_padded_limits([y for _, y, *_ in points]))
        axis.set_title(load_text(at_load[0]))
        axis.set_xlabel("program completion, P95, est. of all, virtual s")
        axis.text(0.01, 0.99, "↖ better", transform=axis.transAxes, va="top", color="#555555")
        labelled.append((axis, points))
    _label_left(axes, "output throughput, tokens/s")
    figure.suptitle(workload_text(rows[0]))
    place_labels(figure, labelled)
    return figure


def pareto_frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto-optimal points, in order of x. Small x and large y are good. A point is Pareto-optimal if
    each other point is worse in x or in y."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def _bars(rows: Sequence[RunRow], styles: Mapping[str, PlotStyle]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 1.6 + 0.46 * len(rows)), layout="constrained")
    axes = figure.subplots(2, 2, sharey=True).flat
    for axis, metric in zip(axes, _METRICS, strict=True):
        values = [metric_value(row, metric) or 0.0 for row in rows]
        most = max(values) or 1.0
        for place, (row, value) in enumerate(zip(rows, values, strict=True)):
            axis.barh(place, value, height=0.7, color=styles[row.policy].colour)
            bound = metric is P95 and "p95" in row.completion_estimate_s.at_least
            axis.text(
                value + most * 0.01,
                place,
                f"{'≥' if bound else ''}{_three_digits(value)}",
                va="center",
                fontsize=7,
            )
        axis.set_yticks(range(len(rows)), [row.policy for row in rows])
        axis.set_xlim(0, most * 1.12)
        axis.grid(axis="y", visible=False)
        axis.set_title(metric.title)
    figure.axes[0].invert_yaxis()
    figure.suptitle(f"{workload_text(rows[0])} · {load_text(rows[0])}")
    return figure


def _panels(
    number: int, height: float = _PANEL_INCHES[1], width: float | None = None
) -> tuple[Any, list[Any]]:
    """A figure with ``number`` panels, at most ``_COLUMNS`` per line."""
    from matplotlib.figure import Figure

    columns = 2 if number == 4 else min(number, _COLUMNS)
    lines = -(-number // columns)
    if width is None:
        width = 9.0 if number == 1 else _PANEL_INCHES[0]
    figure = Figure(figsize=(width * columns, height * lines), layout="constrained")
    grid = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axis in grid[number:]:
        axis.remove()
    return figure, grid[:number]


def _label_left(axes: Sequence[Any], text: str) -> None:
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(text)


def draw_legend(figure: Any, axes: Sequence[Any], title: str | None = None) -> None:
    """Draw a legend beside the panels, with each policy once."""
    found: dict[str, Any] = {}
    for axis in axes:  # a policy may be missing at some loads
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(
        list(found.values()),
        list(found),
        loc="outside right upper",
        title=title,
        handlelength=3.2,
        fontsize=8,
    )


def set_plain_log_scale(axis: Any) -> None:
    """Make the y axis logarithmic, with plain numbers as labels, three per decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _padded_limits(values: Sequence[float]) -> tuple[float, float]:
    """(low, high) limits of an axis around ``values``, so wide that a difference of a few percent looks
    small."""
    low, high = min(values), max(values)
    half = 0.58 * max(high - low, 0.4 * high) or 1.0
    middle = (low + high) / 2
    return max(0.0, middle - half), max(middle + half, 2 * half if middle < half else 0.0)


def metric_value(row: RunRow, metric: PlotMetric) -> float | None:
    """Value of ``metric`` in ``row``; ``None`` if not measured."""
    field, _, figure = metric.value.partition(".")
    value: float | SummaryStatistics | None = getattr(row, field)
    found: float | None = getattr(value, figure) if figure else value  # type: ignore[assignment]
    return found


def workload_text(run: RunLog | RunRow) -> str:
    """Trace, hardware and model of a run, as text for titles."""
    return f"{trace_name(run.trace)} · {run.hardware} · {run.model}"


def load_text(run: RunLog | RunRow) -> str:
    """The load of a run in words, for titles."""
    if run.loop == "open" and run.rate_per_s is not None:
        return f"{run.rate_per_s:g} programs arriving a second"
    return f"{load_value(run):g} programs at once"


def _percent(row: RunRow, tokens: int) -> float:
    return 100.0 * tokens / row.prompt_tokens if row.prompt_tokens else 0.0


def _short_count(tokens: int) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if tokens >= size:
            return f"{tokens / size:.3g} {unit}"
    return str(tokens)


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
