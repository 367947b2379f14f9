"""The table of leases, which keep the KV of programs on the device between their turns: deadlines and blocks.

Times are seconds on the engine's monotonic clock.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sojourn.ids import ProgramId

from ..policies.policy_protocols import DecisionReason
from ..policies.policy_views import LeaseView

SILENCE_S = 20.0
"""The lease of a client that promised heartbeats ends this many seconds after its grant, the promise or the
client's newest event, whichever is latest. Heartbeats come every 3 s."""


@dataclass(slots=True, kw_only=True)
class Lease:
    """The cached blocks of one program, held between its turns."""

    program_id: ProgramId
    rank: int
    granted_s: float
    ttl_s: float
    expires_s: float
    """Time at which the TTL ends. ``LeaseTable.extend`` postpones it."""
    silent_s: float = math.inf
    """Time at which the client's silence ends the lease; ``inf`` if the client never promised heartbeats."""
    block_ids: Sequence[int]
    """The distinct blocks that the lease holds, in context order."""
    reload_s: float
    """Estimated seconds to restore the program's KV if it is evicted."""
    reason: DecisionReason
    tenant: str | None = None
    freed_blocks: int = 0
    """Number of blocks that are held for this lease. A block of several leases is held for that of the
    earliest program, which usually ends last. So the numbers of all leases add up to the blocks held."""
    limit_s: float = math.inf
    """Latest ``expires_s``, however often the client's reports postpone it."""
    anchored: bool = False
    """Whether the TTL is counted from the reported start of a tool."""
    waiting: bool = False
    """Whether a request of the program waits to be scheduled. Meanwhile the lease does not expire (Continuum
    §5.2)."""

    @property
    def blocks(self) -> int:
        return len(self.block_ids)

    def deadline_s(self) -> float:
        return min(self.expires_s, self.silent_s)

    def view(self, score: tuple[float, ...]) -> LeaseView:
        """The lease as input of policies. ``score``: the program's eviction score."""
        return LeaseView(
            self.program_id, self.rank, self.expires_s, self.freed_blocks, self.reload_s, self.waiting, score,
            hinted=self.reason is DecisionReason.HINTED, ttl_s=self.ttl_s,
        )  # fmt: skip


class LeaseTable(dict[ProgramId, Lease]):
    """The leases of one engine, at most one per program. Only ``grant`` and ``end`` change them."""

    def __init__(self, budget_blocks: int) -> None:
        super().__init__()
        self.budget_blocks = budget_blocks
        self._holders: dict[int, list[tuple[int, ProgramId]]] = {}
        """Block id → (rank, id) of the programs whose leases hold the block, in ascending order."""

    @property
    def blocks(self) -> int:
        """Blocks held by all leases; a shared block counts for each lease that holds it."""
        return sum(lease.blocks for lease in self.values())

    @property
    def held_blocks(self) -> int:
        """Number of distinct blocks that leases hold."""
        return len(self._holders)

    def count_unheld(self, block_ids: Iterable[int]) -> int:
        """Return how many of these blocks no lease holds."""
        return sum(block_id not in self._holders for block_id in block_ids)

    def grant(self, lease: Lease) -> None:
        """Add a lease. The program must not have another."""
        assert lease.program_id not in self
        self[lease.program_id] = lease
        holder = (lease.rank, lease.program_id)
        for block_id in lease.block_ids:
            holders = self._holders.setdefault(block_id, [])
            insort(holders, holder)
            if holders[0] == holder:
                lease.freed_blocks += 1
                if len(holders) > 1:
                    self[holders[1][1]].freed_blocks -= 1

    def end(self, program_id: ProgramId) -> Lease | None:
        """Remove and return the program's lease."""
        lease = self.pop(program_id, None)
        if lease is None:
            return None
        holder = (lease.rank, program_id)
        for block_id in lease.block_ids:
            holders = self._holders[block_id]
            place = bisect_left(holders, holder)
            del holders[place]
            if not holders:
                del self._holders[block_id]
            elif not place:
                self[holders[0][1]].freed_blocks += 1
        return lease

    def heard(self, program_id: ProgramId, now: float, *, promised: bool = False) -> None:
        """Record that the client sent an event, which may promise heartbeats (``SILENCE_S``)."""
        lease = self.get(program_id)
        if lease is not None and (promised or lease.silent_s < math.inf):
            lease.silent_s = now + SILENCE_S

    def extend(self, program_id: ProgramId, expires_s: float) -> None:
        """Postpone the lease's expiry to ``expires_s``, at most to ``limit_s``."""
        lease = self.get(program_id)
        if lease is not None:
            lease.expires_s = max(lease.expires_s, min(expires_s, lease.limit_s))

    def set_waiting(self, program_id: ProgramId, waiting: bool) -> bool:
        """Record whether a request of the program waits. Returns whether the program has a lease."""
        lease = self.get(program_id)
        if lease is not None:
            lease.waiting = waiting
        return lease is not None

    def expired(self, now: float) -> list[tuple[ProgramId, DecisionReason]]:
        """Return the programs of the expired leases, earliest first, each with the reason for the end of its
        lease."""
        due = [lease for lease in self.values() if lease.expires_s <= now or lease.silent_s <= now]
        silent, ttl = DecisionReason.SILENT, DecisionReason.TTL
        return [
            (lease.program_id, silent if lease.silent_s < lease.expires_s else ttl)
            for lease in sorted(due, key=Lease.deadline_s)
            if not lease.waiting
        ]
