"""Reports of prefill/decode runs: a table for the terminal, JSON, and a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from sojourn_server.policies.prefill_decode.read_side_policies import PrefillSideRead

from .prefill_decode_outcome import PdOutcome
from .prefill_decode_systems import PD_SYSTEMS, PdSystem

COLUMNS = {
    "system": "what is added to the system above it",
    "took s": "virtual seconds until the last agent has ended",
    "faster": "times as fast as the first system of the table",
    "turns/s": "turns that ended each second",
    "agents": "how many have ended",
    "TTFT s": "mean seconds from a request to its first token",
    "TTST s": "mean seconds from the first token to the second",
    "TPOT ms": "mean milliseconds between the tokens after it",
    "links": "the busiest storage NIC's bytes over the average's, while loaded",
    "P, D busy": "share of the time in which prefill and decode nodes' storage NICs read",
    "attention": "the slowest device's attention over the average's, in the first twentieth",
    "prefill": "share of the time in which prefill devices compute",
}
"""Columns of the table: title → meaning. The table prints the last word of a title on a second line."""
OFFLINE_ONLY = {"took s", "faster", "attention"}
"""Columns that are shown only for runs without arrivals. They say little about runs with arrivals, which have
a fixed length, and few agents at first."""
ONLINE_ONLY = {"agents", "TTFT s", "TTST s", "TPOT ms"}
"""Columns that are shown only for runs with arrivals."""
MOSTLY = 0.5
"""``storage_note`` warns if the prefill nodes' storage NICs were full for less than this share of the run."""


def outcome_table(outcomes: Sequence[PdOutcome]) -> Table:
    """Table with one line per run, at most 80 characters wide. All runs have the same load and cluster."""
    first = outcomes[0]
    online = first.rate_per_s is not None
    load = f"{first.rate_per_s:g} agents/s" if online else f"{first.agents:,} agents"
    made = Table(
        title=f"{first.cluster} ({first.devices:,} devices) · {first.model} · {first.workload} · {load}",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    hidden = OFFLINE_ONLY if online else ONLINE_ONLY
    shown = [name for name in COLUMNS if name not in hidden]
    for name in shown:
        made.add_column(
            "\n".join(name.rsplit(" ", 1)),
            justify="left" if name == "system" else "right",
            vertical="bottom",
            no_wrap=True,
        )
    for outcome in outcomes:
        texts = outcome_row(outcome, first)
        made.add_row(*(texts[name] for name in shown))
    return made


def outcome_row(outcome: PdOutcome, first: PdOutcome) -> dict[str, str]:
    """Table cells of ``outcome``, by column. The column "faster" compares it with ``first``."""
    seen = outcome.seen
    return {
        "system": PD_SYSTEMS[outcome.system].title,
        "took s": f"{outcome.virtual_s:,.0f}",
        "faster": f"{first.virtual_s / outcome.virtual_s:.2f}×" if outcome.virtual_s else "–",
        "turns/s": f"{outcome.turns / outcome.virtual_s:,.1f}" if outcome.virtual_s else "–",
        "agents": f"{outcome.finished_agents:,}",
        "TTFT s": _seconds_text(seen.ttft_mean) if seen else "–",
        "TTST s": _seconds_text(seen.ttst_mean) if seen else "–",
        "TPOT ms": f"{1000 * seen.tpot_mean:,.1f}" if seen else "–",
        "links": f"{outcome.nic_max_over_mean:.2f}" if outcome.nic_max_over_mean else "–",
        "P, D busy": " ".join(f"{share:.0%}" for share in outcome.nic_busy),
        "attention": f"{outcome.attention_max_over_mean:.2f}" if outcome.attention_max_over_mean else "–",
        "prefill": f"{outcome.prefill_busy:.0%}",
    }


def _seconds_text(value: float) -> str:
    return f"{value:.3f}" if value < 100 else f"{value:,.0f}"


def storage_note(outcomes: Sequence[PdOutcome]) -> str | None:
    """Return a warning if the storage NICs were rarely full, because a second read path then saves little.

    The warning is about the first run whose system reads through prefill nodes only. ``None`` (no warning) in
    each of these cases:

    - No system, or every system, reads through prefill nodes only.
    - The NICs were full for at least the share ``MOSTLY`` of that run.
    - That run was shorter than ``WINDOW_S``.
    - That run has an arrival rate. Then the user chose the load.
    """
    one_path = next((each for each in outcomes if _reads_by_prefill_only(PD_SYSTEMS[each.system])), None)
    if one_path is None or one_path.rate_per_s is not None or one_path.prefill_nics_full is None:
        return None
    if (
        all(_reads_by_prefill_only(PD_SYSTEMS[each.system]) for each in outcomes)
        or one_path.prefill_nics_full >= MOSTLY
    ):
        return None
    return (
        f"storage was not the bottleneck. With {PD_SYSTEMS[one_path.system].title} the prefill nodes' "
        f"storage NICs were full {100 * one_path.prefill_nics_full:.0f} % of the time, and a second path "
        "saves much only while they are. Take more agents (--programs), unless prefill devices compute "
        "nearly all the time already (column prefill)."
    )


def _reads_by_prefill_only(system: PdSystem) -> bool:
    """Whether only prefill nodes read from storage. False for the Oracle, whose reads take no time."""
    return system.side is PrefillSideRead and not system.free_io


def outcomes_document(outcomes: Sequence[PdOutcome], made_with: Any) -> dict[str, Any]:
    """The outcomes and ``made_with`` (command, versions and machine) as plain data for JSON."""
    return {
        "made_with": msgspec.to_builtins(made_with),
        "outcomes": [msgspec.to_builtins(outcome) for outcome in outcomes],
    }


def plot_outcomes(outcomes: Sequence[PdOutcome], path: Path) -> None:
    """Write a bar plot of run times, or of mean TTFTs for runs with arrivals. Needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    online = outcomes[0].rate_per_s is not None
    figure = Figure(figsize=(6.5, 0.6 * len(outcomes) + 1.2), layout="constrained")
    axis = figure.subplots()
    names = [PD_SYSTEMS[outcome.system].title for outcome in outcomes]
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
