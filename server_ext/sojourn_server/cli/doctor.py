"""``sojourn doctor``: not written yet."""

import typer


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
