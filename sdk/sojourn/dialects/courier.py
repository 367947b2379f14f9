"""How events reach a server beside the requests: what each dialect has to supply for it.

A courier lives on the emitter's thread and may block there, within the transport's
time limits. It never touches the agent's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sojourn.backlog import Pending
from sojourn.events import Event
from sojourn.stats import Counters

if TYPE_CHECKING:
    from sojourn.transport import Transport


class Road(NamedTuple):
    """What a courier may use. Shared by all couriers of one session, one after the other."""

    transport: Transport
    counters: Counters
    tool_events: str | None = None
    """ZeroMQ endpoint for tool events, where the server has one beside HTTP."""
    unknown_graph: Callable[[Pending], None] | None = None
    """Called with an ``AegReport`` whose graph the server does not know. Must not raise."""


class Batch(NamedTuple):
    """Events of one or more programs, each program's in its order."""

    emitter: str
    """Who numbered them."""
    events: list[Pending]
    now: float
    """Monotonic seconds; the events' ``at_s`` is on the same clock."""
    dropped: int = 0
    """Events this emitter has had to drop so far."""


class Delivery(Enum):
    """What became of a batch."""

    TAKEN = "taken"
    SHOWN = "shown"
    """Taken, and the answer proves that the server speaks this dialect."""
    FAILED = "failed"
    """Nobody there, or not now: leave the server alone for a while."""
    NO_PLACE = "no place"
    """This server does not take events this way, and will not."""


class Courier(Protocol):
    """Brings events to one kind of server. Counts what became of each under exactly one of
    ``events_sent``, ``dropped_send``, ``dropped_unsupported`` and ``encode_error``."""

    @property
    def kinds(self) -> frozenset[type[Event]]:
        """Events it has a use for: the emitter drops others at the door."""

    def deliver(self, batch: Batch) -> Delivery:
        """Send a batch. Raises nothing it can help; a batch it raised over counts as failed."""

    def after_fork(self) -> None:
        """In the child: let go of the parent's connections and of what is the parent's to finish."""

    def close(self) -> None:
        """Nothing follows. Finish what can be finished until the first failure, then let go. Nobody waits for
        it longer than for the emitter's own close."""
