"""``sojourn trace``: convert records of agent runs into a trace for ``simulate`` and ``replay``."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .console import CliError, console

if TYPE_CHECKING:
    from sojourn_server.traces.imports import ImportedTrace

_SOURCES = ("otel", "sojourn")


def register(app: typer.Typer) -> None:
    """Add the command group to ``app``."""
    group = typer.Typer(help="Make traces from records of agent runs.", no_args_is_help=True)
    # Without a callback typer replaces a group of one command by that command.
    group.callback()(lambda: None)
    group.command("import", help="Make a trace from OpenTelemetry spans or from sojourn's ledgers.")(import_)
    app.add_typer(group, name="trace")


def import_(
    files: list[Path] = typer.Argument(help="Files to read, plain or gzipped; they become one trace"),
    source: str = typer.Option(
        ...,
        "--from",
        help="otel: spans in OTLP JSON or in the format of Python's exporters; "
        "sojourn: answers of GET /sojourn/v1/programs/{id}",
    ),
    output: Path = typer.Option(..., "-o", "--output", help="The trace, .jsonl or .jsonl.gz"),
) -> None:
    """Read the files, convert them and write the trace. If a file is unreadable, nothing is written."""
    from sojourn_server.traces.trace_schema import TraceError
    from sojourn_server.traces.trace_writer import write_trace

    if source not in _SOURCES:
        near = difflib.get_close_matches(source, _SOURCES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(_SOURCES)}"
        raise CliError(f"--from {source} is unknown", hint)
    if not output.name.endswith((".jsonl", ".jsonl.gz")):
        raise CliError(f"-o {output}: expected a name ending in .jsonl or .jsonl.gz", "change the name")
    try:
        imported = _read(files, source)
        count = write_trace(output, imported.programs)
    except TraceError as error:
        raise CliError(str(error), "see docs/traces.md for the formats") from None
    turns = sum(len(program.turns) for program in imported.programs)
    console.print(f"{output}: {count} programs, {turns} turns", highlight=False, soft_wrap=True)
    for note in imported.notes:
        console.print(f"[yellow]note:[/] {note}", highlight=False, soft_wrap=True)


def _read(files: list[Path], source: str) -> ImportedTrace:
    if source == "otel":
        from sojourn_server.traces.imports.otel_import import read_otel

        return read_otel(files)
    from sojourn_server.traces.imports.ledger_import import read_ledgers

    return read_ledgers(files)
