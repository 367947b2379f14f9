"""``sojourn parity``: replay a recording in a second scheduler and compare every decision."""

from __future__ import annotations

from pathlib import Path

import typer

from .console import CliError, console, json_option, write_json


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("parity", help="Replay a recording of a live engine; every decision must be the same.")(
        parity
    )


def parity(
    recording: Path = typer.Argument(help="Recording that an engine wrote with the setting recording_file"),
    allow_unfinished: bool = typer.Option(
        False, help="Accept a recording without an end, as a killed engine leaves it"
    ),
    json: str | None = json_option("the report"),
) -> None:
    """Replay ``recording`` and print a report. Exits with code 1 if an action or decision differs from the
    recording, or if the recording holds no decisions."""
    from sojourn_server.simulator.parity_replay import RecordingError, replay_recording

    try:
        report = replay_recording(recording, allow_unfinished=allow_unfinished)
    except RecordingError as error:
        raise CliError(
            str(error),
            "name a recording of this release; for one of a killed engine add --allow-unfinished",
        ) from None
    console.print(report)
    if json is not None:
        write_json(report.as_dict(), json)
    if not report.decisions:
        raise CliError(
            f"{recording} holds no decisions: nothing was compared",
            "give the server time to stop: sojourn serve MODEL … --shutdown-timeout 10",
            exit_code=1,
        )
    if not report.identical:
        raise CliError(
            "the decisions differ from the recording",
            "use the release, preset and policy file of the recording",
            exit_code=1,
        )
