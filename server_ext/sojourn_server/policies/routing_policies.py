"""Routing, for the gateway: which replica serves a request (``routing`` in cluster presets), when does a
program move (``stealing``), and which waiting request is routed first (``waiting_order``)?

A replica is one engine, or one data-parallel rank of an engine: the unit with its own KV memory. A program's
home is the replica that serves the program's turns. Sizes are in tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Literal, NamedTuple, Protocol

from msgspec import Meta

LEAST_MATCH = 0.5
MOST_AHEAD, MOST_RATIO = 64, 1.5
"""Numbers of ``PrefixAffinityRouting``."""
MOST_FULL = 0.9
"""Share of a replica's memory that ``LeastDelayRouting`` plans to fill."""
LOAD_RATIO = 2.0
"""``WorkStealing``: minimum ratio of the loads of victim and thief."""


# -- what the policies see, and what they answer -----------------------------------------


class ReplicaView(NamedTuple):
    """A replica as the gateway knows it from the requests and answers that passed through the gateway."""

    replica_id: str
    load: float
    """The larger of two shares: the used share of the device's KV memory, and the used share of the request
    limit. Requests that wait for the replica at the gateway count as well, so the load may exceed 1."""
    in_flight: int
    """Number of requests that were sent to the replica and have not ended."""
    room_tokens: int
    """``memory_tokens`` minus the expected sizes of all programs at home here; may be negative."""
    homed: int = 0
    """Number of programs whose home is this replica."""
    takes_new: bool = True
    """Whether the replica accepts programs with another home or none: it is healthy and not draining."""
    queued: int = 0
    """Requests that wait for the replica at the gateway."""
    memory_tokens: int = 0
    """KV capacity of device and host memory, in tokens."""
    idle_s: float = 0.0
    """Seconds since the replica stopped being full; 0: it is full, or requests wait for it. Set, like
    ``may_leave``, for the stealing policy."""
    may_leave: int = 0
    """Number of waiting requests that may be stolen. Such a request has not failed at a replica. Its program
    has no request in flight, and has not moved in this turn. Only the oldest requests are examined."""


class ResidentProgramGroup(NamedTuple):
    """Resident programs with the same numbers of past and expected turns. A resident program has a request
    or is expected to return. Token counts are sums over the programs."""

    context_tokens: int
    """The longest contexts that the programs have had so far."""
    size_tokens: int
    """The longest contexts that the programs are expected to reach; at least ``context_tokens``."""
    turns: int
    """Answered turns of each program."""
    turns_left: float
    """Expected further turns of each program, at least 1; of an unknown agent type, as many as past turns."""
    programs: int = 1


class RoutingView(NamedTuple):
    """A request that needs a replica."""

    request_id: str
    number: int
    """Number of requests before this one, over all programs."""
    context_tokens: int
    """Prompt length in tokens."""
    size_tokens: int
    """Expected longest context of the request's program; at least the prompt."""
    home: ReplicaView | None = None
    """The home of the request's program; ``None``: the program has no home, or has to leave its home."""
    cached: bool = False
    """Whether the program's KV is still on ``home``, as far as the gateway knows."""
    parent_home: ReplicaView | None = None
    """Home of the parent program. ``None``: there is none, or the request's program has had an answer
    already."""
    prefix_tokens: Mapping[str, int] = {}
    """Replica id → estimated number of leading prompt tokens that it has computed already, if any. Empty if
    the policy does not set ``reads_prefixes``."""
    turns_left: float = 1.0
    """Expected number of the program's turns from now on, this one included."""
    residents: Mapping[str, Sequence[ResidentProgramGroup]] = {}
    """Other programs by their home replica; replicas without programs are absent."""


class RoutingDecision(NamedTuple):
    """The chosen replica, and the reason as a metric label. ``replica_id`` is ``None`` if the request has to
    wait."""

    replica_id: str | None
    reason: str
    needs_tokens: int = 0
    """Free KV tokens that a request without a replica waits for. It is routed again when a replica that
    accepts programs has that many, or is no program's home. Requests that need fewer may be routed first. 0:
    unknown. Then other requests wait behind it, except those that go home or whose decision ``passes``."""
    passes: bool = False
    """Whether the request may overtake requests that wait for capacity, because its program will soon end."""


NO_REPLICA = RoutingDecision(None, "no_replica")
"""Decision to wait because no replica accepts programs."""


class RoutingPolicy(Protocol):
    """Chooses the replica for a request.

    ``replicas`` are all registered replicas (but see ``reads_residents``), in order of registration. A
    replica with ``takes_new`` False serves only programs whose home it is. A policy may have three more
    attributes:

    - ``reads_residents``: the policy gets ``RoutingView.residents`` and ``turns_left`` for programs without
      KV. For these programs, ``replicas`` has only the few replicas with the most free memory.
    - ``resident_for_s``: seconds for which a program without a request counts as resident after its last
      activity (default: for ever).
    - ``reasons``: all reasons of its decisions, so that metrics can start each count at 0.
    """

    reads_prefixes: bool
    """Whether the policy uses ``RoutingView.prefix_tokens``, which needs an index of computed prefixes."""

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision: ...


# -- which replica ------------------------------------------------------------------------


def stable_hash(what: str, many: int) -> int:
    """Hash ``what`` to a number from 0 to ``many`` - 1, the same in every process."""
    digest = blake2b(f"0/{what}".encode("utf-8", "replace"), digest_size=8).digest()
    return int.from_bytes(digest, "big") % many


def _open(replicas: Sequence[ReplicaView]) -> list[ReplicaView]:
    return [replica for replica in replicas if replica.takes_new]


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRouting:
    """Picks a random replica by a hash of the request's id, like a load balancer without sessions."""

    reads_prefixes = False
    reasons = ("random",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if not (open_ones := _open(replicas)):
            return NO_REPLICA
        return RoutingDecision(open_ones[stable_hash(view.request_id, len(open_ones))].replica_id, "random")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundRobinRouting:
    """Sends request number n to replica n modulo the number of replicas. Only replicas that accept programs
    count."""

    reads_prefixes = False
    reasons = ("in_turn",)

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if not (open_ones := _open(replicas)):
            return NO_REPLICA
        return RoutingDecision(open_ones[view.number % len(open_ones)].replica_id, "in_turn")


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixAffinityRouting:
    """Routes to the replica that has computed the longest prefix of the prompt, if the prefix is long enough.

    This is the rule of SGLang's and vLLM's routers. The replica with the fewest requests is chosen if the
    prefix is less than the share ``LEAST_MATCH`` of the prompt, or if one replica has over ``MOST_AHEAD``
    requests more than another and over ``MOST_RATIO`` times as many.
    """

    reads_prefixes = True
    reasons = ("prefix", "fewest_requests", "unbalanced")

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if not (open_ones := _open(replicas)):
            return NO_REPLICA
        requests = [replica.in_flight + replica.queued for replica in open_ones]
        least, most = min(requests), max(requests)
        fewest = open_ones[requests.index(least)].replica_id
        if most - least > MOST_AHEAD and most > MOST_RATIO * least:
            return RoutingDecision(fewest, "unbalanced")
        best = max(open_ones, key=lambda replica: view.prefix_tokens.get(replica.replica_id, 0)).replica_id
        matched = view.prefix_tokens.get(best, 0)
        if matched and matched >= LEAST_MATCH * view.context_tokens:
            return RoutingDecision(best, "prefix")
        return RoutingDecision(fewest, "fewest_requests")


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionAffinityRouting:
    """Routes to the replica with the program's KV. If that replica is overloaded, routes to the least loaded
    replica (SAGA §5.1, eq. 7; mechanism S6).

    A replica is overloaded if its load is at least ``most_load``. A new sub-agent goes to its parent's
    replica unless that replica is overloaded.
    """

    most_load: Annotated[float, Meta(gt=0)] = 0.8
    reads_prefixes = False
    reasons = ("home", "near_parent", "least_loaded", "home_too_full")

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        home = view.home if view.cached else None
        if home is not None and home.load < self.most_load:
            return RoutingDecision(home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new and near.load < self.most_load:
            return RoutingDecision(near.replica_id, "near_parent")
        # Equal loads: the replica with fewer resident programs, since programs return from their tools.
        least = min(_open(replicas), key=lambda replica: (replica.load, replica.homed), default=None)
        if least is not None and (home is None or home.load >= least.load):
            return RoutingDecision(least.replica_id, "least_loaded" if home is None else "home_too_full")
        return NO_REPLICA if home is None else RoutingDecision(home.replica_id, "home")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityRouting:
    """Routes a program to the replica that has its KV in any tier, or else to the replica with the most free
    memory, if it is enough (MORI §4.3.1; mechanism M7).

    ``size_by`` defines a program's size: its expected longest context (``peak``), or its present context as
    in MORI (``context``). With ``context``, a replica may accept young programs that later outgrow the
    replica. The parent's replica is preferred for a new sub-agent. A replica that is no program's home
    accepts a program of any size. If no replica fits, the program waits.
    """

    size_by: Literal["peak", "context"] = "peak"
    reads_prefixes = False
    reasons = ("home", "near_parent", "fits", "returns")

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if view.home is not None and view.cached:
            return RoutingDecision(view.home.replica_id, "home")
        size = view.size_tokens if self.size_by == "peak" else view.context_tokens
        near = view.parent_home
        if near is not None and near.takes_new and near.room_tokens >= size:
            return RoutingDecision(near.replica_id, "near_parent")
        open_ones = _open(replicas)
        # An empty replica admits its first program whatever its size.
        possible = [replica for replica in open_ones if replica.room_tokens >= size or not replica.homed]
        if not possible:
            return RoutingDecision(None, "no_room", max(1, size)) if open_ones else NO_REPLICA
        best = max(possible, key=lambda replica: (replica.room_tokens >= size, replica.room_tokens))
        return RoutingDecision(best.replica_id, "fits" if view.home is None else "returns")


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastDelayRouting:
    """Routes a program to the replica that has its KV, or else to the replica with enough memory on which it
    and the other programs slow each other least (``mutual_delay``).

    A decode step for several programs reads the KV of all of them. So a program slows the other programs of
    its replica until it ends, and the best replica depends on how long each program stays. A small agent of
    ten turns does best beside programs that are about to end. A large agent does best where few contexts are
    left when it has grown. A new sub-agent goes to its parent's replica, where the parent holds memory until
    the sub-agent ends.

    Memory is enough if all contexts together never exceed the share ``MOST_FULL`` of it
    (``peak_resident_tokens``). Programs end at different times, so more fit than if memory were reserved for
    every program's full size. A replica without other programs, or without requests, always has enough: its
    resident programs may never return. If no replica has enough, the program and all programs behind it wait.
    A request that is expected to be its program's last goes to the least loaded replica instead.
    """

    resident_for_s: Annotated[float, Meta(ge=0)] = 300.0
    """Seconds for which a program without a request counts as resident after its last activity, since many
    clients never report a program's end. The default is the longest time for which SAGA (§4.2) keeps KV."""
    reads_prefixes = False
    reads_residents = True
    reasons = ("home", "near_parent", "least_loaded", "least_delay", "returns")

    def route(self, view: RoutingView, replicas: Sequence[ReplicaView], now: float) -> RoutingDecision:
        if view.home is not None and view.cached:
            return RoutingDecision(view.home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new:
            return RoutingDecision(near.replica_id, "near_parent")
        newcomer = ResidentProgramGroup(view.context_tokens, view.size_tokens, 0, max(1.0, view.turns_left))
        alone = newcomer.turns_left <= 1.0
        ranks: list[tuple[tuple[float, float, int], ReplicaView]] = []
        for replica in replicas:
            if replica.takes_new:
                delayed = mutual_delay(newcomer, view.residents.get(replica.replica_id, ()))
                load = replica.load
                rank = (load, delayed, replica.homed) if alone else (delayed, load, replica.homed)
                ranks.append((rank, replica))
        # The memory check costs more than the rank, so replicas are checked from the best on.
        ranks.sort(key=lambda one: one[0])
        chosen = next(
            (replica for _, replica in ranks if alone or self._memory_suffices(newcomer, view, replica)), None
        )
        if chosen is None:
            return RoutingDecision(None, "no_room") if ranks else NO_REPLICA
        if alone:
            return RoutingDecision(chosen.replica_id, "least_loaded", passes=True)
        return RoutingDecision(chosen.replica_id, "least_delay" if view.home is None else "returns")

    def _memory_suffices(
        self, newcomer: ResidentProgramGroup, view: RoutingView, replica: ReplicaView
    ) -> bool:
        there = view.residents.get(replica.replica_id, ())
        if not there or not (replica.in_flight or replica.queued):
            return True
        return peak_resident_tokens((*there, newcomer)) <= MOST_FULL * replica.memory_tokens


def mutual_delay(newcomer: ResidentProgramGroup, others: Sequence[ResidentProgramGroup]) -> float:
    """Return how much a new program and the other programs of a replica delay each other, in KV tokens.

    In a shared decode step, each program waits while the KV of the others is read. A program's delay is the
    number of the others' KV tokens, as a mean over its turns: of the new program the expected turns, of
    another one also the past turns, since a delay matters relative to a program's duration. All delays are
    added up. A growing context counts with its mean length.
    """
    own = caused = 0.0
    begins, turns_left = newcomer.context_tokens, newcomer.turns_left
    grows = newcomer.size_tokens - begins
    for context, size, turns, left, programs in others:
        together = min(turns_left, left)
        own += together / turns_left * (context + (size - context) * together / left / 2)
        late = together / (turns + left)
        caused += programs * late * (begins + grows * together / turns_left / 2)
    return own + caused


def peak_resident_tokens(programs: Sequence[ResidentProgramGroup]) -> float:
    """Return the largest total of the programs' context tokens from now on, if no further programs arrive.

    Each context is assumed to grow evenly to its expected size, and all programs to take turns at the same
    pace."""
    rows = sorted(
        (one.turns_left, one.context_tokens, (one.size_tokens - one.context_tokens) / one.turns_left)
        for one in programs
    )
    tokens = float(sum(context for _, context, _ in rows))
    growth = sum(each for _, _, each in rows)
    at = most = 0.0
    for left, context, each in rows:
        # The sum peaks just before a program ends, since it only grows in between.
        tokens += growth * (left - at)
        at = left
        most = max(most, tokens)
        tokens -= context + each * left
        growth -= each
    return most


# -- which waiting request ----------------------------------------------------------------


class WaitingProgramView(NamedTuple):
    """A request that waits at the gateway for capacity on any replica, and its program."""

    number: int
    """Number of requests that arrived before this one."""
    returning: bool
    """Whether the program has had an answer before."""
    idleness: float
    """Share of the program's recent time that it spent in tools (MORI equation 1); 0 for a new program."""
    context_tokens: int
    """Length of the prompt."""
    size_tokens: int
    """Expected longest context of the program; at least the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingOrderPolicy:
    """Orders the waiting requests of a tenant that no replica has capacity for, lowest ``key`` first. A
    request's key is computed once, when the request begins to wait. From time to time, the gateway serves the
    oldest request first under every policy, so that no request waits for ever. The base orders by arrival."""

    by_arrival = True
    """Whether the order is that of arrival."""

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        return (request.number,)


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlenessOrder(WaitingOrderPolicy):
    """Orders requests of returning programs by idleness, the least idle first, and then requests of new
    programs. Equally idle programs, and new programs, are ordered by context length, the shortest first (MORI
    §4.3.1)."""

    by_arrival = False

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        idleness = request.idleness if request.returning else 0.0
        return (not request.returning, idleness, request.context_tokens, request.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class LargestFirstOrder(WaitingOrderPolicy):
    """Orders requests by the program's expected longest context, the largest first, as in best-fit decreasing
    (Johnson 1974, MORI §4.3.1)."""

    by_arrival = False

    def key(self, request: WaitingProgramView) -> tuple[float, ...]:
        return (-request.size_tokens, request.number)


# -- which program moves ------------------------------------------------------------------


class StealDecision(NamedTuple):
    """The replica ``thief`` takes over the oldest request that may be stolen from the replica ``victim``, and
    the request's program."""

    thief: str
    victim: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StealingPolicy:
    """Chooses a replica that steals a waiting request (the thief), and a replica that loses it (the victim).
    Under the base, a waiting request stays with its replica.

    The routing core calls ``steal`` while requests wait for a particular replica: at each ``Tick`` event, and
    when a replica joins or stops being full. It repeats the call until the result is ``None``. A policy may
    have an attribute ``reasons``: all reasons of its decisions, so that metrics can start each count at 0.
    """

    is_used = False

    def steal(self, replicas: Sequence[ReplicaView], now: float) -> StealDecision | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkStealing(StealingPolicy):
    """Lets an idle replica, the thief, steal from a replica with a higher load, the victim (SAGA §5.2;
    mechanism S7).

    The victim's load must be more than ``LOAD_RATIO`` times the thief's load, and the thief must have been
    idle for ``idle_s`` seconds, as the paper's safeguard (a) requires. The victim is drawn at random. The
    thief becomes the home of the stolen program.
    """

    idle_s: Annotated[float, Meta(ge=0)] = 0.1
    is_used = True
    reasons = ("idle",)

    def steal(self, replicas: Sequence[ReplicaView], now: float) -> StealDecision | None:
        thieves = [r for r in replicas if r.takes_new and not r.queued and r.idle_s >= self.idle_s]
        if not thieves:
            return None
        thief = min(thieves, key=lambda r: (r.load, -r.idle_s))
        full = [r for r in replicas if r.may_leave and r.load > LOAD_RATIO * thief.load]
        if not full:
            return None
        victim = full[stable_hash(f"{now}/{thief.replica_id}", len(full))]
        return StealDecision(thief.replica_id, victim.replica_id, "idle")
