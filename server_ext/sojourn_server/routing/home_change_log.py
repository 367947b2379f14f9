"""Changes of programs' homes, in batches. A home is the replica that serves a program's turns.

Each gateway keeps a copy of all homes, and asks the core only about new programs. The core sends changes in
batches (SAGA §5.3). Each change has a version, so a gateway can ask for the changes that its copy lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from .bounded_program_table import Key

FLUSH_S = 0.010
"""Default seconds from the first change of a batch until the batch is due."""
FLUSH_CHANGES = 100
"""Number of changes after which a batch is due at once."""
MAX_LOGGED_PROGRAMS = 50_000
"""Maximum number of programs whose latest change is kept. Older changes are dropped. A gateway that lacks a
dropped change gets all homes instead, which takes the coordinator much longer to compute. If a replica is
lost, the homes of all its programs change at once; the maximum is larger than their number."""

Home = tuple[str, str]
"""Replica id and instance. The instance changes when the replica restarts."""


class HomeChange(msgspec.Struct, frozen=True, array_like=True):
    """A program's new home. ``replica_id`` and ``instance`` are ``None`` if the program has no home now."""

    tenant: str
    program_id: str
    version: int
    replica_id: str | None = None
    instance: str | None = None


class HomeChanges(msgspec.Struct, frozen=True):
    """A batch of changes: the latest change of each program whose home changed after version ``since``.

    ``version`` is the version of the last change. If ``full`` is true, ``changes`` lists all homes and
    replaces the gateway's copy. ``life`` is the id of the core that numbers the versions. Versions of two
    cores cannot be compared.
    """

    life: str
    since: int
    version: int
    changes: tuple[HomeChange, ...]
    full: bool = False


class HomeChangeLog:
    """Numbers the changes of homes, returns them in batches, and keeps the latest change of each program.

    A batch is due ``flush_s`` seconds after its first change, or after ``FLUSH_CHANGES`` changes, whichever
    is first. A batch has one entry per program. The log keeps changes of at most ``most_logged`` programs.
    """

    def __init__(
        self, life: str = "", flush_s: float = FLUSH_S, most_logged: int = MAX_LOGGED_PROGRAMS
    ) -> None:
        self.life = life
        self.version = 0
        """Version of the latest change."""
        self._flush_s = flush_s
        self._most_logged = most_logged
        self._log: OrderedDict[Key, HomeChange] = OrderedDict()
        """Latest change of each program, oldest first."""
        self._forgotten = 0
        """Version of the newest change that was dropped."""
        self._flushed = 0
        """Version of the latest change at the last flush."""
        self._first_s: float | None = None
        """Time of the first change since the last flush."""
        self._answer: HomeChanges | None = None
        """The last result of ``since``, reused for gateways with the same copy; ``None``: there was none, or
        a home has changed since."""

    def record_home(self, key: Key, home: Home | None, now: float) -> None:
        """Record a program's new home. If ``home`` is ``None``, the program has no home any more."""
        self.version += 1
        self._answer = None
        replica_id, instance = home or (None, None)
        self._log[key] = HomeChange(*key, self.version, replica_id, instance)
        self._log.move_to_end(key)
        if len(self._log) > self._most_logged:
            self._forgotten = self._log.popitem(last=False)[1].version
        if self._first_s is None:
            self._first_s = now

    def due_s(self, now: float) -> float | None:
        """Seconds until the next batch is due, 0 if it is due now; ``None``: there is no change since the
        last flush."""
        if self._first_s is None:
            return None
        if self.version - self._flushed >= FLUSH_CHANGES or now < self._first_s:
            return 0.0  # ``now`` is before the first change, so the clock stepped back
        return max(0.0, self._first_s + self._flush_s - now)

    def flush(self, now: float) -> bool:
        """End the present batch if it is due, and return whether it was due. ``since`` returns the changes of
        the batch."""
        if self.due_s(now) != 0.0:
            return False
        self._flushed, self._first_s = self.version, None
        return True

    def since(
        self, version: int, life: str, everything: Callable[[], Iterable[tuple[Key, Home]]]
    ) -> HomeChanges:
        """Return the changes that a gateway's copy of the homes lacks, including changes of earlier batches.

        ``version`` and ``life``: the copy's version, and the id of the core that numbered it. Returns all
        homes if ``life`` is the id of another core, or if the log has dropped some of the changes.
        ``everything`` is a function that returns all homes.
        """
        full = life != self.life or not self._forgotten <= version <= self.version
        since, known = 0 if full else version, self._answer
        if known is not None and (known.life, known.since, known.full) == (self.life, since, full):
            return known
        changes = self._all_homes(everything()) if full else self._changes_after(version)
        self._answer = HomeChanges(self.life, since, self.version, changes, full)
        return self._answer

    def _all_homes(self, homes: Iterable[tuple[Key, Home]]) -> tuple[HomeChange, ...]:
        """Return all homes, as changes of the present version."""
        return tuple(HomeChange(*key, self.version, *home) for key, home in homes)

    def _changes_after(self, version: int) -> tuple[HomeChange, ...]:
        """Return the latest change of each program whose home changed after ``version``."""
        newest_first = []
        for change in reversed(self._log.values()):
            if change.version <= version:
                break
            newest_first.append(change)
        return tuple(reversed(newest_first))
