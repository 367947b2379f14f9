"""Closes the simulated worlds of a test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from simulated_transfers import World


@pytest.fixture(autouse=True)
def _close_worlds() -> Iterator[None]:
    yield
    while World.open:
        World.open.pop().close()
