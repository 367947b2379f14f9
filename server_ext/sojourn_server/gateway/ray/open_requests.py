"""Requests of one gateway that are not over, and where those go that nobody else can be asked about."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ..core import facts
from ..http.ticket import Ticket
from ..pd.facts import Role, SendPair
from .messages import Place

MOST_WAIT_AWAY_S = 60.0
"""A request is refused where no replica is known for so long."""
MOST_FAILURES = 3
MOST_FAILURES_COMPUTING = 2
"""Of these, those at replicas that had taken the request in."""
COUNT_EVERY_S = 0.25
"""Between two counts of what was sent where: to decide one request is not to look at all others."""


@dataclass(slots=True)
class OpenRequest:
    """One of them."""

    asked: facts.Asked
    ticket: Ticket
    since_s: float
    sent_to: str | None = None
    prefill_id: str | None = None
    """Of a pair, the engine that is at its prompt still; it was sent there first."""
    began: bool = False
    placed_here: bool = False
    """While the coordinator was away: what it says of where to is about what it did not know."""
    refused: bool = False
    """Here: nothing more is to be decided."""
    failed_at: list[str] = field(default_factory=list)
    failures_computing: int = 0
    """Of these, how often the replica had taken it in."""

    @property
    def state(self) -> tuple[str | None, str | None, bool]:
        """Where it is, and whether its answer has begun."""
        return self.sent_to, self.prefill_id, self.began

    def is_at(self, replica_id: str) -> bool:
        """It counts on this replica."""
        return replica_id in (self.sent_to, self.prefill_id)

    def goes(self, send: facts.Send | None) -> None:
        """It is sent there; ``None``: nowhere for now."""
        self.sent_to = send.replica_id if send is not None else None
        self.prefill_id = send.prefill_id if isinstance(send, SendPair) else None

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
            prefill_id=self.prefill_id,
        )


class OpenRequests(Mapping[str, OpenRequest]):
    """By request id, in the order in which they came."""

    def __init__(self) -> None:
        self._open: dict[str, OpenRequest] = {}
        self._sent: Counter[str] = Counter()
        """How many each replica has, as counted at ``_counted_s`` and decided since."""
        self._counted_s: float | None = None

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
        return [one for one in self._open.values() if one.is_at(replica_id)]

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
        if one.failures_computing >= MOST_FAILURES_COMPUTING:
            message = f"{one.failures_computing} replicas took it in and did not answer it"
            return facts.Refuse(request_id, 502, "replicas_failed", message, 1.0)
        usable = [
            place
            for place in places.values()
            if place.replica_id not in one.failed_at and (place.takes_new or place.health == "suspect")
        ]
        if not usable:
            return self._waits(one, now)
        sent = self._count(now)
        decided = self._chosen(one, places, usable, sent, home, now)
        if isinstance(decided, facts.Send):
            sent[decided.replica_id] += 1
            if isinstance(decided, SendPair) and decided.prefill_id is not None:
                sent[decided.prefill_id] += 1
        return decided

    def _count(self, now: float) -> Counter[str]:
        """Counted once for all that are decided together."""
        if self._counted_s is None or not 0 <= now - self._counted_s < COUNT_EVERY_S:
            self._counted_s = now
            self._sent.clear()
            for one in self._open.values():
                for replica_id in {one.sent_to, one.prefill_id} - {None}:
                    self._sent[str(replica_id)] += 1
        return self._sent

    def _chosen(
        self,
        one: OpenRequest,
        places: Mapping[str, Place],
        usable: Sequence[Place],
        sent: Mapping[str, int],
        home: str | None,
        now: float,
    ) -> facts.Send | facts.Refuse | None:
        if any(place.paths is not None for place in places.values()):
            return self._pair(one, usable, sent, now)
        chosen = min(
            usable,
            key=lambda place: (place.replica_id != home, not place.takes_new, sent[place.replica_id]),
        ).replica_id
        moved_from = home if home is not None and home != chosen else None
        return facts.Send(one.asked.request_id, chosen, "coordinator_away", moved_from)

    def _waits(self, one: OpenRequest, now: float) -> facts.Refuse | None:
        if now - one.since_s < MOST_WAIT_AWAY_S:
            return None
        message = "no replica is known that could answer, and nobody who knows more"
        return facts.Refuse(one.asked.request_id, 503, "coordinator_away", message, 5.0)

    def _pair(
        self, one: OpenRequest, usable: Sequence[Place], sent: Mapping[str, int], now: float
    ) -> facts.Send | facts.Refuse | None:
        """Of each role the engine that this gateway has sent the least to; the prefill side reads."""
        chosen: dict[Role, Place] = {}
        for place in sorted(usable, key=lambda place: (not place.takes_new, sent[place.replica_id])):
            if place.paths is not None:
                chosen.setdefault(place.paths.role, place)
        prefill, decode = chosen.get(Role.PREFILL), chosen.get(Role.DECODE)
        if prefill is None or decode is None or decode.paths is None:
            return self._waits(one, now)
        return SendPair(
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
