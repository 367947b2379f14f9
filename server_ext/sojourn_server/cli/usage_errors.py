"""Usage errors of the command line, in the form of all other errors: what is wrong, and the next step. The
command-line library would print them without a next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from .cli_error import CliError

# The library is click, or in later releases of typer a copy of it, so its classes have no fixed module.
_UsageError: Any = typer.BadParameter.__base__


class Commands(TyperGroup):
    """The sub-commands of ``sojourn``. Their usage errors are ``CliError``."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the words before the name of a sub-command."""
        with _as_cli_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the words after the name of a sub-command, and run it."""
        with _as_cli_errors():
            return super().invoke(ctx)


@contextmanager
def _as_cli_errors() -> Iterator[None]:
    try:
        yield
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its text is the help
            raise
        names: list[str] = []
        context = error.ctx
        while context is not None and context.parent is not None:
            names.insert(0, context.command.name)
            context = context.parent
        text = " ".join(error.format_message().split()).rstrip(".")
        path = " ".join(["sojourn", *names])
        raise CliError(text[:1].lower() + text[1:], f"see {path} --help") from error
