"""Interface of an engine for the routes, and the errors of its calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol


class EngineError(Exception):
    """The engine gave no result; the text is for the server's log only."""


class EngineUnavailableError(EngineError):
    """The engine is starting, dead, shutting down, busy or too slow; a retry may help."""


class StockEngineError(EngineError):
    """The engine runs without our scheduler; a retry does not help."""


def is_stock_answer(answer: str) -> bool:
    """Whether an engine core without our scheduler gave this ``answer``; it is the same for every call."""
    return answer.startswith('{"error"') and json.loads(answer)["error"] == "stock"


class EngineRpc(Protocol):
    """One or more engine cores behind one API server.

    Every core answers every call; the order of the answers is that of ``engine_ids``.
    """

    def engine_ids(self) -> Sequence[str]:
        """Indices of the engines, equal to vLLM's label ``engine``."""
        ...

    async def call(self, op: str, payload: str) -> list[str]:
        """One JSON text per engine for a JSON ``payload``. Raises ``EngineError``."""
        ...
