"""A request on its way through a pair, and the program that it is of."""

from __future__ import annotations

from dataclasses import dataclass

from ..core import facts
from .facts import SendPair


@dataclass(slots=True)
class Program:
    """One that has a request here, or had."""

    stored_tokens: int = 0
    """Of its context, written to storage by decode engines as far as is known: as long as it was at the end
    of its last answer."""
    turns: int = 0
    """Requests that were answered."""
    answered_by: str | None = None
    """The decode engine of the last answer."""
    requests: int = 0
    """Those that are not over."""


@dataclass(slots=True)
class Flight:
    """A request that is not over."""

    asked: facts.Asked
    since_s: float
    waiting_since_s: float
    """Since when it has no pair."""
    prefill_id: str | None = None
    decode_id: str | None = None
    prefilled: bool = False
    began: bool = False
    sent: SendPair | None = None
    """What was decided last."""
    adopted: bool = False
    """Others chose its engines, and it is not in the books of the pairs."""
    failures: int = 0
    failures_computing: int = 0

    def is_at(self, replica_id: str) -> bool:
        """It counts on this engine still."""
        return replica_id == self.decode_id or (replica_id == self.prefill_id and not self.prefilled)
