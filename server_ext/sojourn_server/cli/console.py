"""Shared by all sub-commands: the console, the error format, the JSON writer, and checks of options."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.markup import escape

from .cli_error import CliError as CliError

if TYPE_CHECKING:
    import typer

console = Console(stderr=True)
"""Console on stderr for progress, tables and errors, so that the output of ``--json -`` can be piped."""


def print_line(text: str) -> None:
    """Print ``text`` on stderr as it is: without markup, colours or line breaks of the console."""
    console.print(text, highlight=False, soft_wrap=True, markup=False)


def print_note(text: str) -> None:
    """Print a note to the user on stderr. ``text`` has no markup."""
    console.print(f"[yellow]note:[/] {escape(text)}", highlight=False, soft_wrap=True)


def json_option(what: str) -> Any:
    """Return the option ``--json`` of a command that can write ``what`` as JSON."""
    import typer

    return typer.Option(
        None, "--json", metavar="FILE|-", help=f"Write {what} as JSON to this file, - for stdout"
    )


def is_given(context: typer.Context, name: str) -> bool:
    """Return whether the user gave the option ``name`` on the command line. An environment variable does not
    count."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def check_output_file(path: Path) -> None:
    """Raise ``CliError`` if ``path`` is a folder."""
    if path.is_dir():
        raise CliError(f"{path} is a folder", "name a file")


def check_output_folder(folder: Path) -> None:
    """Raise ``CliError`` if ``folder`` is a file."""
    if folder.is_file():
        raise CliError(f"{folder} is a file", "name a folder")


def check_free_port(host: str, port: int, next_step: str) -> None:
    """Raise ``CliError`` with ``next_step`` if the port is taken. The server itself would report the error
    later and without a next step. vLLM would first load the model."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise CliError(f"cannot listen on {host or '*'}:{port}: {error.strerror}", next_step) from None


def complete_url(url: str | None) -> str | None:
    """Return ``url``, the value of an option, with ``http://`` in front if it is only a host and a port."""
    from sojourn.config import with_scheme

    return url and with_scheme(url)


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
    """Write ``document`` to the file ``target``, or to stdout if ``target`` is ``-``. The file is written
    atomically. Raises ``CliError`` if it cannot be written."""
    text = json.dumps(document, indent=2, sort_keys=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    from sojourn_server.traces.atomic_files import write_atomically

    try:
        write_atomically({Path(target): text.encode()})
    except OSError as error:
        raise CliError(
            f"{target}: {error.strerror or error}",
            "make room or name another place, and run it again",
            exit_code=1,
        ) from None
