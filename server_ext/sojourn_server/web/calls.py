"""What the routes need of an engine, and the ways in which it may fail to answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Protocol


class EngineError(Exception):
    """The engine gave no result; the text is for the server's log, never for the client."""


class EngineUnavailable(EngineError):
    """It is starting, dead, shutting down, busy or too slow: trying again may help."""


class EngineStock(EngineError):
    """It runs, but without our scheduler: trying again will not help."""


def is_stock(answer: str) -> bool:
    """Whether this is what an engine core answers to every call when its scheduler is not ours."""
    return answer.startswith('{"error"') and json.loads(answer)["error"] == "stock"


class EngineCalls(Protocol):
    """One or more engine cores behind one API server.

    Every core answers every call; the order of the answers is that of ``engine_ids``.
    """

    def engine_ids(self) -> Sequence[str]:
        """The engines' indices as vLLM's ``engine`` label has them."""
        ...

    async def call(self, op: str, payload: str) -> list[str]:
        """JSON text in, one JSON text per engine out. Raises ``EngineError``."""
        ...
