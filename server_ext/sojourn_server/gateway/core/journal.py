"""What changed about homes, in batches: gateways keep a copy, and ask the core for new programs only.

Changes are flushed together (SAGA §5.3), each with a number of its own, so that a copy knows how old it is
and what it lacks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

import msgspec

from .programs import Key

FLUSH_S = 0.010
FLUSH_CHANGES = 100
MOST_LOGGED = 20_000
"""Programs whose latest change is remembered: who is further behind is told everything."""

Home = tuple[str, str]
"""A replica and its instance."""


class HomeChange(msgspec.Struct, frozen=True, array_like=True):
    """A program is at home elsewhere than before, or nowhere."""

    tenant: str
    program_id: str
    version: int
    replica_id: str | None = None
    instance: str | None = None


class Changes(msgspec.Struct, frozen=True):
    """What happened after version ``since``, up to ``version``, the latest of each program, in order.

    ``full``: it is all homes there are, and whoever reads it forgets what it had. ``life`` names the journal
    that counts: versions of two lives say nothing about each other.
    """

    life: str
    since: int
    version: int
    changes: tuple[HomeChange, ...]
    full: bool = False


class StateJournal:
    """Numbers changes, hands them out in batches, and remembers the latest of each program.

    ``flush_s``, ``flush_changes``: a batch is due when its first change is so old, or when so many have
    come, whichever is first; several changes of one program are one in it. Raises ``ValueError`` for
    a negative time or counts below 1.
    """

    def __init__(
        self,
        life: str = "",
        flush_s: float = FLUSH_S,
        flush_changes: int = FLUSH_CHANGES,
        most_logged: int = MOST_LOGGED,
    ) -> None:
        if not (flush_s >= 0 and flush_changes >= 1 and most_logged >= 1):
            raise ValueError(
                f"flush_s {flush_s}, flush_changes {flush_changes}, most_logged {most_logged}; "
                "expected ≥ 0, ≥ 1, ≥ 1"
            )
        self.life = life
        self.version = 0
        """Of the latest change."""
        self._flush_s = flush_s
        self._flush_changes = flush_changes
        self._most_logged = most_logged
        self._log: OrderedDict[Key, HomeChange] = OrderedDict()
        """The latest change of each program, oldest first."""
        self._forgotten = 0
        """Changes up to this version are no longer all in the log."""
        self._flushed = 0
        self._first_s: float | None = None
        """When the first change came that has not been flushed."""

    def note(self, key: Key, home: Home | None, now: float) -> None:
        """A program is at home there; ``None``: nowhere."""
        self.version += 1
        replica_id, instance = home or (None, None)
        self._log[key] = HomeChange(*key, self.version, replica_id, instance)
        self._log.move_to_end(key)
        if len(self._log) > self._most_logged:
            self._forgotten = self._log.popitem(last=False)[1].version
        if self._first_s is None:
            self._first_s = now

    def due_s(self, now: float) -> float | None:
        """Seconds until a batch is due, 0 if it is; ``None``: nothing has changed."""
        if self._first_s is None:
            return None
        if self.version - self._flushed >= self._flush_changes or now < self._first_s:
            return 0.0  # before its first change it is by a clock that stepped back
        return max(0.0, self._first_s + self._flush_s - now)

    def flush(self, now: float, everything: Callable[[], Iterable[tuple[Key, Home]]]) -> Changes | None:
        """The batch that is due, ``None`` before; ``everything`` lists all homes, should it have to."""
        if self.due_s(now) != 0.0:
            return None
        changes = self.since(self._flushed, self.life, everything)
        self._flushed, self._first_s = self.version, None
        return changes

    def since(self, version: int, life: str, everything: Callable[[], Iterable[tuple[Key, Home]]]) -> Changes:
        """What a copy of ``version`` of ``life`` lacks, flushed or not; everything, where that is unknown."""
        if life != self.life or not self._forgotten <= version <= self.version:
            homes = tuple(HomeChange(*key, self.version, *home) for key, home in everything())
            return Changes(self.life, 0, self.version, homes, full=True)
        newest_first = []
        for change in reversed(self._log.values()):
            if change.version <= version:
                break
            newest_first.append(change)
        return Changes(self.life, version, self.version, tuple(reversed(newest_first)))
