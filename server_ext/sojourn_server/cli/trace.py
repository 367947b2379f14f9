"""``sojourn trace``: what agents did elsewhere, made into a trace that can be simulated and replayed."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .console import CliError, console

if TYPE_CHECKING:
    from sojourn_server.traces.imports import Imported

_SOURCES = ("otel", "sojourn")


def register(app: typer.Typer) -> None:
    """Add the command group to ``app``."""
    group = typer.Typer(help="Make traces of what agents did.", no_args_is_help=True)
    # A group of one command would otherwise be that command.
    group.callback()(lambda: None)
    group.command("import", help="Make a trace of OpenTelemetry spans or of sojourn's own ledgers.")(import_)
    app.add_typer(group, name="trace")


def import_(
    files: list[Path] = typer.Argument(help="Files to read, plain or gzipped; together they make one trace"),
    source: str = typer.Option(
        ...,
        "--from",
        help="otel: spans as OTLP JSON or as Python's exporters write them; "
        "sojourn: answers of GET /sojourn/v1/programs/{id}",
    ),
    output: Path = typer.Option(..., "-o", "--output", help="The trace, .jsonl or .jsonl.gz"),
) -> None:
    """Read, convert, write; nothing is written where anything cannot be read."""
    from sojourn_server.traces.schema import TraceError
    from sojourn_server.traces.writer import write_trace

    if source not in _SOURCES:
        near = difflib.get_close_matches(source, _SOURCES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_SOURCES)}"
        raise CliError(f"--from {source} is unknown", hint)
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise CliError(f"-o {output} is no trace's name", "end it in .jsonl or .jsonl.gz")
    try:
        imported = _read(files, source)
        count = write_trace(output, imported.programs)
    except TraceError as error:
        raise CliError(str(error), "see docs/traces.md for what is read") from None
    turns = sum(len(program.turns) for program in imported.programs)
    console.print(f"{output}: {count} programs, {turns} turns", highlight=False, soft_wrap=True)
    for note in imported.notes:
        console.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)


def _read(files: list[Path], source: str) -> Imported:
    if source == "otel":
        from sojourn_server.traces.imports.otel import read_otel

        return read_otel(files)
    from sojourn_server.traces.imports.ledgers import read_ledgers

    return read_ledgers(files)
