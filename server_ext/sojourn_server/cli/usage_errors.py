"""Usage errors of the command line, in the form of all other errors: what is wrong, and the next step.

The command-line library would print usage errors itself, but without a next step and without the invalid
value.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from .cli_error import CliError

# The library is click, or in later releases of typer a copy of it, so its classes have no fixed module.
_BadParameter: Any = typer.BadParameter
_UsageError: Any = _BadParameter.__base__


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
        raise _cli_error(error) from error


def _cli_error(error: Any) -> CliError:
    context = error.ctx
    path = _command_path(context)
    if type(error).__name__ == "MissingParameter":
        words = " ".join(_written(each) for each in context.command.params if each.required)
        missing = _written(error.param).removeprefix("-- ").removesuffix("...") if error.param else "a value"
        return CliError(f"{missing} is missing", f"write: {path} [OPTIONS] {words}; see {path} --help")
    if isinstance(error, _BadParameter):
        return CliError(_invalid_value(error), f"see {path} --help")
    return CliError(_sentence(error.format_message()), f"see {path} --help")


def _command_path(context: Any) -> str:
    """Return the sub-command as the user writes it, such as ``sojourn trace import``."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, context.command.name)
        context = context.parent
    return " ".join(["sojourn", *names])


def _written(param: Any) -> str:
    """Return how an argument or an option with its value is written on the command line."""
    value = str(param.metavar or param.name.upper())
    return value if param.param_type_name == "argument" else f"{max(param.opts, key=len)} {value}"


def _invalid_value(error: Any) -> str:
    """Return the text of the error: the option, its invalid value, and the reason."""
    name = error.param.opts[0] if error.param is not None and error.param.opts else "a value"
    reason = error.message.rstrip(".")
    for fault in _faults(error.__cause__ or error.__context__):
        value, kind = str(fault["input"]), fault["type"]
        if kind in ("float_parsing", "int_parsing"):
            reason = f"{value!r} is no {'whole ' if kind == 'int_parsing' else ''}number"
        else:
            reason = str(fault["msg"]).replace("Input", repr(value), 1)
        break
    return f"{name}: {reason}"


def _faults(cause: Any) -> list[dict[str, Any]]:
    """Return the faults that ``cause`` lists if it is a validation error, as later releases of typer raise;
    else an empty list."""
    errors = getattr(cause, "errors", None)
    return list(errors()) if callable(errors) else []


def _sentence(message: str) -> str:
    """Return the library's message in the form of an error: no capital letter, no full stop."""
    text = message.strip().rstrip(".")
    return text[:1].lower() + text[1:]
