"""What an engine of a pair answers where its scheduler is not ours: what it is, and how its links do."""

from __future__ import annotations

from collections.abc import Callable

from sojourn.wire import encode

from ..metrics.links import LinkMeter
from ..metrics.recorder import Recorder
from .service import Paths

ANSWERED = ("capabilities", "drain_metrics", "stats")


class MemberAlone:
    """Answers as ``Service`` does, of what it has."""

    def __init__(self, paths: Paths, engine: Callable[[], dict[str, str]]) -> None:
        """``engine`` describes the engine, as in ``Service``."""
        self._paths = paths
        self._engine = engine
        self._recorder = Recorder()
        self._links = LinkMeter(self._recorder)

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
        return encode({"error": "stock", "answers": ANSWERED}).decode()
