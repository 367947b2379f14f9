"""Events of a gateway that the coordinator has not confirmed."""

from __future__ import annotations

from collections.abc import Sequence

from ...routing.routing_events import AnyRoutingEvent
from .coordinator_messages import REQUESTLESS_EVENTS

MAX_BUFFERED_EVENTS = 10_000
"""Maximum number of events that concern no request and are kept until this gateway has joined."""


class UnconfirmedEvents:
    """Events that wait to be sent, and the events in batches that the coordinator has not answered.

    If the coordinator is lost, events that concern no request are kept, because the join reports only
    requests. The next coordinator gets them in their order. If only the answer to their batch was lost, they
    are processed twice, which does no harm: a program that has ended is unknown, a replica that drains goes
    on draining, one that does not drain has no drain to cancel, and a program without KV at a replica has no
    home there. What happened in between, for at most the time of a lost call, may be overruled. A program
    that began again under its id, or computed KV again at the replica, is then routed anew at its next turn.
    A drain that another gateway began or cancelled has to be reported again. No request fails by that.
    """

    def __init__(self) -> None:
        self.waiting: list[AnyRoutingEvent] = []
        """Events that have not been sent, in order."""
        self._in_flight: dict[int, list[AnyRoutingEvent]] = {}
        """By batch number, in the order of batches: the events of a batch without an answer that concern no
        request."""

    def keep(self, event: AnyRoutingEvent) -> None:
        """Add an event before the join. An event about a request is dropped, since the join reports all
        requests in their state at that time."""
        if isinstance(event, REQUESTLESS_EVENTS) and len(self.waiting) < MAX_BUFFERED_EVENTS:
            self.waiting.append(event)

    def take(self) -> list[AnyRoutingEvent]:
        """Remove and return the events that wait."""
        taken, self.waiting = self.waiting, []
        return taken

    def sent(self, number: int, events: Sequence[AnyRoutingEvent]) -> None:
        """Record that batch ``number`` was sent with these events."""
        kept: list[AnyRoutingEvent] = [event for event in events if isinstance(event, REQUESTLESS_EVENTS)]
        if kept:
            self._in_flight[number] = kept

    def confirm(self, number: int) -> None:
        """Record that the coordinator has processed batch ``number``."""
        self._in_flight.pop(number, None)

    def take_back(self) -> None:
        """Have all batches without an answer wait again, before other events. Events about requests are
        dropped, as by ``keep``, and so are the newest events beyond ``MAX_BUFFERED_EVENTS``."""
        kept = [event for batch in self._in_flight.values() for event in batch]
        kept += [event for event in self.waiting if isinstance(event, REQUESTLESS_EVENTS)]
        self.waiting = kept[:MAX_BUFFERED_EVENTS]
        self._in_flight.clear()
