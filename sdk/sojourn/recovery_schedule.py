"""When to ask a server that refused events whether it accepts them now."""

from __future__ import annotations

from collections.abc import Callable

FIRST_RECOVERY_PAUSE_S = 1.0
MAX_RECOVERY_PAUSE_S = 60.0
"""Longest pause before a server is asked again. The first pause is ``FIRST_RECOVERY_PAUSE_S``; each further
pause is twice as long. The longest one must end within 90 s after a restart, as ``docs/promises.md``
promises."""
FIRST_STOCK_PAUSE_S = 30.0
MAX_STOCK_PAUSE_S = 300.0
"""Longest pause for a server that was never recognised as sojourn's, such as stock vLLM. The first pause is
``FIRST_STOCK_PAUSE_S``. Such a server gets fewer of these requests."""


class RecoverySchedule:
    """Times at which the server is asked, in seconds of the caller's clock."""

    def __init__(self, recognised: Callable[[], bool]) -> None:
        """``recognised`` returns whether the server was ever recognised as sojourn's."""
        self._recognised = recognised
        self._pause_s = 0.0
        self.ask_at_s: float | None = None
        """When to ask next; ``None``: not planned yet."""

    def take_due(self, now: float) -> bool:
        """Return whether to ask the server now. If so, clear ``ask_at_s``."""
        if self.ask_at_s is None or now < self.ask_at_s:
            return False
        self.ask_at_s = None
        return True

    def wait_s(self, now: float) -> float:
        """Return the seconds until the server is to be asked. Set ``ask_at_s`` if it is ``None``."""
        if self.ask_at_s is None:
            first_s, longest_s = (
                (FIRST_RECOVERY_PAUSE_S, MAX_RECOVERY_PAUSE_S)
                if self._recognised()
                else (FIRST_STOCK_PAUSE_S, MAX_STOCK_PAUSE_S)
            )
            self._pause_s = min(longest_s, self._pause_s * 2 or first_s)
            self.ask_at_s = now + self._pause_s
        return self.ask_at_s - now

    def reset(self) -> None:
        """Start again with the first pause. Call this when the server has accepted events."""
        self._pause_s = 0.0
