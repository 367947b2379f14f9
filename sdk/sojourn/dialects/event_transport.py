"""How events reach a server outside of LLM requests: the interface of the dialects' event transports.

An event transport runs on the event sender's thread and may block there, within its time limits. It never
touches the agent's thread.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol

from sojourn.event_queue import PendingEvent
from sojourn.stats import Counters
from sojourn.wire_events import Event

if TYPE_CHECKING:
    from sojourn.http_transport import ServerTransport

UNSUPPORTED_STATUSES = frozenset({404, 405, 501})
"""Status codes of a server that has no endpoint for events."""


class TransportContext(NamedTuple):
    """The objects that all event transports of one session share."""

    transport: ServerTransport
    counters: Counters
    tool_events: str | None = None
    """ZeroMQ endpoint for tool events; ``None`` if the server receives events over HTTP only."""
    unknown_graph: Callable[[PendingEvent], None] | None = None
    """Called with an ``AegReport`` whose graph the server does not know. Must not raise."""
    open_programs: dict[str, None] | None = None
    """Ids of the programs whose end the server still expects. A session that replaces another one at the same
    server shares its dict. ``None``: each event transport has its own."""
    replaced: Callable[[], bool] = lambda: False
    """Returns True if another session has taken over ``open_programs``. That session then reports the
    ends."""


class PendingBatch(NamedTuple):
    """Events of one or more programs, in order within each program."""

    emitter: str
    """Id of the event sender that numbered the events."""
    events: list[PendingEvent]
    now: float
    """Monotonic seconds; the events' ``at_s`` is on the same clock."""
    dropped: int = 0
    """Number of events that the event sender has dropped so far."""


class DeliveryResult(Enum):
    """The result of sending a batch."""

    ACCEPTED = "accepted"
    """The server accepted the batch."""
    CONFIRMED = "confirmed"
    """The server accepted the batch, and the answer proves that the server speaks this dialect."""
    FAILED = "failed"
    """The server is unreachable or busy. The event sender waits before the next batch."""
    UNSUPPORTED = "unsupported"
    """The server has no endpoint for these events and will never accept them."""


class EventTransport(Protocol):
    """Sends events to one kind of server. Counts each event under exactly one of ``events_sent``,
    ``dropped_send``, ``dropped_unsupported`` and ``encode_error``."""

    @property
    def kinds(self) -> frozenset[type[Event]]:
        """Event classes that the server accepts; the event sender drops all others."""

    @property
    def takes_implicit(self) -> bool:
        """Whether the server gets events of implicit programs. Such a program stands for a whole process in
        which the user opened no program (``Program.implicit``)."""

    def deliver(self, batch: PendingBatch) -> DeliveryResult:
        """Send a batch. An exception counts as a failed batch."""

    def after_fork(self) -> None:
        """Drop the parent's unfinished work and connections, in a forked child. The connections are not
        closed, since the parent still uses them."""

    def close(self) -> None:
        """Send the remaining events until the first failure, then close all connections. The event sender's
        ``close`` bounds the time."""
