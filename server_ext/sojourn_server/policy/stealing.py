"""Who moves to another replica so that none stands idle while others queue: work stealing (SAGA §5.2)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from .lots import lot


class StealView(NamedTuple):
    """A replica, for the question who steals from whom."""

    replica_id: str
    load: float
    """As ``ReplicaView.load``."""
    queued: int
    """Requests that wait for it at the gateway."""
    idle_s: float
    """Seconds for which nobody has waited for it and it could have computed more; 0: it cannot."""
    takes_new: bool = True
    may_leave: int = 0
    """Of those who have waited there longest, how many may move: their program has no other request there."""


class Steal(NamedTuple):
    """``thief`` takes the oldest request that may leave from ``victim``, and its program with it."""

    thief: str
    victim: str
    reason: str


class StealingPolicy(Protocol):
    """Asked while somebody waits for a replica at the gateway: each epoch, when a replica comes or has
    become idle, and again after each steal until it says ``None``. ``reasons`` as a ``RoutingPolicy`` may
    list them."""

    steals: bool
    """False: it need not be asked."""

    def steal(self, replicas: Sequence[StealView], now: float) -> Steal | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoStealing:
    """Everybody stays."""

    steals: bool = False

    def steal(self, replicas: Sequence[StealView], now: float) -> Steal | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkStealing:
    """A replica that has been idle for ``idle_s`` takes from one that is ``load_ratio`` times as loaded,
    drawn at random among those (SAGA §5.2).

    Both have to hold, as in the paper's safeguard (a); its text before that says either. With ``either`` the
    ratio alone is enough. A session that has been stolen has its home at the thief, and a steal that comes
    too late finds nobody who may leave. Raises ``ValueError`` for times below 0 or a ratio below 1.
    """

    idle_s: float = 0.1
    load_ratio: float = 2.0
    either: bool = False
    seed: int = 0
    steals: bool = True
    reasons: ClassVar[tuple[str, ...]] = ("idle", "load_ratio")

    def __post_init__(self) -> None:
        if not (self.idle_s >= 0 and self.load_ratio >= 1):
            raise ValueError(f"idle_s {self.idle_s}, load_ratio {self.load_ratio}; expected ≥ 0, ≥ 1")

    def steal(self, replicas: Sequence[StealView], now: float) -> Steal | None:
        thieves = [r for r in replicas if r.takes_new and not r.queued]
        if not self.either:
            thieves = [r for r in thieves if r.idle_s >= self.idle_s]
        if not thieves:
            return None
        thief = min(thieves, key=lambda r: (r.load, -r.idle_s))
        idle = thief.idle_s >= self.idle_s
        full = [r for r in replicas if r.may_leave and r.load > self.load_ratio * thief.load]
        if not full:
            return None
        victim = full[lot(self.seed, f"{now}/{thief.replica_id}", len(full))]
        return Steal(thief.replica_id, victim.replica_id, "idle" if idle else "load_ratio")
