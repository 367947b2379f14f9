"""A room and its bookings, kept in order of time."""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from .slot import Slot


class Taken(ValueError):
    """The room is not free then; the message says who has it."""


@dataclass(frozen=True, order=True)
class Booking:
    """Who has the room when."""

    slot: Slot
    owner: str


class Room:
    """Bookings of one room on one day."""

    def __init__(self, name: str, seats: int, hours: Slot | None = None) -> None:
        self.name = name
        self.seats = seats
        self.hours = hours or Slot.parse("08:00-18:00")
        self.bookings: list[Booking] = []

    def book(self, slot: Slot, owner: str) -> Booking:
        """Take the room. Raises ``Taken``, or ``ValueError`` outside its hours."""
        if slot.start < self.hours.start or slot.end > self.hours.end:
            raise ValueError(f"{self.name} is closed during {slot}")
        for booking in self.bookings:
            if booking.slot.overlaps(slot):
                raise Taken(f"{self.name} is taken by {booking.owner} at {booking.slot}")
        booking = Booking(slot, owner)
        bisect.insort(self.bookings, booking)
        return booking

    def cancel(self, slot: Slot) -> None:
        """Give the room back. Raises ``KeyError`` if there is no such booking."""
        for booking in self.bookings:
            if booking.slot == slot:
                self.bookings.remove(booking)
                return
        raise KeyError(f"{self.name} has no booking at {slot}")

    def free(self, minutes: int = 1) -> list[Slot]:
        """Gaps of at least ``minutes`` between bookings."""
        gaps = []
        start = self.hours.start
        for booking in self.bookings:
            if booking.slot.start - start >= minutes:
                gaps.append(Slot(start, booking.slot.start))
            start = booking.slot.end
        if self.hours.end - start >= minutes:
            gaps.append(Slot(start, self.hours.end))
        return gaps
