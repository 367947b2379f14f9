"""Result pages with generated and hand-written parts. A new run keeps the hand-written text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sojourn_server.cli.console import write_json

FIRST_WORDS = "Nothing has been written yet."
BEGIN, END = "<!-- by hand -->", "<!-- /by hand -->"


def marked(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned."""
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def less(value: float, than: float) -> str:
    """Return the change from ``than`` to ``value`` in percent, as text."""
    return f"{value / than - 1:+.0%}" if than else "–"


def write_page(path: Path, generated: str, first_words: str) -> None:
    """Write ``generated`` to ``path``, with hand-written text in the place of ``{by hand}``.

    The hand-written text is what the old page has between the marks, or ``first_words`` for a new page.
    """
    words = first_words
    if path.exists():
        found = re.search(f"{re.escape(BEGIN)}\n(.*?)\n{re.escape(END)}", path.read_text("utf-8"), re.DOTALL)
        if found:
            words = found.group(1)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(generated.replace("{by hand}", f"{BEGIN}\n{words.strip()}\n{END}"), encoding="utf-8")
    partial.replace(path)


def write_result(folder: Path, name: str, made: Any, document: Mapping[str, Any], page: str) -> None:
    """Write ``NAME.json`` (command, machine and versions, then ``document``) and ``NAME.md``."""
    told = {
        "command": f"python benchmarks/{made.command}",
        "machine": made.machine,
        "versions": made.versions,
    }
    write_json({**told, **document}, str(folder / f"{name}.json"))
    write_page(folder / f"{name}.md", page, FIRST_WORDS)


def made_by(made: Any, wall_s: float) -> str:
    """Return the command, machine, versions and duration of a run, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    machine = made.machine
    return (
        f"```bash\npython benchmarks/{made.command}\n```\n\n"
        f"{machine['cores']} cores of {machine['processor']}; {versions}; {wall_s / 60:.0f} minutes."
    )
