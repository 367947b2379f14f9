"""Attention per step of prefill engines in lockstep, with a compute quota and with token-bounded steps.

    python benchmarks/compute_quota.py --out benchmarks/results

Several engines run as data-parallel ranks with shared expert layers. Each is vLLM's scheduler and prefix
cache without a model. Each plans a step, and the next step begins when the slowest engine has finished
(DualPath §6.2). Each engine has its own agents, which send their next turn at once. A turn has a long cached
context and a short append. Time is virtual and comes from a device and model profile or from ``sojourn
profile`` (``--profile``). The quota knows only the attention costs of that profile.

The report covers the steps in which every engine has a waiting request. For each bound it shows the attention
per step and engine (mean, spread, maximum ÷ quota), the used share of the quota, the maximum ÷ the mean of
the engines (1 if no engine waits), and the time for all turns. There is no decode and no copying. ``--rows``
prints every step.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from result_pages import made_by, marked, write_result
from rich.console import Console
from rich.table import Table
from sojourn_server.policies.costs.engine_profile import EngineProfile, PrefillCurve
from sojourn_server.policies.costs.step_costs import StepCosts
from sojourn_server.policies.prefill_decode.prefill_compute_quota import AttentionCosts
from sojourn_server.simulator.latency.latency_protocol import LatencyModel, StepWork
from sojourn_server.simulator.latency.latency_selection import load_latency_model
from sojourn_server.simulator.report.results_file import made_with

BLOCK_TOKENS = 16
SHORT_SHARE = 0.85
"""Share of appends that are short tool results. The others are the contents of files."""
SHORT_TOKENS, LONG_TOKENS = (50, 1_500), (2_000, 12_000)
UNBOUNDED_TOKENS = 65_536
"""Token limit of a step, for runs in which only the quota limits the step."""


class Way(NamedTuple):
    """One way to limit a step: to ``tokens``, and to ``quota_s`` seconds of attention."""

    name: str
    tokens: int
    quota_s: float | None = None


class Planned(NamedTuple):
    """One engine's plan of a step."""

    attention_s: float
    step_s: float
    tokens: int
    waiting: bool
    """Whether a request was left in the queue."""
    cpu_s: float
    """CPU seconds of ``schedule()``."""


@dataclass(slots=True)
class Load:
    """Requests of one engine's agents. Every way to limit steps gets the same requests."""

    contexts: list[int]
    appends: list[list[int]]
    """Appended tokens of each turn, by agent."""

    @classmethod
    def drawn(cls, draw: random.Random, agents: int, turns: int, shortest: int, longest: int) -> Load:
        """Draw a load: contexts of ``shortest`` to ``longest`` tokens, uniformly distributed."""

        def append() -> int:
            return draw.randrange(*(SHORT_TOKENS if draw.random() < SHORT_SHARE else LONG_TOKENS))

        contexts = [draw.randrange(shortest, longest) for _ in range(agents)]
        return cls(contexts, [[append() for _ in range(turns)] for _ in range(agents)])

    @property
    def most_tokens(self) -> int:
        """Tokens of the longest prompt."""
        return max(
            context + sum(appends) for context, appends in zip(self.contexts, self.appends, strict=True)
        )

    @property
    def kv_tokens(self) -> int:
        """Tokens of all contexts at the end."""
        return sum(self.contexts) + sum(map(sum, self.appends))


class PrefillEngine:
    """vLLM's scheduler with a prefix cache large enough to keep everything. Its agents send their next turn
    at once."""

    def __init__(self, load: Load, way: Way, profile: Path | None, latency: LatencyModel) -> None:
        from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

        settings = None
        if way.quota_s is not None:
            quota = {"compute_quota_s": way.quota_s, "profile_file": str(profile)}
            settings = {"policy": "observe", "strict": True, **quota}
        self._load = load
        self._latency = latency
        self._tokens = list(load.contexts)
        self._turn = [0] * len(load.contexts)
        self.engine = SimulatedEngine(
            SimulatedEngineOptions(
                blocks=load.kv_tokens // BLOCK_TOKENS + 2 * len(load.contexts) + 1_000,
                block_size=BLOCK_TOKENS,
                max_num_batched_tokens=way.tokens,
                max_num_seqs=1_024,
                max_model_len=load.most_tokens + 1_000,
                sojourn=settings,
            ),
            time.monotonic,
        )
        for agent in range(len(self._tokens)):
            self._ask(agent)
        self.engine.run()
        for agent in range(len(self._tokens)):
            self._next(agent)

    @property
    def busy(self) -> bool:
        """Whether any work is left."""
        return bool(self.engine.scheduler.has_unfinished_requests())

    def step(self, attention: AttentionCosts) -> Planned | None:
        """Plan a step and apply its results. Return the plan, or ``None`` if no work is left."""
        if not self.busy:
            return None
        scheduler = self.engine.scheduler
        began = time.thread_time()
        planned = self.engine.plan()
        cpu_s = time.thread_time() - began
        rows = [
            (scheduler.requests[request_id].num_computed_tokens - new, new)
            for request_id, new in planned.num_scheduled_tokens.items()
        ]
        finished = self.engine.update_from_output(planned)
        waiting = len(scheduler.waiting) > 0 or len(scheduler.running) > 0
        for request_id in finished:
            self._next(int(request_id.partition("/")[0]))
        tokens = sum(new for _, new in rows)
        pairs = sum(new * cached + new * (new + 1) // 2 for cached, new in rows)
        work = StepWork(
            requests=len(rows),
            tokens=tokens,
            attention_pairs=pairs,
            kv_tokens_read=sum(cached + new for cached, new in rows),
            sampled=len(finished),
        )
        attention_s = sum(attention.seconds(cached, new) for cached, new in rows)
        return Planned(attention_s, self._latency.step_s(work), tokens, waiting, cpu_s)

    def _next(self, agent: int) -> None:
        turn = self._turn[agent]
        if turn == len(self._load.appends[agent]):
            return
        self._turn[agent] += 1
        self._tokens[agent] += self._load.appends[agent][turn]
        self._ask(agent)

    def _ask(self, agent: int) -> None:
        first = agent * 10_000_000
        self.engine.add(f"{agent}/{self._turn[agent]}", range(first, first + self._tokens[agent]))


@dataclass(slots=True)
class Outcome:
    """Results of one way to limit steps."""

    way: Way
    steps: list[list[Planned | None]] = field(default_factory=list)
    virtual_s: float = 0.0

    @property
    def under_load(self) -> list[list[Planned]]:
        """The steps in which every engine left a request in its queue."""
        full = []
        for step in self.steps:
            mine = [planned for planned in step if planned is not None]
            if len(mine) == len(step) and all(planned.waiting for planned in mine):
                full.append(mine)
        return full

    def figures(self, quota_s: float) -> dict[str, Any]:
        """The figures as plain data. Raises ``SystemExit`` if no step was under load."""
        loaded = self.under_load
        if not loaded:
            raise SystemExit(f"error: {self.way.name}: never was somebody waiting everywhere; more --agents")
        every = [planned.attention_s for step in loaded for planned in step]
        ratios = [max(mine) / statistics.fmean(mine) for mine in _attention(loaded)]
        return {
            "way": self.way.name,
            "steps": len(self.steps),
            "steps_under_load": len(loaded),
            "virtual_s": self.virtual_s,
            "attention_mean_s": statistics.fmean(every),
            "attention_stdev_s": statistics.pstdev(every),
            "attention_largest_s": max(every),
            "largest_over_quota": max(every) / quota_s,
            "quota_used_mean": statistics.fmean(every) / quota_s,
            "quota_used_least": min(every) / quota_s,
            "steps_over_quota": sum(1 for each in every if each > quota_s * (1 + 1e-9)),
            "max_over_mean": statistics.fmean(ratios),
            "waited_share": 1 - sum(every) / sum(max(mine) * len(mine) for mine in _attention(loaded)),
            "tokens_a_step": statistics.fmean(planned.tokens for step in loaded for planned in step),
            "schedule_cpu_ms": statistics.fmean(p.cpu_s for step in loaded for p in step) * 1e3,
        }


def _attention(steps: Sequence[Sequence[Planned]]) -> Iterator[list[float]]:
    for step in steps:
        yield [planned.attention_s for planned in step]


def play(way: Way, loads: Sequence[Load], latency: LatencyModel, costs: StepCosts) -> Outcome:
    """Run all turns of all agents, with the engines in lockstep, and return the results."""
    attention = AttentionCosts.of(costs)
    outcome = Outcome(way)
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "profile.toml"
        profile.write_text(_profile(costs).to_toml(), encoding="utf-8")
        engines = [PrefillEngine(load, way, profile, latency) for load in loads]
        while any(engine.busy for engine in engines):
            step = [engine.step(attention) for engine in engines]
            mine = [planned for planned in step if planned is not None]
            # The time outside attention belongs to the shared layers and is the same for all engines.
            rest_s = max(planned.step_s - planned.attention_s for planned in mine)
            outcome.virtual_s += max(planned.attention_s for planned in mine) + rest_s
            outcome.steps.append(step)
    return outcome


def costs_of(latency: LatencyModel) -> StepCosts:
    """Return the attention costs of a latency model that is linear in attention pairs and in KV reads."""
    nothing = StepWork(1, 1, 0, 0, 0)
    many = 10**9
    base_s = latency.step_s(nothing)
    pairs_s = latency.step_s(nothing._replace(attention_pairs=many))
    read_s = latency.step_s(nothing._replace(kv_tokens_read=many))
    return StepCosts(base_s, 0.0, (pairs_s - base_s) / many, (read_s - base_s) / many, 0.0)


def _profile(costs: StepCosts) -> EngineProfile:
    return EngineProfile(
        model="benchmark",
        hardware="benchmark",
        engine="none",
        block_size=BLOCK_TOKENS,
        prefill=PrefillCurve(0.0, costs.token_s, costs.pair_s / 2),
        points=(),
        steps=costs,
    )


HEAD = (
    "a step is bounded by", "steps", "all turns s", "attention ms", "± ms", "largest ÷ quota", "quota used",
    "least used", "max ÷ mean", "waited for", "tokens", "schedule() ms",
)  # fmt: skip


def cells(row: dict[str, Any]) -> list[str]:
    """Return the cells of a table row."""
    bounded = row["way"].startswith("the quota")
    return [
        row["way"],
        f"{row['steps']:,}",
        f"{row['virtual_s']:.1f}",
        f"{row['attention_mean_s'] * 1e3:.1f}",
        f"{row['attention_stdev_s'] * 1e3:.1f}",
        f"{row['largest_over_quota']:.3f}",
        f"{row['quota_used_mean']:.1%}" if bounded else "–",
        f"{row['quota_used_least']:.1%}" if bounded else "–",
        f"{row['max_over_mean']:.2f}",
        f"{row['waited_share']:.1%}",
        f"{row['tokens_a_step']:,.0f}",
        f"{row['schedule_cpu_ms']:.2f}",
    ]


def plot(outcomes: Sequence[Outcome], quota_s: float, path: Path) -> None:
    """Plot the sorted attention times of all steps. A flat line means that steps are even."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axis = figure.subplots()
    for outcome, colour in zip(outcomes, ("#D55E00", "#E69F00", "#0072B2"), strict=False):
        every = sorted(planned.attention_s * 1e3 for step in outcome.under_load for planned in step)
        shares = [100 * (number + 0.5) / len(every) for number in range(len(every))]
        axis.plot(shares, every, color=colour, label=outcome.way.name)
    axis.axhline(quota_s * 1e3, color="#777777", linewidth=0.8, linestyle="--")
    axis.set(xlabel="steps of engines, %, by their attention", ylabel="attention, ms", ylim=(0, None))
    axis.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Creator": None})


def run(options: argparse.Namespace) -> tuple[list[Outcome], StepCosts]:
    """Run every way to limit steps on the same loads. Return the results and the attention costs."""
    hardware = str(options.profile) if options.profile is not None else options.hardware
    latency, _ = load_latency_model(hardware, None if options.profile is not None else options.model)
    costs = costs_of(latency)
    draw = random.Random(options.seed)
    loads = [
        Load.drawn(draw, options.agents, options.turns, options.shortest, options.longest)
        for _ in range(options.engines)
    ]
    ways = [Way(f"{tokens:,} tokens", tokens) for tokens in options.tokens]
    most = max(UNBOUNDED_TOKENS, *options.tokens)
    ways.append(Way(f"the quota, {options.quota_s * 1e3:g} ms", most, options.quota_s))
    return [play(way, loads, latency, costs) for way in ways], costs


def arguments() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hardware", default="h200", help="a shipped device (default: h200)")
    parser.add_argument("--model", default="qwen2.5-32b", help="a shipped model (default: qwen2.5-32b)")
    parser.add_argument("--profile", type=Path, help="in their place: TOML of sojourn profile")
    parser.add_argument("--quota-s", type=float, default=0.3)
    parser.add_argument("--tokens", type=int, nargs="+", default=[2_048, 8_192], help="of steps without it")
    parser.add_argument("--engines", type=int, default=8, help="that compute in step (default: 8)")
    parser.add_argument("--agents", type=int, default=40, help="of each engine (default: 40)")
    parser.add_argument("--turns", type=int, default=12, help="of each agent (default: 12)")
    parser.add_argument("--shortest", type=int, default=8_000, help="context, tokens (default: 8000)")
    parser.add_argument("--longest", type=int, default=64_000, help="the same (default: 64000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", action="store_true", help="print every step of the last way")
    parser.add_argument("--out", type=Path, help="folder to write compute_quota.json, .md and .svg into")
    return parser


def main() -> None:
    """Run, print and write the results."""
    options = arguments().parse_args()
    began, console = time.monotonic(), Console()
    outcomes, costs = run(options)
    if options.rows:
        for number, step in enumerate(outcomes[-1].steps):
            told = "  ".join("–" if p is None else f"{p.attention_s * 1e3:6.1f}" for p in step)
            console.print(f"{number:5d}  {told}", highlight=False)
    rows = [outcome.figures(options.quota_s) for outcome in outcomes]
    columns = list(zip(HEAD, *map(cells, rows), strict=True))
    table = Table(*columns[0], title=f"{options.engines} engines in step, {options.agents} agents each")
    for line in columns[1:]:
        table.add_row(*line)
    console.print(table)
    if options.out is None:
        return
    made = made_with(sys.argv)
    parameters = {
        name: value for name, value in vars(options).items() if name not in ("out", "rows", "profile")
    }
    document = {"options": parameters, "costs": costs._asdict(), "ways": rows}
    page = "\n".join(
        [
            "# The compute quota on vLLM's own scheduler",
            "",
            f"{options.engines} engines that compute in step and wait for the slowest one's attention; each "
            f"with {options.agents} agents that take {options.turns} turns, contexts of {options.shortest:,} "
            f"to {options.longest:,} tokens and more, cached but for what a turn appends. Seconds are "
            f"virtual: {costs.pair_s * 1e9:.2f} ns a pair, {costs.kv_token_s * 1e9:.0f} ns a token of KV.",
            "",
            marked(HEAD, map(cells, rows)),
            "",
            "Attention is of an engine's step, in steps in which every engine leaves somebody in line; "
            "*max ÷ mean* is of the engines of a step, and *waited for* the share of all engines' seconds "
            "that it means. *schedule()* is CPU time of this machine, stock's where no quota is.",
            "",
            "![attention of steps](compute_quota.svg)",
            "",
            "{by hand}",
            "",
            made_by(made, time.monotonic() - began),
            "",
        ]
    )
    write_result(options.out, "compute_quota", made, document, page)
    plot(outcomes, options.quota_s, options.out / "compute_quota.svg")


if __name__ == "__main__":
    main()
