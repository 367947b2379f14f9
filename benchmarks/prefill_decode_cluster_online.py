"""Runs and tables of ``prefill_decode_cluster.py`` with arriving agents, and the fit to Table 3."""

from __future__ import annotations

from prefill_decode_cluster_runs import COMPARED, HOUR, ONLINE_S, RATES, Bench
from prefill_decode_cluster_tables import SEEN_HEAD, broken, links, seen
from result_pages import marked
from sojourn_server.simulator.prefill_decode.prefill_decode_cluster import (
    CALIBRATED_EFFICIENCY,
    CALIBRATION_JCT_S,
)
from sojourn_server.simulator.prefill_decode.prefill_decode_outcome import PdOutcome
from sojourn_server.simulator.prefill_decode.prefill_decode_systems import PD_SYSTEMS, PUBLISHED_SYSTEMS

PUBLISHED_JCT_S = {"2P4D": CALIBRATION_JCT_S, "48P96D": 3201.0}
PUBLISHED_SEEN = {"2P4D": "1.739 s, 0.228 s, 39 ms", "44P88D": "1.847 s, 0.194 s, 36 ms"}
"""TTFT, TTST and TPOT in Table 3."""
PUBLISHED_GAINS = {"ds-660b": 2.25, "ds-27b": 1.67}
"""Agents per second within the service levels, DualPath ÷ Basic (§7.4)."""


def fit_table(bench: Bench) -> list[str]:
    tried = bench.fit()
    efficiency, took_s = tried[-1]
    return [
        "## The fitted number",
        "",
        f"With {efficiency:.4f} of its FLOP peak a prefill device makes DualPath take {took_s:,.0f} s for "
        f"2,000 agents on 2P4D (the paper's Table 3: {CALIBRATION_JCT_S:,.0f} s); found in {len(tried)} "
        f"runs. The code has {CALIBRATED_EFFICIENCY}, and all other tables are made with that.",
        "",
    ]


def scale_table(bench: Bench) -> list[str]:
    small = bench.run("scale", [bench.spec(system=name) for name in PUBLISHED_SYSTEMS])
    specs = [bench.spec(system=name, nodes=(48, 96), agents=48_000) for name in PUBLISHED_SYSTEMS]
    large = bench.run("scale", specs)
    online = bench.run("scale", [bench.online(0.4, **HOUR), bench.online(8.8, nodes=(44, 88), **HOUR)])
    lines = [
        [
            PD_SYSTEMS[few.system].title,
            f"{few.virtual_s:,.0f} s",
            f"{many.virtual_s:,.0f} s",
            f"{(many.turns / many.virtual_s) / (few.turns / few.virtual_s):.1f}×",
            links(many),
            f"{many.turns / 1e6:.2f} M",
            f"{many.events / 1e6:.1f} M",
            f"{many.cpu_s:,.0f} s",
            f"{1e6 * many.cpu_s / many.turns:.0f} µs",
        ]
        for few, many in zip(small, large, strict=True)
    ]
    head = [
        "system", "2P4D, 2,000", "48P96D, 48,000", "turns/s, of 24×", "links, 48P96D", "turns", "events",
        "CPU", "a turn",
    ]  # fmt: skip
    total_s = sum(each.cpu_s for each in large)
    wall_s = bench.wall_s(specs)
    wall = "" if wall_s is None else f"; run side by side they took {wall_s / 60:.1f} minutes"
    return [
        "## Table 3: one row fitted, the others predicted",
        "",
        marked(["", "here", "published", "here / published"], _table_3(small, large, online)),
        "",
        "## To 1,152 devices",
        "",
        f"All five systems on 48P96D took {total_s:,.0f} s of CPU, each in one process{wall}.",
        "",
        marked(head, lines),
        "",
        "Online (predicted):",
        "",
        marked(SEEN_HEAD, [[f"{each.cluster}, {each.rate_per_s:g}/s", *seen(each)] for each in online]),
        "",
    ]


def _table_3(small: list[PdOutcome], large: list[PdOutcome], online: list[PdOutcome]) -> list[list[str]]:
    lines = []
    for outcomes, what in ((small, "fitted"), (large, "predicted")):
        dual = next(each for each in outcomes if each.system == "scheduling")
        published_s = PUBLISHED_JCT_S[dual.cluster]
        lines.append(
            [
                f"{dual.cluster}, {dual.agents:,} agents: completion, {what}",
                f"{dual.virtual_s:,.0f} s",
                f"{published_s:,.0f} s",
                f"{dual.virtual_s / published_s:.2f}",
            ]
        )
    for each in online:
        found = each.seen
        lines.append(
            [
                f"{each.cluster}, {each.rate_per_s:g} agents/s: TTFT, TTST, TPOT, predicted",
                f"{found.ttft_mean:.3f} s, {found.ttst_mean:.3f} s, {1000 * found.tpot_mean:.0f} ms"
                if found
                else "–",
                PUBLISHED_SEEN[each.cluster],
                "",
            ]
        )
    return lines


def online_table(bench: Bench) -> list[str]:
    outcomes = bench.run(
        "online",
        [bench.online(0.4, system=name, **HOUR) for name in ("basic", "scheduling", "split", "oracle")],
    )
    lines, gains = [], []
    for model, rates in RATES.items():
        most = bench.capacity(model, rates)
        basic, dual = most["basic"], most["scheduling"]
        if basic.rate_per_s:
            gains.append(dual.rate_per_s / basic.rate_per_s)
        lines.append(
            [
                model,
                *(f"{most[system].rate_per_s:g}" for system in COMPARED),
                f"{gains[-1]:.2f}×" if basic.rate_per_s else "–",
                f"{PUBLISHED_GAINS[model]:.2f}×",
                broken(basic),
                broken(dual),
            ]
        )
    if len(gains) == len(PUBLISHED_GAINS):
        published = sum(PUBLISHED_GAINS.values()) / len(PUBLISHED_GAINS)
        average = f"{sum(gains) / len(gains):.2f}×"
        lines.append(["average", *([""] * len(COMPARED)), average, f"{published:.2f}×", "", ""])
    return [
        "## Online (predicted)",
        "",
        "Poisson arrivals for a virtual hour, the second half measured.",
        "",
        marked(
            ["660B, 2P4D, 0.4/s", *SEEN_HEAD[1:]],
            [[PD_SYSTEMS[each.system].title, *seen(each)] for each in outcomes],
        ),
        "",
        "Agents a second within the service levels (mean TTFT ≤ 4 s, mean TPOT ≤ 50 ms, §7.4) in the second "
        f"half of {ONLINE_S * bench.options.share / 3600:g} virtual hours, and what is not kept at the next "
        "rate that was tried. Rates are 0.05 apart, above 1.1 agents a second 0.2.",
        "",
        marked(
            [
                "model",
                *(PD_SYSTEMS[system].title for system in COMPARED),
                "DualPath / Basic",
                "published",
                "Basic's limit",
                "DualPath's limit",
            ],
            lines,
        ),
        "",
    ]
