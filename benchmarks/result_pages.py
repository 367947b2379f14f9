"""Result pages with generated and hand-written parts: a new run keeps the hand-written text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sojourn_server.cli.console import write_json

FIRST_WORDS = "Nothing has been written yet."
BEGIN, END = "<!-- by hand -->", "<!-- /by hand -->"


def marked(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown with the first column left-aligned."""
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def less(value: float, than: float) -> str:
    """The change from ``than`` to ``value`` in percent, as text."""
    return f"{value / than - 1:+.0%}" if than else "–"


def write_page(path: Path, generated: str, first_words: str) -> None:
    """Write ``generated`` to ``path``. ``{by hand}`` in it is replaced by the text between the marks of the
    old page.

    ``first_words`` replace it in a new page.
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
    """``NAME.json``, with the command, machine and versions before ``document``, and ``NAME.md``."""
    told = {
        "command": f"python benchmarks/{made.command}",
        "machine": made.machine,
        "versions": made.versions,
    }
    write_json({**told, **document}, str(folder / f"{name}.json"))
    write_page(folder / f"{name}.md", page, FIRST_WORDS)


def made_by(made: Any, wall_s: float) -> str:
    """The command and the machine, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    machine = made.machine
    return (
        f"```bash\npython benchmarks/{made.command}\n```\n\n"
        f"{machine['cores']} cores of {machine['processor']}; {versions}; {wall_s / 60:.0f} minutes."
    )
