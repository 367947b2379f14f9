"""The routing core of a coordinator: programs have homes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from ...policy.cluster_preset import ClusterPreset
from ..core import facts
from ..core.core import RoutingCore
from ..core.fleet import Health
from ..core.from_preset import core_of
from ..core.journal import Changes
from ..core.limits import CoreLimits
from ..core.state import CoreState
from ..http.decider import LocalDecider
from .autoscale import Need
from .deciding import Deciding, Seen
from .messages import Place, Registration, State
from .register import Register


class DecidingHomes(Deciding):
    """By a cluster preset."""

    core: RoutingCore

    def __init__(
        self, preset: ClusterPreset, limits: CoreLimits, life: str, clock: Callable[[], float]
    ) -> None:
        self.core = core_of(preset, limits, life=life)
        self.journal = self.core.journal
        self._routing = preset.routing
        self._reads = LocalDecider(self.core, clock)
        """Only to read from."""

    def restore(self, kept: CoreState, now: float, elapsed_s: float) -> int:
        self.core.restore(kept, now, elapsed_s)
        for replica in self.core.fleet:
            if replica.health is Health.UP:
                # It may have ended with the coordinator before: nobody new goes there until it registers.
                replica.health = Health.SUSPECT
                self.core.fleet.changed(replica, now)
        return sum(program.home is not None for program in self.core.programs)

    def snapshot(self, now: float) -> CoreState | None:
        return self.core.snapshot(now)

    def why_not(self, told: Registration) -> str:
        return ""

    def turned(self) -> Sequence[facts.ReplicaDrains | facts.ReplicaStays]:
        return ()

    def seen_as(self, place: Place) -> facts.Fact:
        return place.description.seen_as(place.replica_id)

    def told(self, told: Registration, now: float) -> Sequence[facts.AnyAction]:
        return ()

    def replica(self, replica_id: str) -> Seen | None:
        found = self.core.fleet.get(replica_id)
        return Seen(found.instance, found.heard_s, len(found.in_flight)) if found is not None else None

    def drains(self, place: Place) -> facts.ReplicaDrains | None:
        replica = self.core.fleet.get(place.replica_id)
        if replica is None:
            # Nobody is to be sent there in the moment between that it is seen and that it drains.
            self.core.fleet.drained[place.replica_id] = place.instance
        elif replica.health is not Health.DRAINING:
            return facts.ReplicaDrains(place.replica_id)
        return None

    def look(self, register: Register, now: float) -> bool:
        return register.look(self.core, self._routing, now)

    def knows(self, request_id: str) -> bool:
        return request_id in self.core.requests.by_id

    def sent(self, request_id: str) -> facts.Send | None:
        known = self.core.requests.by_id.get(request_id)
        if known is None or known.sent_s is None:
            return None
        assert known.replica_id is not None
        return facts.Send(request_id, known.replica_id, known.reason, known.moved_from, known.left_because)

    def need(self, engines: int) -> Need:
        fleet = self.core.fleet
        homed = sum(replica.homed_tokens for replica in fleet)
        lines = (self.core.requests.anywhere, self.core.requests.failed)
        waiting = sum(max(one.needs_tokens, one.size_tokens) for line in lines for one in line)
        return Need(homed + waiting, fleet.room_tokens // engines if engines else 0)

    def changes_since(self, version: int, life: str) -> Changes:
        return self.core.changes_since(version, life)

    def flush(self, now: float) -> Changes | None:
        return self.core.flush(now)

    async def onto(self, state: State) -> State:
        return msgspec.structs.replace(
            state,
            programs=list(await self._reads.programs()),
            replicas=list(await self._reads.replicas()),
            uses=self._reads.uses(),
        )
