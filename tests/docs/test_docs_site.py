"""The documents build as a site without a warning, and offline."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import sojourn
from docs_tools import ROOT
from script_modules import load_script
from sojourn_server.cli import COMMANDS


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    load_script("scripts/site.py").build(folder)
    return folder


@pytest.mark.nightly
def test_every_page_of_the_navigation_is_built(site: Path) -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    pages = re.findall(r": (\S+)\.md$", nav, re.MULTILINE)
    assert len(pages) > 20
    for page in pages:
        assert (site / re.sub(r"README$", "index", page)).with_suffix(".html").is_file(), page
    written = {path.stem for path in (ROOT / "docs").glob("*.md")}
    assert written <= {page.rpartition("/")[2] for page in pages}, "a document is not in the navigation"


@pytest.mark.nightly
def test_tables_are_tables_and_nothing_is_fetched(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^\|---|<p>\| ", text, re.MULTILINE), f"a table of {page.name} is not one"
        assert not re.search(r"<(?:script|link|img)[^>]+(?:src|href)=\"https?:", text), page.name


def test_the_reference_has_every_command_and_every_public_name() -> None:
    script = load_script("scripts/site.py")
    commands, names = script.cli_page(), script.sdk_page()
    assert set(COMMANDS) <= set(re.findall(r"^## sojourn ([\w-]+)$", commands, re.MULTILINE))
    public = {name for name in sojourn.__all__ if callable(getattr(sojourn, name))}
    assert public <= set(re.findall(r"^## (\w+)$", names, re.MULTILINE))
    routes = script.api_page()
    for document in (script.server_api("engine"), script.server_api("gateway")):
        for path, methods in document["paths"].items():
            assert all(f"\n### {method.upper()} {path}\n" in routes for method in methods)


def test_lists_and_tables_get_the_line_that_markdown_wants() -> None:
    text = "one\n- a\n- b\n  c\n- d\n<!-- x -->\n| t |\n|---|\n<!-- y -->\n| u |\n```\nno\n- list\n```\n"
    assert load_script("scripts/site.py").as_markdown(text) == (
        "one\n\n- a\n- b\n  c\n- d\n\n| t |\n|---|\n| u |\n```\nno\n- list\n```\n"
    )
