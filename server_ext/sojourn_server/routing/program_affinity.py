"""Programs' homes: which replica each program uses, with the sums at replicas and tenants."""

from __future__ import annotations

from .home_change_log import HomeChangeLog
from .replica_fleet import Replica, ReplicaFleet
from .resident_programs import ResidentPrograms
from .routed_programs import RoutedProgram
from .tenant_accounting import TenantAccounting


class ProgramAffinity:
    """The only place that changes a program's home."""

    def __init__(
        self,
        fleet: ReplicaFleet,
        tenants: TenantAccounting,
        journal: HomeChangeLog,
        residents: ResidentPrograms,
    ) -> None:
        self._fleet = fleet
        self._tenants = tenants
        self._journal = journal
        self._residents = residents
        self.capacity_grew = False
        """Some replica has more room since this was last set to False."""

    def leave(self, program: RoutedProgram, now: float) -> None:
        """Take a program's home away; its KV counts as lost."""
        replica = self._fleet.get(program.home)
        if replica is not None:
            self._fleet.homed(replica, -program.size_tokens, -1)
            self._tenants.housed(program.tenant, -program.size_tokens)
            self.capacity_grew = True
        if program.home is not None:
            self._journal.note(program.key, None, now)
            self._residents.touch(program)
        program.home, program.cached, program.size_tokens = None, False, 0

    def settle(self, program: RoutedProgram, replica: Replica, size_tokens: int, now: float) -> str | None:
        """Make a replica a program's home; returns its former home, if another."""
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

    def resize(self, program: RoutedProgram, size_tokens: int) -> None:
        """Change the size that a program counts for at its home."""
        replica = self._fleet.get(program.home)
        if replica is not None and size_tokens != program.size_tokens:
            self._fleet.homed(replica, size_tokens - program.size_tokens)
            self._tenants.housed(program.tenant, size_tokens - program.size_tokens)
            self.capacity_grew = self.capacity_grew or size_tokens < program.size_tokens
        program.size_tokens = size_tokens
        self._residents.touch(program)
