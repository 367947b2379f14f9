"""How soon agents saw tokens."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .agent_state import AgentState


class TokenLatencies:
    """Of each turn that was submitted from ``from_s`` on and has more than one token, in seconds."""

    __slots__ = ("first_token_s", "from_s", "per_token_s", "second_token_s")

    def __init__(self, from_s: float) -> None:
        self.from_s = from_s
        self.first_token_s = array("d")
        """From the request to its first token."""
        self.second_token_s = array("d")
        """From the first token to the second."""
        self.per_token_s = array("d")
        """Between the tokens after that, on average."""

    def note(self, flight: AgentState, now: float) -> None:
        """Its last token was written now."""
        if flight.output_tokens > 1 and flight.submitted_s >= self.from_s:
            self.first_token_s.append(flight.first_token_s - flight.submitted_s)
            self.second_token_s.append(flight.second_token_s - flight.first_token_s)
            self.per_token_s.append((now - flight.decoded_from_s) / (flight.output_tokens - 1))
