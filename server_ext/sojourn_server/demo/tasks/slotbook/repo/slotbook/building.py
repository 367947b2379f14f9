"""All rooms: finds one that is large enough and free."""

from __future__ import annotations

from .room import Booking, Room, Taken
from .slot import Slot


class NothingFree(LookupError):
    """No room fits the wish."""


class Building:
    """Rooms by name."""

    def __init__(self, *rooms: Room) -> None:
        self.rooms = {room.name: room for room in rooms}

    def book(self, people: int, slot: Slot, owner: str) -> tuple[str, Booking]:
        """Book the smallest room that seats ``people``. Raises ``NothingFree``."""
        for room in sorted(self.rooms.values(), key=lambda room: (room.seats, room.name)):
            if room.seats < people:
                continue
            try:
                return room.name, room.book(slot, owner)
            except Taken:
                continue
        raise NothingFree(f"no room for {people} at {slot}")

    def agenda(self, owner: str) -> list[str]:
        """All bookings of one person, in order of time."""
        mine = [
            (booking.slot, room.name)
            for room in self.rooms.values()
            for booking in room.bookings
            if booking.owner == owner
        ]
        return [f"{slot} {name}" for slot, name in sorted(mine)]
