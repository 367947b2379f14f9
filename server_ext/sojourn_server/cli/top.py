"""``sojourn top``: the programs and the KV memory of a running engine or gateway, in a terminal."""

from __future__ import annotations

import shutil
import sys
from contextlib import closing
from typing import Any

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from ..metrics.live_frame import LiveFrame
from .console import CliError, api_key_option, json_option, print_line, url_option, write_json
from .explain import explanation_view, turn_table
from .live_client import AnswerError, LiveClient
from .top_view import MIN_WIDTH, SORTABLE, TopView, sorted_programs

_PIPED_WIDTH = 120
"""Width where stdout is no terminal. It leaves room for the programs' names."""


def top(
    url: str = url_option("An engine or a gateway"),
    api_key: str | None = api_key_option("The server's API key, or a gateway's"),
    once: bool = typer.Option(False, "--once", help="Print one view and exit"),
    json_output: str | None = json_option("one view (then the command exits)"),
    interval_s: float = typer.Option(1.0, "--interval", min=0.5, help="Seconds between two views"),
    sort: str = typer.Option(
        "state", help="Column to sort by: state, for, lease, reuse, ctx, kv, turn, ttft, lost"
    ),
) -> None:
    """Show the programs and the KV memory of a running server, live."""
    if sort not in SORTABLE:
        raise CliError(f"--sort {sort} is unknown", f"use one of {', '.join(SORTABLE)}")
    with closing(LiveClient(url, api_key)) as client:
        if json_output is not None:
            write_json(frame_document(client.frame()), json_output)
            if json_output != "-":
                print_line(f"wrote {json_output}")
        elif once or not sys.stdout.isatty():
            width = max(MIN_WIDTH, shutil.get_terminal_size((_PIPED_WIDTH, 24)).columns)
            view = TopView(client.frame(), width, url=client.shown_url, sort=sort)
            Console(width=width, highlight=False).print(*view.page(), sep="\n", soft_wrap=True)
        else:
            from .top_app import TopApp

            app = TopApp(
                client.frame,
                lambda program_id: explanation_of(client, program_id),
                url=client.shown_url,
                interval_s=interval_s,
                sort=sort,
            )
            app.run()
            # An app that died has printed why, and returned as usual.
            raise typer.Exit(app.return_code or 0)


def frame_document(frame: LiveFrame) -> dict[str, Any]:
    """Return the frame as JSON data with named fields. The ``state``, ``for_s``, ``lease_left_s`` and
    ``kv_bytes`` of a program are those that the view displays."""
    programs = []
    for view in sorted_programs(frame):
        shown = view._asdict() | {"for_s": round(view.for_s, 3)}
        if view.lease_left_s is not None:
            shown["lease_left_s"] = round(view.lease_left_s, 3)
        programs.append({**msgspec.structs.asdict(shown.pop("row")), **shown})
    return {**msgspec.to_builtins(frame), "programs": programs}


def explanation_of(client: LiveClient, program_id: str) -> RenderableType:
    """Return a view of a program: the output of ``sojourn explain`` for its newest turn, and a table of its
    latest turns."""
    program = client.find_program(program_id)
    if program is None:
        return Text("the server does not know this program any more")
    table = Text(turn_table(program))
    try:
        return Group(explanation_view(client.explanation(program_id), program), Text(""), table)
    except AnswerError as error:
        if error.status != 404:  # no turn yet, or a server without explanations
            raise
    return table
