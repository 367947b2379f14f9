"""A gateway's open requests, decisions about them without the coordinator, and unconfirmed events.

The coordinator normally decides for all gateways. A gateway decides by itself while the coordinator does not
answer. Later the gateway joins: it reports all its open requests to the coordinator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from ...routing import routing_events
from ...routing.routing_events import AnyRoutingEvent, PairRole, SendRequestToPair
from ...routing.routing_status import PairEngineStatus, ReplicaStatus
from ..http.routing_backend import RequestDecisionQueue
from .coordinator_messages import REQUESTLESS_EVENTS, ReplicaInfo

MAX_WAIT_WITHOUT_REPLICA_S = 60.0
"""Seconds that a request waits without the coordinator and without a usable replica before it is rejected."""
MAX_FAILURES = 3
"""Number of failures after which a request is rejected."""
MAX_FAILURES_AFTER_ACCEPT = 2
"""A request is rejected after this many failures at replicas that had accepted the request."""
LOAD_COUNT_INTERVAL_S = 0.25
"""Seconds between two counts of the requests per replica. Counting all requests for every decision would be
slow."""


@dataclass(slots=True)
class OpenRequest:
    """A request in progress at this gateway."""

    asked: routing_events.RequestReceived
    decisions: RequestDecisionQueue
    waiting_since_s: float
    """Time at which the request last began to wait, on the gateway's clock: its arrival, or later if it lost
    its replica."""
    sent_to: str | None = None
    """Id of the replica to which the request was sent; ``None``: the request waits."""
    prefill_id: str | None = None
    """Id of the prefill engine while it computes the prompt; ``None`` otherwise."""
    began: bool = False
    """Whether the client has the first byte of the answer."""
    placed_locally: bool = False
    """Whether this gateway chose the replica by itself, and the coordinator has not yet confirmed the choice.
    Until then the coordinator's decisions do not apply, since they rest on outdated state."""
    refused: bool = False
    """Whether this gateway has rejected the request. Then no further decision applies."""
    failed_at: list[str] = field(default_factory=list)
    """Ids of the replicas where the request failed."""
    failures_computing: int = 0
    """Number of failures at replicas that had accepted the request."""

    @property
    def state(self) -> tuple[str | None, str | None, bool]:
        """(``sent_to``, ``prefill_id``, ``began``). Two results differ if the request changed in between."""
        return self.sent_to, self.prefill_id, self.began

    def is_at(self, replica_id: str) -> bool:
        """Whether the request was sent to this replica, or its prompt is being computed there."""
        return replica_id in (self.sent_to, self.prefill_id)

    def set_destination(self, send: routing_events.SendRequest) -> None:
        """Record where the request is sent."""
        self.sent_to = send.replica_id
        self.prefill_id = send.prefill_id if isinstance(send, SendRequestToPair) else None

    def wait(self, now: float) -> None:
        """Record that the request is at no replica any more, and waits for another replica."""
        self.sent_to = self.prefill_id = None
        self.placed_locally = False
        self.waiting_since_s = now

    def as_event(self, now: float) -> routing_events.RequestReceived | routing_events.RequestSent:
        """Return the event that reports the request to a coordinator that does not know it. The event's
        deadline is in seconds from ``now``."""
        asked = self.asked
        if asked.deadline_s is not None:
            asked = msgspec.structs.replace(asked, deadline_s=asked.deadline_s - now)
        if self.sent_to is None:
            return asked
        return routing_events.RequestSent(
            asked.request_id,
            self.sent_to,
            asked.tenant,
            asked.context_tokens,
            program_id=asked.program_id,
            parent_id=asked.parent_id,
            agent_type=asked.agent_type,
            output_tokens=asked.output_tokens,
            deadline_s=asked.deadline_s,
            began=self.began,
            prefill_id=self.prefill_id,
        )


class OpenRequests(Mapping[str, OpenRequest]):
    """Requests in progress at this gateway, by id and in order of arrival."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._sent: Counter[str] = Counter()
        """Number of this gateway's requests per replica, counted at ``_last_count_s``, plus the gateway's own
        decisions since then."""
        self._last_count_s: float | None = None

    def add(self, asked: routing_events.RequestReceived, now: float) -> OpenRequest:
        """Add a request that has just arrived."""
        one = OpenRequest(asked, RequestDecisionQueue(asked.request_id), now)
        self._open[asked.request_id] = one
        return one

    def remove(self, request_id: str) -> None:
        """Remove a request if it is known."""
        self._open.pop(request_id, None)

    def confirm(self, events: Iterable[AnyRoutingEvent]) -> None:
        """Record that the coordinator has processed these events. It now knows where their requests were
        sent."""
        for event in events:
            if isinstance(event, routing_events.RequestSent):
                one = self._open.get(event.request_id)
                if one is not None and one.sent_to == event.replica_id:
                    one.placed_locally = False

    def sent_to(self, replica_id: str) -> list[OpenRequest]:
        """Return the requests of this gateway that are at a replica, including those whose prompt is computed
        there."""
        return [one for one in self._open.values() if one.is_at(replica_id)]

    def status_at(self, place: ReplicaInfo) -> ReplicaStatus:
        """Return the status of a replica as far as this gateway knows. It counts only this gateway's
        requests."""
        mine = self.sent_to(place.replica_id)
        described = place.description
        load = sum(one.asked.context_tokens for one in mine) / described.capacity_tokens
        known = (
            place.replica_id, place.instance, place.health, round(load, 4), len(mine), 0, 0,
            described.capacity_tokens, described.host_tokens, 0,
        )  # fmt: skip
        if place.paths is None:
            return ReplicaStatus(*known)
        paths = place.paths
        return PairEngineStatus(*known, role=paths.role.value, node=paths.node, epoch=paths.epoch, links={})

    def decide(
        self, one: OpenRequest, places: Mapping[str, ReplicaInfo], home: str | None, now: float
    ) -> routing_events.SendRequest | routing_events.RejectRequest | None:
        """Decide about a request without the coordinator; ``None``: the request keeps waiting.

        The request goes to its program's ``home`` if possible, else to the replica in ``places`` with the
        fewest requests of this gateway. Replicas that take new programs come first. The request never goes to
        a replica where it failed. A request that failed too often, or waits too long without a replica, is
        rejected. Prefill and decode engines are chosen without ``home``.
        """
        request_id = one.asked.request_id
        if len(one.failed_at) >= MAX_FAILURES:
            message = f"{len(one.failed_at)} replicas in turn did not answer"
            return routing_events.RejectRequest(request_id, 502, "replicas_failed", message, 1.0)
        if one.failures_computing >= MAX_FAILURES_AFTER_ACCEPT:
            message = f"{one.failures_computing} replicas accepted it and did not answer"
            return routing_events.RejectRequest(request_id, 502, "replicas_failed", message, 1.0)
        usable = [
            place
            for place in places.values()
            if place.replica_id not in one.failed_at and (place.takes_new or place.health == "suspect")
        ]
        if not usable:
            return self._reject_if_waited_too_long(one, now)
        sent = self._count(now)
        decided = self._choose_replica(one, places, usable, sent, home, now)
        if isinstance(decided, routing_events.SendRequest):
            sent[decided.replica_id] += 1
            if isinstance(decided, SendRequestToPair) and decided.prefill_id is not None:
                sent[decided.prefill_id] += 1
        return decided

    def _count(self, now: float) -> Counter[str]:
        """Return the number of this gateway's requests per replica, counted at most once per
        ``LOAD_COUNT_INTERVAL_S``. The caller adds each of its decisions to the result."""
        if self._last_count_s is None or not 0 <= now - self._last_count_s < LOAD_COUNT_INTERVAL_S:
            self._last_count_s = now
            self._sent.clear()
            for one in self._open.values():
                for replica_id in {one.sent_to, one.prefill_id} - {None}:
                    self._sent[str(replica_id)] += 1
        return self._sent

    def _choose_replica(
        self,
        one: OpenRequest,
        places: Mapping[str, ReplicaInfo],
        usable: Sequence[ReplicaInfo],
        sent: Mapping[str, int],
        home: str | None,
        now: float,
    ) -> routing_events.SendRequest | routing_events.RejectRequest | None:
        """Choose a replica from ``usable``: the program's ``home`` if it is usable, else the one with the
        fewest requests of this gateway. Replicas that take new programs come first.

        With prefill and decode engines, ``_choose_pair`` chooses. It may reject the request, or return
        ``None``: the request keeps waiting. ``sent``: number of this gateway's requests in progress at each
        replica, roughly."""
        if any(place.paths is not None for place in places.values()):
            return self._choose_pair(one, usable, sent, now)
        chosen = min(
            usable,
            key=lambda place: (place.replica_id != home, not place.takes_new, sent[place.replica_id]),
        ).replica_id
        moved_from = home if home is not None and home != chosen else None
        return routing_events.SendRequest(one.asked.request_id, chosen, "coordinator_away", moved_from)

    def _reject_if_waited_too_long(self, one: OpenRequest, now: float) -> routing_events.RejectRequest | None:
        """Reject a request that has no usable replica and has waited for ``MAX_WAIT_WITHOUT_REPLICA_S``;
        ``None``: it may still wait."""
        if now - one.waiting_since_s < MAX_WAIT_WITHOUT_REPLICA_S:
            return None
        message = "no replica is known, and the coordinator does not answer"
        return routing_events.RejectRequest(one.asked.request_id, 503, "coordinator_away", message, 5.0)

    def _choose_pair(
        self, one: OpenRequest, usable: Sequence[ReplicaInfo], sent: Mapping[str, int], now: float
    ) -> routing_events.SendRequest | routing_events.RejectRequest | None:
        """Choose the usable prefill engine and decode engine with the fewest requests of this gateway. The
        prefill engine's node reads all stored KV. Without a usable engine of one role, reject the request if
        it has waited for ``MAX_WAIT_WITHOUT_REPLICA_S``, else return ``None``."""
        chosen: dict[PairRole, ReplicaInfo] = {}
        for place in sorted(usable, key=lambda place: (not place.takes_new, sent[place.replica_id])):
            if place.paths is not None:
                chosen.setdefault(place.paths.role, place)
        prefill, decode = chosen.get(PairRole.PREFILL), chosen.get(PairRole.DECODE)
        if prefill is None or decode is None or decode.paths is None:
            return self._reject_if_waited_too_long(one, now)
        return SendRequestToPair(
            one.asked.request_id,
            decode.replica_id,
            "coordinator_away",
            prefill_id=prefill.replica_id,
            peer=decode.paths.peer,
            epoch=decode.paths.epoch,
        )

    def __getitem__(self, request_id: str) -> OpenRequest:
        return self._open[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)


MAX_BUFFERED_EVENTS = 10_000
"""Maximum number of events that concern no request and are kept until this gateway has joined."""


class UnconfirmedEvents:
    """Events that wait to be sent, and events in batches that the coordinator has not answered.

    If the coordinator is lost, events that concern no request are sent to the next coordinator, in the same
    order. Events about requests are dropped, because the join reports all requests.

    If only the answer to a batch was lost, events that concern no request are processed twice. This matters
    only if the state has changed in between, and it fails no request:

        ``ProgramEnded``, ``KvDropped``   a program that has begun again, or has new KV, loses its home; its
                                          next turn is routed anew
        a drain event                     undoes a drain command that another gateway sent in between; the
                                          operator has to repeat that command
    """

    def __init__(self) -> None:
        self.waiting: list[AnyRoutingEvent] = []
        """Events that have not been sent, in order."""
        self._in_flight: dict[int, list[AnyRoutingEvent]] = {}
        """Number of a batch without an answer → its events that concern no request; in batch order."""

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
