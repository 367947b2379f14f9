"""A gateway's copy of programs' homes."""

from __future__ import annotations

from collections.abc import Callable

from ...routing.home_change_log import Home, HomeChanges
from ...routing.routed_programs import Key

OnAffinityChange = Callable[[Key, Home | None, Home], None]


class ProgramAffinityCache:
    """Homes that the coordinator reported, and homes of its predecessor that it has not contradicted.

    A restarted coordinator may lack its predecessor's latest homes; programs stay where they are.
    """

    def __init__(self) -> None:
        self.life = ""
        self.version = -1
        """Version of the coordinator's change log; -1: none received of this life."""
        self._homes: dict[Key, Home] = {}

    def get(self, tenant: str, program_id: str) -> Home | None:
        """Replica and instance."""
        return self._homes.get((tenant, program_id))

    def put(self, key: Key, home: Home | None) -> None:
        """Set a home before the coordinator reports it."""
        if home is not None:
            self._homes[key] = home
        else:
            self._homes.pop(key, None)

    def apply(self, changes: HomeChanges, on_affinity_change: OnAffinityChange) -> None:
        """Apply reported changes; calls ``on_affinity_change`` for each program whose home changed."""
        if not changes.full and (changes.life != self.life or changes.since > self.version):
            return  # changes in between are missing: they are requested again
        if changes.full and changes.life == self.life:
            told = {(change.tenant, change.program_id) for change in changes.changes}
            for key in [key for key in self._homes if key not in told]:
                self.put(key, None)
        for change in changes.changes:
            key = (change.tenant, change.program_id)
            if change.replica_id is None or change.instance is None:
                self.put(key, None)
                continue
            home = (change.replica_id, change.instance)
            before = self._homes.get(key)
            if before != home:
                self.put(key, home)
                on_affinity_change(key, before, home)
        if changes.full or changes.version > self.version:
            self.life, self.version = changes.life, changes.version

    def forget_replica(self, replica_id: str, instance: str) -> None:
        """Remove a replica that is gone as a home."""
        for key in [key for key, home in self._homes.items() if home == (replica_id, instance)]:
            self.put(key, None)
