"""A gateway's copy of where programs are at home."""

from __future__ import annotations

from collections.abc import Callable

from ..core.journal import Changes, Home
from ..core.programs import Key

OnHome = Callable[[Key, Home | None, Home], None]


class HomesCopy:
    """As one coordinator told it, and what an earlier one told that it has not contradicted.

    A coordinator that began anew may lack the newest homes of the one before; a program goes on where it was.
    """

    def __init__(self) -> None:
        self.life = ""
        self.version = -1
        """Of the coordinator's journal; -1: nothing of this life has come."""
        self._homes: dict[Key, Home] = {}

    def get(self, tenant: str, program_id: str) -> Home | None:
        """Replica and instance."""
        return self._homes.get((tenant, program_id))

    def put(self, key: Key, home: Home | None) -> None:
        """It is known before the coordinator's word of it has come."""
        if home is not None:
            self._homes[key] = home
        else:
            self._homes.pop(key, None)

    def apply(self, changes: Changes, on_home: OnHome) -> None:
        """The coordinator's word. ``on_home`` is called for each program whose home is another one now."""
        if not changes.full and (changes.life != self.life or changes.since > self.version):
            return  # what lies between has not come: it is asked for again
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
                on_home(key, before, home)
        if changes.full or changes.version > self.version:
            self.life, self.version = changes.life, changes.version

    def forget_replica(self, replica_id: str, instance: str) -> None:
        """It is gone, and whoever was at home there is at home nowhere."""
        for key in [key for key, home in self._homes.items() if home == (replica_id, instance)]:
            self.put(key, None)
