"""``sojourn explain``: where the seconds and tokens of one turn of a program went, and why."""

from __future__ import annotations

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from .console import json_option, write_json
from .doctor_server import KEY_VARIABLES
from .live_client import DEFAULT_URL, LiveClient

_NOT_TERMS = ("seq", "at_s", "kind", "program_id", "reason")


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("explain", help="Say why a turn of a program took as long as it did.")(explain)


def explain(
    program: str = typer.Argument(help="Id of the program; GET /sojourn/v1/programs lists them"),
    turn: int | None = typer.Option(None, min=1, help="Number of the turn; without it the newest one"),
    url: str = typer.Option(DEFAULT_URL, help="The engine or gateway"),
    api_key: str | None = typer.Option(None, envvar=list(KEY_VARIABLES), help="Its API key"),
    json_output: str | None = json_option("the explanation"),
) -> None:
    """Print a paragraph and a table. The numbers are the turn ledger's; estimates are named as such."""
    client = LiveClient(url, api_key)
    try:
        found = client.explanation(program, turn)
    finally:
        client.close()
    if json_output is not None:
        write_json(found, json_output)
    if json_output != "-":
        print_explanation(found, Console())


def print_explanation(found: dict[str, Any], out: Console) -> None:
    """Print an explanation, as the route answers it."""
    out.print(f"[bold]{escape(found['program_id'])}[/]: {escape(found['text'])}", highlight=False)
    table = Table("where", "seconds", "tokens", "note", box=None, pad_edge=False)
    before, seconds, tokens = found["before"], found["seconds"], found["tokens"] or {}
    if before["gap_s"] is not None:
        lease = "lease held" if before["leased_at_return"] else "no lease left"
        table.add_row("tool", f"{before['gap_s']:.2f}", "", f"{before['tool'] or 'unknown'}; {lease}")
    table.add_row("queued", f"{seconds['queued']:.2f}", "", "")
    prompt = tokens.get("prompt")
    table.add_row("prefilling", f"{seconds['prefilling']:.2f}", f"{prompt:,}" if prompt else "", "prompt")
    for source in ("device", "host", "new", "tail"):
        if tokens.get(source):
            table.add_row(f"  {source}", "", f"{tokens[source]:,}", "")
    for cause, count in tokens.get("lost", {}).items():
        by = f"taken by {found['lost_to']}" if found["lost_to"] else ""
        table.add_row(f"  lost: {cause}", "", f"{count:,}", by)
    table.add_row("decoding", f"{seconds['decoding']:.2f}", "", found["outcome"])
    out.print(table, markup=False)
    for decision in found["decisions"]:
        terms = " ".join(f"{name}={decision[name]:g}" for name in decision if name not in _NOT_TERMS)
        out.print(
            f"decision {decision['seq']}: {decision['kind']} ({decision['reason']}) {terms}", markup=False
        )
    for one in found["advice"]:
        saves = f" Saves about {one['saves_s']:.2f} s (estimate)." if one["saves_s"] else ""
        out.print(f"hint {one['hint'] or 'none'}: {one['text']}{saves}", markup=False)
    for text in found["unknown"]:
        out.print(f"unknown: {text}", markup=False)
