"""Routing by delay: a program goes to the replica on which it and the other programs slow each other least.

A decode step for several programs reads the KV of all of them. So a program slows the other programs of its
replica until the program ends. The best replica depends on how long each program stays. A small agent of ten
turns does best beside programs that are about to end. A large agent does best where few contexts are left
when the agent has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from .replica_views import NO_REPLICA, ReplicaView, ResidentProgramGroup, RoutingDecision, RoutingView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastDelayRouting:
    """Routes a program to the replica that has its KV, or else to a replica with enough memory. Of several
    replicas with enough memory, it chooses the replica with the least ``mutual_delay`` of the program and the
    replica's programs.

    A new sub-agent goes to its parent's replica, because the parent holds memory on that replica until the
    sub-agent ends.

    The memory check assumes that contexts grow evenly to their programs' expected sizes, and that all
    programs take turns at the same pace. Memory is enough if all contexts together never exceed the share
    ``most_full`` of the memory. Programs end at different times, so more programs fit than if memory were
    reserved for every program's full size. A replica without other programs always counts as having enough
    memory. So does a replica without requests, since its resident programs may never return.

    If no replica has enough memory for a program, the program and all programs behind it wait. A request that
    is expected to be its program's last does not wait: the request goes to the least loaded replica.

    ``resident_for_s``: seconds for which a program without a request counts as resident after its last
    activity. A limit is needed, since many clients never report a program's end. The default is the longest
    time for which SAGA (§4.2) keeps KV. Raises ``ValueError`` if ``most_full`` is not in (0, 1] or the time
    is negative.
    """

    most_full: float = 0.9
    resident_for_s: float = 300.0
    reads_prefixes: bool = False
    reads_residents: bool = True
    reasons: ClassVar[tuple[str, ...]] = ("home", "near_parent", "least_loaded", "least_delay", "returns")

    def __post_init__(self) -> None:
        if not 0 < self.most_full <= 1:
            raise ValueError(f"most_full is {self.most_full}; expected above 0, at most 1")
        if not self.resident_for_s >= 0:
            raise ValueError(f"resident_for_s is {self.resident_for_s}; expected seconds ≥ 0")

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
        """Return whether the replica has enough memory for the new program, by the rules of the class
        docstring."""
        there = view.residents.get(replica.replica_id, ())
        if not there or not (replica.in_flight or replica.queued):
            return True
        return peak_resident_tokens((*there, newcomer)) <= self.most_full * replica.memory_tokens


def mutual_delay(newcomer: ResidentProgramGroup, others: Sequence[ResidentProgramGroup]) -> float:
    """Return how much a new program and the other programs of a replica delay each other, in KV tokens.

    In a shared decode step, each program waits while the KV of the others is read. The new program's delay is
    the number of the others' KV tokens, as a mean over the new program's expected turns. Another program's
    delay is the number of the new program's KV tokens, as a mean over the other program's past and expected
    turns. Past turns count, since a delay matters relative to a program's duration. All delays are added up.
    A growing context counts with its mean length.
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
