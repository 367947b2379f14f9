"""Which replica each program is at home on: the sums at the replicas, and what changed."""

from __future__ import annotations

from .fleet import Fleet, Replica
from .journal import StateJournal
from .programs import Program
from .residents import Residents
from .tenants import Tenants


class Homes:
    """Moves programs in and out. Whoever changes a program's home does it here."""

    def __init__(self, fleet: Fleet, tenants: Tenants, journal: StateJournal, residents: Residents) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._journal = journal
        self._residents = residents
        self.room_grew = False
        """Some replica has more room since this was last set to False."""

    def leave(self, program: Program, now: float) -> None:
        """It is at home nowhere, and has its KV nowhere."""
        replica = self._fleet.get(program.home)
        if replica is not None:
            self._fleet.homed(replica, -program.size_tokens, -1)
            self._tenants.housed(program.tenant, -program.size_tokens)
            self.room_grew = True
        if program.home is not None:
            self._journal.note(program.key, None, now)
            self._residents.touch(program)
        program.home, program.cached, program.size_tokens = None, False, 0

    def settle(self, program: Program, replica: Replica, size_tokens: int, now: float) -> str | None:
        """It is at home there from now on; returns where it was, if that was elsewhere."""
        before = program.home
        if before == replica.replica_id:
            self.resize(program, size_tokens)
            return None
        self.leave(program, now)
        program.home, program.size_tokens = replica.replica_id, size_tokens
        self._residents.touch(program)
        self._fleet.homed(replica, size_tokens, 1)
        self._tenants.housed(program.tenant, size_tokens)
        self._journal.note(program.key, (replica.replica_id, replica.instance), now)
        if before is not None:
            program.moves += 1
            program.moved_at_turn = program.turns
        return before

    def resize(self, program: Program, size_tokens: int) -> None:
        """It counts for so much at its home."""
        replica = self._fleet.get(program.home)
        if replica is not None and size_tokens != program.size_tokens:
            self._fleet.homed(replica, size_tokens - program.size_tokens)
            self._tenants.housed(program.tenant, size_tokens - program.size_tokens)
            self.room_grew = self.room_grew or size_tokens < program.size_tokens
        program.size_tokens = size_tokens
        self._residents.touch(program)
