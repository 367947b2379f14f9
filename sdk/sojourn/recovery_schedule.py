"""When to ask a server that refused events whether it accepts them now."""

from __future__ import annotations

from collections.abc import Callable

FIRST_RECOVERY_PAUSE_S = 1.0
MAX_RECOVERY_PAUSE_S = 60.0
"""First and longest pause before the server is asked again. The pause doubles each time. The longest one ends
within the 90 s after a restart that are promised."""
FIRST_STOCK_PAUSE_S = 30.0
MAX_STOCK_PAUSE_S = 300.0
"""The same for a server that was never recognised as sojourn's, such as stock vLLM, so that it gets few such
requests."""


class RecoverySchedule:
    """Times at which the server is asked, in seconds of the caller's clock."""

    def __init__(self, recognised: Callable[[], bool]) -> None:
        """``recognised`` returns whether the server was ever sojourn's."""
        self._recognised = recognised
        self._pause_s = 0.0
        self.ask_at_s: float | None = None
        """When to ask next; ``None``: not planned yet."""

    def take_due(self, now: float) -> bool:
        """Return whether to ask now. If so, the next time is no longer planned."""
        if self.ask_at_s is None or now < self.ask_at_s:
            return False
        self.ask_at_s = None
        return True

    def wait_s(self, now: float) -> float:
        """Return the seconds until the server is asked. Plan the next time if there is none."""
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
        """Begin with the first pause again, since the server has accepted events."""
        self._pause_s = 0.0
