"""What a sweep is made for: throughput and P95 completion against what was swept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .comparison_plots import P95, THROUGHPUT, draw_legend, draw_metric, load_text, read, set_plain_log_scale
from .plot_styles import PlotStyle
from .run_row import RunRow
from .sweep_results import SweepRuns

_WIDE = 8
"""Largest over smallest above which an axis is logarithmic: what is small would be in one spot."""


def plot_sweep(swept: SweepRuns, rows: Sequence[RunRow], looks: Mapping[str, PlotStyle]) -> Any:
    """Two panels, a line a policy. Returns a matplotlib figure.

    A policy that the swept field does not touch is a level line. Rows without times, which are limits that
    were only counted, are left out; raises ``ValueError`` where no row has any.
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
        draw_metric(axis, metric, placed, looks)
        _place_values(axis, swept)
        found = [number for _, row in placed if (number := read(row, metric))]
        if metric.log and found and max(found) / min(found) > _WIDE:
            set_plain_log_scale(axis)
        else:
            # From 0, else a tier that buys a percent would look as if it bought everything.
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
    """The workload, and the load where that is not what was swept."""
    told: tuple[set[str], ...] = (
        {row.trace for row in rows},
        {row.hardware for row in rows},
        {row.model for row in rows},
        {load_text(row) for row in rows},
    )
    return " · ".join(same.pop() for same in told if len(same) == 1)
