"""``sojourn policy``: switches the policy of a running engine, or of all engines of a gateway, off and on."""

from __future__ import annotations

from contextlib import closing

import typer

from .api_key_option import api_key_option
from .cli_error import CliError
from .live_client import API, DEFAULT_URL, LiveClient


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command(
        "policy",
        help=(
            "Switch the policy of a running engine off, or on again.\n\n"
            "Example: sojourn policy off --url http://127.0.0.1:8000\n\n"
            "While it is off, requests are scheduled as by stock vLLM: leases end, no request is held back, "
            "and the queue goes by arrival. Requests in the engine go on. A gateway switches all engines. "
            "A restarted engine has its policy on."
        ),
    )(policy)


def policy(
    switch: str = typer.Argument(metavar="on|off", help="The state to switch to"),
    url: str = typer.Option(DEFAULT_URL, help="The engine or gateway"),
    api_key: str | None = api_key_option("Its API key; a gateway's admin key"),
) -> None:
    """Switch, and print the policy of each engine. Raises ``CliError`` for another word than on and off, and
    if an engine was not switched."""
    if switch not in ("on", "off"):
        raise CliError(
            f"{switch!r} is not a state; expected on or off",
            "another policy needs a new start of the engine: sojourn serve --policy NAME",
        )
    with closing(LiveClient(url, api_key)) as client:
        answer = client.post(f"{API}/policy", on=switch == "on")
        for engine, state in answer.get("engines", {client.shown_url: answer}).items():
            started = "" if switch == "on" else f" (started with {state.get('started_with')})"
            typer.echo(f"{engine}: policy {state.get('policy')}{started}")
    if left := [*answer.get("stock", ()), *answer.get("silent", ())]:
        raise CliError(
            f"not switched: {', '.join(left)}",
            "engines under --policy stock have no policy; for the others see sojourn doctor --url",
        )
