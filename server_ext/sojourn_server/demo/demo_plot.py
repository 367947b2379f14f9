"""Plot of the demo: completions of both arms, and a timeline of every program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .demo_report import notes

# Okabe and Ito's palette: distinct for every kind of colour blindness, and in grey.
ARM_COLOURS = ("#D55E00", "#0072B2", "#009E73")
TURN_COLOUR, TOOL_COLOUR = "#56B4E9", "#E69F00"


def draw(result: Mapping[str, Any], path: Path) -> None:
    """Plot the result of ``demo_report.document`` into a PNG: completions on top, one timeline per arm below.
    Every arm must have at least one program."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    arms: Mapping[str, Any] = result["arms"]
    rows = 1 + len(arms)
    longest_s = max(figures["wall_s"] for figures in arms.values()) * 1.02
    figure, axes = pyplot.subplots(
        rows, 1, figsize=(10, 2.6 * rows), sharex=True, layout="constrained", squeeze=False
    )
    _completions(axes[0][0], arms, longest_s)
    for (axis,), (name, figures) in zip(axes[1:], arms.items(), strict=True):
        _timeline(axis, name, figures)
    handles = [
        Patch(color=TURN_COLOUR, label="waiting for the model"),
        Patch(color=TOOL_COLOUR, label="running a tool"),
    ]
    axes[1][0].legend(handles=handles, loc="upper right", fontsize="small")
    axes[-1][0].set_xlabel("seconds since the arm began")
    axes[-1][0].set_xlim(0, longest_s)
    title = f"The same coding agents in both arms; {result['pool']}"
    figure.suptitle("\n".join([title, *notes(result)]))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _completions(axis: Any, arms: Mapping[str, Any], longest_s: float) -> None:
    for (name, figures), colour in zip(arms.items(), ARM_COLOURS, strict=False):
        ends = sorted(program["ended_s"] for program in figures["details"])
        axis.step(
            [0.0, *ends, longest_s], [0, *range(1, len(ends) + 1), len(ends)],
            where="post", color=colour, linewidth=2,
            label=f"{name}: mean {figures['completion_mean_s']:.0f} s",
        )  # fmt: skip
    axis.set_ylabel("programs done")
    axis.yaxis.get_major_locator().set_params(integer=True)
    axis.grid(alpha=0.3)
    axis.legend(loc="upper left")


def _timeline(axis: Any, name: str, figures: Mapping[str, Any]) -> None:
    programs = figures["details"]
    for row, program in enumerate(programs):
        turns = program["turns"]
        model = [(turn["start_s"], turn["first_tool_s"] - turn["start_s"]) for turn in turns]
        tools = [(turn["first_tool_s"], turn["end_s"] - turn["first_tool_s"]) for turn in turns]
        axis.broken_barh(model, (row - 0.4, 0.8), facecolors=TURN_COLOUR, edgecolor="white", linewidth=0.4)
        axis.broken_barh(tools, (row - 0.4, 0.8), facecolors=TOOL_COLOUR)
    axis.set_yticks(range(len(programs)), [program["task"] for program in programs], fontsize="small")
    axis.invert_yaxis()
    axis.set_ylabel(name)
