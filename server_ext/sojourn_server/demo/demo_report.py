"""Figures of the demo: one dictionary per arm, their ratios, a table and a plot.

``prefill_again`` counts tokens that the engine prefilled although an earlier turn had computed their KV: for
each turn after the first, ``max(0, (prompt - cached) - (prompt - previous prompt - previous output))``.
Only whole blocks are reused, so even perfect reuse leaves up to one block per turn.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.table import Table

from ..metrics.summary_statistics import summarise
from .demo_agent import DemoTurnRecord
from .demo_run import STOCK, ArmRecord

RATIOS = {
    "completion_mean": "completion_mean_s",
    "completion_p95": "completion_p95_s",
    "ttft_mean": "ttft_mean_s",
    "prefill_again": "prefill_again_tokens",
}
"""Name of a ratio → name of the figure that it compares. A ratio is the stock arm's figure ÷ the sojourn
arm's. Above 1, sojourn needed less."""

# Okabe and Ito's palette: distinct for every kind of colour blindness, and in grey.
ARM_COLOURS = ("#D55E00", "#0072B2", "#009E73")
TURN_COLOUR, TOOL_COLOUR = "#56B4E9", "#E69F00"

SMOKE = (
    "a smoke run, not a measurement: sojourn may be slower here, since tiny computes a lost context again\n"
    "in no time, and waiting for a place takes some; sojourn demo without --quick measures"
)
"""Note in the table and the plot of ``sojourn demo --quick``. Its JSON report has ``"smoke": true``."""


def notes(result: Mapping[str, Any]) -> list[str]:
    """Return the notes below the table and in the plot. They mark a smoke run and count failed programs."""
    failed = [
        f"{figures['programs_failed']} of {figures['programs']} programs of {name}"
        for name, figures in result["arms"].items()
        if figures["programs_failed"]
    ]
    found = [SMOKE] if result.get("smoke") else []
    return [*found, f"no measurement: {' and '.join(failed)} failed, and ended early"] if failed else found


def recomputed_prompt_tokens(turns: Sequence[DemoTurnRecord]) -> int:
    """Return the number of prompt tokens that one program computed again, by the formula of this module."""
    total = 0
    for before, turn in pairwise(turns):
        computed = turn.prompt_tokens - turn.cached_tokens
        new = turn.prompt_tokens - before.prompt_tokens - before.output_tokens
        total += max(0, computed - new)
    return total


def arm_figures(arm: ArmRecord) -> dict[str, Any]:
    """Return one arm's figures for the JSON, in seconds and tokens. ``hit_rate`` is cached tokens ÷ prompt
    tokens."""
    turns = [turn for program in arm.programs for turn in program.turns]
    completions = [program.completion_s for program in arm.programs]
    completion = summarise(completions)
    prompt = sum(turn.prompt_tokens for turn in turns)
    cached = sum(turn.cached_tokens for turn in turns)
    figures = {
        "completion_mean_s": completion["mean"],
        "completion_p50_s": completion["p50"],
        "completion_p95_s": completion["p95"],
        "completions_s": completions,
        "ttft_mean_s": arm.ttft_mean_s,
        "turns": len(turns),
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_tokens": sum(turn.output_tokens for turn in turns),
        "prefill_tokens": prompt - cached,
        "prefill_again_tokens": sum(recomputed_prompt_tokens(program.turns) for program in arm.programs),
        "hit_rate": cached / prompt if prompt else None,
        "preemptions": arm.preemptions,
        "programs": len(arm.programs),
        "programs_failed": sum(program.error is not None for program in arm.programs),
        "repositories_fixed": sum(program.fixed for program in arm.programs),
        "wall_s": arm.wall_s,
        "details": [asdict(program) for program in arm.programs],
    }
    return {**_rounded(figures), "decisions": dict(arm.decisions), "tiers": dict(arm.tiers)}


def ratios(arms: Mapping[str, Mapping[str, Any]]) -> dict[str, float | None]:
    """Return a ratio for each name in ``RATIOS``: the stock arm's figure ÷ the other arm's figure.

    A ratio is ``None`` if a figure is missing or the divisor is 0. All ratios are ``None`` if any program
    failed. A failed program ends early, so its arm would look faster.
    """
    if _any_failed(arms):
        return dict.fromkeys(RATIOS)
    stock = arms.get(STOCK, {})
    other = next((figures for name, figures in arms.items() if name != STOCK), {})
    pairs = {name: (stock.get(key), other.get(key)) for name, key in RATIOS.items()}
    return {name: _rounded(a / b) if a is not None and b else None for name, (a, b) in pairs.items()}


def document(arms: Sequence[ArmRecord], facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the demo's JSON report: ``arms``, ``ratio``, and the ``facts`` needed to repeat the run. If a
    program failed, the ratios are ``None``."""
    figures = {arm.name: arm_figures(arm) for arm in arms}
    return {"arms": figures, "ratio": ratios(figures), **facts}


def succeeded(arms: Sequence[ArmRecord]) -> bool:
    """Return whether every program of every arm ended without an error and fixed its repository."""
    return all(program.fixed and program.error is None for arm in arms for program in arm.programs)


_ROWS = (
    ("completion, mean", "completion_mean_s", "completion_mean", "{:.1f} s"),
    ("completion, P50", "completion_p50_s", None, "{:.1f} s"),
    ("completion, P95", "completion_p95_s", "completion_p95", "{:.1f} s"),
    ("time to first token, mean", "ttft_mean_s", "ttft_mean", "{:.2f} s"),
    ("tokens prefilled", "prefill_tokens", None, "{:,}"),
    ("  of these, recomputed", "prefill_again_tokens", "prefill_again", "{:,}"),
    ("prefix-cache hit rate", "hit_rate", None, "{:.0%}"),
    ("preemptions", "preemptions", None, "{:,}"),
    ("all programs done after", "wall_s", None, "{:.1f} s"),
)


def table(result: Mapping[str, Any]) -> Table:
    """Return a table with one column per arm, and the ratios last. Needs at least one arm."""
    arms: Mapping[str, Mapping[str, Any]] = result["arms"]
    first = next(iter(arms.values()))
    title = f"{first['programs']} coding agents, {result['pool']}"
    made = Table(title=title, caption="\n".join(notes(result)) or None)
    made.add_column("")
    for name in arms:
        made.add_column(name, justify="right")
    # A tiny model computes a lost context in no time, so its ratios would say nothing.
    with_ratio = len(arms) > 1 and not (result.get("smoke") or _any_failed(arms))
    if with_ratio:
        made.add_column("stock ÷ sojourn", justify="right")
    for label, key, ratio, form in _ROWS:
        cells = [
            form.format(value) if (value := figures[key]) is not None else "–" for figures in arms.values()
        ]
        if with_ratio:
            value = result["ratio"][ratio] if ratio else None
            cells.append(f"{value:.2f}" if value is not None else "")
        made.add_row(label, *cells)
    fixed = [f"{figures['repositories_fixed']}/{figures['programs']}" for figures in arms.values()]
    made.add_row("repositories fixed", *fixed)
    if _any_failed(arms):
        made.add_row("programs failed", *(str(figures["programs_failed"]) for figures in arms.values()))
    return made


def draw_plot(result: Mapping[str, Any], path: Path) -> None:
    """Plot the result of ``document`` into a PNG: completions on top, one timeline per arm below.
    Every arm must have at least one program."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    arms: Mapping[str, Any] = result["arms"]
    rows = 1 + len(arms)
    longest_s = max(figures["wall_s"] for figures in arms.values()) * 1.02
    figure, axes = pyplot.subplots(rows, 1, figsize=(10, 2.6 * rows), sharex=True, layout="constrained")
    _completions(axes[0], arms, longest_s)
    for axis, (name, figures) in zip(axes[1:], arms.items(), strict=True):
        _timeline(axis, name, figures)
    colours = {"waiting for the model": TURN_COLOUR, "running a tool": TOOL_COLOUR}
    handles = [Patch(color=colour, label=label) for label, colour in colours.items()]
    axes[1].legend(handles=handles, loc="upper right", fontsize="small")
    axes[-1].set_xlabel("seconds since the arm began")
    axes[-1].set_xlim(0, longest_s)
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


def _any_failed(arms: Mapping[str, Mapping[str, Any]]) -> bool:
    return any(figures["programs_failed"] for figures in arms.values())


def _rounded(value: Any) -> Any:
    """Return plain data with all of its numbers rounded; ``None`` in place of numbers that JSON lacks."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return round(value, 4) if math.isfinite(value) else None
    return value
