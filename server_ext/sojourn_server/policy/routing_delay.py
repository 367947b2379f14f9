"""Which replica a program moves into: where it and those there delay each other least, if memory lasts.

A step that writes a token for each of several programs reads the KV of all of them, so a program is slowed by
the contexts beside it for as long as they are there, and slows the others by its own. Which replica is best
thus depends on how long everybody will stay: a small agent of ten turns is best off beside whoever is
about to end, a large one where little will be when it has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .replica_views import NOBODY, ReplicaView, Resident, Route, RouteView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastDelay:
    """Home while its KV is there; else where the delays are least, of those whose memory lasts. A sub-agent
    that begins as its parent did goes to its parent, which holds memory until the sub-agent has ended.

    Contexts are taken to grow evenly to their programs' sizes, a turn of everybody's at a time. Memory
    lasts where all together never come to more than ``most_full`` of it, at the end of no one's turns:
    programs that end at different times need less than the sum of their sizes, so more may be there than
    if room were kept for each size. Where no other program is it always lasts, and a replica with nothing to
    do takes one in whoever is at home there: they may never come back, and an idle device helps nobody. A
    program for which no memory lasts waits, and so does whoever's turn comes after it. A request that is
    alone, or of which it is not known whether more will follow, waits for nobody and goes where the load is
    least. Raises ``ValueError`` for ``most_full`` that is not above 0 and at most 1.
    """

    most_full: float = 0.9
    reads_prefixes: bool = False
    reads_residents: bool = True

    def __post_init__(self) -> None:
        if not 0 < self.most_full <= 1:
            raise ValueError(f"most_full is {self.most_full}; expected above 0, at most 1")

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        if view.home is not None and view.cached:
            return Route(view.home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new:
            return Route(near.replica_id, "near_parent")
        newcomer = Resident(view.context_tokens, view.size_tokens, 0, max(1.0, view.turns_left))
        alone = newcomer.turns_left <= 1.0
        best: tuple[float, float, int] | None = None
        chosen: ReplicaView | None = None
        anybody = False
        for replica in replicas:
            if not replica.takes_new:
                continue
            anybody = True
            there = view.residents.get(replica.replica_id, ())
            may_overflow = there and not alone and (replica.in_flight or replica.queued)
            if may_overflow and most_tokens((*there, newcomer)) > self.most_full * replica.memory_tokens:
                continue
            delayed, load = delay(newcomer, there), replica.load
            rank = (load, delayed, replica.homed) if alone else (delayed, load, replica.homed)
            if best is None or rank < best:
                best, chosen = rank, replica
        if chosen is None:
            return Route(None, "no_room") if anybody else NOBODY
        if alone:
            return Route(chosen.replica_id, "least_loaded", passes=True)
        return Route(chosen.replica_id, "least_delay" if view.home is None else "returns")


def delay(newcomer: Resident, others: Sequence[Resident]) -> float:
    """By how much a newcomer is slowed beside these and slows them, in tokens of KV read a step: means over
    its own turns, and over all turns of each of theirs, since being late is relative to what one takes."""
    own = caused = 0.0
    for other in others:
        together = min(newcomer.turns_left, other.turns_left)
        own += together / newcomer.turns_left * _mean_tokens(other, together)
        caused += together / (other.turns + other.turns_left) * _mean_tokens(newcomer, together)
    return own + caused


def most_tokens(programs: Sequence[Resident]) -> float:
    """The most that these come to together at any time, if nobody else comes."""
    rows = sorted(
        (one.turns_left, one.context_tokens, (one.size_tokens - one.context_tokens) / one.turns_left)
        for one in programs
    )
    tokens = float(sum(context for _, context, _ in rows))
    growth = sum(each for _, _, each in rows)
    at = most = 0.0
    for left, context, each in rows:
        # Just before one ends: between two ends the sum only grows.
        tokens += growth * (left - at)
        at = left
        most = max(most, tokens)
        tokens -= context + each * left
        growth -= each
    return most


def _mean_tokens(one: Resident, turns: float) -> float:
    """Of its context over its next turns."""
    return one.context_tokens + (one.size_tokens - one.context_tokens) * turns / one.turns_left / 2
