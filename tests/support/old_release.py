"""Runs tests again with an older release of a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def run_with_release(requirement: str, module: str, folder: Path, *arguments: str) -> None:
    """Run pytest with ``arguments`` in a process of its own, which imports ``module`` from ``requirement``
    (``name==version``), installed in ``folder``. Skips the test if pip cannot get that release."""
    line = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), requirement]
    fetched = subprocess.run(line, capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"{requirement} is not to be had here: {fetched.stderr.strip()[-200:]}")
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    tests = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    result = subprocess.run(tests, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout[-3000:]
    # An import may take seconds of a core, and the tests above have done it.
    code = f"from importlib.util import find_spec; print(find_spec({module!r}).origin)"
    where = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert where.stdout.startswith(str(folder))
