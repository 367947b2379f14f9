"""The plots of ``prefill_decode_cluster.py``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import TTFT_SLO_S, PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS

Found = dict[str, list[PdOutcome]]


def draw(found: Found, path: Path) -> bool:
    """Draw a panel for each part that has a plot and was run. Returns False if there is no such part."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    parts = [part for part in _PANELS if part in found]
    if not parts:
        return False
    columns = min(2, len(parts))
    rows = -(-len(parts) // columns)
    figure = Figure(figsize=(6.0 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False).flat
    for axis, part in zip(axes, parts, strict=False):
        _PANELS[part](axis, found[part])
    for axis in list(axes)[len(parts) :]:
        axis.set_visible(False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return True


def _bars(axis: Any, outcomes: list[PdOutcome], title: str) -> None:
    """Plot the completion times of systems, by cluster and number of agents."""
    rows = [each for each in outcomes if each.rate_per_s is None]
    groups = list(dict.fromkeys((each.cluster, each.agents) for each in rows))
    names = list(dict.fromkeys(each.system for each in rows))
    height = 0.8 / len(groups)
    for place, (cluster, agents) in enumerate(groups):
        took = [
            next(e.virtual_s for e in rows if (e.system, e.cluster, e.agents) == (name, cluster, agents))
            for name in names
        ]
        axis.barh(
            [number + place * height for number in range(len(names))],
            took,
            height,
            label=f"{cluster}, {agents:,} agents",
        )
    axis.set_yticks(
        [number + (len(groups) - 1) * height / 2 for number in range(len(names))],
        [PD_SYSTEMS[name].title for name in names],
    )
    axis.invert_yaxis()
    axis.set(title=title, xlabel="until the last agent has ended, s")
    axis.legend(frameon=False)


def _online(axis: Any, outcomes: list[PdOutcome]) -> None:
    """Plot the mean TTFT of the 660B model by rate, like the paper's Figure 10."""
    for name in ("basic", "scheduling", "oracle"):
        ttft_s = {
            each.rate_per_s: each.seen.ttft_mean
            for each in outcomes
            if (each.system, each.model) == (name, "ds-660b") and each.rate_per_s and each.seen
        }
        rates = sorted(ttft_s)
        axis.plot(rates, [ttft_s[rate] for rate in rates], marker="o", label=PD_SYSTEMS[name].title)
    axis.axhline(TTFT_SLO_S, color="gray", linestyle=":", label="service level")
    axis.set(title="online, 660B on 2P4D", xlabel="agents a second", ylabel="mean TTFT, s", yscale="log")
    axis.legend(frameon=False)


def _links(axis: Any, outcomes: list[PdOutcome]) -> None:
    """Plot the bytes of the busiest storage NIC ÷ the mean over storage NICs."""
    groups = list(dict.fromkeys((each.model, each.cluster) for each in outcomes))
    names = list(dict.fromkeys(each.system for each in outcomes))
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        mine = [each.nic_max_over_mean or 0.0 for each in outcomes if each.system == name]
        axis.bar(
            [number + place * width for number in range(len(groups))],
            mine,
            width,
            label=PD_SYSTEMS[name].title,
        )
    axis.set_xticks(
        [number + (len(names) - 1) * width / 2 for number in range(len(groups))],
        [f"{model}\n{cluster}" for model, cluster in groups],
    )
    for published in (1.53, 1.18):
        axis.axhline(published, color="gray", linestyle=":")
    axis.set(
        title="storage NICs, published 1.53 and 1.18 dotted", ylabel="busiest over average", ylim=(0.9, None)
    )
    axis.legend(frameon=False)


_PANELS: dict[str, Callable[[Any, list[PdOutcome]], None]] = {
    "ablation": lambda axis, outcomes: _bars(axis, outcomes, "what each part adds"),
    "scale": lambda axis, outcomes: _bars(axis, outcomes, "to 1,152 devices"),
    "online": _online,
    "links": _links,
}
