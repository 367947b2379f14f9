"""Decides for separated prefill and decode engines, behind the face that a gateway asks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from ..http.decider import CoreInProcess, ProgramPlace, ReplicaStatus
from .core import Engine, PdCore


class PdDecider(CoreInProcess):
    """The core of pairs is in this process. Nobody is at home anywhere: KV comes from storage."""

    def __init__(
        self, core: PdCore, tenants: Iterable[str], clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(core, clock)
        self.core = core
        self._tenants = tuple(tenants)

    def home(self, tenant: str, program_id: str) -> str | None:
        """None."""
        return None

    def is_anothers(self, tenant: str, program_id: str) -> bool:
        """A program of this id is in storage, and is another tenant's."""
        return any(self.core.stored_tokens(other, program_id) for other in self._tenants if other != tenant)

    async def programs(self) -> Sequence[ProgramPlace]:
        """None is at any engine."""
        return ()

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """All engines, in the order in which they were first seen."""
        return [self._status(engine) for engine in self.core.engines.values()]

    def _status(self, engine: Engine) -> ReplicaStatus:
        seen = engine.seen
        flights = [one for one in self.core.flights.values() if one.is_at(seen.replica_id)]
        tokens = sum(one.asked.context_tokens for one in flights)
        health = "suspect" if engine.suspect else "draining" if engine.draining else "up"
        return ReplicaStatus(
            seen.replica_id,
            seen.instance,
            health,
            round(tokens / seen.kv_tokens, 4),
            len(flights),
            0,
            0,
            seen.kv_tokens,
            0,
            max(0, seen.kv_tokens - tokens),
        )
