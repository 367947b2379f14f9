"""The page of ``judge.py``, with a table of aims, and the cells, the worst first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import TYPE_CHECKING, Any

import msgspec
from result_pages import marked, number
from sojourn_server.simulator.report.run_row import RunRow

if TYPE_CHECKING:
    from typing import Self  # Python 3.11

CLOSED_AIM, SLACK_AIM = 0.97, 1.02
MEAN_AIMS = {"output_tok_per_s": 1.08, "ended_work_s": 1.05}
FREE_IO_AIM, UNLIMITED_AIM = 0.95, 0.85
AGAIN_AIM = 0.02
WAY_AIM = 0.5
BUSY_LOADS = ("open 0.95", "open 1.1")
OURS = "sojourn"
STOCK = "stock"
LIMITS = ("free-io", "unlimited")
ORACLE = "sojourn-oracle"
"""Policy that shows what an order could gain. It runs in open loops, where programs wait for each other."""
BOUNDS = (*LIMITS, ORACLE)
"""Runs that no preset is compared with."""
TITLES = {
    "output_tok_per_s": "tokens/s",
    "ended_work_s": "work of the programs that ended",
    "slowdown_mean": "mean slowdown",
    "slowdown_p95": "P95 of slowdown",
    "slowdown_p99": "P99 of slowdown",
}
"""Figure that the aims count → its name."""


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """What the page needs of one run, as in its JSON file. Results of earlier commits lack figures that have
    a default."""

    output_tok_per_s: float | None
    programs_finished: int
    ended_work_s: float | None = None
    """Seconds that the requests of the programs that ended take, each program alone on an empty engine."""
    completion_mean_s: float | None
    slowdown_mean: float | None = None
    """Completion time ÷ completion time alone on an empty engine."""
    slowdown_p95: float | None = None
    slowdown_p99: float | None = None
    recomputed_share: float
    rate_per_s: float | None

    @classmethod
    def of(cls, row: RunRow) -> Self:
        """The figures of a run."""
        return cls(
            output_tok_per_s=row.output_tok_per_s,
            programs_finished=row.programs_finished,
            ended_work_s=row.ended_work_s,
            completion_mean_s=row.completion_s.mean,
            slowdown_mean=row.slowdown.mean,
            slowdown_p95=row.slowdown.p95,
            slowdown_p99=row.slowdown.p99,
            recomputed_share=row.regenerated_tokens / row.prompt_tokens if row.prompt_tokens else 0.0,
            rate_per_s=row.rate_per_s,
        )


@dataclass(frozen=True)
class Cell:
    """The runs of all policies under one load."""

    name: str
    load: str
    host: float
    rows: dict[str, Figures]
    """Figures by policy."""

    @property
    def is_closed(self) -> bool:
        return self.load.startswith("closed")

    @property
    def main_figure(self) -> str:
        """What the policies are compared by: tokens per second in a closed loop, in an open one the mean of
        completion ÷ alone, or of completion if a run lacks that."""
        if self.is_closed:
            return "output_tok_per_s"
        is_known = all(row.slowdown_mean is not None for row in self.rows.values())
        return "slowdown_mean" if is_known else "completion_mean_s"

    def value(self, policy: str, figure: str = "") -> float | None:
        """The measure of a policy; more is better. It is a figure, by default the main one, or the reciprocal
        of a time."""
        if (row := self.rows.get(policy)) is None:
            return None
        name = figure or self.main_figure
        found: float = getattr(row, name) or 0.0
        return found if name in MEAN_AIMS or not found else 1.0 / found

    def presets(self) -> list[str]:
        return [name for name in self.rows if name not in (OURS, *BOUNDS)]

    def best(self, figure: str = "") -> str:
        """The preset with the best measure, ``stock`` included."""
        return max(self.presets(), key=lambda name: self.value(name, figure) or 0.0)

    def ratio(self, policy: str, other: str, figure: str = "") -> float | None:
        """Measure of ``policy`` over that of ``other``; above 1 is better."""
        mine, theirs = self.value(policy, figure), self.value(other, figure)
        return None if mine is None or not theirs else mine / theirs

    def over_best(self, figure: str = "") -> float | None:
        """Measure of ``OURS`` over that of the best preset; ``None`` if a run lacks the figure."""
        names = (OURS, *self.presets())
        if figure and any(getattr(self.rows[name], figure) is None for name in names):
            return None
        return self.ratio(OURS, self.best(figure), figure)

    def way_to_oracle(self) -> float | None:
        """How far ``OURS`` gets from the best preset's mean (0) to the oracle's (1). ``None`` if no oracle
        ran, or if the oracle gains less than 2 %."""
        own, best, oracle = (self.value(name) for name in (OURS, self.best(), ORACLE))
        if not own or not best or not oracle or oracle < SLACK_AIM * best:
            return None
        return (1 / best - 1 / own) / (1 / best - 1 / oracle)

    def document(self) -> dict[str, Any]:
        """The cell's figures by policy, for JSON."""
        return {
            "cell": self.name,
            "load": self.load,
            "host": self.host,
            "policies": msgspec.to_builtins(self.rows),
        }

    @classmethod
    def read(cls, document: dict[str, Any]) -> Self:
        """The cell of a ``document``. Raises ``msgspec.ValidationError`` and ``KeyError`` for another one."""
        rows = msgspec.convert(document["policies"], dict[str, Figures])
        return cls(document["cell"], document["load"], document["host"], rows)

    def summary(self) -> str:
        """One line with every policy's measure over that of ``stock``, the best first."""
        over = {name: self.ratio(name, STOCK) or 0.0 for name in self.rows}
        parts = (f"{name} {over[name]:.2f}" for name in sorted(over, key=lambda n: -over[n]))
        return f"{self.name}: {', '.join(parts)}"


def page(cells: Sequence[Cell]) -> list[str]:
    """The paragraphs of the page; ``{by hand}`` marks the place of hand-written text."""
    ordered = sorted(cells, key=lambda cell: cell.over_best() or 0.0)
    return [
        f"{len(cells)} cells of the grid. A closed loop is measured by output tokens per second, an open "
        "loop by the reciprocal of the mean of completion time ÷ completion time alone on an empty engine "
        "(*slowdown*); so more is better everywhere. *Best* is the best preset of each cell and figure.",
        "{by hand}",
        "## Aims",
        marked(("aim", "wanted", "found", "cells that miss it"), aims(cells)),
        "## Cells, the worst first",
        f"*Ended*: programs that ended in a closed loop under `{OURS}` and under the best preset. *Ended "
        "work*: what these programs would take alone, over the preset with the most. More tokens with as "
        "much ended work come from programs that began and did not end. Their first turns have short "
        "contexts, so they cost less. *P95*, *P99*: of slowdown in an open loop, over the preset with the "
        "shortest. *Again*: share of the prompt tokens computed again.",
        marked(
            (
                "load",
                "over the best",
                "best",
                "over stock",
                *(f"of {n}" for n in BOUNDS),
                "ended",
                "ended work",
                "P95",
                "P99",
                "again",
            ),
            map(_cell_line, ordered),
        ),
    ]


def _cell_line(cell: Cell) -> list[str]:
    best = cell.best()
    ended = [str(cell.rows[name].programs_finished) for name in (OURS, best)]
    return [
        cell.name, number(cell.ratio(OURS, best)), best, number(cell.ratio(OURS, STOCK)),
        *(number(cell.ratio(OURS, limit)) for limit in BOUNDS), " / ".join(ended) if cell.is_closed else "–",
        number(cell.over_best("ended_work_s") if cell.is_closed else None),
        *(number(None if cell.is_closed else cell.over_best(f"slowdown_{at}")) for at in ("p95", "p99")),
        f"{cell.rows[OURS].recomputed_share:.1%}",
    ]  # fmt: skip


def aims(cells: Sequence[Cell]) -> list[list[str]]:
    """One row per aim: name, wanted value, found value, number of cells that miss it."""
    closed = [cell for cell in cells if cell.is_closed]
    busy = [cell for cell in cells if cell.load in BUSY_LOADS]
    calm = [cell for cell in cells if cell.load == "open 0.5"]
    hosted = [cell for cell in cells if cell.host >= 1]
    with_host = [cell for cell in closed if cell.host >= 1]
    without = [cell for cell in closed if not cell.host]

    def least(name: str, wanted: float, found: Iterable[float | None]) -> list[str]:
        values = [value for value in found if value is not None]
        if not values:
            return [name, f"≥ {wanted:.3g}", "–", "no cell"]
        missed = sum(value < wanted for value in values)
        return [name, f"≥ {wanted:.3g}", f"{min(values):.3g} (worst)", f"{missed} of {len(values)}"]

    def best_single(figure: str, wanted: float) -> list[str]:
        single, factor = _over_best_single(closed, figure)
        name = f"closed loop: {TITLES[figure]}, geometric mean over the best single preset ({single})"
        return [name, f"≥ {wanted}", number(factor), "–"]

    return [
        *(
            least(
                f"closed loop: {TITLES[figure]}, over the best preset",
                CLOSED_AIM,
                (c.over_best(figure) for c in closed),
            )
            for figure in MEAN_AIMS
        ),
        *(best_single(figure, wanted) for figure, wanted in MEAN_AIMS.items()),
        least("closed loop: over stock", 1.0, (c.ratio(OURS, STOCK) for c in closed)),
        least(
            "closed loop, host memory: of free-io",
            FREE_IO_AIM,
            (c.ratio(OURS, "free-io") for c in with_host),
        ),
        least(
            "closed loop, no host memory: of unlimited",
            UNLIMITED_AIM,
            (c.ratio(OURS, "unlimited") for c in without),
        ),
        *(
            least(
                f"open loop from 0.95: {TITLES[figure]}, over the best preset",
                1 / SLACK_AIM,
                (c.over_best(figure) for c in busy),
            )
            for figure in TITLES
            if figure not in MEAN_AIMS
        ),
        least(
            "open loop from 0.95: of the way from the best preset to the oracle",
            WAY_AIM,
            (c.way_to_oracle() for c in busy),
        ),
        least("open loop at 0.5: over stock", 1 / SLACK_AIM, (c.ratio(OURS, STOCK) for c in calm)),
        least(
            "host memory: prompt tokens not computed again",
            1 - AGAIN_AIM,
            (1 - c.rows[OURS].recomputed_share for c in hosted),
        ),
    ]


def _over_best_single(closed: Sequence[Cell], figure: str) -> tuple[str, float | None]:
    """The preset with the largest geometric mean of a figure, and the factor of ``OURS`` over it.

    A policy with host memory and the same policy without it count as one, since a user who has host memory
    uses it. ``continuum+host`` stands for ``continuum`` where it ran. Without host memory, ``stock`` stands
    for ``mori``."""

    def mean(name: str) -> float | None:
        ratios = []
        for cell in closed:
            found = [n for n in cell.rows if _without_host(n) == name]
            # A preset that needs host memory does not start without it, so such a user runs stock.
            best = cell.best(figure)
            ratios.append(max(cell.ratio(n, best, figure) or 0.0 for n in found or [STOCK]))
        return math.exp(math.fsum(map(math.log, ratios)) / len(ratios)) if ratios and all(ratios) else None

    names = dict.fromkeys(_without_host(name) for cell in closed for name in cell.presets())
    means = {name: found for name in names if (found := mean(name))}
    mine = mean(OURS)
    if not means or mine is None:
        return "–", None
    best = max(means, key=means.__getitem__)
    return best, mine / means[best]


def _without_host(name: str) -> str:
    """Name that a policy shares with its variant for host memory, because a user chooses one of the two."""
    name = name.removesuffix("+host").removesuffix("-offload")
    return STOCK if name == "lru" else name


KINDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("20 to 80 agents at once", ("closed 20", "closed 40", "closed 80")),
    ("arrivals at 0.95 and 1.1 of the capacity", BUSY_LOADS),
    ("arrivals at 0.5 and 0.8 of it, bursts", ("open 0.5", "open 0.8", "bursts")),
)
"""Kind of load → its loads."""


def kinds_table(cells: Sequence[Cell]) -> str:
    """The table of docs/concepts.md: ratios of ``OURS`` by kind of load, geometric mean and range."""
    rows = []
    for label, loads in KINDS:
        some = [cell for cell in cells if cell.load in loads]
        generated = [cell.over_best() for cell in some if cell.name.startswith("synthetic:")]
        recorded = [cell.over_best() for cell in some if not cell.name.startswith("synthetic:")]
        over_stock = [cell.ratio(OURS, STOCK) for cell in some]
        rows.append((f"{len(some)} with {label}", *map(_spread, (over_stock, recorded, generated))))
    head = (
        "simulated loads",
        "over stock vLLM",
        "over the best of the others: recorded agents",
        "generated",
    )
    return marked(head, rows)


def _spread(ratios: Iterable[float | None]) -> str:
    known = [ratio for ratio in ratios if ratio]
    return f"{geometric_mean(known):.2f} ({min(known):.2f} to {max(known):.2f})" if known else "–"
