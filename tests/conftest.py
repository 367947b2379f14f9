"""Makes ``tests/support`` importable: fakes that several rooms share."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "support"))


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect each folder's garbage under its own filters: what an engine leaves is no finding elsewhere."""
    if nextitem is None or nextitem.path.parent != item.path.parent:
        gc.collect()
