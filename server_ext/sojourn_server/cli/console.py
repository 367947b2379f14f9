"""What every sub-command says and how: one console, one way to fail, one way to print JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

console = Console(stderr=True)
"""Progress, tables and errors go to stderr, so that ``--json -`` can be piped."""


class CliError(Exception):
    """A failure the user can act on: what was wrong, and what to do next."""

    def __init__(self, message: str, next_step: str, *, exit_code: int = 2) -> None:
        super().__init__(message)
        self.message = message
        self.next_step = next_step
        self.exit_code = exit_code


@contextmanager
def fail_loudly() -> Iterator[None]:
    """Turn a ``CliError`` into two lines on stderr and its exit code; let all else through."""
    try:
        yield
    except CliError as error:
        console.print(f"[bold red]error:[/] {escape(error.message)}", highlight=False, soft_wrap=True)
        console.print(f"[bold]next:[/] {escape(error.next_step)}", highlight=False, soft_wrap=True)
        sys.exit(error.exit_code)


def write_json(document: Any, target: str) -> None:
    """Write ``document`` to the file ``target``, or to stdout where it is ``-``.

    The file appears whole or not at all.
    """
    text = json.dumps(document, indent=2, sort_keys=False) + "\n"
    if target == "-":
        sys.stdout.write(text)
        return
    from sojourn_server.traces.whole_files import write_whole

    write_whole({Path(target): text.encode()})
