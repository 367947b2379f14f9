"""Outcomes for a reader: a table for the terminal, JSON, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from .outcome import PdOutcome
from .systems import SYSTEMS

COLUMNS = {
    "system": "what is added to the system above it",
    "took": "virtual seconds until the last agent has ended",
    "faster": "times as fast as the first system of the table",
    "turns/s": "turns that ended each second",
    "agents": "how many have ended",
    "TTFT": "mean seconds from a request to its first token",
    "TTST": "mean seconds from the first token to the second",
    "TPOT": "mean milliseconds between the tokens after it",
    "links": "the busiest storage NIC's bytes over the average's, while loaded",
    "P, D busy": "share of the time in which prefill and decode nodes' storage NICs read",
    "attention": "the slowest device's attention over the average's, in the first twentieth",
    "prefill": "share of the time in which prefill devices compute",
}
"""Column → meaning."""


def table(outcomes: Sequence[PdOutcome]) -> Table:
    """A line a run. Those of one call are one load on one cluster."""
    first = outcomes[0]
    online = first.rate_per_s is not None
    load = f"{first.rate_per_s:g} agents/s" if online else f"{first.agents:,} agents"
    made = Table(
        title=f"{first.cluster} ({first.devices:,} devices) · {first.model} · {first.workload} · {load}",
        title_justify="left",
        box=None,
    )
    hidden = {"took", "faster"} if online else {"TTFT", "TTST", "TPOT", "agents"}
    shown = [name for name in COLUMNS if name not in hidden]
    for name in shown:
        made.add_column(name, justify="left" if name == "system" else "right")
    for outcome in outcomes:
        texts = row(outcome, first)
        made.add_row(*(texts[name] for name in shown))
    return made


def row(outcome: PdOutcome, first: PdOutcome) -> dict[str, str]:
    """The texts of a line, by column."""
    seen = outcome.seen
    return {
        "system": SYSTEMS[outcome.system].title,
        "took": f"{outcome.virtual_s:,.0f} s",
        "faster": f"{first.virtual_s / outcome.virtual_s:.2f}×" if outcome.virtual_s else "–",
        "turns/s": f"{outcome.turns / outcome.virtual_s:,.1f}" if outcome.virtual_s else "–",
        "agents": f"{outcome.finished_agents:,}",
        "TTFT": f"{seen.ttft_mean:.3f} s" if seen else "–",
        "TTST": f"{seen.ttst_mean:.3f} s" if seen else "–",
        "TPOT": f"{1000 * seen.tpot_mean:.1f} ms" if seen else "–",
        "links": f"{outcome.nic_max_over_mean:.2f}" if outcome.nic_max_over_mean else "–",
        "P, D busy": " ".join(f"{share:.0%}" for share in outcome.nic_busy),
        "attention": f"{outcome.attention_max_over_mean:.2f}" if outcome.attention_max_over_mean else "–",
        "prefill": f"{outcome.prefill_busy:.0%}",
    }


def document(outcomes: Sequence[PdOutcome], made_with: Any) -> dict[str, Any]:
    """For JSON."""
    return {
        "made_with": msgspec.to_builtins(made_with),
        "outcomes": [msgspec.to_builtins(outcome) for outcome in outcomes],
    }


def draw(outcomes: Sequence[PdOutcome], path: Path) -> None:
    """Bars of what each system took, or of how long it let agents wait. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    online = outcomes[0].rate_per_s is not None
    figure = Figure(figsize=(6.5, 0.6 * len(outcomes) + 1.2), layout="constrained")
    axis = figure.subplots()
    names = [SYSTEMS[outcome.system].title for outcome in outcomes]
    values = [
        (outcome.seen.ttft_mean if outcome.seen else 0.0) if online else outcome.virtual_s
        for outcome in outcomes
    ]
    bars = axis.barh(names, values, color="#4c78a8")
    axis.bar_label(bars, [f" {value:,.2f}" if online else f" {value:,.0f}" for value in values])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    first = outcomes[0]
    axis.set(
        title=f"{first.cluster}, {first.model}, {first.workload}",
        xlabel="mean time to first token, s" if online else "until the last agent has ended, s",
    )
    figure.savefig(path, metadata={"Date": None, "Creator": None} if path.suffix == ".svg" else None)
