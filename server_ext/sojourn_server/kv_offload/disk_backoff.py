"""``DiskBackoff``: how long a disk whose writes fail is left alone."""

from __future__ import annotations


class DiskBackoff:
    """Pauses disk writes after a failure, at first for 16 steps. Each further failure doubles the pause, up
    to ``LONGEST_STEPS``. After a success, the next pause is 16 steps again."""

    LONGEST_STEPS = 4096

    def __init__(self) -> None:
        self._steps = 0
        self._left = 0

    def failed(self) -> None:
        self._steps = min(self.LONGEST_STEPS, max(16, 2 * self._steps))
        self._left = self._steps

    def worked(self) -> None:
        self._steps = 0

    @property
    def is_active(self) -> bool:
        return self._left > 0

    def count_step(self) -> None:
        """Count one step of the pause. Call it once per step."""
        self._left = max(0, self._left - 1)
