"""A stretch of time within a day, in minutes since midnight."""

from __future__ import annotations

from dataclasses import dataclass

DAY_MINUTES = 24 * 60


@dataclass(frozen=True, order=True)
class Slot:
    """From ``start`` up to, but without, ``end``."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= DAY_MINUTES:
            raise ValueError(f"{self.start} to {self.end} is no part of a day")

    @classmethod
    def parse(cls, text: str) -> Slot:
        """Read ``09:00-10:30``."""
        start, _, end = text.partition("-")
        return cls(_minutes(start), _minutes(end))

    @property
    def minutes(self) -> int:
        """How long it lasts."""
        return self.end - self.start

    def overlaps(self, other: Slot) -> bool:
        """Whether the two share a minute; slots that only touch do not."""
        return self.start <= other.end and other.start <= self.end

    def __str__(self) -> str:
        return f"{_clock(self.start)}-{_clock(self.end)}"


def _minutes(text: str) -> int:
    hours, _, minutes = text.strip().partition(":")
    return int(hours) * 60 + int(minutes or 0)


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02d}:{minutes % 60:02d}"
