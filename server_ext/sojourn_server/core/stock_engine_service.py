"""What an engine of a pair answers where its scheduler is not ours: what it is, and how its links do."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.wire import encode

from ..metrics.link_metrics import LinkMetrics
from ..metrics.metrics_recorder import MetricsRecorder
from .engine_service import KVTransferStatus

SUPPORTED_OPERATIONS = ("capabilities", "drain_metrics", "stats")


class StockEngineService:
    """Answers as ``EngineService`` does, of what it has."""

    def __init__(self, paths: KVTransferStatus, engine: Callable[[], dict[str, str]]) -> None:
        """``engine`` describes the engine, as in ``EngineService``."""
        self._paths = paths
        self._engine = engine
        self._recorder = MetricsRecorder()
        self._links = LinkMetrics(self._recorder)

    def call(self, operation: str) -> str:
        """JSON; of what only a scheduler of ours has, that it is stock, and what is answered all the same."""
        if operation == "capabilities":
            # By its name clients know who understands events and hints, and this one does not.
            told = {"engine": self._engine(), "tiers": None, "paths": self._paths.capabilities()}
            return encode({"name": "vllm", "wire": [], "policy": "stock", **told}).decode()
        if operation == "stats":
            return encode({"policy": "stock", "paths": self._paths.stats()}).decode()
        if operation == "drain_metrics":
            return encode(self._recorder.drain(self._links.take(self._paths.stats()))).decode()
        return encode({"error": "stock", "answers": SUPPORTED_OPERATIONS}).decode()
