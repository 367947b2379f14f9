"""Stock vLLM that was started with ``--scheduling-policy priority``: the header, and ``priority``.

Only by choice, never found by asking: by the words of vLLM's own API any other
server answers an error to a priority that is not zero. (vLLM 0.32 was seen to
ignore it.)
"""

from __future__ import annotations

from typing import Any

from sojourn.hints import AgenticContext

from .courier import Road
from .header import session_header
from .numbers import i32


class VllmPriorityDialect:
    """In vLLM the *lower* number goes first: what matters more here is negated there."""

    name = "vllm_priority"
    carries_events = False
    yields_to: frozenset[str] = frozenset()

    def fields(self, context: AgenticContext) -> tuple[dict[str, Any], dict[str, str]]:
        body = {} if context.priority is None else {"priority": -i32(context.priority)}
        return body, session_header(context.program_id)

    def courier(self, road: Road) -> None:
        return None
