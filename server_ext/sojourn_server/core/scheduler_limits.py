"""``SchedulerLimits``: how many programs a scheduler knows, how long leases and waits last at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """Bounds, each with its unit. The plugin's settings of the same names replace six of them."""

    max_programs: int = 20_000
    max_graphs: int = 256
    max_graph_bytes: int = 4 * 1024 * 1024
    """All graphs together, in bytes of JSON."""
    lease_budget_fraction: float = 0.95
    """Share of the pool that all leases together may hold."""
    max_ends_per_tick: int = 1000
    """Maximum number of leases ended in one engine step; the others follow in the next."""
    max_hinted_ttl_s: float = 300.0
    max_held_s: float = 310.0
    """Maximum seconds of a lease, whatever its client reports, unless its policy granted more."""
    gate_timeout_s: float = 600.0
    """A request that placement parks for longer is refused with an error."""
    line_patience_s: float = 30.0
    """Seconds of waiting after which a request without a program goes first in the queue and may end any
    lease, and later requests no longer pass a program that waits for admission."""
    return_grace_s: float = 2.0
    """Seconds of a lease after its tool's reported end: the time a request needs to arrive."""
    idle_program_s: float = 1800.0
    """A program that is silent between turns for longer has expired."""
    silent_program_s: float = 60.0
    """The same for a client that promised heartbeats."""
