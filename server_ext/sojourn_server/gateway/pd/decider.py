"""Decides for separated prefill and decode engines, behind the face that a gateway asks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ..http.decider import CoreInProcess, ProgramPlace, ReplicaStatus
from .core import Engine, PdCore
from .facts import Role
from .told import LinkTold


class PairStatus(ReplicaStatus, frozen=True, kw_only=True):
    """An engine of pairs as the gateway knows it. Nobody is at home there."""

    role: str
    node: str
    epoch: str
    links: Mapping[str, LinkTold]
    """What it told last of its links, by name; empty: nothing."""


class PdDecider(CoreInProcess):
    """The core of pairs is in this process. Nobody is at home anywhere: KV comes from storage."""

    def __init__(self, core: PdCore, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(core, clock)
        self.core = core
        self.links_of: Callable[[str], Mapping[str, LinkTold]] = lambda replica_id: {}
        """What an engine told last of its links; set by whoever asks engines."""

    def home(self, tenant: str, program_id: str) -> str | None:
        """None."""
        return None

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """The decode engine of a program's last answer, which knows what that was; ``None``: none yet."""
        program = self.core.programs.get((tenant, program_id))
        return program.answered_by if program is not None else None

    async def programs(self) -> Sequence[ProgramPlace]:
        """All that are known, the one heard of last first. Their contexts are what is in storage of them."""
        waiting = Counter(
            (flight.asked.tenant, flight.asked.program_id)
            for flight in self.core.flights.values()
            if flight.decode_id is None
        )
        found = [
            ProgramPlace(
                name,
                tenant,
                None,
                program.turns,
                program.stored_tokens,
                program.stored_tokens,
                0,
                program.requests - waiting[tenant, name],
                waiting[tenant, name],
            )
            for (tenant, name), program in self.core.programs.items()
        ]
        found.reverse()
        return found

    async def replicas(self) -> Sequence[PairStatus]:
        """All engines, in the order in which they were first seen."""
        counts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for flight in self.core.flights.values():
            for replica_id in (flight.prefill_id, flight.decode_id):
                if replica_id is not None and flight.is_at(replica_id):
                    counts[replica_id] += 1
                    tokens[replica_id] += flight.asked.context_tokens
        return [self._status(one, counts, tokens) for one in self.core.engines.values()]

    def _status(self, engine: Engine, counts: Counter[str], tokens: Counter[str]) -> PairStatus:
        seen = engine.seen
        name, held = seen.replica_id, tokens[seen.replica_id]
        load = held / seen.kv_tokens
        if seen.max_running and seen.role is Role.DECODE:  # of no other that is a bound
            load = max(load, counts[name] / seen.max_running)
        return PairStatus(
            name,
            seen.instance,
            "suspect" if engine.suspect else "draining" if engine.draining else "up",
            round(load, 4),
            counts[name],
            0,
            0,
            seen.kv_tokens,
            0,
            max(0, seen.kv_tokens - held),
            role=seen.role.value,
            node=seen.node,
            epoch=seen.epoch,
            links=self.links_of(name),
        )
