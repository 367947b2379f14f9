"""``DiskBackoff``: how long disk writes pause after a failure, and whether the disk counts as broken."""

from __future__ import annotations

FIRST_STEPS = 16
"""Length of the first pause, in engine steps."""


class DiskBackoff:
    """Pauses disk writes after a failure, at first for ``FIRST_STEPS`` engine steps. Each further failure
    doubles the pause, up to ``LONGEST_STEPS``. After a success, the next pause is ``FIRST_STEPS`` again."""

    LONGEST_STEPS = 4096

    def __init__(self) -> None:
        self._steps = 0
        self._left = 0
        self._unanswered = 0

    def failed(self) -> None:
        self._steps = min(self.LONGEST_STEPS, max(FIRST_STEPS, 2 * self._steps))
        self._left = self._steps
        self._unanswered = 0

    def worked(self) -> None:
        self._steps = self._unanswered = 0

    @property
    def is_active(self) -> bool:
        """Whether writes are paused now."""
        return self._left > 0

    @property
    def is_broken(self) -> bool:
        """Whether the last two writes have failed, or a write has run for ``LONGEST_STEPS`` without a
        result."""
        return self._steps > FIRST_STEPS or self._unanswered >= self.LONGEST_STEPS

    def count_step(self, writing: bool) -> None:
        """Count one engine step. ``writing``: whether a write is under way."""
        self._left = max(0, self._left - 1)
        self._unanswered = self._unanswered + 1 if writing else 0
