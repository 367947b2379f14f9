"""AIBrix (github.com/vllm-project/aibrix): ``x-aibrix-session-key`` and nothing else.

Its ``x-session-id`` is the encoded address of a pod, which only AIBrix itself may
make up: ours would send the request astray, so it is never sent here.
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .header import header_text

SESSION_KEY_HEADER = "x-aibrix-session-key"


class AibrixDialect:
    """The key by which AIBrix keeps a session on its pod."""

    name = "aibrix"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        return {}, {SESSION_KEY_HEADER: header_text(context.program_id)}

    def courier(self, road: Road) -> None:
        return None
