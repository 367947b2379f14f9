"""Records of a routing core: replicas, programs, requests and their queues, and their statuses for operators.
Sizes are in tokens of KV, times in seconds on the core's clock."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from heapq import merge
from itertools import islice
from operator import attrgetter
from typing import Any

import msgspec

from ..core.engine_answers import LinkStats
from ..policies.fairness_policies import RunningTaskView
from ..policies.routing_policies import ReplicaView, ResidentProgramGroup
from ..programs.idleness import IdlenessTracker
from .routing_events import PairEngineRegistered, PairRole, ReplicaRegistered, SendRequest

Key = tuple[str, str]
"""Tenant and program id. Two tenants may use the same id for different programs."""

DEFAULT_MAX_RUNNING = 64
"""Assumed number of requests that a replica runs at once, if the replica does not report it."""

_NUMBER = attrgetter("number")
_KEY = attrgetter("queue_key")


class ProgramRouteStatus(msgspec.Struct, frozen=True):
    """Status of a program: its home, turns, sizes in tokens, and numbers of open requests."""

    program_id: str
    tenant: str
    replica: str | None
    """Id of the program's home; ``None``: the program has no home."""
    turns: int
    """Number of answered requests."""
    context_tokens: int
    """Longest context so far. With prefill and decode engines: number of context tokens whose KV is in
    storage."""
    size_tokens: int
    """Longest context that is expected; 0 without a home."""
    moves: int
    """Number of changes from one home to another."""
    in_flight: int
    """Number of requests that were sent and have not ended."""
    waiting: int
    """Number of requests that wait at the gateway."""


class ReplicaStatus(msgspec.Struct, frozen=True):
    """Status of a replica. Sizes are in tokens of KV."""

    replica: str
    instance: str
    health: str
    """``up``, ``draining`` or ``suspect``."""
    load: float
    """The larger of two ratios of the replica's sent and waiting requests: their context tokens ÷
    ``capacity_tokens``, and their number ÷ the number that the replica runs at once. Above 1, some requests
    wait."""
    in_flight: int
    """Number of requests that were sent and have not ended."""
    queued: int
    """Number of requests that wait for the replica at the gateway."""
    programs: int
    """Number of programs whose home is the replica."""
    capacity_tokens: int
    """KV capacity of the device."""
    host_tokens: int
    """KV capacity of host memory."""
    room_tokens: int
    """KV capacity of device and host memory minus the expected sizes of all programs whose home is the
    replica. It may be negative."""


class PairEngineStatus(ReplicaStatus, frozen=True, kw_only=True):
    """Status of a prefill or decode engine. Only prefill engines are homes of programs. A request is in
    flight at a prefill engine until its prompt is computed. ``room_tokens`` is the KV capacity minus the
    contexts of the requests in flight, at least 0."""

    role: str
    """``prefill`` or ``decode``."""
    node: str
    """Name of the engine's machine."""
    epoch: str
    """Instance of the engine's KV transfer manager; empty: unknown."""
    links: Mapping[str, LinkStats]
    """Last report of each link, by the link's name; empty: there is no report."""


class ReplicaHealth(str, Enum):
    """State of a replica, as far as the core knows."""

    UP = "up"
    DRAINING = "draining"
    SUSPECT = "suspect"
    """The replica was silent for too long or failed at a request. It is probed, keeps its programs, and gets
    no new programs until it reports."""


@dataclass(slots=True, eq=False)
class RoutedProgram:
    """A program that the gateway routes."""

    key: Key
    agent_type: str | None
    parent: Key | None
    began_s: float
    """Time of the program's first request."""
    last_s: float
    """Time of the program's last event."""
    deadline_s: float | None = None
    """Deadline that the client stated; ``None``: it stated none."""
    home: str | None = None
    """Id of the replica that serves the program's turns, with pairs the prefill engine of the last one;
    ``None``: no replica yet, or the replica is gone or has lost the KV."""
    cached: bool = False
    """Whether the program's KV is at its home, as far as known."""
    former_home: str | None = None
    """Id of the last home that the program has left."""
    decoded_by: str | None = None
    """Id of the decode engine of the program's last answer; ``None``: none, or engines are not in pairs."""
    context_tokens: int = 0
    """Longest context of the program so far. With pairs: the number of tokens whose KV is in storage."""
    size_tokens: int = 0
    """Expected longest context, which is counted for the program at its home; 0 without a home."""
    turns: int = 0
    """Number of answered requests."""
    in_flight: int = 0
    """Number of requests that were sent to a replica and have not ended."""
    waiting: int = 0
    """Number of requests that have not been sent."""
    moves: int = 0
    """Number of changes of the home, from one replica to another."""
    moved_at_turn: int = -1
    """Value of ``turns`` when the program last moved to another home; -1: never. Stealing and preemption do
    not move the program again while ``turns`` has this value."""
    idleness: IdlenessTracker = field(default_factory=IdlenessTracker)
    """Time in tools and in engines; kept only if the order of waiting requests reads it. A request counts as
    running from its sending to its end, because engines do not report their own queues."""
    turns_left: float | None = None
    """Number of turns left, estimated at the last turn; ``None``: unknown, or the policy does not read it."""
    pending_steps: float | None = None
    """Number of steps that were left at the engine's last report, by a declared graph or the client's hint;
    ``None``: unknown."""
    pending_at_turn: int = 0
    """Value of ``turns`` when ``pending_steps`` was reported."""
    task: RunningTaskView | None = None
    """Estimated work and deadline, for the tenant's share; ``None``: to be estimated again."""
    is_reported: bool = False
    """Whether the program is known only from an engine's report: it had no request at this gateway."""
    is_partial: bool = False
    """Whether the program began elsewhere, so that its turns and duration are unknown."""
    is_over: bool = False
    """Whether the client has ended the program, which still has open requests."""

    @property
    def tenant(self) -> str:
        """The tenant of the program's API key."""
        return self.key[0]

    @property
    def is_idle(self) -> bool:
        """Whether the program has no open request."""
        return not (self.in_flight or self.waiting)

    @property
    def steps_left(self) -> float | None:
        """Number of steps left by the last report, less the turns since then; at least 1. ``None``:
        unknown."""
        if self.pending_steps is None:
            return None
        return max(1.0, self.pending_steps - (self.turns - self.pending_at_turn))

    def status(self) -> ProgramRouteStatus:
        """Status of the program, for operators."""
        tenant, name = self.key
        return ProgramRouteStatus(
            name,
            tenant,
            self.home,
            self.turns,
            self.context_tokens,
            self.size_tokens,
            self.moves,
            self.in_flight,
            self.waiting,
        )


@dataclass(slots=True, eq=False)
class RoutedRequest:
    """A request in progress."""

    request_id: str
    number: int
    """Number of requests that arrived before this one."""
    tenant: str
    program: RoutedProgram | None
    """Record of the request's program. The table may no longer have this record."""
    context_tokens: int
    """Prompt length, at most the longest context that a replica can compute."""
    size_tokens: int
    """Longest context that the program is expected to reach. Without a program, it is the request's prompt
    plus its expected output."""
    since_s: float
    """Time at which the request arrived."""
    waiting_since_s: float
    """Time at which the request last began to wait: when it arrived, or was taken from its replica."""
    output_tokens: int = 0
    """Output length that the client expects; 0: the client stated none."""
    prefix: tuple[int, ...] = ()
    only_replica_id: str | None = None
    """The replica that stores the conversation, which no other can continue; ``None``: there is none."""
    replica_id: str | None = None
    """The replica that the request waits for or was sent to; ``None``: the request waits for any replica."""
    sent: SendRequest | None = None
    """The action that sent the request; ``None``: the request waits."""
    prefill_id: str | None = None
    """Id of the prefill engine of a sent request; ``None``: there is none."""
    sent_s: float = 0.0
    began: bool = False
    """Whether the client has the first byte of the answer."""
    prefilled: bool = True
    """Whether the prefill engine has nothing left to do for the request."""
    failures: int = 0
    """Number of replicas that did not answer the request."""
    failures_computing: int = 0
    """Number of replicas that accepted the request and did not answer it."""
    failed_at: set[tuple[str, str]] = field(default_factory=set)
    """(id, instance) of replicas that did not answer the request. It is not sent to them again."""
    lost_with: str | None = None
    """Id of the last replica that was removed with the request. ``None`` again when a ``RequestFailed``
    reports that this replica had accepted the request."""
    placed: SendRequest | None = None
    """The action that sent the request or, if it waits for its replica, will send it; ``None``: it has not
    been placed."""
    needs_tokens: int = 0
    """Free KV tokens that the request waits for, as stated by its last routing decision; 0: the request has
    to be routed again first."""
    recalled_from: str | None = None
    """Id of the replica from which the request was recalled; ``None``: it was not recalled, or a replica has
    answered since."""
    recalled: bool = False
    """Whether the request was recalled before. A request is recalled only once."""
    displaced_others: bool = False
    """Whether other requests made way for this one. Then it never makes way itself."""
    first_since: int | None = None
    """Number of admitted requests at the time ``first_since_s``; ``None``: the request has not been the
    oldest in its tenant's queue."""
    first_since_s: float = 0.0
    """Time at which the request first became the oldest in its tenant's queue."""
    lane: str = ""
    """The tenant if tenants share capacity, else empty. Requests of one lane wait in one line."""
    queue_key: tuple[float, ...] = ()
    """Sort key of the request in its lane, lowest first. It is set when the request enters a queue."""

    def is_at(self, replica_id: str) -> bool:
        """Whether a replica has work for the request. A prefill engine has work until the prompt is
        computed."""
        if self.sent is None:
            return False
        return replica_id == self.replica_id or (replica_id == self.prefill_id and not self.prefilled)

    @property
    def can_move(self) -> bool:
        """Whether stealing or preemption may move this waiting request, and its program, to another replica.
        False if only one replica may serve the request, if it failed at a replica, if the program has another
        request in flight, or if it has not finished a turn since its last move."""
        program = self.program
        if self.failed_at or self.only_replica_id is not None:
            return False
        return program is None or (not program.in_flight and program.moved_at_turn != program.turns)


class WaitingQueue:
    """Requests that wait for the same replica, or for any replica. ``by_arrival``: whether the order of
    ``queue_key`` is the order of arrival."""

    def __init__(self, *, by_arrival: bool = True) -> None:
        self._by_arrival = by_arrival
        self.lanes: dict[str, list[RoutedRequest]] = {}
        """The requests of each ``RoutedRequest.lane`` that has some, in the order of ``queue_key``."""

    def __iter__(self) -> Iterator[RoutedRequest]:
        for requests in self.lanes.values():
            yield from requests

    def of(self, program: RoutedProgram) -> list[RoutedRequest]:
        """Return the waiting requests of one program."""
        return [one for one in self if one.program is program]

    def first(self, lane: str) -> RoutedRequest:
        """Return the request of a lane that arrived first."""
        requests = self.lanes[lane]
        return requests[0] if self._by_arrival else min(requests, key=_NUMBER)

    def oldest(self, count: int) -> list[RoutedRequest]:
        """Return the ``count`` requests that arrived first, of all lanes, or all if there are fewer. Only for
        a queue in order of arrival."""
        return list(islice(merge(*self.lanes.values(), key=_NUMBER), count))

    def add(self, request: RoutedRequest) -> None:
        """Insert a request by its key."""
        insort(self.lanes.setdefault(request.lane, []), request, key=_KEY)

    def remove(self, request: RoutedRequest) -> bool:
        """Remove a request. Returns False if it is not in this queue."""
        requests = self.lanes.get(request.lane, [])
        place = bisect_left(requests, request.queue_key, key=_KEY)
        if place == len(requests) or requests[place] is not request:
            return False
        del requests[place]
        if not requests:
            del self.lanes[request.lane]
        return True


@dataclass(slots=True, eq=False)
class Replica:
    """A replica: an engine, or one data-parallel rank of an engine; or one engine of the pairs."""

    seen: ReplicaRegistered
    """The last registration or report."""
    replica_id: str
    instance: str
    """Id of the replica's process, which changes with each restart."""
    heard_s: float
    """Time of the replica's last report."""
    health: ReplicaHealth = ReplicaHealth.UP
    programs: dict[Key, RoutedProgram] = field(default_factory=dict)
    """Programs whose home is the replica."""
    homed_tokens: int = 0
    """Sum of the expected sizes of these programs."""
    in_flight: dict[str, RoutedRequest] = field(default_factory=dict)
    """Requests in progress at the replica, by id."""
    queue: WaitingQueue = field(default_factory=lambda: WaitingQueue())
    """Requests that wait for the replica at the gateway, in order of arrival."""
    other_requests: int = 0
    """Number of requests that the engine has from elsewhere, by its last report."""
    other_tokens: int = 0
    """Context tokens of these requests."""
    reported_others: tuple[int, int] = (0, 0)
    """Requests and tokens beyond the gateway's own in the last report."""
    idle_since_s: float | None = None
    """Time at which the replica stopped being full; ``None``: the replica is full."""
    probed_s: float | None = None
    """Time of the last probe since the replica's last report; ``None``: there was none."""
    groups: tuple[ResidentProgramGroup, ...] | None = None
    """Cache of the replica's resident programs; ``None``: to be grouped again."""
    groups_until_s: float = math.inf
    """Time from which ``groups`` is outdated."""
    known_view: ReplicaView | None = None
    """Cache of ``view``; ``None``: to be built again."""

    @property
    def is_full(self) -> bool:
        """Whether a new request has to wait for the replica, which is full or has waiting requests."""
        return self.idle_since_s is None or bool(self.queue.lanes)

    @property
    def used_tokens(self) -> int:
        """Context tokens of the requests at the replica."""
        return sum(one.context_tokens for one in self.in_flight.values()) + self.other_tokens

    def load(self, queued: Collection[RoutedRequest] = ()) -> float:
        """Return the load from the requests at the replica: the larger of their context tokens ÷ KV
        capacity of the device, and their number ÷ number that run at once. ``queued``: waiting requests
        that count too."""
        tokens = self.used_tokens + sum(one.context_tokens for one in queued)
        requests = len(self.in_flight) + self.other_requests + len(queued)
        load = tokens / self.seen.capacity_tokens
        return max(load, requests / self.seen.max_running) if self.seen.max_running else load

    def add_homed(self, program: RoutedProgram, tokens: int) -> None:
        """Add ``tokens`` to the size of a program whose home is the replica."""
        self.programs[program.key] = program
        self.homed_tokens += tokens
        self.known_view = self.groups = None

    def remove_homed(self, program: RoutedProgram) -> None:
        """Remove a program whose home was the replica."""
        del self.programs[program.key]
        self.homed_tokens -= program.size_tokens
        self.known_view = self.groups = None

    def view(self) -> ReplicaView:
        """Return the view of the replica for routing policies."""
        if self.known_view is None:
            memory_tokens = self.seen.capacity_tokens + self.seen.host_tokens
            queued = list(self.queue)
            self.known_view = ReplicaView(
                self.replica_id,
                self.load(queued),
                len(self.in_flight) + self.other_requests,
                memory_tokens - self.homed_tokens,
                len(self.programs),
                self.health is ReplicaHealth.UP,
                len(queued),
                memory_tokens,
            )
        return self.known_view

    def status(self) -> ReplicaStatus:
        """Return the status of the replica, for operators. The ``links`` of an engine of a pair are empty."""
        seen, view = self.seen, self.view()
        status = ReplicaStatus(
            self.replica_id,
            seen.instance,
            self.health.value,
            round(view.load, 4),
            view.in_flight,
            view.queued,
            view.homed,
            seen.capacity_tokens,
            seen.host_tokens,
            view.room_tokens,
        )
        if not isinstance(seen, PairEngineRegistered):
            return status
        # A prefill engine has no bound on its requests.
        load = self.load() if seen.role is PairRole.DECODE else self.used_tokens / seen.capacity_tokens
        room_tokens = max(0, seen.capacity_tokens - self.used_tokens)
        pair: dict[str, Any] = {"role": seen.role.value, "node": seen.node, "epoch": seen.epoch}
        pair |= {"load": round(load, 4), "room_tokens": room_tokens, "links": {}}
        return PairEngineStatus(**{**msgspec.structs.asdict(status), **pair})


class ReplicaFleet(dict[str | None, Replica]):
    """All known replicas by id, in the order of registration; ``None`` is the id of none. ``full_load``: a
    replica with at least this load is full and gets no more requests; ``inf``: no replica is ever full."""

    def __init__(self, full_load: float = math.inf) -> None:
        super().__init__()
        self._full_load = full_load
        self.capacity_tokens = 0
        """KV capacity of all replicas on their devices."""
        self.memory_tokens = 0
        """KV capacity of all replicas in device and host memory. Disk is not counted."""
        self.longest_tokens = 0
        """Longest context that any replica can compute; 0: there is no replica."""
        self.max_running = 0
        """Number of requests that all replicas together run at once."""
        self.newly_idle = False
        """True if a replica registered or stopped being full since the core last set this to False."""
        self.drained: dict[str, str] = {}
        """Replicas to drain as soon as they register: replica id → instance. A replica that registers as
        another instance is not drained."""

    def missing(self, replica: Replica) -> tuple[int, int]:
        """Return (tokens, requests) in flight that must end until a full replica is no longer full; (0, 0) if
        it is not full."""
        if math.isinf(self._full_load):
            return 0, 0
        seen = replica.seen
        tokens = replica.used_tokens - math.ceil(self._full_load * seen.capacity_tokens) + 1
        requests = 0
        if seen.max_running:
            there = len(replica.in_flight) + replica.other_requests
            requests = there - math.ceil(self._full_load * seen.max_running) + 1
        return max(0, tokens), max(0, requests)

    def most_room(self, but: str | None = None) -> ReplicaView | None:
        """Return the view of the replica with the most free KV capacity; a replica without programs is
        preferred to all others. ``None``: no replica accepts new programs. ``but``: id of a replica to
        leave out."""
        views = [view for one in self.values() if (view := one.view()).takes_new and view.replica_id != but]
        return max(views, key=lambda view: (not view.homed, view.room_tokens), default=None)

    def fitting(self, tokens: int) -> int:
        """Return the smaller of ``tokens`` and the longest context that any replica can compute. Without
        replicas, return ``tokens``."""
        return min(tokens, self.longest_tokens) if self.longest_tokens else tokens

    def register(self, event: ReplicaRegistered, now: float) -> bool:
        """Process a registration or report of a replica. Returns whether waiting requests have to be routed
        again: the replica is new, has other sizes, or was suspect. The caller must have removed an earlier
        instance of the replica."""
        replica = self.get(event.replica_id)
        if replica is None:
            drained = self.drained.pop(event.replica_id, None) == event.instance
            health = ReplicaHealth.DRAINING if drained else ReplicaHealth.UP
            replica = Replica(event, event.replica_id, event.instance, now, health)
            self[replica.replica_id] = replica
        else:
            replica.heard_s, replica.probed_s = now, None
            if replica.seen == event and replica.health is not ReplicaHealth.SUSPECT:
                return False
            replica.seen = event
            if replica.health is ReplicaHealth.SUSPECT:
                replica.health = ReplicaHealth.UP
        self._sum_up()
        self.changed(replica, now)
        return True

    def remove(self, replica: Replica) -> None:
        """Remove a replica. If it was draining, remember its instance in ``drained``."""
        if replica.health is ReplicaHealth.DRAINING:
            self.drained[replica.replica_id] = replica.instance
        del self[replica.replica_id]
        self._sum_up()

    def changed(self, replica: Replica, now: float) -> None:
        """Update a replica after a change of its health, sizes or requests in flight."""
        replica.known_view = replica.groups = None
        if self._full_load < math.inf and replica.load() >= self._full_load:
            replica.idle_since_s = None
        elif replica.idle_since_s is None:
            replica.idle_since_s = now
            self.newly_idle = True

    def _sum_up(self) -> None:
        seen = [one.seen for one in self.values()]
        self.capacity_tokens = sum(one.capacity_tokens for one in seen)
        self.memory_tokens = self.capacity_tokens + sum(one.host_tokens for one in seen)
        self.max_running = sum(one.max_running or DEFAULT_MAX_RUNNING for one in seen)
        self.longest_tokens = max((one.max_context_tokens or one.capacity_tokens for one in seen), default=0)
