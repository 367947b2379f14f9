"""``sojourn parity``: tell a tape's facts to a second steward and compare every decision."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import CliError, console, write_json


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("parity", help="Replay a tape of a live engine: every decision must come out the same.")(
        parity
    )


def parity(
    tape: Path = typer.Argument(help="What an engine wrote with the setting tape_file"),
    allow_unfinished: bool = typer.Option(
        False, help="The engine was killed: take the tape as far as it goes"
    ),
    json: str | None = typer.Option(None, metavar="FILE|-", help="Write the report as JSON, - for stdout"),
) -> None:
    """Compare and show; exit code 1 at the first decision or answer that differs."""
    from sojourn_server.lab.parity import TapeError, replay_tape

    try:
        report = replay_tape(tape, allow_unfinished=allow_unfinished)
    except TapeError as error:
        raise CliError(
            str(error), "name a tape that this release wrote; a killed engine's needs --allow-unfinished"
        ) from None
    console.print(report)
    if json is not None:
        write_json(report.as_dict(), json)
    if not report.total_decisions:
        raise CliError(
            f"{tape} holds no decisions: nothing was compared",
            "let the server stop in peace: sojourn serve MODEL … --shutdown-timeout 10",
            exit_code=1,
        )
    if not report.identical:
        raise CliError(
            "the tape was not reproduced",
            "it was made with another release, preset or policy file",
            exit_code=1,
        )
