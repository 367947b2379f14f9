"""docs/simulator.md against the command, the tables and the code it speaks of."""

from __future__ import annotations

import re
from typing import Any

import pytest
import typer
from docs_tools import ROOT, block, code_words, rows
from sojourn_server.cli import build_app
from sojourn_server.simulator.report.results_table import COLUMNS
from test_docs import generator

PAGE = (ROOT / "docs" / "simulator.md").read_text(encoding="utf-8")


def test_what_is_generated_is_current() -> None:
    assert generator().simulator_page(PAGE) == PAGE, "run: python docs/generate.py"


def test_every_option_has_an_example_that_uses_it() -> None:
    command: Any = typer.main.get_command(build_app()).commands["simulate"]  # type: ignore[attr-defined]
    known = {
        parameter.opts[0]: {*parameter.opts, *parameter.secondary_opts}
        for parameter in command.params
        if parameter.param_type_name == "option"
    }
    table = {row[0].strip("`"): row[1] for row in rows(block(PAGE, "options"))}
    assert table.keys() == known.keys() - {"--help"}
    for option, example in table.items():
        named = {word for words in code_words(example) for word in words.split() if word.startswith("-")}
        assert named & known[option], option
        assert named - {"-"} <= {name for names in known.values() for name in names}


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


def test_the_example_is_as_short_as_promised() -> None:
    assert len(re.findall(r"`(examples/custom_policy/[\w.]+)`", PAGE)) == 2
    code = block(PAGE, "own-preset") + block(PAGE, "own-policy")
    assert 20 < len(code.splitlines()) < 100
