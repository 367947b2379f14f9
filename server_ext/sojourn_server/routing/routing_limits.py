"""Bounds of a routing core that no policy changes, and its counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

MAX_ERROR_CHARS = 200
"""Characters kept of a policy's error message."""


class PolicyCallError(RuntimeError):
    """A policy raised an exception, which is the cause of this one. Nothing else was changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimits:
    """Bounds that no policy changes. Times in seconds."""

    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this; ``inf``: engines queue."""
    most_waiting: int = 20_000
    """Maximum number of waiting requests. If tenants share capacity, a tenant below its equal part of these
    may still add requests, up to twice as many in total."""
    wait_s: float = 600.0
    """A request that waits longer is rejected."""
    line_patience_s: float = 30.0
    """Requests that need less room may pass one that needs more for this long; then a replica is reserved."""
    line_patience_requests: int = 32
    """Maximum number of requests that may pass it in that time, while it is the first of its tenant."""
    lease_s: float = 10.0
    """A replica that is silent for this long is probed; only the prober may declare it gone."""
    most_failures: int = 3
    """Replicas that one request may fail at; it is sent to none of them twice."""
    most_failures_computing: int = 2
    """Replicas that had accepted a request before it failed there, at most: the request itself may be the
    cause."""
    silent_program_s: float = 1800.0
    """A program that is silent for this long counts as ended."""
    slo_factor: float = 1.5
    """A program without a deadline is due after this many times the usual duration of its agent type."""
    usual_life_s: float = 300.0
    """Default duration for an agent type without finished programs."""


@dataclass(slots=True)
class RoutingCounters:
    """Totals since the start."""

    routes: dict[str, int] = field(default_factory=dict)
    """Requests sent, by reason."""
    moves: int = 0
    steals: int = 0
    recalls: int = 0
    """Requests taken back from a replica for a more urgent tenant."""
    refused: int = 0
    replayed: int = 0
    cut: int = 0
    policy_failures: int = 0
    """Calls of a policy that raised an exception."""

    newest_policy_failure: str = ""
    """Text of the last one: the core writes no log."""

    def policy_failed(self, error: BaseException) -> None:
        """Count an exception of a policy."""
        self.policy_failures += 1
        cause = error.__cause__ or error
        try:
            text = str(cause)
        except Exception:
            text = "its text cannot be read"
        self.newest_policy_failure = f"{type(cause).__name__}: {text[:MAX_ERROR_CHARS]}"

    def sent(self, reason: str) -> None:
        """Count a request that was sent."""
        self.routes[reason] = self.routes.get(reason, 0) + 1
