"""Statistics of tenants' ended programs, from which ``ProgramEstimator`` estimates later programs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar

from ..programs.output_length_history import MAX_OUTPUT_TOKENS
from ..programs.tool_and_turn_history import SlidingMean, SortedWindow

Kept = TypeVar("Kept")

MAX_TENANTS = 64
"""Maximum number of tenants whose statistics are kept."""
MAX_COUNT = 64
"""Maximum number of observations that a ``FrequentTenants`` counts for one tenant."""
HALVING_OBSERVATIONS = 1024
"""Number of counted observations after which a ``FrequentTenants`` halves all counts."""
LENGTH_WINDOW = 64
"""Number of latest programs whose sizes and turns are kept."""
MEAN_WINDOW = 64
"""Number of latest programs or turns that a mean covers."""
MAX_AGENT_TYPES = 64
"""Maximum number of agent types of a tenant whose statistics are kept."""
MAX_TYPES_OF_ALL = 512
"""Maximum number of agent types of all tenants together. Clients can invent types without limit."""


class FrequentTenants(Generic[Kept]):
    """One record per tenant, for the ``MAX_TENANTS`` tenants with the most observations in recent time.

    A new tenant displaces the tenant with the fewest observations. If several tenants have the fewest, the
    most recently observed of them is displaced. So if more than ``MAX_TENANTS`` tenants are equally active,
    some of them stay long enough for an estimate. LRU order would displace each of them too early. Counts are
    halved regularly, so an inactive tenant is displaced in the end. ``new``: function that builds the record
    of a new tenant.
    """

    def __init__(self, new: Callable[[], Kept]) -> None:
        self._new = new
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        """Least recently observed first."""
        self._counts: dict[str, float] = {}
        self._counted = 0
        """Number of counted observations since the last halving."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, tenant: str) -> Kept | None:
        """The record of a tenant; ``None``: there is none."""
        return self._kept.get(tenant)

    def items(self) -> Iterator[tuple[str, Kept]]:
        """Tenants with their records, least recently observed first."""
        return iter(self._kept.items())

    def values(self) -> Iterator[Kept]:
        """The records of all tenants, least recently observed first."""
        return iter(self._kept.values())

    def observed(self, tenant: str) -> Kept:
        """Count an observation of a tenant; return the tenant's record, for the caller to update."""
        if tenant not in self._kept:
            self.put(tenant, self._new(), 0)
        self._kept.move_to_end(tenant)
        # Observations beyond the maximum are not counted, so that they do not speed up the halving.
        if self._counts[tenant] + 1 <= MAX_COUNT:
            self._counts[tenant] += 1
            self._counted += 1
        if self._counted >= HALVING_OBSERVATIONS:
            self._counted = 0
            self._counts = {name: count / 2 for name, count in self._counts.items()}
        return self._kept[tenant]

    def put(self, tenant: str, kept: Kept, count: int) -> None:
        """Add or replace a tenant's record. ``count``: number of the tenant's observations so far."""
        if tenant not in self._kept and len(self._kept) >= MAX_TENANTS:
            dropped = min(reversed(self._kept), key=self._counts.__getitem__)
            del self._kept[dropped], self._counts[dropped]
        self._kept[tenant] = kept
        self._counts[tenant] = min(MAX_COUNT, count)


class TypeStatistics:
    """Sizes, turns and durations of the programs of one agent type."""

    __slots__ = ("life_s", "peaks", "turn_s", "turns")

    def __init__(self) -> None:
        self.peaks = SortedWindow(LENGTH_WINDOW)
        """Longest contexts, in tokens."""
        self.turns = SortedWindow(LENGTH_WINDOW)
        self.turn_s = SlidingMean(MEAN_WINDOW)
        self.life_s = SlidingMean(MEAN_WINDOW)

    def snapshot(self) -> list[list[Any]]:
        """All statistics as a JSON-able document."""
        return [
            list(self.peaks.arrivals),
            list(self.turns.arrivals),
            self.turn_s.values(),
            self.life_s.values(),
        ]

    @classmethod
    def restore(cls, peaks: Any, turns: Any, turn_s: Any, life_s: Any) -> TypeStatistics:
        """Build the statistics from a ``snapshot``. Raises ``ValueError`` for anything else."""
        known = cls()
        known.peaks = SortedWindow(LENGTH_WINDOW, _numbers(peaks, 1, whole=True))
        known.turns = SortedWindow(LENGTH_WINDOW, _numbers(turns, 1, whole=True))
        for mean, values in ((known.turn_s, turn_s), (known.life_s, life_s)):
            for value in _numbers(values, 0):
                mean.observe(value)
        return known


class TenantStatistics:
    """Statistics of one tenant's programs, by agent type and of all types."""

    def __init__(self) -> None:
        self.all = TypeStatistics()
        self.types: OrderedDict[str, TypeStatistics] = OrderedDict()
        """Least recently observed first."""

    def observed(self, kind: str | None) -> tuple[TypeStatistics, ...]:
        """Return the statistics to update for a program of the agent type ``kind`` (``None``: without a
        type). Adds a new type. If there are more than ``MAX_AGENT_TYPES``, drops the least recently observed
        type."""
        if kind is None:
            return (self.all,)
        found = self.types.get(kind)
        if found is None:
            found = self.types[kind] = TypeStatistics()
            if len(self.types) > MAX_AGENT_TYPES:
                self.types.popitem(last=False)
        self.types.move_to_end(kind)
        return self.all, found

    def lengths(
        self, kind: str | None, of: Callable[[TypeStatistics], SortedWindow], least: int
    ) -> Sequence[int]:
        """Return the lengths of the programs of an agent type, ascending. ``of`` selects the lengths from a
        ``TypeStatistics``. The result is a live view: do not keep it.

        If ``kind`` is ``None`` or has fewer than ``least`` lengths, return the lengths of all types. If these
        are also fewer than ``least``, the result is empty."""
        for one in (self.types.get(kind) if kind is not None else None, self.all):
            if one is not None and len(of(one).ordered) >= least:
                return of(one).ordered
        return ()

    def mean(self, kind: str | None, of: Callable[[TypeStatistics], SlidingMean]) -> float | None:
        """Return the mean of an agent type. If the type has no values, or ``kind`` is ``None``, return the
        mean over all types. ``None``: there are no values at all. ``of`` selects the mean from a
        ``TypeStatistics``."""
        for one in (self.types.get(kind) if kind is not None else None, self.all):
            if one is not None and of(one).count():
                return of(one).mean()
        return None

    def snapshot(self) -> list[list[Any]]:
        """Return all statistics as a JSON-able document: first those of all types together, then those of
        each type."""
        return [[None, *self.all.snapshot()], *([kind, *one.snapshot()] for kind, one in self.types.items())]

    @classmethod
    def restore(cls, document: Any) -> TenantStatistics:
        """Build the statistics from a ``snapshot``. Raises ``ValueError`` for anything else."""
        known = cls()
        match document:
            case [[None, peaks, turns, turn_s, life_s], *by_type]:
                known.all = TypeStatistics.restore(peaks, turns, turn_s, life_s)
            case _:
                raise ValueError("estimates: expected a list of statistics, those of all agent types first")
        for entry in by_type[-MAX_AGENT_TYPES:]:
            match entry:
                case [str(kind), peaks, turns, turn_s, life_s]:
                    known.types[kind] = TypeStatistics.restore(peaks, turns, turn_s, life_s)
                case _:
                    raise ValueError(f"estimates: {entry!r:.80}; expected an agent type and its statistics")
        return known


class ProgramStatistics(FrequentTenants[TenantStatistics]):
    """The statistics of all tenants' programs."""

    def __init__(self) -> None:
        super().__init__(TenantStatistics)

    def of_program(self, tenant: str, kind: str | None) -> tuple[TypeStatistics, ...]:
        """Count an observation of a tenant; return the statistics to update for a program of the tenant and
        of the agent type ``kind`` (``None``: without a type)."""
        known = self.observed(tenant)
        is_new = kind is not None and kind not in known.types
        found = known.observed(kind)
        if is_new:
            self._drop_types()
        return found

    def snapshot(self) -> list[list[Any]]:
        """All statistics as a JSON-able document."""
        return [[tenant, known.snapshot()] for tenant, known in self.items()]

    @classmethod
    def restore(cls, document: list[Any]) -> ProgramStatistics:
        """Build the statistics from a ``snapshot``. Raises ``ValueError`` for a list of anything else."""
        restored = cls()
        for entry in document[-MAX_TENANTS:]:
            match entry:
                case [str(tenant), statistics]:
                    known = TenantStatistics.restore(statistics)
                    restored.put(tenant, known, known.all.turn_s.count())
                case _:
                    raise ValueError("estimates: expected a list of tenants and their statistics")
        restored._drop_types()
        return restored

    def _drop_types(self) -> None:
        """Drop agent types beyond ``MAX_TYPES_OF_ALL``, each from the tenant with the most types."""
        for _ in range(sum(len(one.types) for one in self.values()) - MAX_TYPES_OF_ALL):
            max(self.values(), key=lambda one: len(one.types)).types.popitem(last=False)


def _numbers(values: Any, least: int, *, whole: bool = False) -> list[Any]:
    """Return ``values`` if it is a list of numbers of at least ``least``. With ``whole``, the numbers must be
    integers up to ``MAX_OUTPUT_TOKENS``. Raises ``ValueError`` for anything else."""
    if not isinstance(values, list):
        raise ValueError(f"estimates: {values!r:.80}; expected a list of numbers")
    for value in values:
        if (
            not isinstance(value, int if whole else (int, float))
            or isinstance(value, bool)
            or not value >= least
            or (whole and value > MAX_OUTPUT_TOKENS)
        ):
            raise ValueError(f"estimates: {value!r:.80}; expected a number of at least {least}")
    return values
