"""Preemptions that follow one another: cascades (Tetris §1)."""

from __future__ import annotations

CASCADE_STEPS = 10
"""Two preemptions at most this many engine steps apart belong together. Tetris §1 counts cascades without
saying how near is near; ten steps are well under a second of decoding."""


class Cascades:
    """The chain of preemptions that is still growing. Steps are numbered by the engine's steps."""

    def __init__(self) -> None:
        self.length = 0
        """Preemptions in the newest chain."""
        self._at_step = 0

    def preempted(self, step: int) -> int:
        """A preemption in engine step ``step``. Returns the length of the chain that it leaves behind, where
        it begins another one, else 0."""
        if self.length and step - self._at_step <= CASCADE_STEPS:
            self.length += 1
            over = 0
        else:
            over, self.length = self.length, 1
        self._at_step = step
        return over

    def over(self, step: int) -> int:
        """The length of the chain, once no preemption at ``step`` or later can lengthen it; else 0. It is
        forgotten with that."""
        if not self.length or step - self._at_step <= CASCADE_STEPS:
            return 0
        over, self.length = self.length, 0
        return over
