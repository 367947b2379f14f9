"""Fixtures for tests on vLLM's real scheduler without a model, which take seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests that import vLLM. Only warnings of sojourn are errors there; vLLM and torch may warn."""
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
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Sojourn's warnings and errors; vLLM's loggers hand nothing on to pytest."""
    lines: list[str] = []
    for level in ("warning", "error"):
        logger = logging.getLogger("vllm.sojourn")
        monkeypatch.setattr(logger, level, lambda text, *args, **_: lines.append(text % args))
    return lines


@pytest.fixture
def make_engine(clock: Clock) -> Callable[..., Any]:
    """``make_engine(policy | None, **options)`` builds an engine in strict mode, so that sojourn's failures
    are raised."""
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    def make(policy: str | None = "fixed-ttl", settings: dict[str, Any] | None = None, **options: Any) -> Any:
        sojourn = None if policy is None else {"policy": policy, "strict": True, **(settings or {})}
        return SimulatedEngine(SimulatedEngineOptions(sojourn=sojourn, **options), clock)

    return make


@pytest.fixture
def make_paths_engine(
    make_engine: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """``make_paths_engine(policy | None, extra, **options)`` is like ``make_engine``, with the scheduler side
    of the paths connector. ``extra`` has the connector's settings; a value of ``None`` leaves a setting
    out. With ``pair_host_blocks``, it has as much host memory."""
    from sojourn_server.simulator import simulated_engine
    from sojourn_server.vllm.kv_transfer_connector import PathsConnector
    from sojourn_server.vllm.pair_connector import PairConnector
    from turns import paths_settings
    from vllm.config import KVTransferConfig

    monkeypatch.setenv("PYTHONHASHSEED", "0")

    def make(
        policy: str | None, extra: dict[str, Any] | None = None, pair_host_blocks: int = 0, **options: Any
    ) -> Any:
        def transfer(options: Any, page_bytes: int) -> KVTransferConfig:
            host = {"host": {"host_bytes": pair_host_blocks * page_bytes}} if pair_host_blocks else {}
            connector = PairConnector if host else PathsConnector
            return KVTransferConfig(
                kv_connector=connector.__name__,
                kv_connector_module_path=connector.__module__,
                kv_role="kv_both",
                kv_load_failure_policy="recompute",
                kv_connector_extra_config=paths_settings(tmp_path, **(extra or {})) | host,
            )

        monkeypatch.setattr(simulated_engine, "_transfer_config", transfer)
        made = make_engine(policy, **options)
        assert isinstance(made.scheduler.connector, PathsConnector)
        return made

    return make
