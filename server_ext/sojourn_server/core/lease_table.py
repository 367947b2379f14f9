"""The table of leases: the programs whose KV is held between turns, their deadlines, and sums of blocks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, KeysView
from dataclasses import dataclass

from sojourn.ids import ProgramId

from ..policies.policy_protocols import DecisionReason
from ..policies.policy_views import LeaseView

SILENCE_INITIAL_S = 20.0
"""A client that promised heartbeats may stay silent for this many seconds after the grant of a lease. Then
the lease ends. If the client makes the promise during the lease, the seconds count from the promise."""
SILENCE_EXTENSION_S = 10.0
"""After each event, such a client may stay silent for this many seconds (it sends heartbeats every 3 s). Then
the lease ends, but not before ``SILENCE_INITIAL_S`` is over."""


@dataclass(slots=True)
class Lease:
    """A lease: the cached blocks of one program, held between its turns.

    Times are seconds on the engine's monotonic clock."""

    program_id: ProgramId
    rank: int
    granted_s: float
    ttl_s: float
    expires_s: float
    """Time at which the TTL ends. ``LeaseTable.extend`` postpones it."""
    silent_s: float | None
    """Time at which the client's silence ends the lease; ``None`` if the client never promised heartbeats."""
    blocks: int
    reload_s: float
    """Estimated seconds to restore the program's KV if it is evicted."""
    reason: DecisionReason
    tool: str | None = None
    tenant: str | None = None
    own_blocks: int = 0
    """Number of this lease's blocks that count against its tenant's share. At the grant, blocks that other
    leases already hold do not count. When another hinted lease of the tenant ends, this lease may still hold
    the ended lease's blocks. So the ended lease's number is added here, up to ``blocks``."""
    limit_s: float = float("inf")
    """Latest ``expires_s``: the client's reports cannot postpone the expiry beyond this time."""
    anchored: bool = False
    """Whether the TTL is counted from the reported start of a tool."""
    waiting: bool = False
    """True while a request of the program waits to be scheduled. The lease does not expire during this wait
    (Continuum §5.2)."""

    def deadline_s(self) -> float:
        """The time at which the lease ends: its expiry, or earlier if the client stays silent."""
        return self.expires_s if self.silent_s is None else min(self.expires_s, self.silent_s)

    def view(self) -> LeaseView:
        """The lease as input of policies."""
        return LeaseView(
            self.program_id, self.rank, self.expires_s, self.blocks, self.reload_s, self.waiting,
            hinted=self.reason is DecisionReason.HINTED,
        )  # fmt: skip


class LeaseTable:
    """The leases of one engine, at most one per program."""

    def __init__(self, budget_blocks: int) -> None:
        self.budget_blocks = budget_blocks
        self.changes = 0
        """Number of leases granted or ended so far."""
        self.blocks = 0
        """Blocks held by all leases; a shared block counts for each lease that holds it."""
        self.hinted_blocks: Counter[str | None] = Counter()
        """Tenant → sum of ``own_blocks`` of its hinted leases, whose TTL the client chose. Tenants with 0
        blocks are absent."""
        self._uncounted: dict[str | None, dict[ProgramId, Lease]] = {}
        """Hinted leases with shared blocks that do not count (``own_blocks`` < ``blocks``), by tenant."""
        self._leases: dict[ProgramId, Lease] = {}
        self.next_deadline_s = math.inf
        """A time before which no lease expires."""

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        return iter(self._leases.values())

    def __contains__(self, program_id: object) -> bool:
        return program_id in self._leases

    def programs(self) -> KeysView[ProgramId]:
        """Programs with a lease."""
        return self._leases.keys()

    def get(self, program_id: ProgramId) -> Lease | None:
        """The program's lease, if it has one."""
        return self._leases.get(program_id)

    def grant(self, lease: Lease) -> None:
        """Add a lease. The program must not hold another."""
        assert lease.program_id not in self._leases
        self._leases[lease.program_id] = lease
        self.changes += 1
        self.blocks += lease.blocks
        if lease.reason is DecisionReason.HINTED:
            self.hinted_blocks[lease.tenant] += lease.own_blocks
            if lease.own_blocks < lease.blocks:
                self._uncounted.setdefault(lease.tenant, {})[lease.program_id] = lease
        self._push(lease)

    def heard(self, program_id: ProgramId, now: float) -> None:
        """Record that the client sent an event. If it promised heartbeats, its silence ends the lease at
        ``now`` plus ``SILENCE_EXTENSION_S``, or at the previous deadline if that is later."""
        lease = self._leases.get(program_id)
        if lease is not None and lease.silent_s is not None:
            later = now + SILENCE_EXTENSION_S
            if later > lease.silent_s:
                lease.silent_s = later
                self._push(lease)

    def promised(self, program_id: ProgramId, now: float) -> None:
        """Record that the client promised heartbeats. From now on, its silence ends the lease. The next
        event is due within ``SILENCE_INITIAL_S``."""
        lease = self._leases.get(program_id)
        if lease is not None and lease.silent_s is None:
            lease.silent_s = now + SILENCE_INITIAL_S
            self._push(lease)

    def extend(self, program_id: ProgramId, expires_s: float) -> bool:
        """Postpone the lease's expiry to ``expires_s``, at most to ``limit_s``. Returns whether the expiry
        changed."""
        lease = self._leases.get(program_id)
        if lease is None:
            return False
        expires_s = min(expires_s, lease.limit_s)
        if expires_s <= lease.expires_s:
            return False
        lease.expires_s = expires_s
        self._push(lease)
        return True

    def set_waiting(self, program_id: ProgramId, waiting: bool) -> bool:
        """Record whether a request of the program waits. Returns whether the program has a lease."""
        lease = self._leases.get(program_id)
        if lease is None:
            return False
        lease.waiting = waiting
        if not waiting:
            self._push(lease)
        return True

    def end(self, program_id: ProgramId) -> Lease | None:
        """Remove and return the program's lease, if it has one."""
        lease = self._leases.pop(program_id, None)
        if lease is not None:
            self.blocks -= lease.blocks
            if lease.reason is DecisionReason.HINTED:
                self._discount(lease)
            self.changes += 1
        return lease

    def _discount(self, ended: Lease) -> None:
        """Subtract the counted blocks of an ended hinted lease from its tenant's sum. Blocks that other
        leases of the tenant may still hold are not subtracted, but counted with those leases."""
        tenant, left = ended.tenant, ended.own_blocks
        others = self._uncounted.get(tenant, {})
        others.pop(ended.program_id, None)
        while left and others:
            program_id, other = next(iter(others.items()))
            moved = min(left, other.blocks - other.own_blocks)
            other.own_blocks += moved
            left -= moved
            if other.own_blocks == other.blocks:
                del others[program_id]
        if not others:
            self._uncounted.pop(tenant, None)
        self.hinted_blocks[tenant] -= left
        if not self.hinted_blocks[tenant]:
            del self.hinted_blocks[tenant]

    def pop_expired(self, now: float, limit: int) -> list[tuple[Lease, DecisionReason]]:
        """Remove and return at most ``limit`` expired leases, each with the reason for its end. The lease of
        a program with a waiting request stays until the request is scheduled (Continuum §5.2)."""
        if now < self.next_deadline_s:
            return []
        due = [lease for lease in self._leases.values() if not lease.waiting and lease.deadline_s() <= now]
        ended: list[tuple[Lease, DecisionReason]] = []
        for lease in sorted(due, key=Lease.deadline_s)[:limit]:
            silent = lease.silent_s is not None and lease.silent_s < lease.expires_s
            self.end(lease.program_id)
            ended.append((lease, DecisionReason.SILENT if silent else DecisionReason.TTL))
        left = (lease.deadline_s() for lease in self._leases.values() if not lease.waiting)
        self.next_deadline_s = min(left, default=math.inf)
        return ended

    def _push(self, lease: Lease) -> None:
        self.next_deadline_s = min(self.next_deadline_s, lease.deadline_s())
