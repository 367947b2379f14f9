"""Error of predicted remaining output lengths, on real traces with half of the programs held back.

    python benchmarks/length_prediction_error.py --traces traces --out benchmarks/results

The programs of each trace, sub-agents with their parents, are split into two halves, ``--splits`` times. The
outputs of one half are learned as an engine learns them (``OutputLengthHistory``: by agent type and the tool
whose result the prompt ends with). For each output of the other half, every predictor predicts the remaining
tokens at its beginning and at 32, 128, 512 and 2,048 tokens. There are two variants. In ``held back``,
nothing is learned from the other half. In ``online``, its outputs are learned as they end, as in an engine.

32 programs run at once, or a quarter of a half if that is less; when one ends, the next starts. A token takes
20 ms, a tool at most a minute. The learning half is played twice and learned the second time, because in an
engine that has just started, short outputs end first. The other half follows. Contexts end at the 131,072
tokens of the simulator's default model. Splits are by program, so that no output is predicted from its own
program except online. Several programs of a trace may work on the same task.

Predictors: ``survival`` and ``mean``, as in the engine; ``survival, of all`` and ``mean, of all``, without
types and tools; ``none`` (always one token) and ``oracle``, as bounds. The functions below define the
measures. Loads named synthetic are drawn from published lengths, not recorded.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from result_pages import FIRST_WORDS, made_by, marked, write_page
from rich.console import Console
from rich.progress import track
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.core.demand_forecaster import MIN_OUTPUT_SAMPLES
from sojourn_server.policies.forecasting.output_length_prediction import (
    QUANTILE_POINTS,
    MeanLengthPrediction,
    OutputLengthView,
    RemainingTokensPolicy,
    SurvivalPrediction,
)
from sojourn_server.programs.output_length_history import ALL_OUTPUTS, LengthKey, OutputLengthHistory
from sojourn_server.simulator.report.results_file import Provenance, made_with
from sojourn_server.simulator.workloads.arrival_processes import load_programs
from sojourn_server.simulator.workloads.program_plans import PlaybackOptions, ProgramPlan, ProgramPlanner
from sojourn_server.traces.trace_schema import ASSUMED_DECODE_S

TRACES = {
    "claude-code": "kvct_v6_claude_code.jsonl.gz",
    "claude-code-entire": "entire_claude_code.jsonl.gz",
    "isobench": "isobench_trae.jsonl.gz",
    "taubench": "taubench_gpt4o_airline.jsonl.gz",
    "lmcache-miniswe": "lmcache_miniswe.jsonl.gz",
    "lmcache-magagent": "lmcache_magagent.jsonl.gz",
}
"""Recorded traces; tokens of claude-code-entire, taubench and lmcache are estimated from characters."""
SYNTHETIC = ("reasoning-mix", "reasoning-math", "reasoning-requests", "reasoning-agent")
SO_FAR = (0, 32, 128, 512, 2048)
AT_ONCE = 32
MAX_GAP_S = 60.0
MAX_MODEL_LEN = 131_072
VARIANTS = ("held back", "online")
PREDICTORS = ("survival", "mean", "survival, of all", "mean, of all", "none", "oracle")
LEVELS = tuple((point + 0.5) / QUANTILE_POINTS for point in range(QUANTILE_POINTS))
"""Level of each value of a prediction, which is the share of outputs that should be shorter than the
value."""
LEAST_ANSWERS = 50
"""Minimum number of answers in a split. Figures from fewer answers are left out."""


class Output(NamedTuple):
    """One output of the trace."""

    name: str
    key: LengthKey
    begins_s: float
    prompt_tokens: int
    tokens: int
    place: int = 0
    """Index of the output's program in the order of the run."""

    @property
    def ends_s(self) -> float:
        """Time at which the last token is generated."""
        return self.begins_s + self.tokens * ASSUMED_DECODE_S


class Answer(NamedTuple):
    """A prediction for one output, and the actual length."""

    so_far: int
    left: tuple[float, ...]
    """Predicted remaining tokens, as equally likely ascending values or a single value."""
    actual: int
    """Actual number of remaining tokens; at least one."""

    @property
    def middle(self) -> float:
        """The middle one of the predicted values, which the engine's metrics use as the prediction."""
        return self.left[len(self.left) // 2]


# -- measures ---------------------------------------------------------------------------


def log_error(answer: Answer) -> float:
    """Return |ln(predicted ÷ actual)| of the output's total length, for the middle predicted value."""
    return abs(math.log((answer.so_far + answer.middle) / (answer.so_far + answer.actual)))


def pinball(answer: Answer) -> float:
    """Return twice the quantile loss in tokens, as a mean over ``LEVELS``. For a single value it is the
    absolute error, so a useful distribution has a lower loss than its middle alone."""
    losses = (
        (level if answer.actual >= point else level - 1) * (answer.actual - point)
        for level, point in zip(LEVELS, points(answer.left), strict=True)
    )
    return 2 * math.fsum(losses) / QUANTILE_POINTS


def points(left: Sequence[float]) -> Sequence[float]:
    """Return one value for each of ``LEVELS``. A single value is repeated for all of them."""
    return left if len(left) == QUANTILE_POINTS else [left[0]] * QUANTILE_POINTS


def coverage(answers: Sequence[Answer]) -> list[float]:
    """Return the share of actual lengths below the predicted value, for each of ``LEVELS``. An exact hit
    counts half."""
    below = [0.0] * QUANTILE_POINTS
    for answer in answers:
        for index, point in enumerate(points(answer.left)):
            below[index] += 1.0 if answer.actual < point else 0.5 if answer.actual == point else 0.0
    return [count / len(answers) for count in below]


def off(covered: Sequence[float]) -> float:
    """Return the largest difference between a level and its coverage."""
    return max(abs(share - level) for share, level in zip(covered, LEVELS, strict=True))


def bias(answers: Sequence[Answer]) -> float:
    """Return mean predicted ÷ mean actual remaining tokens, which is the error of a forecast of total
    demand."""
    return math.fsum(fmean(answer.left) for answer in answers) / sum(answer.actual for answer in answers)


def measures(answers: Sequence[Answer]) -> dict[str, Any]:
    """Return all measures over ``answers``, which must not be empty."""
    errors = [log_error(answer) for answer in answers]
    covered = coverage(answers)
    return {
        "answers": len(answers),
        "log_error_median": median(errors),
        "log_error_mean": fmean(errors),
        "absolute_tokens": fmean(abs(answer.middle - answer.actual) for answer in answers),
        "pinball_tokens": fmean(map(pinball, answers)),
        "coverage": covered,
        "coverage_off": off(covered),
        "bias": bias(answers),
    }


# -- questions --------------------------------------------------------------------------


def halves(programs: Sequence[ProgramPlan], seed: int) -> tuple[list[ProgramPlan], list[ProgramPlan]]:
    """Split the programs into a half to learn from and a half that is held back."""
    dealt = list(programs)
    random.Random(f"halves/{seed}").shuffle(dealt)
    return dealt[: len(dealt) // 2], dealt[len(dealt) // 2 :]


def outputs(programs: Sequence[ProgramPlan], at_once: int) -> tuple[list[Output], list[float]]:
    """Return the outputs of all turns, and the start time of each program, if ``at_once`` programs run at a
    time."""
    free = [0.0] * at_once
    made: list[Output] = []
    begins: list[float] = []
    for place, program in enumerate(programs):
        begins.append(free[0])
        heapq.heapreplace(free, _played(program, free[0], "agent", place, made))
    return made, begins


def _played(plan: ProgramPlan, begins_s: float, kind: str, place: int, made: list[Output]) -> float:
    """Add the outputs of a program and its sub-agents to ``made``. Return the program's end time."""
    tool: str | None = None
    for child in [child for child in plan.children if child.parent_turn is None]:
        _played(child, begins_s + (child.start_offset_s or 0.0), "sub-agent", place, made)
    for turn, lengths in enumerate(plan.plans):
        output = Output(
            f"{plan.instance_id}/{turn}",
            (plan.agent_type or kind, tool),
            begins_s,
            lengths.prompt_tokens,
            lengths.output_tokens,
            place,
        )
        made.append(output)
        for child in [child for child in plan.children if child.parent_turn == turn]:
            _played(child, output.ends_s, "sub-agent", place, made)
        begins_s = output.ends_s + min(plan.gap_s(turn), MAX_GAP_S)
        tool = plan.tool(turn)
    return begins_s


class Lesson(NamedTuple):
    """Outputs to learn from (``learned``), and outputs to predict (``of``)."""

    learned: list[Output]
    of: list[Output]
    later: list[Output]
    """Outputs that end during the predictions. They are learned in the variant ``online``."""


def lesson(past: Sequence[ProgramPlan], held_back: Sequence[ProgramPlan]) -> Lesson:
    """Return the lesson in which outputs of ``past`` are learned and outputs of ``held_back`` predicted."""
    at_once = max(1, min(AT_ONCE, len(past) // 4))
    played, begins = outputs([*past, *past, *held_back], at_once)
    again_s, asked_s = begins[len(past)], begins[2 * len(past)]
    return Lesson(
        [output for output in played if again_s < output.ends_s <= asked_s],
        [output for output in played if output.place >= 2 * len(past)],
        [output for output in played if output.ends_s > asked_s],
    )


def asked(lesson: Lesson, *, online: bool) -> Iterator[tuple[Output, int, OutputLengthHistory]]:
    """Yield (output, tokens so far, history) for each prediction to make, in order of time. The history
    changes later, so use it at once."""
    known = OutputLengthHistory()
    for output in sorted(lesson.learned, key=lambda output: output.ends_s):
        known.observe(*output.key, output.tokens)
    moments = [
        (output.begins_s + so_far * ASSUMED_DECODE_S, so_far, output)
        for output in lesson.of
        for so_far in SO_FAR
        if so_far < output.tokens
    ]
    if online:
        moments += [(output.ends_s, output.tokens, output) for output in lesson.later]
    for _, so_far, output in sorted(moments, key=lambda moment: moment[0]):
        if so_far == output.tokens:
            known.observe(*output.key, output.tokens)
        else:
            yield output, so_far, known


def answers(lesson: Lesson, *, online: bool) -> dict[str, dict[int, list[Answer]]]:
    """Return the answers of each predictor at each of ``SO_FAR``."""
    survival, mean = SurvivalPrediction(), MeanLengthPrediction()
    found: dict[str, dict[int, list[Answer]]] = {
        name: {so_far: [] for so_far in SO_FAR} for name in PREDICTORS
    }
    for output, so_far, known in asked(lesson, online=online):
        actual = output.tokens - so_far
        left: dict[str, tuple[float, ...] | None] = {"none": (1.0,), "oracle": (float(actual),)}
        kinds: Mapping[str, LengthKey] = {"": output.key, ", of all": ALL_OUTPUTS}
        policies: Mapping[str, RemainingTokensPolicy] = {"survival": survival, "mean": mean}
        for kind, key in kinds.items():
            view = OutputLengthView(
                output.name,
                so_far,
                max(1, MAX_MODEL_LEN - output.prompt_tokens - so_far),
                known.sorted_lengths(*key, MIN_OUTPUT_SAMPLES),
            )
            for name, policy in policies.items():
                left[name + kind] = policy.remaining(view, output.begins_s)
        if all(left.values()):  # otherwise too little is known yet
            for name in PREDICTORS:
                found[name][so_far].append(Answer(so_far, left[name] or (), actual))
    return found


Figures = dict[str, dict[str, dict[int, dict[str, Any]]]]
"""Variant → predictor → tokens so far → measures. Measures are left out if a split has fewer than
``LEAST_ANSWERS`` answers for them."""


def measure(programs: Sequence[ProgramPlan], splits: int, seed: int) -> Figures:
    """Return the figures of one load, over ``splits`` splits of its programs."""
    found: dict[tuple[str, str, int], list[dict[str, Any]]] = {}
    for split in range(seed, seed + splits):
        taught = lesson(*halves(programs, split))
        for variant in VARIANTS:
            for name, at in answers(taught, online=variant == "online").items():
                for so_far, said in at.items():
                    if len(said) >= LEAST_ANSWERS:
                        found.setdefault((variant, name, so_far), []).append(measures(said))
    figures: Figures = {variant: {name: {} for name in PREDICTORS} for variant in VARIANTS}
    for (variant, name, so_far), each in found.items():
        if len(each) == splits:
            figures[variant][name][so_far] = over_splits(each)
    return figures


def over_splits(of: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the medians over the splits, and ``pinball_tokens`` of each split."""
    made: dict[str, Any] = {
        name: _rounded(median(one[name] for one in of)) for name in of[0] if name != "coverage"
    }
    made["coverage"] = [
        _rounded(median(shares)) for shares in zip(*(one["coverage"] for one in of), strict=True)
    ]
    made["pinball_tokens_of_splits"] = [_rounded(one["pinball_tokens"]) for one in of]
    return made


def _rounded(value: float) -> float:
    return float(f"{value:.5g}")


# -- output -----------------------------------------------------------------------------

HEAD = (
    "load", "so far", "asked", "left", "ln, survival", "ln, mean", "ln, of all", "±, survival", "±, mean",
    "pinball, survival", "pinball, mean", "pinball, of all", "survival ÷ mean", "bias, survival",
    "bias, mean", "coverage off",
)  # fmt: skip
LEGEND = """\
*so far*: tokens written when asked; *asked*: outputs that came so far; *left*: tokens they had yet to come,
mean. *ln*: median of |ln(predicted ÷ actual)| of the whole output, by the middle of the eight lengths that
survival names. *±*: mean absolute error of what is left, in tokens, by the same. *pinball*: mean quantile
loss over the eight levels, times two, in tokens: of the mean, which is one number, it is the absolute error;
*survival ÷ mean* is that of the two, and below 1 survival is better: median of the splits, and from the least
to the most. *of all*: survival without types and tools. *bias*: mean predicted ÷ mean actual of what is left.
*coverage off*: of survival, the most that the share of actual lengths below one of its eight is off the share
that should be; where few were asked some of it is chance. The JSON has the coverage at each level, the mean
of |ln|, and every predictor, `none` and `oracle` among them."""


def lines(found: Mapping[str, Any], variant: str) -> Iterator[list[str]]:
    """Yield the rows of the table."""
    for load, of in found.items():
        figures = of["figures"][variant]
        for so_far in figures["survival"]:
            ours, theirs, alike, none = (
                figures[name][so_far] for name in ("survival", "mean", "survival, of all", "none")
            )
            each = zip(ours["pinball_tokens_of_splits"], theirs["pinball_tokens_of_splits"], strict=True)
            ratios = [our / their for our, their in each]
            yield [
                load + (" (synthetic)" if of["synthetic"] else ""), f"{so_far:,}", f"{ours['answers']:,.0f}",
                f"{none['absolute_tokens'] + 1:,.0f}",  # it predicts one token more
                *(f"{one['log_error_median']:.2f}" for one in (ours, theirs, alike)),
                *(f"{one['absolute_tokens']:,.0f}" for one in (ours, theirs)),
                *(f"{one['pinball_tokens']:,.0f}" for one in (ours, theirs, alike)),
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                *(f"{one['bias']:.2f}" for one in (ours, theirs)), f"{ours['coverage_off']:.2f}",
            ]  # fmt: skip


def page(result: Mapping[str, Any], made: Provenance, wall_s: float) -> str:
    """Return the result page in Markdown; ``{by hand}`` marks the place of hand-written text."""
    tables = []
    for variant in VARIANTS:
        tables += [f"## {variant.capitalize()}", "", marked(HEAD, lines(result["loads"], variant)), ""]
    last = result["seed"] + result["splits"] - 1
    return "\n".join(
        [
            "# Remaining output length: predicted against actual",
            "",
            "Generated by the command below, but for what is between the marks.",
            "",
            made_by(made, wall_s),
            "",
            f"Medians over {result['splits']} ways to deal a load's programs into a half that is learned and "
            f"a half that is asked about, seeds {result['seed']} to {last}.",
            "",
            "![share of outputs below each of the predicted lengths](length_prediction_error.svg)",
            "",
            "{by hand}",
            "",
            *tables,
            LEGEND,
            "",
        ]
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw the reliability plot of each load, held back: the share of actual lengths below each predicted
    value, by the value's level."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    import matplotlib.pyplot as plt

    colours = dict(zip(SO_FAR, ("#000000", "#0072B2", "#009E73", "#E69F00", "#CC79A7"), strict=True))
    loads = result["loads"]
    rows = math.ceil(len(loads) / 4)
    figure, axes = plt.subplots(
        rows, 4, figsize=(9.6, 2.5 * rows + 0.5), sharex=True, sharey=True, squeeze=False
    )
    for axis in axes.flat[len(loads) :]:
        axis.set_visible(False)
    for axis, (load, of) in zip(axes.flat, loads.items(), strict=False):
        axis.plot((0, 1), (0, 1), color="#8A8A8A", linewidth=0.8)
        for so_far, colour in colours.items():
            for name, dash, marker in (("survival", "-", "o"), ("mean", ":", "")):
                figures = of["figures"]["held back"][name].get(so_far)
                if figures is not None:
                    look: dict[str, Any] = {"color": colour, "linestyle": dash, "marker": marker}
                    axis.plot(LEVELS, figures["coverage"], markersize=3, linewidth=1.2, **look)
        axis.set_title(f"{load}{' (synthetic)' if of['synthetic'] else ''}", fontsize=9)
        axis.grid(alpha=0.25)
    figure.supxlabel("level: share that should be below", fontsize=9)
    figure.supylabel("share that was below", fontsize=9)
    line = plt.Line2D
    handles = [
        line([], [], color=colour, label=f"at {so_far:,} tokens") for so_far, colour in colours.items()
    ]
    handles += [line([], [], color="#444444", marker="o", markersize=3, label="survival"),
                line([], [], color="#444444", linestyle=":", label="mean")]  # fmt: skip
    figure.legend(handles=handles, loc="upper center", ncols=len(handles), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0, 1, 0.95))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder of the traces")
    loads = [*TRACES, *SYNTHETIC]
    parser.add_argument("--only", nargs="+", choices=loads, default=loads)
    parser.add_argument("--splits", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--out", type=Path, help="folder to write length_prediction_error.json, .md and .svg into"
    )
    options = parser.parse_args()
    began, console = time.monotonic(), Console(width=200)
    found: dict[str, Any] = {}
    for load in track(options.only, "measuring", console=console, transient=True):
        synthetic = load in SYNTHETIC
        workload = f"synthetic:{load}" if synthetic else str(options.traces / TRACES[load])
        programs = load_programs(workload, options.seed)
        playable = ProgramPlanner(programs, PlaybackOptions(max_context_tokens=MAX_MODEL_LEN))
        plans = [playable.plan(index) for index in range(len(playable))]
        found[load] = {
            "synthetic": synthetic,
            "programs": len(plans),
            "outputs": len(outputs(plans, 1)[0]),
            "figures": measure(plans, options.splits, options.seed),
        }
    result = {"splits": options.splits, "seed": options.seed, "loads": found}
    for variant in VARIANTS:
        table = Table(*HEAD, title=variant)
        for line in lines(found, variant):
            table.add_row(*line)
        console.print(table)
    if options.out is not None:
        made = made_with(sys.argv)
        document = {"command": f"python benchmarks/{made.command}", "machine": made.machine,
                    "versions": made.versions, **result}  # fmt: skip
        write_json(document, str(options.out / "length_prediction_error.json"))
        plot(result, options.out / "length_prediction_error.svg")
        write_page(
            options.out / "length_prediction_error.md",
            page(result, made, time.monotonic() - began),
            FIRST_WORDS,
        )


if __name__ == "__main__":
    main()
