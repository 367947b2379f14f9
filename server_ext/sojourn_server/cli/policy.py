"""``sojourn policy``: switches the policy of a running engine, or of all engines of a gateway, off and on."""

from __future__ import annotations

from contextlib import closing

import typer

from .console import CliError, api_key_option, url_option
from .live_client import API, LiveClient


def policy(
    switch: str = typer.Argument(metavar="on|off", help="The state to switch to"),
    url: str = url_option("The engine or gateway"),
    api_key: str | None = api_key_option("Its API key; a gateway's admin key"),
) -> None:
    """Switch the policy of a running engine off, or on again.

    Example: sojourn policy off --url http://127.0.0.1:8000

    While it is off, requests are scheduled as by stock vLLM: leases end, no request is held back, and the
    queue goes by arrival. Requests in the engine go on. A gateway switches all engines. A restarted engine
    has its policy on.
    """
    if switch not in ("on", "off"):
        raise CliError(
            f"{switch!r} is not a state; expected on or off",
            "sojourn doctor --url URL shows the policy; another one needs a new start of the engine: "
            "sojourn serve MODEL --policy NAME",
        )
    with closing(LiveClient(url, api_key)) as client:
        answer = client.post(f"{API}/policy", on=switch == "on")
        engines = answer.get("engines", {client.shown_url: answer})
        for engine, state in engines.items():
            started = "" if switch == "on" else f" (started with {state.get('started_with')})"
            typer.echo(f"{engine}: policy {state.get('policy')}{started}")
    if left := [*answer.get("stock", ()), *answer.get("silent", ())]:
        raise CliError(
            f"not switched: {', '.join(left)}",
            "engines under --policy stock have no policy; for the others see sojourn doctor --url",
        )
    if not engines:
        raise CliError("nothing switched: the gateway has no engine that answers", "see sojourn doctor --url")
