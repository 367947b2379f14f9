"""The plot of ``sojourn simulate --plot``: throughput, finished programs, TTFT and completion of each
policy."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sojourn_server.traces.atomic_files import write_atomically

from ..parameter_sweep import ParameterSweep
from .results_table import read_metric, title
from .run_row import RunRow

_METRICS = {
    "output throughput, tokens/s": "output_tok_per_s",
    "programs finished per hour": "programs_per_hour",
    "time to first token, mean, s": "ttft_s.mean",
    "program completion, P95, est. of all, s (hollow: at least)": "completion_estimate_s.p95",
}
"""Title → metric (see ``read_metric``)."""
STYLE_FILE = Path(__file__).with_name("plot.mplstyle")
# Okabe and Ito's palette without yellow (too pale on white).
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00")
_DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)))


def write_plot(rows: Sequence[RunRow], folder: Path, swept: ParameterSweep | None = None) -> list[Path]:
    """Draw ``rows`` into ``metrics.png`` and ``metrics.svg`` in ``folder``, and return their paths. The
    metrics are over the swept value or the load; at a single load they are bars."""
    from matplotlib import style

    files = {}
    with style.context(STYLE_FILE, after_reset=True):  # in place of the user's own settings
        figure = _figure(rows, swept)
        for form in ("png", "svg"):
            buffer = io.BytesIO()
            # Without date and version, the same rows give the same bytes.
            metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
            figure.savefig(buffer, format=form, dpi=130, metadata=metadata)
            files[folder / f"metrics.{form}"] = buffer.getvalue()
    write_atomically(files)
    return list(files)


def _figure(rows: Sequence[RunRow], swept: ParameterSweep | None) -> Any:
    from matplotlib.figure import Figure

    if swept is not None:
        meaning = swept.meaning
        pairs = zip(swept.values, swept.groups(rows), strict=True)
        placed = [(value, row) for value, group in pairs for row in group]
    else:
        meaning = "programs at once" if rows[0].loop == "closed" else "programs arriving a second"
        placed = [(row.rate_per_s or float(row.programs), row) for row in rows]
    policies = list(dict.fromkeys(row.policy for row in rows))
    single = len({x for x, _ in placed}) == 1
    size = (10.5, 1.6 + 0.46 * len(policies)) if single else (10.5, 7.0)
    figure = Figure(figsize=size, layout="constrained")
    axes = list(figure.subplots(2, 2, sharex=not single, sharey=single).flat)
    for axis, (heading, metric) in zip(axes, _METRICS.items(), strict=True):
        axis.set_title(heading)
        values = [(row.policy, x, *read_metric(row, metric)) for x, row in placed]
        for number, policy in enumerate(policies):
            points = sorted((x, y, bound) for name, x, y, bound in values if name == policy and y is not None)
            colour = _COLOURS[number % len(_COLOURS)]
            if single:
                bars = axis.barh(number, points[0][1] if points else 0.0, height=0.7, color=colour)
                axis.bar_label(bars, [f" {'≥' if bound else ''}{y:,.4g}" for _, y, bound in points] or [" –"])
                continue
            dash = _DASHES[number // len(_COLOURS) % len(_DASHES)]
            axis.plot(
                [x for x, *_ in points], [y for _, y, _ in points], color=colour, linestyle=dash, label=policy
            )
            for x, y, bound in points:
                axis.plot([x], [y], marker="o", color=colour, markerfacecolor="white" if bound else colour)
        if single:
            axis.set_yticks(range(len(policies)), policies)
            axis.margins(x=0.15)
        else:
            axis.set(xlabel=meaning, ylim=(0, None))
    if single:
        axes[0].invert_yaxis()
    else:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper")
    figure.suptitle(title(rows))
    return figure
