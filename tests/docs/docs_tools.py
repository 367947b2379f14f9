"""Reads the documents, and the code that they describe, without importing an engine."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
SERVER = ROOT / "server_ext" / "sojourn_server"
PACKAGES = {
    "sojourn": ROOT / "sdk" / "sojourn",
    "sojourn_integrations": ROOT / "integrations" / "sojourn_integrations",
    **{folder.name: folder for folder in SERVER.iterdir() if (folder / "__init__.py").is_file()},
}
"""Package → its folder."""


def documents() -> list[Path]:
    """All Markdown files of the project, except those of the demo's task repositories."""
    found = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").glob("*.md")]
    return sorted(found)


def block(document: str, name: str) -> str:
    """The text between ``<!-- name -->`` and ``<!-- /name -->``."""
    found = re.search(rf"<!-- {name} -->\n(.*?)<!-- /{name} -->", document, re.DOTALL)
    assert found, f"there is no block {name}"
    return found.group(1)


def rows(table: str) -> list[list[str]]:
    """Cells of a Markdown table, header and ruler left out."""
    lines = [line for line in table.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines[2:]]


def code_words(text: str) -> set[str]:
    """All texts in backticks, except those in fenced blocks."""
    return set(re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)))


def top_level_names(path: Path) -> set[str]:
    """Functions, classes and constants a file defines, with ``Class.method``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names.add(node.name)
            for inner in node.body:
                if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef)):
                    names.add(f"{node.name}.{inner.name}")
        elif isinstance(node, ast.Assign):
            names.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names
