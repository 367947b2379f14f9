"""Who decides: the core in this process, or behind the same face a coordinator elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec

from ..core import facts
from ..core.core import RoutingCore
from ..core.limits import CoreCounts
from .policy_log import PolicyLog
from .ticket import Ticket

logger = logging.getLogger(__name__)

TICK_S = 0.1
"""An epoch of shares (SAGA §6.1); nothing of the core's needs to be looked at more often."""

Told = facts.Left | facts.Probe


class ProgramPlace(msgspec.Struct, frozen=True):
    """A program as the gateway knows it."""

    program_id: str
    tenant: str
    replica: str | None
    turns: int
    context_tokens: int
    size_tokens: int
    moves: int
    in_flight: int
    waiting: int


class ReplicaStatus(msgspec.Struct, frozen=True):
    """A replica as the gateway knows it. Sizes in tokens of KV."""

    replica: str
    instance: str
    health: str
    load: float
    in_flight: int
    queued: int
    """Requests that wait for it at the gateway."""
    programs: int
    capacity_tokens: int
    host_tokens: int
    room_tokens: int


class Decider(Protocol):
    """Where requests go. Calls come from one event loop and never block it."""

    on_told: Callable[[Told], None]
    """Called with what is not about one request."""

    def open(self, asked: facts.Asked) -> Ticket:
        """Ask for a request; its ticket gets what is decided, until ``close``."""
        ...

    def close(self, ticket: Ticket) -> None:
        """Nobody looks at the ticket any more."""
        ...

    def tell(self, fact: facts.AnyFact) -> None:
        """Something happened."""
        ...

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        ...

    async def programs(self) -> Sequence[ProgramPlace]:
        """All that are alive."""
        ...

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All that are known."""
        ...


class Core(Protocol):
    """Decides about requests: facts and ``now`` in, actions out."""

    @property
    def counts(self) -> CoreCounts: ...

    def take(self, fact: Any, now: float) -> Sequence[facts.AnyAction]: ...


class CoreInProcess:
    """A core, and the tickets of those who have asked it. Used in one event loop."""

    def __init__(self, core: Core, clock: Callable[[], float] = time.monotonic) -> None:
        self.on_told: Callable[[Told], None] = lambda told: None
        self.on_decided: Callable[[facts.AnyAction], None] = lambda action: None
        """Called with everything that is decided, for the books."""
        self._core = core
        self._clock = clock
        self._tickets: dict[str, Ticket] = {}
        self._untold: deque[facts.Fact] = deque()
        self._telling = False
        self._policy_log = PolicyLog(core.counts)

    def open(self, asked: facts.Asked) -> Ticket:
        """Ask for a request."""
        ticket = self._tickets[asked.request_id] = Ticket(asked.request_id)
        self.tell(asked)
        return ticket

    def close(self, ticket: Ticket) -> None:
        """Nobody looks at the ticket any more."""
        self._tickets.pop(ticket.request_id, None)

    def tell(self, fact: facts.Fact) -> None:
        """Something happened. An error of the core's is logged: it must not end a client's connection."""
        # Whoever is told of an action may have something to tell: that comes after all actions of this one.
        self._untold.append(fact)
        if self._telling:
            return
        self._telling = True
        try:
            while self._untold:
                self._take(self._untold.popleft())
        finally:
            self._telling = False

    async def run(self) -> None:
        """Tell the core that time goes by, until cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            self.tell(facts.Tick())

    def _take(self, fact: facts.Fact) -> None:
        actions: Sequence[facts.AnyAction]
        now = self._clock()
        try:
            actions = self._core.take(fact, now)
        except Exception:
            logger.exception("the routing core failed at %s; please report this", type(fact).__name__)
            if not isinstance(fact, facts.Asked):
                return
            actions = [
                facts.Refuse(fact.request_id, 500, "gateway_failed", "the gateway failed; see its log")
            ]
        self._policy_log.look(now)
        for action in actions:
            # First whoever waits for it, then the books: an error of theirs must keep nobody waiting.
            try:
                if isinstance(action, (facts.Left, facts.Probe)):
                    self.on_told(action)
                elif (ticket := self._tickets.get(action.request_id)) is not None:
                    ticket.take(action)
                self.on_decided(action)
            except Exception:
                logger.exception("what was decided could not be passed on; please report this")


class LocalDecider(CoreInProcess):
    """The routing core is in this process."""

    def __init__(
        self,
        core: RoutingCore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(core, clock)
        self.core = core

    def home(self, tenant: str, program_id: str) -> str | None:
        """The replica that a program is at home at."""
        program = self.core.programs.get((tenant, program_id))
        return program.home if program is not None else None

    async def programs(self) -> Sequence[ProgramPlace]:
        """All that are alive, the one heard of last first."""
        found = [
            ProgramPlace(
                program.key[1],
                program.tenant,
                program.home,
                program.turns,
                program.context_tokens,
                program.size_tokens,
                program.moves,
                program.in_flight,
                program.waiting,
            )
            for program in self.core.programs
        ]
        found.reverse()
        return found

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All that are known, in the order in which they registered."""
        return replica_statuses(self.core)

    def uses(self) -> dict[str, float]:
        """By tenant, what its requests in flight use of its share; without shares nothing."""
        tenants = self.core.tenants
        return {tenant: tenants.used(tenant) / share for tenant, share in tenants.shares.items() if share > 0}


def replica_statuses(core: RoutingCore) -> list[ReplicaStatus]:
    """The core's replicas for those who ask."""
    found = []
    queues = core.requests.queues
    for replica in core.fleet:
        view = replica.view()
        found.append(
            ReplicaStatus(
                replica.replica_id,
                replica.instance,
                replica.health.value,
                round(view.load, 4),
                view.in_flight,
                len(queues.get(replica.replica_id, ())),
                view.homed,
                replica.capacity_tokens,
                replica.host_tokens,
                view.room_tokens,
            )
        )
    return found
