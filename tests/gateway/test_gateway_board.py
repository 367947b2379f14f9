"""The Grafana board and the documents name metrics that there are, and all of them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from sojourn_server.gateway.http.books import Books

DOCS = Path(__file__).parents[2] / "docs"
_NAME = re.compile(r"sojourn_gateway_[a-z_]+[a-z]")


def exposed() -> set[str]:
    """Names of the series, as a query writes them."""
    return {sample for family in Books().registry.collect() for sample in _series(family.name, family.type)}


def _series(name: str, kind: str) -> list[str]:
    if kind == "counter":
        return [f"{name}_total"]
    return [f"{name}_bucket"] if kind == "histogram" else [name]


def test_the_board_asks_for_what_there_is() -> None:
    board = json.loads((DOCS / "boards" / "gateway.json").read_text("utf-8"))
    asked = {
        name
        for panel in board["panels"]
        for target in panel["targets"]
        for name in _NAME.findall(target["expr"])
    }
    assert asked <= exposed()
    shown_elsewhere = {"sojourn_gateway_replica_in_flight"}  # the load says the same of more
    assert exposed() - asked == shown_elsewhere
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    places = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in board["panels"]]
    assert len(set(places)) == len(places)


def test_the_page_lists_every_metric() -> None:
    page = (DOCS / "gateway.md").read_text("utf-8")
    listed = set(re.findall(r"^\| `(sojourn_gateway_[a-z_]+)`", page, re.MULTILINE))
    assert listed == {name.removesuffix("_bucket") for name in exposed()}
