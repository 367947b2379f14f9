"""Which replica a program moves into: where it and those there delay each other least, if memory lasts.

A step that writes a token for each of several programs reads the KV of all of them, so a program is slowed by
the contexts beside it for as long as they are there, and slows the others by its own. Which replica is best
thus depends on how long everybody will stay: a small agent of ten turns is best off beside whoever is
about to end, a large one where little will be when it has grown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

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
    least.

    ``resident_for_s``: a program that has no request is taken to come back for so many seconds after it was
    last heard of (SAGA §4.2 keeps nobody's KV for longer): many a client never says that one is over. Raises
    ``ValueError`` for ``most_full`` that is not above 0 and at most 1, or a negative time.
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

    def route(self, view: RouteView, replicas: Sequence[ReplicaView], now: float) -> Route:
        if view.home is not None and view.cached:
            return Route(view.home.replica_id, "home")
        near = view.parent_home
        if view.home is None and near is not None and near.takes_new:
            return Route(near.replica_id, "near_parent")
        newcomer = Resident(view.context_tokens, view.size_tokens, 0, max(1.0, view.turns_left))
        alone = newcomer.turns_left <= 1.0
        ranks: list[tuple[tuple[float, float, int], ReplicaView]] = []
        for replica in replicas:
            if replica.takes_new:
                delayed = delay(newcomer, view.residents.get(replica.replica_id, ()))
                load = replica.load
                rank = (load, delayed, replica.homed) if alone else (delayed, load, replica.homed)
                ranks.append((rank, replica))
        # Whether memory lasts takes longer to see than how good a replica is: the best is looked at first.
        ranks.sort(key=lambda one: one[0])
        chosen = next(
            (replica for _, replica in ranks if alone or self._lasts(newcomer, view, replica)), None
        )
        if chosen is None:
            return Route(None, "no_room") if ranks else NOBODY
        if alone:
            return Route(chosen.replica_id, "least_loaded", passes=True)
        return Route(chosen.replica_id, "least_delay" if view.home is None else "returns")

    def _lasts(self, newcomer: Resident, view: RouteView, replica: ReplicaView) -> bool:
        there = view.residents.get(replica.replica_id, ())
        if not there or not (replica.in_flight or replica.queued):
            return True
        return most_tokens((*there, newcomer)) <= self.most_full * replica.memory_tokens


def delay(newcomer: Resident, others: Sequence[Resident]) -> float:
    """By how much a newcomer is slowed beside these and slows them, in tokens of KV read a step: means over
    its own turns, and over all turns of each of theirs, since being late is relative to what one takes. Of a
    context that grows evenly the mean over some turns is what it is half way."""
    own = caused = 0.0
    begins, turns_left = newcomer.context_tokens, newcomer.turns_left
    grows = newcomer.size_tokens - begins
    for context, size, turns, left, programs in others:
        together = min(turns_left, left)
        own += together / turns_left * (context + (size - context) * together / left / 2)
        late = together / (turns + left)
        caused += programs * late * (begins + grows * together / turns_left / 2)
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
