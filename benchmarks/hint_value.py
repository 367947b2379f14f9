"""What a hint is worth: programs' completion with each hint true, absent, wrong by half, and hostile.

    python benchmarks/hint_value.py --cache hint-cache

Each load is made so that a hint can matter: memory is short, and what the hint says cannot be learned from
earlier programs. Programs arrive by a Poisson process and run until all have ended. Beside the hint clients
send what sojourn's SDK sends. *Half*: a program's numbers are all halved or all doubled, and half of its
other values are wrong. *Hostile*: half of the programs state what would help them most, were it believed
(``stated_hints.HOSTILE``); *honest* counts the others. Bounds: unlimited KV memory, and ``sojourn`` with
the work that each program has left (``oracle_policies``).
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import replace as replace_run
from itertools import pairwise
from math import exp, log, nan
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple

from kept_runs import run_arguments, run_kept
from msgspec.structs import replace
from oracle_policies import WORK_ORACLE, know_work
from result_pages import Result, marked, show
from sojourn_server.metrics.summary_statistics import summarise
from sojourn_server.simulator.report.run_metrics import service_s
from sojourn_server.simulator.simulation import Simulation
from sojourn_server.simulator.simulation_run import RunSpec, run_simulation
from sojourn_server.simulator.workloads.arrival_processes import open_loop
from sojourn_server.simulator.workloads.program_plans import ProgramPlanner
from sojourn_server.simulator.workloads.synthetic_workloads import append_only
from sojourn_server.traces.trace_schema import TraceProgram, TraceToolRun, TraceTurn
from stated_hints import HintSetting, state

QUALITIES = ("true", "half", "hostile")
BOUNDS = ("unlimited", WORK_ORACLE)
COLUMNS = (
    *(("mean", quality) for quality in QUALITIES), ("honest", "hostile"),
    *((figure, quality) for figure in ("P95", "ended", "work") for quality in QUALITIES),
)  # fmt: skip
"""(figure, quality) of the table."""
LIARS = 0.5
"""Share of the programs that lie in a hostile run."""

# -- the loads ----------------------------------------------------------------------

FIRST_PART = 3_000
"""Tokens of a planner's prompt that its workers' prompts begin with, such as task and rules."""
ITEM_TURNS = 4
"""Mean number of turns of an item of a to-do list."""


def agent(rng: random.Random, turns: int, kind: str, tools: Sequence[float], **more: Any) -> TraceProgram:
    """An agent whose context grows by about 450 tokens a turn; ``tools``: the seconds of its calls."""
    appends = [rng.randint(2_000, 4_000), *(rng.randint(100, 500) for _ in range(turns - 1))]
    outputs = [rng.randint(50, 250) for _ in range(turns)]
    runs = [TraceToolRun(name="tool", s=round(seconds, 3)) for seconds in tools]
    return replace(append_only(appends, outputs, runs, agent_type=kind), **more)


def with_hints(program: TraceProgram, hints: Sequence[dict[str, Any]]) -> TraceProgram:
    turns = (replace(turn, hints=hint) for turn, hint in zip(program.turns, hints, strict=True))
    return replace(program, turns=tuple(turns))


def short_tools(rng: random.Random, count: int) -> list[float]:
    return [0.1 + rng.expovariate(0.5) for _ in range(count)]


def step_limits(rng: random.Random) -> Iterator[TraceProgram]:
    """Agents of one type that use all of their steps: 5 to 100."""
    turns = rng.choice((5, 10, 20, 50, 100))
    yield agent(rng, turns, "worker", short_tools(rng, turns))


def to_do_lists(rng: random.Random) -> Iterator[TraceProgram]:
    """Agents that know their list of things to do, and guess ``ITEM_TURNS`` turns for each item."""
    items = [1 + min(15, int(rng.expovariate(1 / (ITEM_TURNS - 1)))) for _ in range(rng.randint(2, 14))]
    left = [
        float((len(items) - item - 1) * ITEM_TURNS + max(0, ITEM_TURNS - 1 - turn))
        for item, turns in enumerate(items)
        for turn in range(turns)
    ]
    made = agent(rng, sum(items), "assistant", short_tools(rng, sum(items)))
    yield with_hints(made, [{"expected_steps_left": steps} for steps in left])


def long_outputs(rng: random.Random) -> Iterator[TraceProgram]:
    """Requests of one type: a third thinks for 2,000 to 16,000 tokens, the others answer at once."""
    turns = rng.randint(1, 3)
    outputs = [
        round(exp(rng.uniform(log(2_000), log(16_000)))) if rng.random() < 0.35 else rng.randint(50, 400)
        for _ in range(turns)
    ]
    tools = [TraceToolRun(name="search", s=1.0)] * turns
    yield append_only([rng.randint(500, 3_000) for _ in outputs], outputs, tools, agent_type="thinker")


def known_tools(rng: random.Random) -> Iterator[TraceProgram]:
    """Agents with long contexts and one tool, whose calls take up to a minute. The caller knows."""
    turns = rng.randint(8, 16)
    made = agent(rng, turns, "operator", [rng.choice((0.5, 2.0, 15.0, 60.0)) for _ in range(turns)])
    longer = [replace(turn, prompt_tokens=turn.prompt_tokens + 16_000) for turn in made.turns]
    yield replace(made, turns=tuple(longer))


def urgent_ones(rng: random.Random) -> Iterator[TraceProgram]:
    """A fifth are short, urgent and important; the others have an hour."""
    kind, turns, hints = "urgent", rng.randint(3, 8), {"priority": 10, "deadline_seconds": 90.0}
    if rng.random() < 0.8:
        kind, turns, hints = "batch", rng.randint(15, 40), {"priority": 1, "deadline_seconds": 3600.0}
    yield with_hints(agent(rng, turns, "agent", short_tools(rng, turns), tenant=kind), [hints] * turns)


BRANCHES = {
    "nodes": ["plan", "work", "join"],
    "edges": [
        ("__start__", "plan", 1.0), ("plan", "work", 1.0), ("work", "work", 5 / 7), ("work", "join", 2 / 7),
        ("join", "work", 0.5), ("join", "__end__", 0.5),
    ],
}  # fmt: skip


def branches(rng: random.Random) -> Iterator[TraceProgram]:
    """A planner; two to five workers one after the other, whose prompts keep only its first part; a join that
    returns to the planner's whole context; then other workers, or the end."""
    turns: list[TraceTurn] = []
    prompt, output, back = rng.randint(6_000, 14_000), 800, {}
    while True:
        hints = {"node": "join" if turns else "plan", "graph": BRANCHES}
        turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=output, gap_s=1.0, hints=hints, **back))
        if len(turns) > 1 and (rng.random() < 0.5 or len(turns) > 20):
            break
        back = {"prefix_tokens": FIRST_PART, "prefix_tokens_any": prompt + output}
        hints = {"node": "work", "graph": BRANCHES}
        for _ in range(rng.randint(2, 5)):
            asked, told, gap_s = rng.randint(1_500, 3_000), rng.randint(200, 600), rng.uniform(2.0, 15.0)
            length = {"prompt_tokens": FIRST_PART + asked, "output_tokens": told, "gap_s": round(gap_s, 3)}
            turns.append(TraceTurn(prefix_tokens=FIRST_PART, reset=True, hints=hints, **length))
        prompt, output = prompt + output + 400 * 4, 600
    yield TraceProgram(program_id="", turns=tuple(turns), agent_type="planner")


def pipelines(rng: random.Random) -> Iterator[TraceProgram]:
    """Applications of twenty kinds, each a chain of 3 to 40 steps whose last one, a review, may send back to
    the step before it."""
    kind = rng.randrange(20)
    chain = [f"step {number}" for number in range(random.Random(f"pipeline {kind}").randint(3, 40))]
    edges = [("__start__", chain[0], 1.0), *((one, after, 1.0) for one, after in pairwise(chain))]
    edges += [(chain[-1], chain[-2], 0.3), (chain[-1], "__end__", 0.7)]
    nodes = list(chain)
    while rng.random() < 0.3:
        nodes += chain[-2:]
    made = agent(rng, len(nodes), f"pipeline {kind}", short_tools(rng, len(nodes)))
    yield with_hints(made, [{"node": node, "graph": {"nodes": chain, "edges": edges}} for node in nodes])


FAN_OUT = {
    "nodes": ["plan", "join"],
    "edges": [
        ("__start__", "plan", 1.0), ("plan", "join", 1.0), ("join", "join", 0.5), ("join", "__end__", 0.5),
    ],
}  # fmt: skip
WORKER = {
    "nodes": ["work"],
    "edges": [("__start__", "work", 1.0), ("work", "work", 0.8), ("work", "__end__", 0.2)],
}


def fan_out(rng: random.Random) -> Iterator[TraceProgram]:
    """A planner whose workers are sub-agents at the same time. They share the first part of its prompt. It
    returns to its whole context when all have ended, and starts others or ends."""
    team = {"group": f"team {rng.random()}", "shared_prefix_tokens": FIRST_PART}
    prompts = [rng.randint(6_000, 14_000)]
    while (rng.random() < 0.5 and len(prompts) < 4) or len(prompts) < 2:
        prompts.append(prompts[-1] + 800 + 400 * 4)
    turns = []
    for number, prompt in enumerate(prompts):
        hints = {"node": "join" if number else "plan", "graph": FAN_OUT, "kv_retention_ttl_seconds": 60.0}
        kind = "agents" if number + 1 < len(prompts) else None
        turns.append(TraceTurn(prompt_tokens=prompt, output_tokens=800, gap_kind=kind, hints=hints))
        for _ in range(rng.randint(2, 5) if kind else 0):
            steps = rng.randint(3, 8)
            worker = agent(
                rng, steps, "worker", short_tools(rng, steps), parent="", parent_turn=number, **team
            )
            grown = [replace(turn, prompt_tokens=turn.prompt_tokens + FIRST_PART) for turn in worker.turns]
            yield with_hints(replace(worker, turns=grown), [{"node": "work", "graph": WORKER}] * steps)
    yield TraceProgram(program_id="", turns=tuple(turns), agent_type="planner", **team)


@dataclass(frozen=True, kw_only=True)
class Load:
    """Programs that arrive, and the memory that they share."""

    make: Callable[[random.Random], Iterator[TraceProgram]]
    """Draws a program: its sub-agents, then itself."""
    hints: tuple[str, ...]
    rate_per_s: float
    pool_tokens: int
    programs: int = 80
    replicas: int | None = None
    policy: str | None = None
    """Policy in place of the chosen one."""
    counted: str | None = None
    """Tenant whose programs count; ``None``: all."""

    def draw(self, seed: int) -> list[TraceProgram]:
        made = []
        for number in range(self.programs):
            *workers, root = self.make(random.Random(f"{seed}/{number}"))
            made.append(replace(root, program_id=f"p{number}"))
            for place, worker in enumerate(workers):
                made.append(replace(worker, program_id=f"p{number}.{place}", parent=f"p{number}"))
        return made


LOADS = {
    "step limits": Load(
        make=step_limits, hints=("expected_steps_left", "expected_resume"), rate_per_s=0.12,
        pool_tokens=150_000,
    ),
    "to-do lists": Load(
        make=to_do_lists, hints=("expected_steps_left",), rate_per_s=0.14, pool_tokens=150_000
    ),
    "long outputs": Load(
        make=long_outputs, hints=("expected_output_length",), rate_per_s=0.14, pool_tokens=100_000
    ),
    "known tools": Load(
        make=known_tools, hints=("expected_s", "kv_retention_ttl_seconds"), rate_per_s=0.2,
        pool_tokens=100_000,
    ),
    "branches": Load(
        make=branches, hints=("aeg", "expected_steps_left"), rate_per_s=0.2, pool_tokens=100_000
    ),
    "fan-out": Load(
        make=fan_out, hints=("aeg", "expected_resume", "kv_retention_ttl_seconds"), rate_per_s=0.15,
        pool_tokens=150_000,
    ),
    "pipelines": Load(
        make=pipelines, hints=("aeg", "expected_steps_left"), rate_per_s=0.25, pool_tokens=120_000
    ),
    "urgent": Load(
        make=urgent_ones, hints=("priority", "deadline_seconds"), rate_per_s=0.14, pool_tokens=100_000,
        counted="urgent",
    ),
    "urgent, gateway": Load(
        make=urgent_ones, hints=("deadline_seconds",), rate_per_s=0.28, pool_tokens=100_000,
        counted="urgent", replicas=2, policy="saga",
    ),
}  # fmt: skip

# -- the runs -----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Run:
    """One load under one policy. Plain data, so that its result can be kept."""

    load: str
    policy: str
    hint: str | None = None
    """``None``: no hint beyond what the SDK sends."""
    quality: str = "true"
    ends: bool = True
    seed: int = 0


class Ended(NamedTuple):
    """A program that counts."""

    program_id: str
    completion_s: float
    in_time: bool
    """Whether it had ended when the last program arrived."""
    work_s: float


def play(run: Run) -> list[Ended]:
    """The programs of a run that count."""
    load, is_oracle = LOADS[run.load], run.policy == WORK_ORACLE
    spec = RunSpec(
        policy="sojourn" if is_oracle else run.policy, workload=run.load, hardware="a100-80gb",
        model="llama-3.1-8b", async_scheduling=True, pool_tokens=load.pool_tokens, replicas=load.replicas,
        programs=load.programs, rate_per_s=load.rate_per_s, until_s=None, seed=run.seed,
    )  # fmt: skip
    arrivals = open_loop(ProgramPlanner(load.draw(run.seed)), load.rate_per_s, load.programs, run.seed)

    def prepare(simulation: Simulation) -> None:
        state(setting(run))(simulation)
        if is_oracle:
            know_work(simulation)

    done = run_simulation(spec, arrivals=arrivals, prepare=prepare)
    assert not done.hook_failures, (run, done.notes)
    # Behind a gateway, a program's request may reach its engine before its event of a tool's end.
    assert load.replicas or not done.refused_hints, run
    work_s: Counter[str] = Counter()
    for program in done.programs:
        work_s[program.parent or program.program_id] += service_s(program)
    roots = [program for program in done.programs if program.parent is None]
    last_s = max(program.arrived_s for program in roots)
    return [
        Ended(p.program_id, p.finished_s - p.arrived_s, p.finished_s <= last_s, work_s[p.program_id])
        for p in roots
        if load.counted in (None, p.tenant) and p.finished_s is not None
    ]


def setting(run: Run) -> HintSetting:
    """What clients state in a run."""
    liars = LIARS if run.quality == "hostile" else 1.0
    stated = () if run.hint is None else (run.hint,)
    return HintSetting(stated=stated, quality=run.quality, liars=liars, ends=run.ends)


def figures(found: Sequence[Ended]) -> dict[str, float]:
    times = summarise(one.completion_s for one in found)
    in_time = [one for one in found if one.in_time]
    return {
        "mean": times["mean"] or nan,
        "P95": times["p95"] or nan,
        "ended": len(in_time),
        "work": sum(one.work_s for one in in_time),
    }


def compared(run: Run, found: Mapping[Run, Sequence[Ended]], base: Run) -> dict[str, float]:
    """Figures of a run ÷ those of ``base``."""
    mine, theirs = figures(found[run]), figures(found[base])
    ratios = {name: mine[name] / theirs[name] if theirs[name] else nan for name in mine}
    if run.quality == "hostile":
        lies = setting(run).lies
        means = (
            fmean(one.completion_s for one in found[each] if not lies(one.program_id)) for each in (run, base)
        )
        ratios["honest"] = next(means) / next(means)
    return ratios


def plan(policy: str, names: Sequence[str], seed: int) -> dict[tuple[str, str, str], tuple[Run, Run]]:
    """(load, hint or bound, quality) → the run, and the run without that hint."""
    made = {}
    for name in names:
        load = LOADS[name]
        base = Run(load=name, policy=load.policy or policy, seed=seed)
        for hint in load.hints:
            # Where the hint says that a program ends, no event does: coding agents report no ends.
            one = replace_run(base, hint=hint, ends=hint != "expected_resume")
            for quality in QUALITIES:
                made[name, hint, quality] = replace_run(one, quality=quality), replace_run(one, hint=None)
        if load.replicas is None:
            for bound in BOUNDS:
                made[name, f"bound: {bound}", "true"] = replace_run(base, policy=bound), base
    return made


Ratios = dict[tuple[str, str], dict[str, dict[str, float]]]
"""(load, hint) → quality → figure → ratio to the run without the hint, geometric mean over the seeds."""


def measured(options: Namespace, names: Sequence[str]) -> Ratios:
    """Run what ``plan`` plans."""
    plans = [plan(options.policy, names, seed) for seed in range(options.seeds)]
    runs = list(dict.fromkeys(run for made in plans for pair in made.values() for run in pair))
    found = dict(zip(runs, run_kept(runs, options.cache, options.jobs, play), strict=True))
    ratios: Ratios = {}
    for load, hint, quality in plans[0]:
        of_seeds = [compared(run, found, base) for run, base in (made[load, hint, quality] for made in plans)]
        means = {figure: geometric_mean([of[figure] for of in of_seeds]) for figure in of_seeds[0]}
        ratios.setdefault((load, hint), {})[quality] = means
    return ratios


HEAD = ("load", "hint", *(f"{figure}: {quality}" for figure, quality in COLUMNS))


def lines(ratios: Ratios) -> list[list[str]]:
    """The table's rows."""
    return [
        [load, hint, *(f"{of[q][f]:.2f}" if f in of.get(q, {}) else "–" for f, q in COLUMNS)]
        for (load, hint), of in ratios.items()
    ]


def page(ratios: Ratios, options: Namespace) -> list[str]:
    """The paragraphs of the page; ``{by hand}`` marks the place of hand-written text."""
    loads = [
        f"- *{name}*: {(load.make.__doc__ or '').split('.')[0]}. {load.programs} programs, "
        f"{load.rate_per_s:g} a second, {load.pool_tokens:,} KV tokens"
        + (f"; `{load.policy}`, {load.replicas} engines" if load.replicas else "")
        + ("; only the urgent ones count" if load.counted else "")
        for name, load in LOADS.items()
    ]
    words = (
        f"Policy `{options.policy}` in the simulator, {options.seeds} seeds. Ratios to the same run without "
        "the hint: mean and P95 of completion (below 1 is better); programs that had ended when the last one "
        "arrived, and their work, in seconds that it takes alone (above 1 is better)."
    )
    return [words, marked(HEAD, lines(ratios)), "{by hand}", "\n".join(loads)]


def main() -> None:
    parser = run_arguments(__doc__)
    parser.add_argument("--policy", default="sojourn", help="preset of the engine")
    parser.add_argument("--only", help="loads, commas between")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    result = Result("hint_value", "What a hint is worth")
    names = options.only.split(",") if options.only else list(LOADS)
    ratios = measured(options, names)
    document = {
        "policy": options.policy, "seeds": options.seeds,
        "ratios": [{"load": load, "hint": hint, **of} for (load, hint), of in ratios.items()],
    }  # fmt: skip
    result.write(options.out, document, *page(ratios, options))
    show(HEAD, lines(ratios))


if __name__ == "__main__":
    main()
