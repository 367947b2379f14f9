"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """Seconds since the simulation began. Call it to read it, as one would ``time.monotonic``."""

    __slots__ = ("now_s",)

    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def advance_to(self, at_s: float) -> None:
        """Go on to ``at_s``. Raises ``ValueError`` for a time that has passed."""
        if at_s < self.now_s:
            raise ValueError(f"time cannot go back from {self.now_s} s to {at_s} s")
        self.now_s = at_s
