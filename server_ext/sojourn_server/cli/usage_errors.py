"""Errors of the sub-commands, all in one form: what is wrong, and the next step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from sojourn.errors import InputError
from typer.core import TyperGroup

from .cli_error import CliError
from .console import PLACE_STEP

# The library is click, or in later releases of typer a copy of it, so its classes have no fixed module.
_UsageError: Any = typer.BadParameter.__base__
_NEXT_STEPS = {
    "LatencyProfileError": "set --hardware, --model, --tp, --max-model-len or --pool-tokens",
    "NoProgramFitsError": "allow more: --max-context, --max-model-len, --pool-tokens, or larger --hardware",
    "PolicyError": "docs/simulator.md lists the policies",
    "RayConfigError": "docs/ray.md lists the keys",
    "RecordingError": "name a recording of this release; for one of a killed engine add --allow-unfinished",
    "ResultsError": "name a file written by sojourn simulate --save",
    "SimulatorError": "see docs/simulator.md",
    "SweepError": "for example --sweep cpu_ratio=0,1,2,4, with a --policy that has host memory",
    "TraceError": "name a trace or synthetic:NAME; docs/traces.md has the formats and lists the names",
}
"""Class of an error → next step."""


class Commands(TyperGroup):
    """The sub-commands of ``sojourn``. Errors that the user can fix are ``CliError``."""

    def make_context(self, *arguments: Any, **options: Any) -> Any:
        """Parse the words before the name of a sub-command."""
        with _as_cli_errors():
            return super().make_context(*arguments, **options)

    def invoke(self, ctx: Any) -> Any:
        """Parse the words after the name of a sub-command, and run it."""
        with _as_cli_errors(ctx):
            return super().invoke(ctx)


@contextmanager
def _as_cli_errors(context: Any = None) -> Iterator[None]:
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
    except CliError:
        raise
    except OSError as error:
        if error.filename is None:  # of the output, for main
            raise
        where = error.filename2 or error.filename
        raise CliError(f"{where}: {error.strerror or error}", PLACE_STEP, exit_code=1) from error
    except Exception as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        known = next((_NEXT_STEPS[name] for name in kinds if name in _NEXT_STEPS), None)
        next_step = getattr(error, "next_step", None) or known
        if next_step is None and not isinstance(error, InputError):
            raise
        help = f"see sojourn {context.invoked_subcommand if context else ''} --help"
        raise CliError(getattr(error, "message", None) or str(error), next_step or help) from error
