"""Memory of a fixed size that requests take and give back, first come first served."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FcfsMemoryPool(Generic[Item]):
    """Who finds no room waits in line. Who needs more than there is gets it once nobody else is inside."""

    __slots__ = ("free", "line", "size", "waiting")

    def __init__(self, size: float) -> None:
        self.size = size
        self.free = size
        self.line: deque[tuple[float, Item]] = deque()
        self.waiting = 0.0
        """What those in line need."""

    def take(self, amount: float, item: Item) -> bool:
        """False: ``item`` waits in line, and ``leave`` will tell when it has its room."""
        if not self.line and (amount <= self.free or self.free == self.size):
            self.free -= amount
            return True
        self.line.append((amount, item))
        self.waiting += amount
        return False

    def leave(self, amount: float) -> Iterator[Item]:
        """Give back; whoever has room now, in order."""
        self.free += amount
        line = self.line
        while line and (line[0][0] <= self.free or self.free == self.size):
            needs, item = line.popleft()
            self.waiting -= needs
            self.free -= needs
            yield item
