"""The ``sojourn`` command in this process: a test need not pay for importing vLLM again."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from sojourn_server.cli import main
from sojourn_server.cli.console import console

COLUMNS = 250
"""Width of tables, so that none of their words is broken."""


def run_sojourn(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command line with ``arguments``; processes that it starts write to the test's own streams."""
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
