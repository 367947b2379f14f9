"""Registered engines with their replicas, the list of replicas for gateways, and votes on silent replicas.

The coordinator, which decides for all gateways, uses this module. An instance is one run of an engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from ...policies.routing.replica_views import RoutingView
from ...policies.routing.routing_policy import RoutingPolicy
from ...routing.affinity_core import AffinityCore
from ...routing.replica_fleet import Replica, ReplicaHealth
from ...routing.routing_core import RoutingCore
from ..http.replica_addresses import rank_addresses
from .coordinator_messages import EngineRegistration, ReplicaInfo

RUNNING_S = 3.0
"""An engine counts as running for this many seconds after its last report. Engines report twice a second. A
replacement takes longer than this to start, so a killed engine and its replacement never count together."""
SAMPLE_TURNS = 8
"""Number of sample turns by which ``routes_home_directly`` tests a policy."""


class RegistrationResult(NamedTuple):
    """Result of an engine's registration: its replicas, and what the registration replaces."""

    places: list[ReplicaInfo]
    """The engine's replicas, one per data-parallel rank."""
    changed: bool
    """Whether the replicas differ from those of the last registration."""
    left: list[ReplicaInfo]
    """The engine's earlier replicas that are gone or restarted."""
    replaced: list[str]
    """Ids of other engines that are registered at an address that this engine now has."""


class EngineRegistry:
    """All engines that have registered with this coordinator or an earlier one, in the order of
    registration."""

    def __init__(self, engines: Mapping[str, list[ReplicaInfo]] | None = None) -> None:
        self._engines = {engine: list(places) for engine, places in (engines or {}).items()}
        self._drains: dict[str, str | None] = {}
        """Id of an engine that drains → its instance; ``None`` if it has not registered yet."""
        self._heard: set[str] = set()
        """Ids of the engines that have registered with this coordinator. All other engines come from the
        checkpoint."""
        self.shown: tuple[ReplicaInfo, ...] = ()
        """The list of replicas for gateways, as of the last ``refresh_shown``."""
        self.version = 0
        """Version of ``shown``, which grows with each change."""

    def kept(self) -> dict[str, list[ReplicaInfo]]:
        """Return a copy of the engines and their replicas, for the checkpoint."""
        return {engine: list(places) for engine, places in self._engines.items()}

    def replicas_of(self, engine_id: str) -> list[ReplicaInfo]:
        """Return an engine's replicas; empty: the engine is unknown."""
        return self._engines.get(engine_id, [])

    def engine_of(self, replica_id: str) -> str | None:
        """The id of a replica's engine; ``None``: unknown."""
        for engine_id, places in self._engines.items():
            if any(place.replica_id == replica_id for place in places):
                return engine_id
        return None

    def has_registered(self, engine_id: str) -> bool:
        """Whether an engine has registered with this coordinator."""
        return engine_id in self._heard

    def put(self, registration: EngineRegistration) -> RegistrationResult:
        """Register an engine, or update its registration. A restarted engine does not drain any more."""
        engine_id, description, paths = registration.engine_id, registration.description, registration.paths
        before = self.replicas_of(engine_id)
        known = {place.replica_id: place for place in before}
        self._heard.add(engine_id)
        if engine_id in self._drains:
            if self._drains[engine_id] in (None, description.instance):
                self._drains[engine_id] = description.instance
            else:
                del self._drains[engine_id]
        places = []
        for address in rank_addresses(registration.url, description.ranks):
            was = known.get(address.replica_id)
            place = ReplicaInfo(
                address.replica_id,
                address.url,
                address.rank,
                description,
                health=ReplicaHealth.UP.value if was is None else was.health,
                direct=was is not None and was.direct,
                takes_new=was is None or was.takes_new,
                paths=paths,
            )
            places.append(place)
        self._engines[engine_id] = places
        ids = {place.replica_id for place in places}
        instance = description.instance
        return RegistrationResult(
            places,
            changed=places != before,
            left=[place for place in before if place.replica_id not in ids or place.instance != instance],
            replaced=[
                other_id
                for other_id, others in self._engines.items()
                if other_id != engine_id and any(place.replica_id in ids for place in others)
            ],
        )

    def remove(self, engine_id: str) -> list[ReplicaInfo]:
        """Remove an engine and its drain; return its replicas, empty if it is unknown."""
        self._drains.pop(engine_id, None)
        self._heard.discard(engine_id)
        return self._engines.pop(engine_id, [])

    def drain(self, engine_id: str) -> bool:
        """Begin to drain an engine, even before it registers. Returns False if it drains already."""
        if engine_id in self._drains:
            return False
        places = self.replicas_of(engine_id)
        self._drains[engine_id] = places[0].instance if places else None
        return True

    def drains(self, engine_id: str) -> bool:
        """Whether an engine is being drained."""
        return engine_id in self._drains

    def running(self, core: RoutingCore, now: float) -> int:
        """Return the number of engines that report to this coordinator and do not drain."""
        leases = (
            core.lease(self._engines[engine_id][0].replica_id)
            for engine_id in self._heard - self._drains.keys()
            if self._engines.get(engine_id)
        )
        return sum(1 for lease in leases if lease is not None and now - lease[1] < RUNNING_S)

    def refresh_shown(self, core: RoutingCore, routing: RoutingPolicy | None, now: float) -> bool:
        """Update ``shown``; return whether it has changed. ``routing``: the routing policy; ``None`` for
        prefill and decode engines, which have no such policy."""
        each = (
            self._shown(place, core, routing, now) for places in self._engines.values() for place in places
        )
        found = tuple(place for place in each if place is not None)
        if found == self.shown:
            return False
        self.shown = found
        self.version += 1
        return True

    def _shown(
        self, place: ReplicaInfo, core: RoutingCore, routing: RoutingPolicy | None, now: float
    ) -> ReplicaInfo | None:
        """Return a replica's entry in the list for gateways; ``None``: the replica gets no requests.
        ``routing``: see ``refresh_shown``."""
        health = core.health(place.replica_id)
        if health is None:
            return None
        direct, paths = False, place.paths
        if isinstance(core, AffinityCore):
            replica = core.fleet.get(place.replica_id)
            assert replica is not None
            assert routing is not None
            direct = routes_home_directly(core, routing, replica, now)
        elif paths is None:
            return None
        else:
            # Gateways do not read ``block_s``, which changes with each report.
            paths = dataclasses.replace(paths, block_s=0.0)
        takes_new = health == ReplicaHealth.UP.value
        return msgspec.structs.replace(place, health=health, direct=direct, takes_new=takes_new, paths=paths)

    def __len__(self) -> int:
        return sum(1 for places in self._engines.values() if places)


def routes_home_directly(core: AffinityCore, routing: RoutingPolicy, replica: Replica, now: float) -> bool:
    """Whether gateways may send the turns of programs whose home is this replica without asking the
    coordinator.

    To find out, the policy routes ``SAMPLE_TURNS`` made-up turns of such programs. The result is True if the
    policy sends all of them to this replica, and the replica can accept turns at once. The result is False
    for a policy that reads the prompts' prefixes. If the policy fails, the failure is counted and the result
    is False.
    """
    if (
        replica.health is not ReplicaHealth.UP
        or routing.reads_prefixes
        or core.fleet.full(replica)
        or replica.replica_id in core.requests.queues
    ):
        return False
    home = core.fleet.view(replica.replica_id)
    try:
        for number in range(SAMPLE_TURNS):
            turn = RoutingView(f"made-up-{number}", number, 1, 1, home, True, None, {})
            if routing.route(turn, core.fleet.views, now).replica_id != replica.replica_id:
                return False
    except Exception as error:
        core.counts.policy_failed(error)
        return False
    return True


VOTE_TIMEOUT_S = 20.0
"""Maximum duration of a vote, in seconds. Gateways that have not voted by then are ignored."""


@dataclass(slots=True)
class _LivenessVote:
    """A running vote on whether an instance of a replica is alive."""

    instance: str
    asked: frozenset[str]
    """Ids of the gateways that vote."""
    began_s: float
    failed: set[str] = field(default_factory=set)
    """Ids of the gateways that did not reach the replica."""


class LivenessQuorum:
    """Votes of the gateways on whether a silent replica is alive, at most one vote per replica."""

    def __init__(self) -> None:
        self._votes: dict[str, _LivenessVote] = {}
        """Running votes by replica id."""

    def begin(self, replica_id: str, instance: str, gateways: Collection[str], now: float) -> bool:
        """Start a vote of these gateways on a replica. Returns False if a vote on this instance is running
        already, or if there is no gateway."""
        vote = self._votes.get(replica_id)
        if not gateways or (
            vote is not None and vote.instance == instance and now - vote.began_s < VOTE_TIMEOUT_S
        ):
            return False
        self._votes[replica_id] = _LivenessVote(instance, frozenset(gateways), now)
        return True

    def record_failed_probe(self, replica_id: str, instance: str, gateway_id: str) -> None:
        """Record that a gateway did not reach this instance of a replica. No effect without a running
        vote."""
        vote = self._votes.get(replica_id)
        if vote is not None and vote.instance == instance:
            vote.failed.add(gateway_id)

    def cancel_vote(self, replica_id: str) -> None:
        """Cancel the vote on a replica, if any, because the replica's state became known in another way."""
        self._votes.pop(replica_id, None)

    def take_unreachable(self, gateways: Collection[str], now: float) -> list[tuple[str, str]]:
        """End the votes that are decided. Returns (replica id, instance) of each replica that all voting
        gateways failed to reach. After ``VOTE_TIMEOUT_S``, one failure is enough. ``gateways``: ids of the
        gateways that still exist; only their votes are awaited."""
        found = []
        for replica_id, vote in list(self._votes.items()):
            still_there = vote.asked & set(gateways)
            late = now - vote.began_s >= VOTE_TIMEOUT_S
            if vote.failed and (late or still_there <= vote.failed):
                del self._votes[replica_id]
                found.append((replica_id, vote.instance))
            elif late or not still_there:
                del self._votes[replica_id]
        return found
