"""Every recipe of docs/cookbook.md, run as it stands against a fake server."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import sojourn
from docs_tools import ROOT
from sojourn.testing import FakeServer

TEXT = (ROOT / "docs" / "cookbook.md").read_text(encoding="utf-8")
RECIPES = [
    (title, code, re.findall(r"`(\w+)`", sends))
    for title, code, sends in re.findall(
        r"^## (\d+\. .+?)$.*?```python\n(.*?)```.*?^Sends: (.*?)$", TEXT, re.MULTILINE | re.DOTALL
    )
]


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    yield
    sojourn.shutdown()
    sojourn.uninstrument()


def test_there_are_eight_recipes() -> None:
    assert [int(title.partition(".")[0]) for title, _, _ in RECIPES] == list(range(1, 9))


@pytest.mark.parametrize(("title", "code", "sends"), RECIPES, ids=[title for title, _, _ in RECIPES])
def test_a_recipe_runs_and_sends_what_it_says(title: str, code: str, sends: list[str]) -> None:
    with FakeServer() as server:
        exec(
            compile(code.replace("http://127.0.0.1:8000", server.url), title, "exec"), {"__name__": "recipe"}
        )
        assert sojourn.flush(60), sojourn.stats()
        assert [type(event).__name__ for event in server.program_events()] == sends
