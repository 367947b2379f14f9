"""The cache itself: an ordered dictionary, oldest use first."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

from .entry import Entry
from .statistics import Statistics


class TooLarge(ValueError):
    """The value would not fit even into an empty cache."""


class Cache:
    """Holds at most ``capacity`` units; every entry lives ``ttl_s`` seconds from its writing."""

    def __init__(self, capacity: int, ttl_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.statistics = Statistics()
        self._clock = clock
        self._entries: OrderedDict[Hashable, Entry] = OrderedDict()
        self._used = 0

    def put(self, key: Hashable, value: Any, size: int = 1) -> None:
        """Store ``value``, dropping what is spoiled, then what was used least recently."""
        if size > self.capacity:
            raise TooLarge(f"{size} units into a cache of {self.capacity}")
        self._drop(key)
        self.sweep()
        while self._used + size > self.capacity:
            oldest = next(iter(self._entries))
            self._drop(oldest)
            self.statistics.evicted += 1
        self._entries[key] = Entry(value, size, self._clock() + self.ttl_s)
        self._used += size

    def get(self, key: Hashable, default: Any = None) -> Any:
        """The value, or ``default`` if it is unknown or spoiled."""
        now_s = self._clock()
        entry = self._entries.get(key)
        if entry is not None and not entry.fresh(now_s):
            self._drop(key)
            self.statistics.expired += 1
            entry = None
        if entry is None:
            self.statistics.misses += 1
            return default
        entry.touch(now_s, self.ttl_s)
        self._entries.move_to_end(key)
        self.statistics.hits += 1
        return entry.value

    def sweep(self) -> int:
        """Drop everything spoiled; returns how many entries went."""
        now_s = self._clock()
        spoiled = [key for key, entry in self._entries.items() if not entry.fresh(now_s)]
        for key in spoiled:
            self._drop(key)
        self.statistics.expired += len(spoiled)
        return len(spoiled)

    def __len__(self) -> int:
        return len(self._entries)

    def _drop(self, key: Hashable) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used -= entry.size
