"""Limits and counters of a routing core. The limits are fixed when the core is built; policies cannot
change them. Only ``build_routing_core`` replaces ``send_below_load``, by the value of the cluster preset."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

SILENT_PROGRAM_S = 1800.0
"""Default of ``RoutingLimits.silent_program_s``."""
MAX_ERROR_CHARS = 200
"""Maximum length, in characters, of a stored error message of a policy. Longer messages are cut."""


QUEUE_FULL_RETRY_S = 5.0
"""``Retry-After``, in seconds, for a request rejected because too many requests wait."""
NO_ROOM_RETRY_S = 10.0
"""``Retry-After``, in seconds, for a request rejected because no replica had free KV capacity while it
waited."""
REPLICAS_FAILED_RETRY_S = 1.0
"""``Retry-After``, in seconds, for a request rejected because it failed at several replicas."""


class PolicyCallError(RuntimeError):
    """A policy raised an exception, which is the ``__cause__`` of this error. The failed call changed no
    state; changes that the core made before the call remain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingLimits:
    """Limits of a routing core. Times are in seconds."""

    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this value. ``inf``: requests are
    sent at once and queue in the engines."""
    most_waiting: int = 20_000
    """Maximum number of waiting requests. Further requests are rejected with status 429.

    There is one exception if tenants share capacity. A tenant's fair part of the queue is ``most_waiting`` ÷
    number of tenants with waiting requests. Requests of a tenant below its fair part are accepted until
    2 × ``most_waiting`` requests wait."""
    wait_s: float = 600.0
    """A request that waits longer than this is rejected."""
    queue_patience_s: float = 30.0
    """Seconds for which requests that need less KV capacity may pass a waiting request. After that, a replica
    is reserved for the waiting request."""
    queue_patience_requests: int = 32
    """Number of requests that may pass a tenant's oldest waiting request. After that, a replica is reserved
    for the waiting request."""
    lease_s: float = 10.0
    """A replica that has not reported for this long is suspect and is probed. It is removed on a
    ``ReplicaGone`` event, which the gateway sends after failed probes."""
    most_failures: int = 3
    """A request that has failed at this many replicas is rejected. A request is never sent again to a replica
    where it failed, unless the replica has restarted since."""
    most_failures_computing: int = 2
    """A request that has failed at this many replicas after they had accepted it is rejected, because the
    request itself may be the cause."""
    silent_program_s: float = SILENT_PROGRAM_S
    """A program without open requests is forgotten after this time without an event."""
    slo_factor: float = 1.5
    """A program whose client states no deadline gets one: its start plus this multiple of the mean duration
    of its agent type."""
    usual_life_s: float = 300.0
    """Assumed mean duration of a program, while no program has ended."""


@dataclass(slots=True)
class RoutingCounters:
    """Totals since the core's start."""

    routes: Counter[str] = field(default_factory=Counter)
    """Number of requests sent, by reason."""
    policy_failures: int = 0
    """Number of policy calls that raised an exception."""
    newest_policy_failure: str = ""
    """Text of the last exception that a policy raised. It is kept here because the core writes no log."""

    def policy_failed(self, error: BaseException) -> None:
        """Count an exception of a policy, and keep its text. ``error`` is the exception itself or a
        ``PolicyCallError``."""
        self.policy_failures += 1
        cause = error.__cause__ or error
        self.newest_policy_failure = f"{type(cause).__name__}: {str(cause)[:MAX_ERROR_CHARS]}"
