"""Who holds memory, and what the programs do, over time: one row of panels a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ..run_log import OccupancySample, RunLog
from .comparison_plots import load_text, workload_text

_BINS = 300
"""Samples drawn: more than there are pixels only makes files large."""
_RUNNING, _TOOL, _OTHER, _WAITING, _HOST = "#0072B2", "#E69F00", "#BDBDBD", "#CC79A7", "#000000"


def plot_occupancy(runs: Sequence[RunLog]) -> Any:
    """Left the device's KV blocks in % of the pool, with host memory's fill as a line; right the programs."""
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
        memory.set_ylim(0, 104)  # a full host's line is seen
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
    """At most ``_BINS`` times, in virtual seconds, each with the samples around it."""
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
    """Areas above each other; in % of ``whole`` where that is not 0."""
    scale = 100.0 / whole if whole else 1.0
    heights = [[scale * _mean(held, read) for held in samples] for read in reads]
    axis.stackplot(at, heights, colors=colours, linewidth=0)


def _mean(samples: Sequence[OccupancySample], read: Callable[[OccupancySample], float]) -> float:
    return sum(read(sample) for sample in samples) / len(samples)
