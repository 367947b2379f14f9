"""Cascades: chains of preemptions that follow one another within a few engine steps (Tetris §1)."""

from __future__ import annotations

CASCADE_STEPS = 10
"""Maximum number of engine steps between two preemptions of a cascade. Tetris §1 gives no number; ten steps
are well under a second of decoding."""


class PreemptionCascades:
    """Tracks the current chain of preemptions by engine step."""

    def __init__(self) -> None:
        self.length = 0
        """Preemptions in the current chain."""
        self._at_step = 0

    def preempted(self, step: int) -> int:
        """Record a preemption at ``step``. If it starts a new chain, return the length of the previous chain;
        else return 0."""
        if self.length and step - self._at_step <= CASCADE_STEPS:
            self.length += 1
            over = 0
        else:
            over, self.length = self.length, 1
        self._at_step = step
        return over

    def end_if_stale(self, step: int) -> int:
        """End the current chain if ``step`` is more than ``CASCADE_STEPS`` after its last preemption. Returns
        the length of the ended chain, or 0 if no chain ended."""
        if not self.length or step - self._at_step <= CASCADE_STEPS:
            return 0
        over, self.length = self.length, 0
        return over
