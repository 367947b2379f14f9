"""Who may enter, by what all that run will need, so that nobody is soon preempted (Tetris §2.3)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .demand import POINTS, needed_blocks, peak
from .views import EntryView

SLIGHT_SHARE = 0.1
"""Of the most that a request will need: where less of it is expected to be left, it is most likely over."""

LARGEST_SHARE = 0.5
"""Of the room: more is never kept for one request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastFits:
    """A request enters where what it and all that run are expected to need fits, for ``horizon_steps``.

    The paper names "comparing future KV cache demand with available memory" as what starts an offload
    ahead of a preemption. Asked of newcomers the same comparison prevents it: an engine that lets
    everybody in whose prompt fits preempts the newest as the others grow, takes it in again a step
    later, and so on. ``reserve`` of the room is kept free, since an expectation is exceeded half of the time.

    Somebody of whom nothing is known enters as in the untouched engine. So does whoever is first where
    nothing runs, however much it will need. One that will need most of the room would wait until nobody
    runs, and all others behind it: half of the room is what is kept for it. And where the others will run
    short when it is most likely over, it is not for this request to wait.
    """

    reserve: float = 0.05
    horizon_steps: float = math.inf
    gates: bool = True
    counts_promised: bool = False
    forecasts: bool = True

    def __post_init__(self) -> None:
        if not 0 <= self.reserve < 1 or not self.horizon_steps > 0:
            raise ValueError(
                f"reserve {self.reserve}, horizon_steps {self.horizon_steps}; expected 0 up to 1, and above 0"
            )

    def may_enter(self, entry: EntryView, now: float) -> bool:
        own = entry.own
        if not entry.anything_running or own is None or not own.remaining or not entry.needed_blocks:
            return True
        room = entry.room_blocks * (1 - self.reserve)
        its = [min(part, LARGEST_SHARE * room) for part in needed_blocks([own], entry.block_size)]
        most = peak(its, self.horizon_steps)
        return not any(
            others + part > room and part >= SLIGHT_SHARE * most
            for point, others, part in zip(POINTS, entry.needed_blocks, its, strict=True)
            if point <= self.horizon_steps
        )
