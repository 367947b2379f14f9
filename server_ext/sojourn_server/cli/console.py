"""Shared by all sub-commands: the console, the form of errors, files, common options and their checks."""

from __future__ import annotations

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.markup import escape
from sojourn.config import with_scheme
from sojourn.errors import InputError
from typer.core import TyperGroup

from ..launch.engine_server import ServerStartError, free_port
from ..traces.atomic_files import write_atomically
from .cli_error import CliError as CliError

_Settings = TypeVar("_Settings")
console = Console(stderr=True)
"""Console on stderr for progress, tables and errors, so that the output of ``--json -`` can be piped."""
PLACE_STEP = "make room or name another place, and run it again"
"""Next step after an error because a file cannot be written."""
DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLES = ("VLLM_API_KEY", "SOJOURN_API_KEY")
"""Environment variables that may hold the API key: vLLM's first, then that of the SDK and the gateway."""
PASS_KEY = f"pass --api-key, or set {', or else '.join(KEY_VARIABLES)}"
"""Next step after an error because of a missing key."""

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


def print_line(text: str) -> None:
    """Print ``text`` on stderr as it is: without markup, colours or line breaks of the console."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def print_note(*texts: str) -> None:
    """Print notes to the user on stderr, each in a line. A text has no markup."""
    for text in texts:
        console.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


class ProgressLines:
    """Prints lines of progress, at most one every ``INTERVAL_S`` seconds. ``at_once``: also one at first."""

    INTERVAL_S = 15.0

    def __init__(self, *, at_once: bool = False) -> None:
        self._started_s = time.monotonic()
        self._said_s = -math.inf if at_once else self._started_s

    def show(self, text: str | Callable[[float], str]) -> None:
        """Print ``text`` if a line is due. A function gets the seconds since the start."""
        now_s = time.monotonic()
        if now_s - self._said_s >= self.INTERVAL_S:
            self._said_s = now_s
            print_line(text if isinstance(text, str) else text(now_s - self._started_s))


def json_option(what: str) -> Any:
    """Return the option ``--json`` of a command that can write ``what`` as JSON."""
    help = f"Write {what} as JSON to this file, - for stdout"
    return typer.Option(None, "--json", metavar="FILE|-", callback=output_file, help=help)


def url_option(help: str, default: Any = DEFAULT_URL, *, envvar: str | None = "SOJOURN_URL") -> Any:
    """Return the option ``--url``, which names a server. Its value may lack ``http://``."""
    return typer.Option(
        default, "--url", envvar=envvar, callback=lambda url: url and with_scheme(url), help=help
    )


def api_key_option(help: str = "The server's API key") -> Any:
    """Return the option ``--api-key``."""
    return typer.Option(None, "--api-key", envvar=list(KEY_VARIABLES), help=help)


def key_source(context: typer.Context) -> str:
    """Return the name of the option or environment variable that holds the API key; ``--api-key`` if there
    is no key."""
    source = context.get_parameter_source("api_key")
    if source is None or source.name != "ENVIRONMENT":
        return "--api-key"
    return next(name for name in KEY_VARIABLES if os.environ.get(name))


def given_options(context: typer.Context) -> dict[str, str]:
    """Return the options and arguments that the user gave on the command line: name → flag, or name of the
    argument. Environment variables do not count."""
    given = {}
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        if source is not None and source.name == "COMMANDLINE":
            given[each.name or ""] = each.opts[0]
    return given


def from_options(context: typer.Context, kind: Callable[..., _Settings], **others: Any) -> _Settings:
    """Return settings of the class ``kind``. Each field that is not in ``others`` has the value of the option
    of the same name, or its default if there is no such option."""
    names = signature(kind).parameters.keys() & context.params.keys() - others.keys()
    return kind(**{name: context.params[name] for name in names}, **others)


def check_suffix(flag: str, path: Path, suffixes: Sequence[str]) -> None:
    """Raise ``CliError`` if the name of a file to write has none of ``suffixes``."""
    if not path.name.endswith(tuple(suffixes)):
        raise CliError(f"{flag} {path}: expected a name ending in {' or '.join(suffixes)}", "change the name")


def output_file(path: Any) -> Any:
    """Return ``path``, an option's value, if a file can be written there. A command checks it before minutes
    of work. ``None`` and ``-`` mean no file."""
    if path not in (None, "-"):
        folder = Path(path).parent
        if Path(path).is_dir():
            raise CliError(f"{path} is a folder", "name a file")
        if not folder.is_dir():
            raise CliError(f"{path}: there is no folder {folder}", f"mkdir -p {shlex.quote(str(folder))}")
        if not Path(path).exists() and not os.access(folder, os.W_OK):
            raise CliError(f"{path}: this user cannot write into {folder}", PLACE_STEP)
    return path


def check_free_port(host: str, port: int, next_step: str) -> None:
    """Raise ``CliError`` with ``next_step`` if the port is taken. The server itself would report the error
    later and without a next step. vLLM would first load the model."""
    try:
        free_port(host, port)
    except ServerStartError as error:
        raise CliError(str(error), next_step) from None


@contextmanager
def exit_on_cli_error() -> Iterator[None]:
    """Print a ``CliError`` from the ``with`` block as two lines on stderr, and exit with the error's code.
    Other exceptions propagate."""
    try:
        yield
    except CliError as error:
        console.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
        console.print(f"[bold]next:[/] {escape(error.next_step)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def write_json(document: Any, target: str) -> None:
    """Write ``document`` to the file ``target``, or to stdout if ``target`` is ``-``."""
    text = json.dumps(document, indent=2, sort_keys=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
    else:
        write_file(Path(target), text)


def write_file(path: Path, text: str, next_step: str = PLACE_STEP) -> None:
    """Write a file atomically. Raises ``CliError`` if it cannot be written."""
    try:
        write_atomically({path: text.encode()})
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}", next_step, exit_code=1) from None


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
        text = " ".join(error.format_message().split()).rstrip(".")
        path = error.ctx.command_path if error.ctx is not None else "sojourn"
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
