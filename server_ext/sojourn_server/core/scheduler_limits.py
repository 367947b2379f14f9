"""``SchedulerLimits``: limits on programs, graphs, leases and waits. Also the sizes of the logs."""

from __future__ import annotations

from dataclasses import dataclass

LOGGED_TURNS_AND_DECISIONS = 20_000
"""Maximum number of turns that the turn ledger keeps, and of entries that the decision log keeps."""
MIN_LOGGED_EVICTED_BLOCKS = 16_384
"""Minimum capacity of the eviction log, in blocks (about 6 MB). The log of a large pool has a capacity of
twice the pool's blocks. For a pool of a few hundred blocks that is too little, because such a pool can evict
more blocks during one tool call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Limits of a scheduler. Seven of them can be changed by plugin settings of the same names."""

    max_programs: int = 2_000
    max_graphs: int = 256
    max_graph_bytes: int = 4 * 1024 * 1024
    """Maximum size of all graphs together, in bytes of JSON."""
    lease_budget_fraction: float = 0.95
    """Share of the pool that all leases together may hold."""
    max_hinted_ttl_s: float = 300.0
    max_held_s: float = 310.0
    """Maximum duration of a lease in seconds, however often the client's reports extend the lease. A longer
    TTL from the policy is not shortened. A lease does not expire while a request of its program waits."""
    gate_timeout_s: float = 600.0
    """Maximum seconds for which placement may keep a request waiting (parked). After that, the request is
    refused with an error. Applies only if the placement policy refuses requests; else ``hold_timeout_s``
    applies."""
    hold_timeout_s: float = 240.0
    """Maximum seconds for which a request is parked, if the placement policy refuses no requests. After that,
    the request is released. The default leaves time for the answer in the 600 s after which OpenAI's clients
    give up."""
    queue_patience_s: float = 30.0
    """Seconds after which a waiting request gets privileges.

    - A request without a program is then overdue: it may end any lease. While it waits, all requests that
      have waited for as long are served first, by arrival, and may end any lease too.
    - A request that the admission policy has rejected for this time is no longer overtaken by later requests.
      If a request without a program waits too, the rejected request is admitted as soon as it fits."""
    return_grace_s: float = 2.0
    """Seconds that a lease lasts after the reported end of its tool, so that the next request can arrive."""
    idle_program_s: float = 1800.0
    """Seconds of silence between turns after which a program expires."""
    silent_program_s: float = 60.0
    """Seconds of silence after which a program expires if its client promised heartbeats."""
