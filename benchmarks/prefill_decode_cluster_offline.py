"""Runs and tables of ``prefill_decode_cluster.py`` with all agents present at the start."""

from __future__ import annotations

from prefill_decode_cluster_runs import COMPARED, HOUR, NODES, Bench
from prefill_decode_cluster_tables import COMPARED_HEAD, SEEN_HEAD, attention, compared, links, seen
from result_pages import marked
from sojourn_server.policies.prefill_decode.prefill_decode_ratio import (
    AverageTurnSizes,
    NodeLinks,
    two_path_gain,
)
from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import PdMachine
from sojourn_server.simulator.prefill_decode.prefill_decode_run import PdSpec
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS


def ablation_table(bench: Bench) -> list[str]:
    sizes = (1024, 2048)
    by_size = {
        size: bench.run("ablation", [bench.spec(system=name, agents=size) for name in PD_SYSTEMS])
        for size in sizes
    }
    lines = []
    for place, name in enumerate(PD_SYSTEMS):
        mine = [by_size[size][place] for size in sizes]
        less = [1 - by_size[size][place].virtual_s / by_size[size][0].virtual_s for size in sizes]
        lines.append(
            [
                PD_SYSTEMS[name].title,
                *(f"{each.virtual_s:,.0f} s" for each in mine),
                *(f"{1 / (1 - part):.2f}×" for part in less),
                links(mine[-1]),
                " ".join(f"{share:.0%}" for share in mine[-1].nic_busy),
                attention(mine[-1]),
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


def loads_table(bench: Bench) -> list[str]:
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
                [f"{workload}, {model}, {outcomes[0].cluster}, {size:,} agents", *compared(outcomes)]
            )
    return [
        "## Workloads and models (predicted)",
        "",
        "Published (Figure 7): more for longer contexts and more agents, up to 1.87×; the 660B model comes "
        "near Oracle, the other two do not.",
        "",
        marked(["", *COMPARED_HEAD], lines),
        "",
    ]


def ratios_table(bench: Bench) -> list[str]:
    lines = []
    took: dict[tuple[str, str], float] = {}
    for nodes in ((1, 1), (2, 1), (1, 2)):
        outcomes = bench.run(
            "ratios",
            [bench.spec(system=name, agents=1024, model="ds-27b", nodes=nodes) for name in COMPARED],
        )
        lines.append([f"{nodes[0]}P{nodes[1]}D", *compared(outcomes)])
        took.update({(outcome.cluster, outcome.system): outcome.virtual_s for outcome in outcomes})
    pairs = (
        (("1P1D", "basic"), ("1P2D", "basic")),
        (("1P1D", "scheduling"), ("2P1D", "basic")),
        (("2P1D", "scheduling"), ("1P2D", "scheduling")),
    )
    alike = "; ".join(
        f"{PD_SYSTEMS[a[1]].title} {a[0]} / {PD_SYSTEMS[b[1]].title} {b[0]} = {took[a] / took[b]:.2f}"
        for a, b in pairs
    )
    return [
        "## P/D ratios, 1,024 agents (predicted)",
        "",
        "Published (Figure 8): pairs with as many storage NICs in use take about as long. Here, one over the "
        "other: "
        f"{alike}.",
        "",
        marked(["27B", *COMPARED_HEAD], lines),
        "",
        "Not in the paper: six nodes of the 660B model, shared out in five ways, and what two paths gain at "
        "most by storage NICs and computing; where another link is full `sojourn plan-pd` says nothing.",
        "",
        marked(["660B", *COMPARED_HEAD, "at most", "P, D NICs busy, DualPath"], _six_nodes(bench)),
        "",
    ]


def _six_nodes(bench: Bench) -> list[list[str]]:
    lines = []
    for prefill in (1, 2, 3, 4, 5):
        outcomes = bench.run(
            "ratios",
            [bench.spec(system=name, agents=1024, nodes=(prefill, 6 - prefill)) for name in COMPARED],
        )
        most = two_path_gain(NodeLinks(), AverageTurnSizes(), prefill, 6 - prefill).max_speedup
        busy = " ".join(f"{share:.0%}" for share in outcomes[1].nic_busy)
        lines.append([f"{prefill}P{6 - prefill}D", *compared(outcomes), f"{most:.2f}×", busy])
    return lines


def lengths_table(bench: Bench) -> list[str]:
    lines = []
    for name in ("append_scale", "output_scale"):
        for scale in (1.0, 2.0, 4.0, 8.0):
            if scale == 1.0 and name == "output_scale":
                continue
            outcomes = bench.run(
                "lengths", [bench.spec(system=system, agents=1024, **{name: scale}) for system in COMPARED]
            )
            lines.append([f"{name.removesuffix('_scale')} × {scale:g}", *compared(outcomes)])
    return [
        "## Longer appends, longer outputs: 2P4D, 660B, 1,024 agents (predicted)",
        "",
        "Published (Figure 9): the longer either, the nearer Basic comes to the others; those change little.",
        "",
        marked(["", *COMPARED_HEAD], lines),
        "",
    ]


def links_table(bench: Bench) -> list[str]:
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
                *(links(outcome) for outcome in outcomes),
                *(f"{max(outcome.nic_busy):.0%}" for outcome in outcomes),
            ]
        )
    return [
        "## Balance between storage NICs (predicted)",
        "",
        "The busiest NIC's bytes over the average's in windows of 10 s, from 5 % to half of a run. Published "
        "(Figure 13, three nodes): 1.53 with round robin, 1.18 with the scheduler. Where NICs are not the "
        "bottleneck the figure says little: nobody waits for them.",
        "",
        marked(
            [
                "",
                *(PD_SYSTEMS[name].title for name in names),
                *(f"{PD_SYSTEMS[name].title}: NICs busy" for name in names),
            ],
            lines,
        ),
        "",
    ]


def lanes_table(bench: Bench) -> list[str]:
    lines = []
    for isolated in (True, False):
        outcomes = bench.run(
            "lanes",
            [bench.spec(system=name, agents=1024, isolated=isolated) for name in ("layerwise", "scheduling")],
        )
        online = bench.run("lanes", [bench.online(0.4, isolated=isolated, **HOUR)])
        lines.append(
            [
                "traffic classes" if isolated else "one lane",
                *(f"{each.virtual_s:,.0f} s" for each in outcomes),
                *seen(online[0])[1:],
            ]
        )
    head = ["compute network", "+ layerwise, 1,024 agents", "+ scheduling, 1,024 agents", *SEEN_HEAD[2:]]
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


def packing_table(bench: Bench) -> list[str]:
    lines = []
    for tokens in (None, 2048, 8192):
        outcomes = bench.run(
            "packing", [bench.spec(system=name, agents=1024, step_tokens=tokens) for name in COMPARED]
        )
        lines.append(
            [
                "0.3 s of attention" if tokens is None else f"{tokens:,} tokens",
                *compared(outcomes),
                *(attention(each) for each in outcomes),
            ]
        )
    return [
        "## Step size (2P4D, 660B, 1,024 agents; predicted)",
        "",
        "All systems above have the quota, though the paper gives it to DualPath and Oracle only and does "
        "not tell what bounds Basic's steps. Here it is tokens for all three. Attention: the slowest "
        "device's over the average's in the first twentieth of the run; published 1.06 for DualPath.",
        "",
        marked(
            ["a step", *COMPARED_HEAD, *(f"attention, {PD_SYSTEMS[name].title}" for name in COMPARED)], lines
        ),
        "",
    ]


def memory_table(bench: Bench) -> list[str]:
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
        "## Gain of layerwise transfer by memory (2P4D, 660B, 2,000 agents; predicted)",
        "",
        marked(
            ["device, KV on a prefill device", "Basic", "+ layerwise", "+ scheduling", "less by layerwise"],
            lines,
        ),
        "",
    ]


def traces_table(bench: Bench) -> list[str]:
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
