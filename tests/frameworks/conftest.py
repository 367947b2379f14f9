"""Tests of the framework adapters, run in the environments that ``tox`` makes: see ``[tool.tox]``. The
engine's environment has only what ``HERE_TOO`` needs; the other files are passed over there.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import sojourn
from gc_tools import old_objects_passed_over
from scripted_engine import Engine, require_engine
from sojourn.testing import FakeServer

# litellm and mini-swe-agent read these when imported. Without them, they print, ask for a setup and download
# a price list.
os.environ.update(
    MSWEA_SILENT_STARTUP="1",
    MSWEA_CONFIGURED="true",
    MSWEA_COST_TRACKING="ignore_errors",
    LITELLM_LOCAL_MODEL_COST_MAP="True",
)

HERE_TOO = {
    "test_frameworks_scenarios.py",
    "test_frameworks_engine.py",
    "test_frameworks_examples.py",
    "test_frameworks_faults.py",
    "test_frameworks_litellm.py",
}
"""Files that need no tox environment. They leave out scenarios whose packages are missing."""

if find_spec("langchain_core") is None:
    collect_ignore = [
        path.name for path in Path(__file__).parent.glob("test_*.py") if path.name not in HERE_TOO
    ]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run all tests with the engine in one process, because two engines would compete for the cores."""
    for item in items:
        if "engine" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("engine"))


@pytest.fixture(autouse=True, scope="module")
def quick_collections() -> Iterator[None]:
    """Make garbage collections fast, because every test here collects, and many collect three times."""
    with old_objects_passed_over():
        yield


@pytest.fixture(autouse=True)
def offline_afterwards() -> Iterator[None]:
    """Remove sessions, patches and listeners after each test. No run of LangChain's is left open."""
    yield
    sojourn.shutdown()
    gc.collect()
    langchain = sys.modules.get("sojourn_integrations.langchain.callback_handler")
    assert langchain is None or len(langchain.tree) == 0


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """A server that answers by ``server.script``; give it the script before the first request."""
    with FakeServer() as fake:
        yield fake


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """The real engine, once for all files."""
    require_engine()
    with Engine() as running:
        yield running
