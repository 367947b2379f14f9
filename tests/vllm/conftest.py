"""Tests on vLLM's real scheduler without a model: seconds, not minutes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that import vLLM, and let vLLM and torch warn: only warnings of sojourn are errors."""
    for item in items:
        if item.path.parent == HERE and item.path.name != "test_vllm_compat.py":
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.filterwarnings("default"))


@dataclass
class Clock:
    """Virtual seconds."""

    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The virtual clock of a test."""
    return Clock()


@pytest.fixture
def make_engine(clock: Clock) -> Callable[..., Any]:
    """``make_engine(policy | None, **options)``; strict, so that no failure of ours is swallowed."""
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    def make(policy: str | None = "fixed-ttl", settings: dict[str, Any] | None = None, **options: Any) -> Any:
        sojourn = None if policy is None else {"policy": policy, "strict": True, **(settings or {})}
        return SimulatedEngine(SimulatedEngineOptions(sojourn=sojourn, **options), clock)

    return make
