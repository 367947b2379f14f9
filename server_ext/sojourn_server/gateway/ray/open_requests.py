"""Requests of one gateway that are not over, and where those go that nobody else can be asked about."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ..core import facts
from ..http.ticket import Ticket
from .messages import Place

MOST_WAIT_AWAY_S = 60.0
"""A request is refused where no replica is known for so long."""
MOST_FAILURES = 3


@dataclass(slots=True)
class OpenRequest:
    """One of them."""

    asked: facts.Asked
    ticket: Ticket
    since_s: float
    sent_to: str | None = None
    began: bool = False
    placed_here: bool = False
    """While the coordinator was away: what it says of where to is about what it did not know."""
    refused: bool = False
    """Here: nothing more is to be decided."""
    failed_at: list[str] = field(default_factory=list)

    def as_it_is(self) -> facts.Asked | facts.Sent:
        """As somebody hears of it who knows nothing of it."""
        asked = self.asked
        if self.sent_to is None:
            return asked
        return facts.Sent(
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
        )


class OpenRequests(Mapping[str, OpenRequest]):
    """By request id, in the order in which they came."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}

    def add(self, asked: facts.Asked, now: float) -> OpenRequest:
        """One more, and a ticket for it."""
        one = OpenRequest(asked, Ticket(asked.request_id), now)
        self._open[asked.request_id] = one
        return one

    def remove(self, request_id: str) -> None:
        """It is over. One that is not there is left aside."""
        self._open.pop(request_id, None)

    def sent_to(self, replica_id: str) -> list[OpenRequest]:
        """Those that a replica has."""
        return [one for one in self._open.values() if one.sent_to == replica_id]

    def decide(
        self, one: OpenRequest, places: Mapping[str, Place], home: str | None, now: float
    ) -> facts.Send | facts.Refuse | None:
        """Where one of them goes that the coordinator cannot be asked about; ``None``: it waits on.

        Home (``home``) where that may be, else to the replica that this gateway has sent the least to, to
        none that it has failed at.
        """
        request_id = one.asked.request_id
        if len(one.failed_at) >= MOST_FAILURES:
            message = f"{len(one.failed_at)} replicas in turn did not answer"
            return facts.Refuse(request_id, 502, "replicas_failed", message, 1.0)
        usable = [
            place
            for place in places.values()
            if place.replica_id not in one.failed_at and (place.takes_new or place.health == "suspect")
        ]
        if not usable:
            if now - one.since_s < MOST_WAIT_AWAY_S:
                return None
            message = "no replica is known that could answer, and nobody who knows more"
            return facts.Refuse(request_id, 503, "coordinator_away", message, 5.0)
        sent = dict.fromkeys(places, 0)
        for other in self._open.values():
            if other.sent_to in sent:
                sent[other.sent_to] += 1
        chosen = min(
            usable,
            key=lambda place: (place.replica_id != home, not place.takes_new, sent[place.replica_id]),
        ).replica_id
        moved_from = home if home is not None and home != chosen else None
        return facts.Send(request_id, chosen, "coordinator_away", moved_from)

    def __getitem__(self, request_id: str) -> OpenRequest:
        return self._open[request_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._open)

    def __len__(self) -> int:
        return len(self._open)
