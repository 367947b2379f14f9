"""Bounds of a routing core that no policy changes, and the core's counters."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

SILENT_PROGRAM_S = 1800.0
"""Default seconds after which a gateway forgets a program that sends nothing."""
MAX_ERROR_CHARS = 200
"""Number of characters to which a policy's error message is cut."""


class PolicyCallError(RuntimeError):
    """A policy raised an exception, which is the cause of this one. The failed call changed no state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimits:
    """Bounds that no policy changes. Times in seconds."""

    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this; ``inf``: requests queue in
    the engines."""
    most_waiting: int = 20_000
    """Maximum number of waiting requests. If tenants share capacity, a tenant that has less than an equal
    part of this number may exceed it. The total never exceeds twice this number."""
    wait_s: float = 600.0
    """A request that waits longer than this is rejected."""
    line_patience_s: float = 30.0
    """How long smaller requests may pass a request that waits for more capacity. After that, a replica is
    reserved for it."""
    line_patience_requests: int = 32
    """How many requests may pass a tenant's first waiting request before a replica is reserved for it."""
    lease_s: float = 10.0
    """A replica that has not reported for this long is probed. Only the prober may declare it dead."""
    most_failures: int = 3
    """Maximum number of replicas at which a request may fail. It is sent to none of them twice."""
    most_failures_computing: int = 2
    """Maximum number of replicas at which a request may fail after they had accepted it. The request itself
    may be the cause of such failures."""
    silent_program_s: float = SILENT_PROGRAM_S
    """A program without events for this long counts as ended."""
    slo_factor: float = 1.5
    """A program without a deadline is due after this many times the mean duration of its agent type."""
    usual_life_s: float = 300.0
    """Assumed duration for an agent type without finished programs."""


@dataclass(slots=True)
class RoutingCounters:
    """Totals since the core's start."""

    routes: dict[str, int] = field(default_factory=dict)
    """Number of requests sent, by reason."""
    moves: int = 0
    steals: int = 0
    recalls: int = 0
    """Number of requests recalled from a replica in favour of a more urgent tenant."""
    refused: int = 0
    replayed: int = 0
    cut: int = 0
    policy_failures: int = 0
    """Number of policy calls that raised an exception."""

    newest_policy_failure: str = ""
    """Text of the last exception that a policy raised. It is kept here because the core writes no log."""

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
        """Count a request that was sent for ``reason``."""
        self.routes[reason] = self.routes.get(reason, 0) + 1
