"""How identity and advice are said to each kind of server. One file per dialect."""

from __future__ import annotations

from typing import Any, Protocol

from sojourn.hints import AgenticContext

from .sojourn import SojournDialect
from .vllm import VllmDialect


class Dialect(Protocol):
    """Translates one turn's context; holds no state."""

    name: str
    carries_events: bool
    """Unsent events may ride along in the body."""

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        """Body fields and headers for one request. The caller owns both."""


DIALECTS: dict[str, Dialect] = {"sojourn": SojournDialect(), "vllm": VllmDialect()}
"""By name."""

__all__ = ["DIALECTS", "Dialect", "SojournDialect", "VllmDialect"]
