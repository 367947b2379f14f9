"""Runs the ``sojourn`` command in this process, so that a test does not have to import vLLM again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from sojourn_server.cli import build_app, main
from sojourn_server.cli.cli_error import CliError
from sojourn_server.cli.console import console
from typer.testing import CliRunner, Result

COLUMNS = 250
"""Width of the console in characters, with which tables break no word."""


def run_sojourn(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run ``sojourn`` with ``arguments`` in the folder ``cwd``, and return its exit code and output. The
    output of child processes goes to the test's own streams instead."""
    out, err, code = StringIO(), StringIO(), 0
    with (
        chdir(cwd or os.curdir),
        patch.object(sys, "argv", ["sojourn", *arguments]),
        patch.object(console, "_width", COLUMNS),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def invoke(*arguments: str, **environment: str) -> Result:
    """Run ``sojourn`` up to its exception, which ``main`` would print."""
    return CliRunner().invoke(build_app(), arguments, env=environment)


def refused(*arguments: str) -> CliError:
    """The error of a command, which has one line and names a next step."""
    result = invoke(*arguments)
    assert isinstance(result.exception, CliError), (result.output, result.exception)
    assert result.exception.next_step
    assert "\n" not in result.exception.message + result.exception.next_step
    return result.exception
