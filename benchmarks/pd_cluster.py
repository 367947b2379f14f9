"""Two ways to storage in a simulated cluster, beside DualPath's figures.

    python benchmarks/pd_cluster.py --cache pd-cache

One number is fitted: ``calibrate`` finds what share of its peak a prefill device achieves, so that DualPath
on 2P4D with 2,000 agents of the 64K workload takes as long as in the paper's Table 3. All else is predicted.

calibrate  the fit, and whether the constant in the code is still what it finds
ablation   §7.5: what each part adds, 1,024 and 2,048 agents, 2P4D; the published systems and split reads
loads      §7.3, Figure 7: the three workloads
ratios     §7.3, Figure 8: 1P1D, 2P1D, 1P2D of the 27B model
lengths    §7.3, Figure 9: longer appends and longer outputs
links      Figure 13: how evenly storage NICs are used, three nodes
online     §7.4 and Table 3: latencies, and how many agents a second within the service levels
scale      Table 3: 48P96D with 48,000 agents, 1,152 devices, and 44P88D online
lanes      traffic classes, or one lane for all
packing    steps bounded by tokens in place of the compute quota
memory     layer by layer on devices of 80 GB
traces     recorded agents

Writes pd_cluster.json, .md and .svg into ``--out``; what is between the marks of the .md was written by hand
and stays. Finished runs are kept in ``--cache``, so that it goes on where it was interrupted; empty it when
the model changes.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from lab_pages import FIRST_WORDS, made_by, marked, write_page
from rich.console import Console
from sojourn_server.cli.console import write_json
from sojourn_server.lab.pd.machine import CALIBRATED_EFFICIENCY, CALIBRATION_JCT_S, PdMachine
from sojourn_server.lab.pd.outcome import PdOutcome
from sojourn_server.lab.pd.run import PdSpec, calibrate, run_all
from sojourn_server.lab.pd.systems import PUBLISHED_SYSTEMS, SYSTEMS
from sojourn_server.lab.report.results import made_with

PARTS = (
    "calibrate", "ablation", "loads", "ratios", "lengths", "links", "online", "scale", "lanes", "packing",
    "memory", "traces",
)  # fmt: skip
COMPARED = ("basic", "scheduling", "oracle")
ONLINE_S, WARM_UP_S = 3600.0, 1800.0
"""Virtual seconds; agents take a quarter of an hour each: by half of it about as many end as come."""
RATES = {
    "ds-660b": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1),
    "ds-27b": (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4, 1.6, 1.8),
}
"""Agents a second, of which the most within the service levels is looked for."""
NODES = {"ds-660b": (2, 4), "ds-27b": (1, 1), "qwen2.5-32b": (1, 2)}
"""The paper's defaults."""


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--traces", type=Path, nargs="*", default=[], help="recorded traces, for that part")
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the agents and the time: less, for a try"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, help="processes; default: one a core")
    parser.add_argument("--cache", type=Path, help="folder in which finished runs are kept")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"), help="folder to write into")
    return parser.parse_args(given)


class Bench:
    """Runs specs, keeps what they came to, and remembers all for the JSON."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.found: dict[str, list[PdOutcome]] = {}
        self.console = Console(stderr=True)

    def spec(self, **told: Any) -> PdSpec:
        """A spec of ``--seed`` and ``--share``."""
        told = {"seed": self.options.seed, **told}
        if "nodes" in told:
            told["prefill_nodes"], told["decode_nodes"] = told.pop("nodes")
        spec = PdSpec(**told)
        share = self.options.share
        if share == 1.0:
            return spec
        if spec.until_s is None:
            return replace(spec, agents=max(2, round(spec.agents * share)))
        return replace(spec, until_s=spec.until_s * share, warm_up_s=spec.warm_up_s * share)

    def online(self, rate_per_s: float, **told: Any) -> PdSpec:
        """Agents that arrive at that rate."""
        told = {"agents": 10**9, "until_s": ONLINE_S, "warm_up_s": WARM_UP_S, **told}
        return self.spec(rate_per_s=rate_per_s, **told)

    def run(self, part: str, specs: Sequence[PdSpec]) -> list[PdOutcome]:
        """In their order; those that were kept are not run again."""
        kept = {spec: outcome for spec in specs if (outcome := self._kept(spec)) is not None}
        missing = [spec for spec in dict.fromkeys(specs) if spec not in kept]

        def done(number: int, outcome: PdOutcome) -> None:
            self.console.print(
                f"{part}: {missing[number].label} {outcome.model} {outcome.virtual_s:,.0f} virtual s, "
                f"{outcome.cpu_s:,.0f} s of CPU",
                highlight=False,
            )
            self._keep(missing[number], outcome)

        if missing:
            kept.update(
                zip(missing, run_all(missing, processes=self.options.jobs, on_done=done), strict=True)
            )
        outcomes = [kept[spec] for spec in specs]
        self.found.setdefault(part, []).extend(outcomes)
        return outcomes

    def _file(self, spec: PdSpec) -> Path | None:
        folder = self.options.cache
        name = hashlib.sha256(repr(spec).encode()).hexdigest()[:24]
        return None if folder is None else folder / f"{name}.json"

    def _kept(self, spec: PdSpec) -> PdOutcome | None:
        file = self._file(spec)
        if file is None or not file.exists():
            return None
        return msgspec.json.decode(file.read_bytes(), type=PdOutcome)

    def _keep(self, spec: PdSpec, outcome: PdOutcome) -> None:
        file = self._file(spec)
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(msgspec.json.encode(outcome))


# -- the parts -----------------------------------------------------------------------------


def calibrate_part(bench: Bench) -> list[str]:
    tried = calibrate(PdSpec(seed=bench.options.seed))
    efficiency, took_s = tried[-1]
    return [
        "## The one number that was fitted",
        "",
        f"With {efficiency:.4f} of its FLOP peak a prefill device makes DualPath take {took_s:,.0f} s for "
        f"2,000 agents on 2P4D (the paper's Table 3: {CALIBRATION_JCT_S:,.0f} s); found in {len(tried)} "
        f"runs. The code has {CALIBRATED_EFFICIENCY}.",
        "",
    ]


def ablation_part(bench: Bench) -> list[str]:
    sizes = (1024, 2048)
    by_size = {
        size: bench.run("ablation", [bench.spec(system=name, agents=size) for name in SYSTEMS])
        for size in sizes
    }
    lines = []
    for place, name in enumerate(SYSTEMS):
        mine = [by_size[size][place] for size in sizes]
        less = [1 - by_size[size][place].virtual_s / by_size[size][0].virtual_s for size in sizes]
        lines.append(
            [
                SYSTEMS[name].title,
                *(f"{each.virtual_s:,.0f} s" for each in mine),
                *(f"{1 / (1 - part):.2f}×" for part in less),
                _links(mine[-1]),
                " ".join(f"{share:.0%}" for share in mine[-1].nic_busy),
                f"{mine[-1].attention_max_over_mean:.2f}" if mine[-1].attention_max_over_mean else "–",
                f"{mine[-1].prefill_busy:.0%}",
            ]
        )
    head = [
        "system", *(f"{size:,} agents" for size in sizes), *(f"against Basic, {size:,}" for size in sizes),
        "links, max/avg", "P, D NICs busy", "attention, max/avg", "prefill busy",
    ]  # fmt: skip
    return [
        "## Ablation, 2P4D, 64K (predicted)",
        "",
        "Published (§7.5, Figure 12): each part lowers the completion time, the second path most; DualPath "
        "is up to 1.87 times as fast as Basic over all set-ups.",
        "",
        marked(head, lines),
        "",
    ]


def loads_part(bench: Bench) -> list[str]:
    lines = []
    for workload in ("dualpath-32k", "dualpath-48k", "dualpath-64k"):
        for model in NODES:
            size = 2048 if model == "ds-660b" else 1024
            outcomes = bench.run(
                "loads",
                [
                    bench.spec(
                        system=name,
                        agents=size,
                        workload=f"synthetic:{workload}",
                        model=model,
                        nodes=NODES[model],
                    )
                    for name in COMPARED
                ],
            )
            lines.append(
                [f"{workload}, {model}, {outcomes[0].cluster}, {size:,} agents", *_compared(outcomes)]
            )
    return [
        "## Workloads and models (predicted)",
        "",
        "Published (Figure 7): more for longer contexts and more agents, up to 1.87×; the 660B model comes "
        "near Oracle, the other two do not.",
        "",
        marked(["", *_COMPARED_HEAD], lines),
        "",
    ]


def ratios_part(bench: Bench) -> list[str]:
    lines = []
    took: dict[tuple[str, str], float] = {}
    for nodes in ((1, 1), (2, 1), (1, 2)):
        outcomes = bench.run(
            "ratios",
            [bench.spec(system=name, agents=1024, model="ds-27b", nodes=nodes) for name in COMPARED],
        )
        lines.append([f"{nodes[0]}P{nodes[1]}D", *_compared(outcomes)])
        took.update({(outcome.cluster, outcome.system): outcome.virtual_s for outcome in outcomes})
    pairs = (
        (("1P1D", "basic"), ("1P2D", "basic")),
        (("1P1D", "scheduling"), ("2P1D", "basic")),
        (("2P1D", "scheduling"), ("1P2D", "scheduling")),
    )
    alike = "; ".join(
        f"{SYSTEMS[a[1]].title} {a[0]} / {SYSTEMS[b[1]].title} {b[0]} = {took[a] / took[b]:.2f}"
        for a, b in pairs
    )
    return [
        "## P/D ratios, 27B, 1,024 agents (predicted)",
        "",
        "Published (Figure 8): pairs with as many storage NICs in use take about as long. Here, one over the "
        "other: "
        f"{alike}.",
        "",
        marked(["", *_COMPARED_HEAD], lines),
        "",
    ]


def lengths_part(bench: Bench) -> list[str]:
    lines = []
    for name in ("append_scale", "output_scale"):
        for scale in (1.0, 2.0, 4.0, 8.0):
            if scale == 1.0 and name == "output_scale":
                continue
            outcomes = bench.run(
                "lengths", [bench.spec(system=system, agents=1024, **{name: scale}) for system in COMPARED]
            )
            lines.append([f"{name.removesuffix('_scale')} × {scale:g}", *_compared(outcomes)])
    return [
        "## Longer appends, longer outputs: 2P4D, 660B, 1,024 agents (predicted)",
        "",
        "Published (Figure 9): the longer either, the nearer Basic comes to the others; those change little.",
        "",
        marked(["", *_COMPARED_HEAD], lines),
        "",
    ]


def links_part(bench: Bench) -> list[str]:
    names = ("dual-path", "scheduling", "split")
    lines = []
    for model, nodes, size in (
        ("qwen2.5-32b", (1, 2), 1024),
        ("ds-27b", (1, 2), 1024),
        ("ds-660b", (2, 4), 2048),
    ):
        outcomes = bench.run(
            "links", [bench.spec(system=name, model=model, nodes=nodes, agents=size) for name in names]
        )
        lines.append(
            [
                f"{model}, {outcomes[0].cluster}",
                *(_links(outcome) for outcome in outcomes),
                *(f"{max(outcome.nic_busy):.0%}" for outcome in outcomes),
            ]
        )
    return [
        "## How evenly storage NICs are used (predicted)",
        "",
        "The busiest NIC's bytes over the average's in windows of 10 s, from 5 % to half of a run. Published "
        "(Figure 13, three nodes): 1.53 with round robin, 1.18 with the scheduler. Where NICs are not the "
        "bottleneck the figure says little: nobody waits for them.",
        "",
        marked(
            [
                "",
                *(SYSTEMS[name].title for name in names),
                *(f"{SYSTEMS[name].title}: NICs busy" for name in names),
            ],
            lines,
        ),
        "",
    ]


def online_part(bench: Bench) -> list[str]:
    text = [
        "## Online (predicted)",
        "",
        f"Poisson arrivals for {ONLINE_S * bench.options.share:,.0f} virtual s, the second half measured. "
        "Published (Table 3): 2P4D at 0.4 agents/s TTFT 1.739 s, TTST 0.228 s, TPOT 39 ms.",
        "",
    ]
    outcomes = bench.run(
        "online", [bench.online(0.4, system=name) for name in ("basic", "scheduling", "split", "oracle")]
    )
    text += [marked(_SEEN_HEAD, [[SYSTEMS[each.system].title, *_seen(each)] for each in outcomes]), ""]
    lines = []
    for model, rates in RATES.items():
        most = capacity(bench, model, rates)
        ratio = most["scheduling"] / most["basic"] if most["basic"] else 0.0
        lines.append(
            [
                model,
                *(f"{most[system]:g}" for system in ("basic", "scheduling", "split", "oracle")),
                f"{ratio:.2f}×" if ratio else "–",
            ]
        )
    return [
        *text,
        "Agents a second within the service levels (mean TTFT ≤ 4 s, mean TPOT ≤ 50 ms), of the rates tried. "
        "Published: 2.25× for the 660B model, 1.67× for the 27B one, 1.96× on average.",
        "",
        marked(
            ["model", "Basic", "+ scheduling", "+ split reads", "Oracle", "DualPath against Basic"], lines
        ),
        "",
    ]


def capacity(bench: Bench, model: str, rates: Sequence[float]) -> dict[str, float]:
    """The highest of ``rates`` that each system serves within the service levels, by halving; 0.0: none."""
    bounds = {system: (-1, len(rates)) for system in ("basic", "scheduling", "split", "oracle")}
    while open_ := {system: sum(b) // 2 for system, b in bounds.items() if b[1] - b[0] > 1}:
        outcomes = bench.run(
            "online",
            [
                bench.online(rates[place], system=system, model=model, nodes=NODES[model])
                for system, place in open_.items()
            ],
        )
        for (system, place), outcome in zip(open_.items(), outcomes, strict=True):
            low, high = bounds[system]
            served = outcome.seen is not None and outcome.seen.within_slo
            bounds[system] = (place, high) if served else (low, place)
    return {system: rates[low] if low >= 0 else 0.0 for system, (low, _) in bounds.items()}


def scale_part(bench: Bench) -> list[str]:
    lines = []
    small = bench.run("scale", [bench.spec(system=name) for name in PUBLISHED_SYSTEMS])
    large = bench.run(
        "scale", [bench.spec(system=name, nodes=(48, 96), agents=48_000) for name in PUBLISHED_SYSTEMS]
    )
    for few, many in zip(small, large, strict=True):
        lines.append(
            [
                SYSTEMS[few.system].title,
                f"{few.virtual_s:,.0f} s",
                f"{many.virtual_s:,.0f} s",
                f"{(many.turns / many.virtual_s) / (few.turns / few.virtual_s):.1f}×",
                f"{many.turns / 1e6:.2f} M",
                f"{many.events / 1e6:.1f} M",
                f"{many.cpu_s:,.0f} s",
                f"{1e6 * many.cpu_s / many.turns:.0f} µs",
            ]
        )
    head = ["system", "2P4D, 2,000", "48P96D, 48,000", "turns/s, of 24×", "turns", "events", "CPU", "a turn"]
    online = bench.run("scale", [bench.online(0.4), bench.online(8.8, nodes=(44, 88))])
    total_s = sum(each.cpu_s for each in large)
    return [
        "## To 1,152 devices",
        "",
        "Published (Table 3): DualPath 3,167 s on 2P4D, which is what was fitted, and 3,201 s on 48P96D. All "
        f"five systems on 48P96D took {total_s:,.0f} s of CPU, {total_s / 120:.1f} minutes on two cores.",
        "",
        marked(head, lines),
        "",
        "Online, published (TTFT, TTST, TPOT): 2P4D at 0.4 agents/s 1.739 s, 0.228 s, 39 ms; 44P88D at 8.8 "
        "agents/s 1.847 s, 0.194 s, 36 ms.",
        "",
        marked(_SEEN_HEAD, [[f"{each.cluster}, {each.rate_per_s:g}/s", *_seen(each)] for each in online]),
        "",
    ]


def lanes_part(bench: Bench) -> list[str]:
    lines = []
    for isolated in (True, False):
        outcomes = bench.run(
            "lanes",
            [bench.spec(system=name, agents=1024, isolated=isolated) for name in ("layerwise", "scheduling")],
        )
        online = bench.run("lanes", [bench.online(0.4, isolated=isolated)])
        lines.append(
            [
                "traffic classes" if isolated else "one lane",
                *(f"{each.virtual_s:,.0f} s" for each in outcomes),
                *_seen(online[0])[1:],
            ]
        )
    head = ["compute network", "+ layerwise, 1,024 agents", "+ scheduling, 1,024 agents", *_SEEN_HEAD[2:]]
    share = PdMachine().collective_share
    return [
        "## Traffic classes, or one lane for all (2P4D, 660B; predicted)",
        "",
        f"Arithmetic, not a fabric: devices exchange tokens for {share:.0%} of a step, which is chosen. With "
        "classes KV gets what is left of the network; in one lane it takes half whenever it wants, and a "
        "step's exchanges take twice as long beside it. The right half is DualPath online at 0.4 agents/s.",
        "",
        marked(head, lines),
        "",
    ]


def packing_part(bench: Bench) -> list[str]:
    lines = []
    for tokens in (None, 2048, 8192):
        outcomes = bench.run(
            "packing", [bench.spec(system=name, agents=1024, step_tokens=tokens) for name in COMPARED]
        )
        lines.append(
            [
                "0.3 s of attention" if tokens is None else f"{tokens:,} tokens",
                *_compared(outcomes),
                *(f"{each.attention_max_over_mean:.2f}" for each in outcomes if each.attention_max_over_mean),
            ]
        )
    return [
        "## How much a step computes (2P4D, 660B, 1,024 agents; predicted)",
        "",
        "All systems above have the quota, though the paper gives it to DualPath and Oracle only and does "
        "not tell what bounds Basic's steps. Here it is tokens for all three. Attention: the slowest "
        "device's over the average's in the first twentieth of the run; published 1.06 for DualPath.",
        "",
        marked(
            ["a step", *_COMPARED_HEAD, *(f"attention, {SYSTEMS[name].title}" for name in COMPARED)], lines
        ),
        "",
    ]


def memory_part(bench: Bench) -> list[str]:
    lines = []
    for memory_gb in (141, 80):
        machine = PdMachine(device_memory_bytes=memory_gb * 1e9)
        outcomes = bench.run(
            "memory",
            [bench.spec(system=name, machine=machine) for name in ("basic", "layerwise", "scheduling")],
        )
        kv_tokens = machine.prefill_kv_tokens(PdSpec().cluster.model)
        lines.append(
            [
                f"{memory_gb} GB, {kv_tokens:,} tokens",
                *(f"{each.virtual_s:,.0f} s" for each in outcomes),
                f"{1 - outcomes[1].virtual_s / outcomes[0].virtual_s:.1%}",
            ]
        )
    return [
        "## What layer by layer is worth by memory (2P4D, 660B, 2,000 agents; predicted)",
        "",
        marked(
            ["device, KV on a prefill device", "Basic", "+ layerwise", "+ scheduling", "less by layerwise"],
            lines,
        ),
        "",
    ]


def traces_part(bench: Bench) -> list[str]:
    if not bench.options.traces:
        return []
    lines = []
    for path in bench.options.traces:
        for gap_s in (0.0, None):
            outcomes = bench.run(
                "traces",
                [
                    bench.spec(
                        system=name,
                        workload=str(path),
                        agents=1000,
                        max_gap_s=gap_s if gap_s == 0.0 else 30.0,
                    )
                    for name in ("basic", "scheduling", "split", "oracle")
                ],
            )
            basic = outcomes[0]
            lines.append(
                [
                    f"{path.name.split('.')[0]}, gaps {'left out' if gap_s == 0.0 else 'cut to 30 s'}",
                    f"{basic.prompt_tokens / basic.turns:,.0f}",
                    *(f"{each.virtual_s:,.0f} s" for each in outcomes),
                    f"{basic.virtual_s / outcomes[1].virtual_s:.2f}×",
                ]
            )
    head = [
        "load",
        "prompt tokens",
        "Basic",
        "+ scheduling",
        "+ split reads",
        "Oracle",
        "DualPath against Basic",
    ]
    return [
        "## Recorded agents: 2P4D, 660B, 1,000 agents (predicted)",
        "",
        "Hits are those of each program's own turns before; sub-agents are programs of their own.",
        "",
        marked(head, lines),
        "",
    ]


_COMPARED_HEAD = [
    "Basic",
    "DualPath",
    "Oracle",
    "against Basic",
    "of Oracle",
    "prefill busy: Basic, DualPath",
]


def _compared(outcomes: Sequence[PdOutcome]) -> list[str]:
    basic, dual, oracle = (outcome.virtual_s for outcome in outcomes)
    return [
        *(f"{each:,.0f} s" for each in (basic, dual, oracle)),
        f"{basic / dual:.2f}×",
        f"{oracle / dual:.0%}",
        f"{outcomes[0].prefill_busy:.0%}, {outcomes[1].prefill_busy:.0%}",
    ]


_SEEN_HEAD = ["", "turns/s", "TTFT, mean", "TTFT, P95", "TTST", "TPOT"]


def _seen(outcome: PdOutcome) -> list[str]:
    seen = outcome.seen
    if seen is None:
        return ["–"] * 5
    return [
        f"{outcome.turns / outcome.virtual_s:,.1f}",
        f"{seen.ttft_mean:.3f} s",
        f"{seen.ttft_p95:.3f} s",
        f"{seen.ttst_mean:.3f} s",
        f"{1000 * seen.tpot_mean:.1f} ms",
    ]


def _links(outcome: PdOutcome) -> str:
    return f"{outcome.nic_max_over_mean:.2f}" if outcome.nic_max_over_mean else "–"


_WORK: dict[str, Callable[[Bench], list[str]]] = {
    "calibrate": calibrate_part, "ablation": ablation_part, "loads": loads_part, "ratios": ratios_part,
    "lengths": lengths_part, "links": links_part, "online": online_part, "scale": scale_part,
    "lanes": lanes_part, "packing": packing_part,
    "memory": memory_part, "traces": traces_part,
}  # fmt: skip


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    began = time.monotonic()
    bench = Bench(options)
    made = made_with(sys.argv)
    sections: list[str] = []
    for part in PARTS:
        if part in options.only:
            sections += _WORK[part](bench)
    options.out.mkdir(parents=True, exist_ok=True)
    found = {part: [msgspec.to_builtins(each) for each in outcomes] for part, outcomes in bench.found.items()}
    write_json({"made_with": msgspec.to_builtins(made), **found}, str(options.out / "pd_cluster.json"))
    drawn = draw(bench.found, options.out / "pd_cluster.svg")
    lines = [
        "# Two ways to storage, simulated",
        "",
        "Generated by the command below, but for what is between the marks. What is simulated and what not:",
        "[the page](../../docs/dualpath.md#the-cluster-simulation).",
        "",
        made_by(made, time.monotonic() - began),
        "",
        *(["![what each part adds, and how it scales](pd_cluster.svg)", ""] if drawn else []),
        *sections,
        "## What this says",
        "",
        "{by hand}",
        "",
    ]
    text = "\n".join(lines)
    write_page(options.out / "pd_cluster.md", text, FIRST_WORDS)
    Console().print(text, highlight=False, markup=False)


def draw(found: dict[str, list[PdOutcome]], path: Path) -> bool:
    """Completion times of the ablation, and of the large cluster. False: there is nothing to draw."""
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "sojourn"
    parts = [part for part in ("ablation", "scale") if part in found]
    if not parts:
        return False
    figure = Figure(figsize=(6.0 * len(parts), 3.6), layout="constrained")
    axes = figure.subplots(1, len(parts), squeeze=False)[0]
    for axis, part in zip(axes, parts, strict=True):
        rows = [each for each in found[part] if each.rate_per_s is None]
        groups = list(dict.fromkeys((each.cluster, each.agents) for each in rows))
        names = list(dict.fromkeys(each.system for each in rows))
        height = 0.8 / len(groups)
        for place, (cluster, agents) in enumerate(groups):
            took = [
                next(e.virtual_s for e in rows if (e.system, e.cluster, e.agents) == (name, cluster, agents))
                for name in names
            ]
            axis.barh(
                [number + place * height for number in range(len(names))],
                took,
                height,
                label=f"{cluster}, {agents:,} agents",
            )
        axis.set_yticks(
            [number + (len(groups) - 1) * height / 2 for number in range(len(names))],
            [SYSTEMS[name].title for name in names],
        )
        axis.invert_yaxis()
        axis.set(title=part, xlabel="until the last agent has ended, s")
        axis.legend(frameon=False)
    figure.savefig(path, metadata={"Date": None, "Creator": None})
    return True


if __name__ == "__main__":
    main()
