"""Output shared by all sub-commands: the console, the error format and the JSON writer."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from .cli_error import CliError as CliError

console = Console(stderr=True)
"""Console on stderr for progress, tables and errors, so that the output of ``--json -`` can be piped."""


@contextmanager
def fail_loudly() -> Iterator[None]:
    """Print a ``CliError`` from the ``with`` block as two lines on stderr, and exit with its code. Other
    exceptions propagate."""
    try:
        yield
    except CliError as error:
        console.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
        console.print(f"[bold]next:[/] {escape(error.next_step)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def write_json(document: Any, target: str) -> None:
    """Write ``document`` to the file ``target``, or to stdout if ``target`` is ``-``.

    The file is written atomically.
    """
    text = json.dumps(document, indent=2, sort_keys=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    from sojourn_server.traces.atomic_files import write_atomically

    write_atomically({Path(target): text.encode()})
