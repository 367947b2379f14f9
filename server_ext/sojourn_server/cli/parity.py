"""``sojourn parity``: replay a recording in a second scheduler and compare every decision."""

from __future__ import annotations

from pathlib import Path

import typer

from ..simulator.parity_replay import replay_recording
from .console import CliError, console, json_option, write_json


def parity(
    recording: Path = typer.Argument(help="Recording that an engine wrote with the setting recording_file"),
    allow_unfinished: bool = typer.Option(
        False, help="Accept a recording without an end, as a killed engine leaves it"
    ),
    json: str | None = json_option("the report"),
) -> None:
    """Replay a recording of a live engine; every decision must be the same."""
    report = replay_recording(recording, allow_unfinished=allow_unfinished)
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
