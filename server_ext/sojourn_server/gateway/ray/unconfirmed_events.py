"""Events of a gateway that the coordinator has not confirmed."""

from __future__ import annotations

from collections.abc import Sequence

from ...routing.routing_events import AnyRoutingEvent
from .coordinator_messages import REQUESTLESS_EVENTS

MAX_BUFFERED_EVENTS = 10_000
"""Maximum number of events that concern no request and are kept until this gateway has joined."""


class UnconfirmedEvents:
    """Events that wait to be sent, and the events in batches that the coordinator has not answered.

    If the coordinator is lost, events that concern no request are kept and sent to the next coordinator in
    the same order. Events about requests are dropped, because the join reports all requests.

    If only the answer to a batch was lost, the kept events are processed twice. The second time usually has
    no effect: the program has ended already, the replica drains already, the drain is cancelled already, or
    the program has no home there. It has an effect only if the state changed after the first time. A program
    that began again under its id, or computed KV again at the replica, is then routed anew at its next turn.
    A drain that another gateway began or cancelled meanwhile has to be repeated. No request fails.
    """

    def __init__(self) -> None:
        self.waiting: list[AnyRoutingEvent] = []
        """Events that have not been sent, in order."""
        self._in_flight: dict[int, list[AnyRoutingEvent]] = {}
        """Events that concern no request, for each batch without an answer, by batch number and in the order
        of batches."""

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
        """Put the events of all batches without an answer back into ``waiting``, before the events there.
        Events about requests are dropped, as are the newest events beyond ``MAX_BUFFERED_EVENTS``."""
        kept = [event for batch in self._in_flight.values() for event in batch]
        kept += [event for event in self.waiting if isinstance(event, REQUESTLESS_EVENTS)]
        self.waiting = kept[:MAX_BUFFERED_EVENTS]
        self._in_flight.clear()
