"""Tables and pages of results. A page has generated and hand-written parts; a new run keeps the latter."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table
from sojourn_server.cli.console import write_json
from sojourn_server.simulator.report.results_file import made_with

HERE = Path(__file__).resolve().parent
FIRST_WORDS = "Nothing has been written yet."
BEGIN, END = "<!-- by hand -->", "<!-- /by hand -->"


def marked(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with the first column left-aligned."""
    rows = [head, ["---", *["--:"] * (len(head) - 1)], *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def show(head: Sequence[str], lines: Iterable[Sequence[str]], **options: Any) -> None:
    """Print a table with the first column left-aligned."""
    table = Table(**options)
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if place else "left")
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 150).print(table)


def less(value: float, than: float) -> str:
    """Return the change from ``than`` to ``value`` in percent, as text."""
    return f"{value / than - 1:+.0%}" if than else "–"


def number(value: float | None) -> str:
    """Return a number with two decimals, as text; a dash for none."""
    return "–" if value is None else f"{value:.2f}"


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


def provenance(made: Any) -> dict[str, Any]:
    """Return what made a result, as the first fields of its JSON."""
    command = f"python benchmarks/{made.command}"
    return {"command": command, "machine": made.machine, "versions": made.versions}


def write_result(folder: Path, name: str, made: Any, document: Mapping[str, Any], page: str) -> None:
    """Write ``NAME.json`` (command, machine and versions, then ``document``) and ``NAME.md``."""
    write_json({**provenance(made), **document}, str(folder / f"{name}.json"))
    write_page(folder / f"{name}.md", page, FIRST_WORDS)


class Result:
    """What a benchmark finds: a page and a JSON file. Made when the benchmark begins."""

    def __init__(self, name: str, title: str) -> None:
        self._name, self._title = name, title
        made, folder = made_with(sys.argv), Path(sys.argv[0]).resolve().parent
        inside = f"{folder.relative_to(HERE)}/" if HERE in folder.parents else ""
        self.made = msgspec.structs.replace(made, command=inside + made.command)
        self._began_s = time.monotonic()
        self.earlier_s = 0.0
        """Seconds of earlier runs whose results are part of this one."""

    @property
    def wall_s(self) -> float:
        return self.earlier_s + time.monotonic() - self._began_s

    def write(self, folder: Path, document: Mapping[str, Any], *parts: str) -> None:
        """Write ``NAME.json`` with ``document``, and ``NAME.md`` with the paragraphs ``parts``, both after
        what made them; ``{by hand}`` in a part marks the place of hand-written text."""
        write_result(folder, self._name, self.made, document, self._page(parts))

    def write_paper(self, folder: Path, document: Mapping[str, Any], parts: Iterable[str]) -> None:
        """Do the same for the figures of a paper, whose JSON has the form of ``sojourn simulate --json``.
        Print the page."""
        page = self._page(parts)
        folder.mkdir(parents=True, exist_ok=True)
        made = {"made_with": msgspec.to_builtins(self.made)}
        write_json({**made, **document}, str(folder / f"{self._name}.json"))
        write_page(folder / f"{self._name}.md", page, FIRST_WORDS)
        Console().print(page, highlight=False, markup=False)

    def _page(self, parts: Iterable[str]) -> str:
        return "\n\n".join([opening(self._title, self.made, self.wall_s), *parts]) + "\n"


def made_by(made: Any, wall_s: float) -> str:
    """Return the command, machine, versions and duration of a run, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in made.versions.items())
    machine = made.machine
    return (
        f"```bash\npython benchmarks/{made.command}\n```\n\n"
        f"{machine['cores']} cores of {machine['processor']}; {versions}; {wall_s / 60:.0f} minutes."
    )


def opening(title: str, made: Any, wall_s: float) -> str:
    """Return the title of a generated page, and what made it, as Markdown."""
    words = "Generated by the command below, but for what is between the marks."
    return f"# {title}\n\n{words}\n\n{made_by(made, wall_s)}"
