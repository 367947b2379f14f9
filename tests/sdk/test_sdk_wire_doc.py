"""The examples of docs/wire.md are the encoder's output, byte for byte. ``tests/fuzz`` reads them too."""

from __future__ import annotations

import re
import typing
from pathlib import Path

import pytest
from sojourn.aeg import END, START, Aeg
from sojourn.wire_codec import Outcome, decode_batch, decode_context, decode_event, decode_outcomes, encode
from sojourn.wire_events import AegReport, AnyEvent

DOCUMENT = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
SHOWN = dict(re.findall(r"<!-- example: (\w+) -->\n```json\n(.*?)\n```", DOCUMENT, re.DOTALL))
DECODERS = {
    "context": decode_context, "riding": decode_context, "batch": decode_batch, "outcomes": decode_outcomes,
}  # fmt: skip
"""Of the examples that are no events."""


@pytest.mark.parametrize("name", SHOWN)
def test_an_example_is_what_the_encoder_says(name):
    found = DECODERS.get(name, decode_event)(SHOWN[name].encode())
    assert encode(found).decode() == SHOWN[name]
    inside = getattr(getattr(found, "sojourn", found), "events", ())  # kept as they came
    assert [encode(decode_event(raw)) for raw in inside] == [bytes(raw) for raw in inside]


def test_every_kind_of_message_has_an_example():
    assert SHOWN.keys() >= DECODERS.keys()
    events = [decode_event(text.encode()) for name, text in SHOWN.items() if name not in DECODERS]
    assert {type(event) for event in events} == set(typing.get_args(AnyEvent))


def test_the_graph_shown_has_the_hash_shown():
    graph = Aeg(
        {"plan": (), "act": ("bash", "edit")},
        [(START, "plan"), ("plan", "act"), ("act", "act", 0.7), ("act", END, 0.3)],
    )
    shown = decode_event(SHOWN["aeg"].encode())
    assert isinstance(shown, AegReport)
    assert (shown.graph_hash, shown.graph) == (graph.hash, graph.wire())


def test_every_outcome_is_explained():
    table = DOCUMENT.split("## Outcomes")[1].split("## Capabilities")[0]
    for outcome in Outcome:
        assert f"| `{outcome.value}` |" in table
