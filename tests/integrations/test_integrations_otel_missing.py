"""Without OpenTelemetry's SDK the modules name the package to install."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

BLOCK = """
    import sys

    class Absent:
        def find_spec(self, name, path=None, target=None):
            if name == {absent!r} or name.startswith({absent!r} + "."):
                raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

    sys.meta_path.insert(0, Absent())
"""


@pytest.mark.parametrize("absent", ["opentelemetry", "opentelemetry.sdk"])
@pytest.mark.parametrize("name", ["install", "export_spans"])
def test_the_error_names_the_extra(absent, name):
    code = textwrap.dedent(BLOCK.format(absent=absent)) + f"from sojourn_integrations.otel import {name}\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "pip install '.[otel]'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError")
