"""The ``sojourn`` command. One file per sub-command; each registers itself and imports late."""

from __future__ import annotations

from importlib import import_module

import typer

from .console import fail_loudly

COMMANDS = (
    "serve", "gateway", "demo", "replay", "simulate", "simulate-pd", "plan-pd", "parity", "profile", "trace",
    "doctor", "run",
)  # fmt: skip


def build_app() -> typer.Typer:
    """The Typer application with every sub-command registered."""
    app = typer.Typer(
        name="sojourn",
        help="Keep an agent's KV cache across its tool calls, on an unforked vLLM.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    for name in COMMANDS:
        import_module(f"{__name__}.{name.replace('-', '_')}").register(app)
    return app


def main() -> None:
    """Entry point of the ``sojourn`` script."""
    with fail_loudly():
        build_app()()
