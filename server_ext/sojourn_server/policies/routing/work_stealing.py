"""Work stealing: a program moves to an idle replica while requests wait for other replicas (SAGA §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from .baseline_routing import stable_hash


class StealingReplicaView(NamedTuple):
    """A replica as the stealing policy sees it: a possible thief or a possible victim."""

    replica_id: str
    load: float
    """The larger of two shares: used KV memory of the device, and used request limit. May exceed 1."""
    queued: int
    """Requests that wait for the replica at the gateway."""
    idle_s: float
    """Seconds since the replica stopped being full; 0: it is full, or requests wait for it."""
    takes_new: bool = True
    """Whether the replica accepts new programs, and programs whose home (the replica that keeps their KV) is
    another one. If false, it cannot be a thief."""
    may_leave: int = 0
    """Number of waiting requests that may be stolen. Such a request has not failed at a replica. Its program
    has no request in flight, and has not moved in this turn. Only the oldest requests are examined."""


class StealDecision(NamedTuple):
    """Decision that the replica ``thief`` takes over a request from the replica ``victim``, and the request's
    program. The request is the oldest waiting one that may be stolen."""

    thief: str
    victim: str
    reason: str


class StealingPolicy(Protocol):
    """Chooses a replica that steals a waiting request (the thief), and a replica that loses it (the victim).

    The routing core calls ``steal`` while requests wait for a particular replica: at each ``Tick`` event, and
    when a replica joins or stops being full. It repeats the call until the result is ``None``. A policy may
    have an attribute ``reasons``: all reasons of its decisions, so that metrics can start each count at 0.
    """

    is_used: bool
    """Whether the policy is used; false: no request is ever stolen."""

    def steal(self, replicas: Sequence[StealingReplicaView], now: float) -> StealDecision | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStealing:
    """Never steals: a waiting request stays with its replica."""

    is_used: bool = False

    def steal(self, replicas: Sequence[StealingReplicaView], now: float) -> StealDecision | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkStealing:
    """Lets an idle replica, the thief, steal from a replica with a higher load, the victim (SAGA §5.2).

    The victim's load must be more than ``load_ratio`` times the thief's load, and the thief must have been
    idle for ``idle_s`` seconds, as the paper's safeguard (a) requires. The victim is drawn at random. The
    thief becomes the home of the stolen program. Raises ``ValueError`` for times below 0 or a ratio below 1.
    """

    idle_s: float = 0.1
    load_ratio: float = 2.0
    seed: int = 0
    is_used: bool = True
    reasons: ClassVar[tuple[str, ...]] = ("idle",)

    def __post_init__(self) -> None:
        if not (self.idle_s >= 0 and self.load_ratio >= 1):
            raise ValueError(f"idle_s {self.idle_s}, load_ratio {self.load_ratio}; expected ≥ 0, ≥ 1")

    def steal(self, replicas: Sequence[StealingReplicaView], now: float) -> StealDecision | None:
        thieves = [r for r in replicas if r.takes_new and not r.queued and r.idle_s >= self.idle_s]
        if not thieves:
            return None
        thief = min(thieves, key=lambda r: (r.load, -r.idle_s))
        full = [r for r in replicas if r.may_leave and r.load > self.load_ratio * thief.load]
        if not full:
            return None
        victim = full[stable_hash(self.seed, f"{now}/{thief.replica_id}", len(full))]
        return StealDecision(thief.replica_id, victim.replica_id, "idle")
