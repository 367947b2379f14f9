"""Results of the soak test, with what was not released, how memory grew, and the result page."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import linear_regression
from typing import Any

from result_pages import made_by, marked, write_result
from soak_stack import MOST_PROGRAMS, ServerState

MOST_GROWTH = 0.02
"""Maximum growth of a process's memory after ``--settle`` minutes of its life, as a share."""
SPARE_FILE_DESCRIPTORS = 16
"""A process may have this many file descriptors more than after the first silence, because connection pools
vary. More are a leak."""
TABLE_BOUNDS = {"engine": {"programs": MOST_PROGRAMS}, "gateway": {"programs": 200_000}}


def problems(states: Sequence[ServerState], first: Mapping[str, ServerState]) -> list[str]:
    """Return one line for each thing that was not released. ``first`` maps a server's name to its state after
    the first silence."""
    found = []
    for state in states:
        found += [f"{state.name}: {count:g} {what}" for what, count in state.counts.items() if count]
        bounds = TABLE_BOUNDS[state.name.split()[0]]
        found += [
            f"{state.name}: {state.tables[what]:g} {what}, more than {most}"
            for what, most in bounds.items()
            if state.tables[what] > most
        ]
        before = {one.role: one for one in first[state.name].processes} if state.name in first else {}
        for process in state.processes:
            if process.half_closed:
                found.append(f"{state.name}, {process.role}: {process.half_closed} connections not closed")
            known = before.get(process.role)
            if (
                known is not None
                and process.file_descriptors > known.file_descriptors + SPARE_FILE_DESCRIPTORS
            ):
                found.append(
                    f"{state.name}, {process.role}: {process.file_descriptors} file descriptors, "
                    f"{known.file_descriptors} after the first silence"
                )
    return found


@dataclass
class Life:
    """One process of a server, and the process's memory at each silence."""

    server: str
    role: str
    number: int
    minutes: list[float] = field(default_factory=list)
    """Minutes from the start of the process to each silence."""
    rss_mib: list[float] = field(default_factory=list)

    def growth(self, settle_min: float) -> tuple[float, float] | None:
        """Return two relative growths of memory from the first silence after ``settle_min`` to the last
        silence. The first is of the measured values, the second of the line fitted to them. ``None`` for
        fewer than three silences."""
        kept = [(at, rss) for at, rss in zip(self.minutes, self.rss_mib, strict=True) if at >= settle_min]
        if len(kept) < 3:
            return None
        times, sizes = [at for at, _ in kept], [rss for _, rss in kept]
        line = linear_regression(times, sizes)
        begin, end = (line.slope * at + line.intercept for at in (times[0], times[-1]))
        return sizes[-1] / sizes[0] - 1, end / begin - 1

    def late_growth(self, settle_min: float) -> tuple[float, float] | None:
        """Return the ``growth`` in the second half of the time after ``settle_min``. Bounded tables fill up
        in the first half, but a leak continues."""
        return self.growth((settle_min + self.minutes[-1]) / 2) if self.minutes else None


@dataclass
class Record:
    """All data for the result page."""

    seed: int
    settle_min: float
    rounds: list[dict[str, Any]] = field(default_factory=list)
    totals: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)
    lives: dict[tuple[str, str, int, float], Life] = field(default_factory=dict)

    def remember(self, states: Sequence[ServerState]) -> None:
        """Add the memory of all processes at a silence to their lives."""
        for state in states:
            for process in state.processes:
                key = (state.name, process.role, process.pid, process.since)
                if key not in self.lives:
                    before = sum(name == state.name and role == process.role for name, role, *_ in self.lives)
                    self.lives[key] = Life(state.name, process.role, before + 1)
                self.lives[key].minutes.append(round((time.time() - process.since) / 60, 2))
                self.lives[key].rss_mib.append(process.rss_mib)

    def failed(self, number: int, what: str) -> None:
        """Record a failure, with the round and the seed that reproduce it."""
        self.failures.append(f"round {number}, seed {self.seed}: {what}")

    def verdict(self) -> dict[str, Any]:
        """Return the numbers of leaks and failures, the growth of memory, and whether the soak ``holds``."""
        growths = [life.growth(self.settle_min) for life in self.lives.values()]
        late = [life.late_growth(self.settle_min) for life in self.lives.values()]
        left = [problem for one in self.rounds for problem in one["left"]]
        most, most_late = (
            max((max(pair) for pair in pairs if pair is not None), default=None) for pairs in (growths, late)
        )
        flat = most is None or most <= MOST_GROWTH
        return {
            "rounds": len(self.rounds),
            "leaked_blocks": sum("blocks not back" in problem for problem in left),
            "leaked_leases": sum("lease" in problem for problem in left),
            "other_leaks": sum("blocks not back" not in one and "lease" not in one for one in left),
            "failures": len(self.failures),
            "largest_rss_growth": None if most is None else round(most, 4),
            "largest_late_rss_growth": None if most_late is None else round(most_late, 4),
            "holds": bool(self.rounds) and not left and not self.failures and flat,
        }


def percent(share: float) -> str:
    """Return a share as percent, with a sign and one decimal."""
    return f"{100 * share:+.1f} %"


def told(share: float | None) -> str:
    """Return a growth as text; ``None`` means that the time was too short."""
    return "too short to say" if share is None else percent(share)


def page(record: Record, made: Any, wall_s: float, policy: str, drawn: bool) -> str:
    """Return the result as Markdown."""
    verdict = record.verdict()
    loads = [row["load_average"] for row in record.rounds] or [0.0]
    silences = [row["silence_s"] for row in record.rounds if "silence_s" in row] or [0.0]
    most, late = verdict["largest_rss_growth"], verdict["largest_late_rss_growth"]
    lives = [
        [
            f"{life.server}, {life.role}",
            f"{life.minutes[-1]:.0f}",
            f"{life.rss_mib[bisect_left(life.minutes, record.settle_min)]:.1f}",
            f"{life.rss_mib[-1]:.1f}",
            *map(percent, growth),
            *map(told, life.late_growth(record.settle_min) or (None, None)),
        ]
        for life in record.lives.values()
        if (growth := life.growth(record.settle_min)) is not None
    ]
    head = (
        "process", "minutes", f"MiB at minute {record.settle_min:g}", "MiB at the end",
        "growth", "of the line", "in the second half", "of its line",
    )  # fmt: skip
    others = sum(life.growth(record.settle_min) is None for life in record.lives.values())
    parts = [
        "# Soak: agents, floods, kills and restarts",
        made_by(made, wall_s),
        f"Two engines (model `tiny`, policy `{policy}`, host memory and disk) behind two gateways. "
        f"{verdict['rounds']} rounds of load and silence, seed {record.seed}; load average "
        f"{min(loads):.1f} to {max(loads):.1f}. "
        f"In the silences all was back after {min(silences):.0f} to {max(silences):.0f} s.",
        f"**Verdict: {'holds' if verdict['holds'] else 'does not hold'}.** "
        f"Silences with leaked blocks: {verdict['leaked_blocks']}, with leaked leases: "
        f"{verdict['leaked_leases']}, with other leaks: {verdict['other_leaks']}. "
        f"Failures: {verdict['failures']}. "
        f"Largest growth of memory after minute {record.settle_min:g}: "
        f"{told(most)} (bound: {percent(MOST_GROWTH)}), in the second half of that time: {told(late)}.",
        "## Memory",
        marked(head, lives),
        f"Resident memory at the silences of processes with at least three of them after minute "
        f"{record.settle_min:g} of their lives. {others} other processes were restarted sooner.",
        *(["![memory](soak.svg)"] if drawn else []),
        "## What happened",
        marked(("", "times"), [[what, f"{count:,}"] for what, count in sorted(record.totals.items())]),
        "## Failures",
        "\n".join(f"- {failure}" for failure in record.failures) or "None.",
        "{by hand}",
    ]
    return "\n\n".join(parts) + "\n"


def draw_memory(record: Record, path: Path) -> bool:
    """Plot the memory of each process relative to the first silence. Return False without matplotlib."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        return False
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    figure = Figure(figsize=(9, 4), layout="constrained")
    axis = figure.subplots()
    for life in record.lives.values():
        if len(life.minutes) > 2:
            own = [100 * (rss / life.rss_mib[0] - 1) for rss in life.rss_mib]
            axis.plot(life.minutes, own, linewidth=1.1, label=f"{life.server} {life.number}, {life.role}")
    axis.axvline(record.settle_min, color="#999999", linewidth=0.8, linestyle="--")
    axis.set_xlabel("minutes of the process's life")
    axis.set_ylabel("RSS over the first silence, %")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=7, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    return True


def write(record: Record, out: Path, made: Any, wall_s: float, policy: str) -> None:
    """Write ``soak.json``, ``soak.md`` and ``soak.svg`` into the folder ``out``."""
    drawn = draw_memory(record, out / "soak.svg")
    document = {
        "seed": record.seed,
        "wall_s": round(wall_s, 1),
        "verdict": record.verdict(),
        "totals": dict(sorted(record.totals.items())),
        "failures": record.failures,
        "lives": [asdict(life) for life in record.lives.values()],
        "rounds": [{key: row[key] for key in row if key != "states"} for row in record.rounds],
        "last_states": record.rounds[-1].get("states", []) if record.rounds else [],
    }
    write_result(out, "soak", made, document, page(record, made, wall_s, policy, drawn))
