"""``sojourn plan-pd``: choose the ratio of prefill to decode nodes.

Also shows the speed-up if decode nodes read KV from storage too, so that storage has two paths (DualPath).
"""

from __future__ import annotations

import math
from typing import Any

import typer
from rich.table import Table

from ..policies.prefill_decode.prefill_decode_ratio import (
    LinkRatioBound,
    NodeLinks,
    PdRatioRange,
    link_utilisation,
    pd_ratio_range,
)
from .console import CliError, console, json_option, write_json

_GBIT = 1e9 / 8


def _positive(option: typer.CallbackParam, value: float) -> float:
    if not 0 < value < math.inf:
        raise CliError(
            f"{option.opts[0]} is {value:g}; expected a finite number above 0",
            f"for example {option.opts[0]} {option.default:g}",
        )
    return value


def _number(default: float, help: str) -> Any:
    return typer.Option(default, callback=_positive, help=help)


def plan_pd(
    nodes: int = typer.Option(6, min=2, help="Number of nodes; the plan shows every division of them"),
    devices: int = typer.Option(8, min=1, help="Devices per node, each with its own compute NIC"),
    compute_nic_gbit: float = _number(400.0, "Compute NIC of a device, Gbit/s each way"),
    storage_nic_gbit: float = _number(400.0, "Storage NIC of a node, Gbit/s"),
    dram_gbyte: float = _number(500.0, "Memory bandwidth of a node, GB/s, reads plus writes"),
    hit_tokens: float = _number(33_147.0, "Tokens per turn with KV from storage"),
    new_tokens: float = _number(292.0, "Computed tokens per turn"),
    kv_bytes: float = _number(
        48_068.0,
        "KV bytes per token, as in an engine's capabilities; the default is DeepSeek-V3.2 in FP8",
    ),
    new_tokens_per_s: float = _number(
        2_160.0, "Prefill speed of a device with contexts of this length, tokens per second"
    ),
    json: str | None = json_option("the plan"),
) -> None:
    """Ratios of prefill to decode nodes for which no link but storage is the bottleneck."""
    links = NodeLinks(
        devices=devices,
        compute_nic_bytes_per_s=compute_nic_gbit * _GBIT,
        storage_nic_bytes_per_s=storage_nic_gbit * _GBIT,
        dram_bytes_per_s=dram_gbyte * 1e9,
    )
    read_per_s = links.storage_nic_bytes_per_s / (hit_tokens * kv_bytes)
    computed_per_s = devices * new_tokens_per_s / new_tokens
    found = pd_ratio_range(links)
    divisions = [
        _division(links, found, count, nodes - count, read_per_s, computed_per_s) for count in range(1, nodes)
    ]
    if json != "-":
        text = "[bold]No useful ratio:[/] at every ratio another link is full before all storage NICs are."
        if found.possible:
            text = f"[bold]P/D from {found.least:.3g} to {found.most:.3g}[/]: prefill nodes for each decode "
            text += "node with which all storage NICs can read at once"
        console.print(text, highlight=False)
        console.print(_bounds(found))
        console.print(_divisions(divisions))
        if not all(each["in_range"] for each in divisions):
            console.print("–: another link is full before all storage NICs are", highlight=False)
    if json is not None:
        bounds = {bound.link: _ends(bound) for bound in found.bounds}
        document = {**_ends(found), "possible": found.possible, "bounds": bounds, "divisions": divisions}
        write_json(document, json)


def _division(
    links: NodeLinks, found: PdRatioRange, prefill: int, decode: int, read_per_s: float, computed_per_s: float
) -> dict[str, Any]:
    """Return one division of the nodes. ``read_per_s``: turns per second that one storage NIC reads;
    ``computed_per_s``: turns per second that one prefill node computes. Load is even, nothing waits, and
    decoding is no bottleneck."""
    loads = link_utilisation(links, prefill, decode)
    fullest = max(loads, key=lambda link: loads[link])
    one_path, two_paths = prefill * read_per_s, (prefill + decode) * read_per_s
    compute = prefill * computed_per_s
    # Outside the useful range, another link limits the storage NICs, so their total bandwidth says nothing.
    in_range = found.possible and found.contains_ratio(prefill / decode)
    gain = min(two_paths, compute) / min(one_path, compute)
    turns = {"one_path": one_path, "two_paths": two_paths if in_range else None, "compute": compute}
    return {
        "prefill_nodes": prefill,
        "decode_nodes": decode,
        "in_range": in_range,
        "fullest_link": fullest,
        "fullest_load": round(loads[fullest], 4),
        "turns_per_s": {name: None if each is None else round(each, 3) for name, each in turns.items()},
        "gain_at_most": round(gain, 4) if in_range else None,
    }


def _bounds(found: PdRatioRange) -> Table:
    table = Table("link", "bound on P/D", box=None, title="Bound of each link", title_justify="left")
    for bound in found.bounds:
        if math.isinf(bound.least) or bound.most <= 0:
            text = "too slow at any ratio"
        elif bound.least:
            text = f"≥ {bound.least:.3g}"
        else:
            text = "none" if math.isinf(bound.most) else f"≤ {bound.most:.3g}"
        table.add_row(bound.link, text)
    return table


def _divisions(divisions: list[dict[str, Any]]) -> Table:
    title = "Turns a second that each resource allows"
    table = Table(box=None, title=title, title_justify="left", pad_edge=False)
    for name in ("nodes", "in\nrange", "fullest link"):
        table.add_column(name, vertical="bottom", no_wrap=name != "fullest link")
    for name in ("load", "one\npath", "two\npaths", "prefill", "gain at\nmost"):
        table.add_column(name, vertical="bottom", justify="right", no_wrap=True)
    for each in divisions:
        numbers = [None if turns is None else f"{turns:,.1f}" for turns in each["turns_per_s"].values()]
        numbers.append(None if each["gain_at_most"] is None else f"{each['gain_at_most']:.2f}×")
        nodes = f"{each['prefill_nodes']}P{each['decode_nodes']}D"
        load = f"{each['fullest_load']:,.0%}"
        in_range = "yes" if each["in_range"] else "no"
        table.add_row(nodes, in_range, each["fullest_link"], load, *(text or "–" for text in numbers))
    return table


def _ends(found: LinkRatioBound | PdRatioRange) -> dict[str, float | None]:
    """Return the bounds of a ratio. ``None``: infinity, which JSON has not."""
    return {name: end if math.isfinite(end := getattr(found, name)) else None for name in ("least", "most")}
