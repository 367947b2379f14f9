"""Bounds of a routing core that no policy moves, and what it counts."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MOST_TEXT = 200
"""Characters kept of what a policy says of its failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Bounds that no policy moves. Times in seconds."""

    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this; ``inf``: engines queue."""
    most_waiting: int = 20_000
    """Where tenants take turns, one under its equal share of these is taken in all the same, up to twice as
    many in all."""
    wait_s: float = 600.0
    """A request that found no place for so long is refused."""
    line_patience_s: float = 30.0
    """So long those who need less room go past one for whom none is; then a replica is kept free for it."""
    line_patience_requests: int = 32
    """Or so many, while it is the first of its tenant's."""
    lease_s: float = 10.0
    """A replica that is silent for so long is probed; only who asked it may say that it is gone."""
    most_failures: int = 3
    """Replicas that one request may fail at; it is sent to none of them a second time."""
    most_failures_computing: int = 2
    """Of these, those that had taken it in: it may be what they fail of."""
    silent_program_s: float = 1800.0
    """A program of which nothing is heard for so long is taken to be over."""
    slo_factor: float = 1.5
    """A program without a deadline is due when it has taken so many times what its kind takes."""
    usual_life_s: float = 300.0
    """What a kind is taken to take of which none has ended yet."""


@dataclass(slots=True)
class CoreCounts:
    """What happened so far."""

    routes: dict[str, int] = field(default_factory=dict)
    """Requests sent, by reason."""
    moves: int = 0
    steals: int = 0
    recalls: int = 0
    """Requests taken back from a replica for somebody more urgent."""
    refused: int = 0
    replayed: int = 0
    cut: int = 0
    policy_failures: int = 0
    """Questions that a policy answered with an exception."""

    newest_policy_failure: str = ""
    """What went wrong the last time: the core writes no log."""

    def policy_failed(self, error: BaseException) -> None:
        """A question was answered with this."""
        self.policy_failures += 1
        cause = error.__cause__ or error
        try:
            text = str(cause)
        except Exception:
            text = "its text cannot be read"
        self.newest_policy_failure = f"{type(cause).__name__}: {text[:MOST_TEXT]}"

    def sent(self, reason: str) -> None:
        """A request was sent."""
        self.routes[reason] = self.routes.get(reason, 0) + 1
