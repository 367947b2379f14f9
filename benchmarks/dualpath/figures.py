"""Two paths to storage in a simulated cluster, against DualPath's figures.

    python benchmarks/dualpath/figures.py --cache pd-cache

One number is fitted, the share of its FLOP peak that a prefill device achieves (``CALIBRATED_EFFICIENCY``):
DualPath on 2P4D with 2,000 agents of the 64K workload takes as long as in the paper's Table 3. All other
figures are predictions.

scale      Table 3: the fitted row, and 48P96D with 48,000 agents, 1,152 devices; 44P88D online
ablation   §7.5: the gain of each part, 1,024 and 2,048 agents, 2P4D
links      Figure 13: balance between storage NICs, three nodes
online     §7.4: latencies, and agents per second within the service levels
loads      §7.3, Figure 7: the three workloads
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from kept_runs import run_arguments, run_kept  # noqa: E402
from pd_cluster import CALIBRATION_JCT_S, PD_MODELS, PdCluster  # noqa: E402
from pd_simulation import PD_SYSTEMS, PdOutcome, PdSpec, run_prefill_decode  # noqa: E402
from result_pages import Result, marked, number  # noqa: E402

TTFT_SLO_S, TPOT_SLO_S = 4.0, 0.05
"""DualPath's SLO (§7.4): maximum of the mean TTFT, and of the mean TPOT."""
ONLINE_S, WARM_UP_S = 7200.0, 3600.0
"""Virtual seconds of runs that find a capacity, and of their warm-up. An agent takes a quarter of an hour,
and above the capacity latencies grow slowly at first, so one hour is too short."""
HOUR = {"until_s": 3600.0, "warm_up_s": 1800.0}
"""Length and warm-up of runs that measure latencies well below the capacity."""
_RATES = tuple(round(0.05 * step, 2) for step in range(4, 23))
RATES = {"ds-660b": _RATES, "ds-27b": (*_RATES, 1.3, 1.5, 1.7, 1.9, 2.1, 2.3)}
"""Model → rates in agents per second, among which the capacity is searched."""
COMPARED = ("basic", "scheduling", "oracle")
NODES = {"ds-660b": (2, 4), "ds-27b": (1, 1), "qwen2.5-32b": (1, 2)}
"""Model → the paper's default numbers of prefill and decode nodes."""
PUBLISHED_JCT_S = {"2P4D": CALIBRATION_JCT_S, "48P96D": 3201.0}
PUBLISHED_SEEN = {"2P4D": "1.739 s, 0.228 s, 39 ms", "44P88D": "1.847 s, 0.194 s, 36 ms"}
"""TTFT, TTST and TPOT in Table 3."""
PUBLISHED_GAINS = {"ds-660b": 2.25, "ds-27b": 1.67}
"""Agents per second within the service levels, DualPath ÷ Basic (§7.4)."""
SEEN_HEAD = ("", "turns/s", "TTFT, mean", "TTFT, P95", "TTST", "TPOT")


TITLES = {name: system.title for name, system in PD_SYSTEMS.items()}


class Bench:
    """Runs specifications, and collects all results for the JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, list[PdOutcome]] = {}

    def spec(
        self,
        *,
        nodes: tuple[int, int] = (2, 4),
        model: str = "ds-660b",
        **given: Any,
    ) -> PdSpec:
        """A specification, with the number of agents or the duration scaled by ``--share``."""
        cluster = PdCluster(prefill_nodes=nodes[0], decode_nodes=nodes[1], model=PD_MODELS[model])
        made = PdSpec(cluster=cluster, seed=self.options.seed, **given)
        share = self.options.share
        changes: dict[str, Any] = {"until_s": made.until_s * share, "warm_up_s": made.warm_up_s * share}
        if made.until_s == math.inf:
            changes = {"agents": max(2, round(made.agents * share))}
        return msgspec.structs.replace(made, **changes)

    def online(self, rate_per_s: float, **given: Any) -> PdSpec:
        """A specification with agents that arrive at ``rate_per_s``."""
        given = {"agents": 10**9, "until_s": ONLINE_S, "warm_up_s": WARM_UP_S, **given}
        return self.spec(rate_per_s=rate_per_s, **given)

    def run(self, part: str, specs: Sequence[PdSpec]) -> list[PdOutcome]:
        """The results of the specifications, in order."""
        outcomes = run_kept(specs, self.options.cache, self.options.jobs, run_prefill_decode)
        self.found.setdefault(part, []).extend(outcomes)
        return outcomes

    def compare(self, part: str, systems: Sequence[str] = COMPARED, **given: Any) -> list[PdOutcome]:
        """The results of one set-up under each of ``systems``."""
        return self.run(part, [self.spec(system=system, **given) for system in systems])


def seconds(outcome: PdOutcome) -> str:
    return f"{outcome.virtual_s:,.0f} s"


def seen(outcome: PdOutcome) -> list[str]:
    """The cells of a table row: turns per second, and latencies."""
    if outcome.ttft_mean is None or outcome.tpot_mean is None:
        return ["–"] * 5
    return [
        f"{outcome.turns / outcome.virtual_s:,.1f}",
        *(f"{each:.3f} s" for each in (outcome.ttft_mean, outcome.ttft_p95, outcome.ttst_mean)),
        f"{1000 * outcome.tpot_mean:.1f} ms",
    ]


def busy_nics(outcome: PdOutcome) -> str:
    return " ".join(f"{share:.0%}" for share in outcome.nic_busy)


def section(heading: str, text: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    return [f"## {heading}", *([text] if text else []), marked(head, lines)]


def scale_table(bench: Bench) -> list[str]:
    small = bench.compare("scale", tuple(PD_SYSTEMS))
    large = bench.compare("scale", tuple(PD_SYSTEMS), nodes=(48, 96), agents=48_000)
    online = bench.run("scale", [bench.online(0.4, **HOUR), bench.online(8.8, nodes=(44, 88), **HOUR)])
    table_3 = []
    for outcomes, what in ((small, "fitted"), (large, "predicted")):
        dual = next(each for each in outcomes if each.system == "scheduling")
        published_s = PUBLISHED_JCT_S[dual.cluster]
        name = f"{dual.cluster}, {dual.agents:,} agents: completion, {what}"
        table_3.append([name, seconds(dual), f"{published_s:,.0f} s", f"{dual.virtual_s / published_s:.2f}"])
    for each in online:
        name = f"{each.cluster}, {each.rate_per_s:g} agents/s: TTFT, TTST, TPOT, predicted"
        _, ttft, _, ttst, tpot = seen(each)
        table_3.append([name, f"{ttft}, {ttst}, {tpot}", PUBLISHED_SEEN[each.cluster], ""])
    lines = [
        [
            TITLES[few.system], seconds(few), seconds(many),
            f"{(many.turns / many.virtual_s) / (few.turns / few.virtual_s):.1f}×",
            number(many.nic_max_over_mean), f"{many.turns / 1e6:.2f} M", f"{many.cpu_s:,.0f} s",
            f"{1e6 * many.cpu_s / many.turns:.0f} µs",
        ]
        for few, many in zip(small, large, strict=True)
    ]  # fmt: skip
    head = (
        "system", "2P4D, 2,000", "48P96D, 48,000", "turns/s, of 24×", "links, 48P96D", "turns", "CPU",
        "a turn",
    )  # fmt: skip
    cpu_s = sum(each.cpu_s for each in large)
    text = f"All five systems on 48P96D took {cpu_s:,.0f} s of CPU, each in one process."
    head_3 = ("", "here", "published", "here / published")
    return [
        *section("Table 3: one row fitted, the others predicted", "", head_3, table_3),
        *section("To 1,152 devices", text, head, lines),
        "Online (predicted):",
        marked(SEEN_HEAD, [[f"{each.cluster}, {each.rate_per_s:g}/s", *seen(each)] for each in online]),
    ]


def ablation_table(bench: Bench) -> list[str]:
    sizes = (1024, 2048)
    by_size = [bench.compare("ablation", tuple(PD_SYSTEMS), agents=size) for size in sizes]
    lines = [
        [
            TITLES[mine[-1].system], *map(seconds, mine),
            *(f"{of[0].virtual_s / each.virtual_s:.2f}×" for of, each in zip(by_size, mine, strict=True)),
            number(mine[-1].nic_max_over_mean), busy_nics(mine[-1]),
            f"{mine[-1].prefill_busy:.0%}",
        ]
        for mine in zip(*by_size, strict=True)
    ]  # fmt: skip
    head = (
        "system", *(f"{size:,} agents" for size in sizes), *(f"against Basic, {size:,}" for size in sizes),
        "links, max/avg", "P, D NICs busy", "prefill busy",
    )  # fmt: skip
    text = (
        "Published (§7.5, Figure 12): each part lowers the completion time, the second path most; DualPath "
        "is up to 1.87 times as fast as Basic over all set-ups."
    )
    return section("Ablation, 2P4D, 64K (predicted)", text, head, lines)


def links_table(bench: Bench) -> list[str]:
    names = ("dual-path", "scheduling")
    lines = []
    for model, nodes, size in (
        ("qwen2.5-32b", (1, 2), 1024),
        ("ds-27b", (1, 2), 1024),
        ("ds-660b", (2, 4), 2048),
    ):
        outcomes = bench.compare("links", names, model=model, nodes=nodes, agents=size)
        lines.append(
            [f"{model}, {outcomes[0].cluster}", *(number(each.nic_max_over_mean) for each in outcomes),
             *(f"{max(each.nic_busy):.0%}" for each in outcomes)]
        )  # fmt: skip
    text = (
        "The busiest NIC's bytes over the average's in windows of 10 s, from 5 % to half of a run. Published "
        "(Figure 13, three nodes): 1.53 with round robin, 1.18 with the scheduler. Where NICs are not the "
        "bottleneck the figure says little."
    )
    head = ("", *(TITLES[name] for name in names), *(f"{TITLES[name]}: NICs busy" for name in names))
    return section("Balance between storage NICs (predicted)", text, head, lines)


def capacity(bench: Bench, model: str, rates: Sequence[float]) -> dict[str, tuple[float, str]]:
    """System → (agents per second within the service levels, what is not kept at the next rate), found by
    bisection of the ascending ``rates``. All systems run in parallel."""
    bounds = {system: (-1, len(rates)) for system in COMPARED}
    above: dict[str, PdOutcome] = {}
    while middle := {system: sum(both) // 2 for system, both in bounds.items() if both[1] - both[0] > 1}:
        specs = [
            bench.online(rates[place], system=system, model=model, nodes=NODES[model])
            for system, place in middle.items()
        ]
        for (system, place), outcome in zip(middle.items(), bench.run("online", specs), strict=True):
            low, high = bounds[system]
            within = outcome.ttft_mean is not None and not _broken(outcome)
            bounds[system] = (place, high) if within else (low, place)
            if not within:
                above[system] = outcome
    return {
        system: (rates[low] if low >= 0 else 0.0, _broken(above.get(system)))
        for system, (low, _) in bounds.items()
    }


def _broken(outcome: PdOutcome | None) -> str:
    if outcome is None or outcome.ttft_mean is None or outcome.tpot_mean is None:
        return "–"
    broken = [f"TTFT {outcome.ttft_mean:.0f} s"] if outcome.ttft_mean > TTFT_SLO_S else []
    broken += [f"TPOT {1000 * outcome.tpot_mean:.0f} ms"] if outcome.tpot_mean > TPOT_SLO_S else []
    return " and ".join(broken)


def online_table(bench: Bench) -> list[str]:
    outcomes = bench.run("online", [bench.online(0.4, system=name, **HOUR) for name in COMPARED])
    lines, gains = [], []
    for model, rates in RATES.items():
        most = capacity(bench, model, rates)
        basic, dual = most["basic"], most["scheduling"]
        gains.append(dual[0] / basic[0] if basic[0] else math.nan)
        lines.append(
            [model, *(f"{most[system][0]:g}" for system in COMPARED), f"{gains[-1]:.2f}×",
             f"{PUBLISHED_GAINS[model]:.2f}×", basic[1], dual[1]]
        )  # fmt: skip
    published = sum(PUBLISHED_GAINS.values()) / len(PUBLISHED_GAINS)
    lines.append(["average", "", "", "", f"{sum(gains) / len(gains):.2f}×", f"{published:.2f}×", "", ""])
    limits = ("Basic's limit", "DualPath's limit")
    head = ("model", *(TITLES[name] for name in COMPARED), "DualPath / Basic", "published", *limits)
    return [
        *section(
            "Online (predicted)",
            "Poisson arrivals for a virtual hour, the second half measured.",
            ("660B, 2P4D, 0.4/s", *SEEN_HEAD[1:]),
            [[TITLES[each.system], *seen(each)] for each in outcomes],
        ),
        "Agents a second within the service levels (mean TTFT ≤ 4 s, mean TPOT ≤ 50 ms, §7.4) in the "
        f"second half of {ONLINE_S * bench.options.share / 3600:g} virtual hours, and what is not kept at "
        "the next rate that was tried. Rates are 0.05 apart, above 1.1 agents a second 0.2.",
        marked(head, lines),
    ]


def loads_table(bench: Bench) -> list[str]:
    lines = []
    for workload in ("dualpath-32k", "dualpath-48k", "dualpath-64k"):
        for model, nodes in NODES.items():
            size = 2048 if model == "ds-660b" else 1024
            outcomes = bench.compare("loads", agents=size, workload=workload, model=model, nodes=nodes)
            basic, dual, oracle = (outcome.virtual_s for outcome in outcomes)
            lines.append(
                [f"{workload}, {model}, {outcomes[0].cluster}, {size:,} agents", *map(seconds, outcomes),
                 f"{basic / dual:.2f}×", f"{oracle / dual:.0%}",
                 f"{outcomes[0].prefill_busy:.0%}, {outcomes[1].prefill_busy:.0%}"]
            )  # fmt: skip
    text = (
        "Published (Figure 7): more for longer contexts and more agents, up to 1.87×; the 660B model comes "
        "near Oracle, the other two do not."
    )
    head = ("", "Basic", "DualPath", "Oracle", "against Basic", "of Oracle", "prefill busy: Basic, DualPath")
    return section("Workloads and models (predicted)", text, head, lines)


PARTS: dict[str, Callable[[Bench], list[str]]] = {
    "scale": scale_table, "ablation": ablation_table, "links": links_table, "online": online_table,
    "loads": loads_table,
}  # fmt: skip
"""Functions that run the parts, in the order of the page."""


def main(given: Sequence[str] | None = None) -> None:
    parser = run_arguments(__doc__)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the agents and the time: less, for a try"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(given)
    result = Result("prefill_decode_cluster", "Two paths to storage, simulated")
    bench = Bench(options)
    sections = [line for part, make in PARTS.items() if part in options.only for line in make(bench)]
    found = {part: msgspec.to_builtins(outcomes) for part, outcomes in bench.found.items()}
    about = (
        "What is simulated and what not: [the page](../../docs/prefill-decode.md#measured). "
        f"Seed {options.seed}."
    )
    result.write_paper(options.out, found, [about, *sections, "## Summary", "{by hand}"])


if __name__ == "__main__":
    main()
