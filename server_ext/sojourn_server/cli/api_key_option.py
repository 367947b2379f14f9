"""The option ``--api-key`` of commands that ask a server, and the environment variables that replace it."""

from __future__ import annotations

import os
from typing import Any

import typer

KEY_VARIABLES = ("VLLM_API_KEY", "SOJOURN_API_KEY")
"""Environment variables that may hold the API key: vLLM's first, then that of the SDK and the gateway."""
PASS_KEY = f"pass --api-key, or set {', or else '.join(KEY_VARIABLES)}"
"""Next step after an error because of a missing key."""


def api_key_option(what: str = "The server's API key") -> Any:
    """The option ``--api-key``. ``what``: its help."""
    return typer.Option(None, "--api-key", envvar=list(KEY_VARIABLES), help=what)


def key_source(context: typer.Context) -> str:
    """Return the name of the option or environment variable that holds the API key; ``--api-key`` if there
    is no key."""
    source = context.get_parameter_source("api_key")
    if source is None or source.name != "ENVIRONMENT":
        return "--api-key"
    return next(name for name in KEY_VARIABLES if os.environ.get(name))
