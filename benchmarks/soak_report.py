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

from result_pages import Result, marked
from soak_stack import ServerState

MOST_GROWTH = 0.02
"""Maximum growth of a process's memory after ``--settle`` minutes of its life, as a share."""
SPARE_FILE_DESCRIPTORS = 16
"""A process may have this many file descriptors more than after the first silence, because connection pools
vary. More are a leak."""


def problems(states: Sequence[ServerState], first: Mapping[str, ServerState]) -> list[str]:
    """Return one line for each thing that was not released. ``first`` maps a server's name to its state after
    the first silence."""
    found = []
    for state in states:
        found += [f"{state.name}: {count:g} {what}" for what, count in state.counts.items() if count]
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
        left = [problem for one in self.rounds for problem in one["left"]]
        most = max((max(pair) for pair in growths if pair is not None), default=None)
        flat = most is None or most <= MOST_GROWTH
        return {
            "rounds": len(self.rounds),
            "leaked_blocks": sum("blocks not back" in problem for problem in left),
            "leaked_leases": sum("lease" in problem for problem in left),
            "other_leaks": sum("blocks not back" not in one and "lease" not in one for one in left),
            "failures": len(self.failures),
            "largest_rss_growth": None if most is None else round(most, 4),
            "holds": bool(self.rounds) and not left and not self.failures and flat,
        }


def percent(share: float) -> str:
    """Return a share as percent, with a sign and one decimal."""
    return f"{100 * share:+.1f} %"


def page(record: Record, policy: str) -> list[str]:
    """Return the paragraphs of the page."""
    verdict = record.verdict()
    loads = [row["load_average"] for row in record.rounds] or [0.0]
    silences = [row["silence_s"] for row in record.rounds if "silence_s" in row] or [0.0]
    most = verdict["largest_rss_growth"]
    lives = [
        [
            f"{life.server}, {life.role}",
            f"{life.minutes[-1]:.0f}",
            f"{life.rss_mib[bisect_left(life.minutes, record.settle_min)]:.1f}",
            f"{life.rss_mib[-1]:.1f}",
            *map(percent, growth),
        ]
        for life in record.lives.values()
        if (growth := life.growth(record.settle_min)) is not None
    ]
    begin = f"MiB at minute {record.settle_min:g}"
    head = ("process", "minutes", begin, "MiB at the end", "growth", "of the line")
    others = sum(life.growth(record.settle_min) is None for life in record.lives.values())
    return [
        f"Two engines (model `tiny`, policy `{policy}`, host memory and disk) behind two gateways. "
        f"{verdict['rounds']} rounds of load and silence, seed {record.seed}; load average "
        f"{min(loads):.1f} to {max(loads):.1f}. "
        f"In the silences all was back after {min(silences):.0f} to {max(silences):.0f} s.",
        f"**Verdict: {'holds' if verdict['holds'] else 'does not hold'}.** "
        f"Silences with leaked blocks: {verdict['leaked_blocks']}, with leaked leases: "
        f"{verdict['leaked_leases']}, with other leaks: {verdict['other_leaks']}. "
        f"Failures: {verdict['failures']}. "
        f"Largest growth of memory after minute {record.settle_min:g}: "
        f"{'too short to say' if most is None else percent(most)} (bound: {percent(MOST_GROWTH)}).",
        "## Memory",
        marked(head, lives),
        f"Resident memory at the silences of processes with at least three of them after minute "
        f"{record.settle_min:g} of their lives. {others} other processes were restarted sooner.",
        "## What happened",
        marked(("", "times"), [[what, f"{count:,}"] for what, count in sorted(record.totals.items())]),
        "## Failures",
        "\n".join(f"- {failure}" for failure in record.failures) or "None.",
        "{by hand}",
    ]


def write(record: Record, out: Path, result: Result, policy: str) -> None:
    """Write ``soak.json`` and ``soak.md`` into the folder ``out``."""
    document = {
        "seed": record.seed,
        "wall_s": round(result.wall_s, 1),
        "verdict": record.verdict(),
        "totals": dict(sorted(record.totals.items())),
        "failures": record.failures,
        "lives": [asdict(life) for life in record.lives.values()],
        "rounds": [{key: row[key] for key in row if key != "states"} for row in record.rounds],
        "last_states": record.rounds[-1].get("states", []) if record.rounds else [],
    }
    result.write(out, document, *page(record, policy))
