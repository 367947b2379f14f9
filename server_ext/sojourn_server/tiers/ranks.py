"""What is worth keeping in host memory, and in which order it goes."""

from __future__ import annotations

from enum import IntEnum


class Rank(IntEnum):
    """Slots of the lowest rank are reused first; within one, the longest unused.

    Members hash and compare as the numbers they are, at the price of a number.
    To name one takes longer: where that is done for each block, it is bound first.
    """

    WORTHLESS = 0
    """Of what nobody is known to come back for. Not written to disk."""
    SPARE = 1
    """Of what the device has too: a copy made in time, where there was room for it. Not written to disk."""
    COLD = 2
    """Of who is idle for so long that the disk is the place for it: there it is, and can be read again."""
    PLAIN = 3
    """Of who is busy, and would rather be on the device; and of content about which nothing else is known."""
    IDLE = 4
    """Of who has left the device for others: host memory is where it is kept."""
    WANTED = 5
    """Of what is read next: its program has just been let onto the device. Nothing takes its place."""

    @property
    def until_written(self) -> Rank:
        """The rank until it is written: what belongs on disk is kept like the idle: nothing else has it."""
        return _IDLE if self is _COLD else self


_COLD, _IDLE = Rank.COLD, Rank.IDLE
