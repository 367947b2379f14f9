"""The lab's pictures: written as PNG and SVG under the same names every time, all of them or none.

matplotlib is loaded here and only when a plot is drawn; its global state, the
backend included, is left alone.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sojourn_server.traces.atomic_files import write_atomically

from ..run_log import RunLog
from .comparison_plots import completion_cdf, load, load_value, pareto, regenerated
from .occupancy_plot import plot_occupancy
from .plot_styles import PlotStyle, styles_by_policy
from .results_table import workloads
from .run_metrics import summarize_run, trace_name
from .run_row import RunRow
from .sweep_plot import plot_sweep
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
    "svg.hashsalt": "sojourn",  # else every SVG has other ids
    "svg.fonttype": "none",
    "hatch.linewidth": 0.5,
}


class PlotError(RuntimeError):
    """Plots cannot be made; the text says what to do."""


def write_plots(
    runs: Sequence[RunLog],
    folder: str | Path,
    *,
    rows: Sequence[RunRow] | None = None,
    since_s: float = 0.0,
) -> list[Path]:
    """Draw ``runs`` into ``folder`` and return the files' paths, in a fixed order.

    Of each trace, hardware, model, loop and seed: ``completion_cdf``, ``load`` (throughput, TTFT and
    completion against programs or arrivals a second; bars where there is one load only),
    ``regenerated`` (by cause), ``pareto`` (throughput against P95 completion), and an ``occupancy-LOAD``
    for each load. Where there are several such sets, each has a folder of its own below ``folder``.

    ``rows`` are the runs' figures where the caller has measured them; they may hold limits that have no
    log. Without them ``summarize_run`` is called with ``since_s``. Plots that need a log are left out where
    there is none. All are drawn before the first is written.

    Raises ``PlotError`` where matplotlib is missing, ``ValueError`` where there is nothing to draw.
    """
    if rows is None:
        rows = [summarize_run(run, since_s=since_s) for run in runs]
    if not rows:
        raise ValueError("no runs to draw")
    drawn = _draw(runs, rows)
    files = {Path(folder) / name: data for name, data in drawn.items()}
    write_atomically(files)
    return list(files)


def write_sweep_plot(swept: SweepRuns, rows: Sequence[RunRow], folder: str | Path) -> list[Path]:
    """Draw ``sweep``, throughput and P95 completion against what was swept, and return the files' paths.

    ``rows`` are the suite's. Raises ``PlotError`` where matplotlib is missing, ``ValueError`` where no row
    has a time.
    """
    with _our_settings():
        figure = plot_sweep(swept, rows, _looks(rows))
        files = {Path(folder) / f"sweep.{form}": _bytes(figure, form) for form in FORMATS}
    write_atomically(files)
    return list(files)


def _draw(runs: Sequence[RunLog], rows: Sequence[RunRow]) -> dict[str, bytes]:
    scenarios: dict[tuple[object, ...], list[RunRow]] = {}
    for group in workloads(rows):
        scenarios.setdefault(_scenario(group[0]), []).extend(group)
    looks = _looks(rows)
    drawn: dict[str, bytes] = {}
    with _our_settings():
        for key, mine in scenarios.items():
            place = f"{_slug('-'.join(str(part) for part in key))}/" if len(scenarios) > 1 else ""
            logs = [run for run in runs if _scenario(run) == key]
            for name, figure in _figures(logs, mine, looks):
                for form in FORMATS:
                    drawn[f"{place}{name}.{form}"] = _bytes(figure, form)
    return drawn


@contextmanager
def _our_settings() -> Iterator[None]:
    try:
        import matplotlib
    except ImportError:
        raise PlotError("plots need matplotlib: pip install 'sojourn[demo]', or leave out --plot") from None
    with matplotlib.rc_context():
        # The user's own settings and style sheets would make the same run look different on every machine.
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def _looks(rows: Sequence[RunRow]) -> dict[str, PlotStyle]:
    limits = {row.policy for row in rows if row.limit}
    return styles_by_policy((row.policy for row in [*(r for r in rows if not r.limit), *rows]), limits)


def _figures(
    logs: Sequence[RunLog], rows: Sequence[RunRow], looks: Mapping[str, PlotStyle]
) -> Iterator[tuple[str, Any]]:
    """Name and figure of every plot there is something to show in."""
    if logs:
        yield "completion_cdf", completion_cdf(logs, looks, rows[0].since_s)
    if any(row.output_tok_per_s is not None for row in rows):
        yield "load", load(rows, looks)
    yield "regenerated", regenerated(rows)
    if any(row.output_tok_per_s is not None and row.completion_estimate_s.p95 is not None for row in rows):
        yield "pareto", pareto(rows, looks)
    sampled = [run for run in logs if run.occupancy]
    for at in sorted({load_value(run) for run in sampled}):
        yield f"occupancy-{at:g}", plot_occupancy([run for run in sampled if load_value(run) == at])


def _bytes(figure: Any, form: str) -> bytes:
    buffer = io.BytesIO()
    # No date and no version: the same run gives the same bytes.
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(buffer, format=form, dpi=130, metadata=metadata)
    return buffer.getvalue()


def _scenario(run: RunLog | RunRow) -> tuple[object, ...]:
    return (trace_name(run.trace), run.hardware, run.model, run.loop, f"seed{run.seed}")


def _slug(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", text).strip("-.") or "run"
