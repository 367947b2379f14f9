"""A fake server, a session that talks to it, and Python processes of their own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sojourn
from gc_tools import old_objects_passed_over
from sdk_settings import PATH as SUPPORT
from sojourn.program import NO_CONTEXT, current_context
from sojourn.testing import FakeServer


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Turn exceptions in finalizers into errors. In these tests they can only be sojourn's own, since no
    engine leaves garbage."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True, scope="module")
def no_garbage_left() -> Iterator[None]:
    """Collect garbage after each file, so that a finalizer that raises fails the file that caused it."""
    with old_objects_passed_over():
        yield
        gc.collect()


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start and end every test without a session, a patch or a program."""
    for name in [name for name in os.environ if name.startswith("SOJOURN_")]:
        monkeypatch.delenv(name)
    assert current_context.get() is NO_CONTEXT
    yield
    sojourn.shutdown()
    assert current_context.get() is NO_CONTEXT


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as fake:
        yield fake


@pytest.fixture
def online(server: FakeServer) -> FakeServer:
    """A session with a sojourn server."""
    sojourn.init(server.url)
    sojourn.runtime.session().server.answered.wait(10)  # longer than init() waits, for a busy machine
    assert sojourn.stats().dialect == "sojourn"
    return server


@pytest.fixture
def python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run code, which may import ``tests/support``, in a fresh interpreter and return its result."""

    def run(
        code: str, env: dict[str, str] | None = None, timeout_s: float = 60, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SOJOURN_")}
        path = os.pathsep.join(filter(None, (clean.get("PYTHONPATH"), SUPPORT)))
        result = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
            env={**clean, "PYTHONPATH": path, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if check and result.returncode:
            raise AssertionError(f"exit code {result.returncode}:\n{result.stdout}\n{result.stderr}")
        return result

    return run
