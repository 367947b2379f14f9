"""Without OpenTelemetry's SDK the modules name the package to install; the rest works."""

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


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("absent", ["opentelemetry", "opentelemetry.sdk"])
@pytest.mark.parametrize("name", ["install", "export_spans"])
def test_the_error_names_the_extra(absent, name):
    done = python(BLOCK.format(absent=absent) + f"\n    from sojourn_integrations.otel import {name}\n")
    assert done.returncode == 1
    assert "pip install '.[otel]'" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("ImportError")


def test_the_sdk_loads_nothing_of_opentelemetry():
    done = python(
        """
        import sys, sojourn
        sojourn.init("http://127.0.0.1:9", probe_timeout_s=0)
        with sojourn.program("p"), sojourn.tool_call("t"):
            pass
        sojourn.shutdown()
        assert not [name for name in sys.modules if name.startswith("opentelemetry")]
        """
    )
    assert done.returncode == 0, done.stderr
