"""docs/simulator.md against the tables and the code it speaks of."""

from __future__ import annotations

import re

import pytest
from docs_tools import ROOT
from sojourn_server.simulator.report.results_table import COLUMNS
from test_docs import generator

PAGE = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_what_is_generated_is_current() -> None:
    assert generator().simulator_page(PAGE) == PAGE, "run: python docs/generate.py"


def test_every_column_is_explained() -> None:
    told = PAGE.split("| column | meaning |")[1].split("\n\n")[0]
    for column in COLUMNS:
        title = column.title if column.unit != "/h" else f"{column.title} {column.unit}"
        assert re.search(rf"^\|[^|]*\b{re.escape(title)}", told, re.MULTILINE), title


@pytest.mark.parametrize("script", re.findall(r"`python (benchmarks/\w+\.py)", PAGE))
def test_the_scripts_exist(script: str) -> None:
    assert (ROOT / script).is_file()


@pytest.mark.parametrize(
    "path", sorted(set(re.findall(r"`((?:tests|examples|benchmarks)/[\w/]+\.\w+)`", PAGE)))
)
def test_the_files_exist(path: str) -> None:
    assert (ROOT / path).is_file() or path == "benchmarks/RESULTS.md"
