"""A program's idleness: the share of its recent time spent in tools (MORI §3.1, §4.2, eq. 1; mechanism M1).

    ι = acting / (reasoning + acting),  both summed over the newest k cycles

A cycle is one inference and the tool call after it. The program *reasons* while one of its requests runs, and
*acts* while it has no request in the engine. While its requests only wait, no time counts, since the
scheduler causes that wait.

    request   arrives  admitted          finishes            arrives   admitted
    counts       |   –   | reasoning ······ | acting ··········· |   –    | reasoning ···
    cycle                 |<----------- one cycle ------------->|         |<-- the next

Parallel tool calls count as one gap. The gap is as long as the longest call, since the next request comes
when all calls are done. Parallel requests count as one inference: acting begins when the last of them has
ended. A sub-agent is a program with its own idleness. For its parent, the sub-agent is a tool call.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

WINDOW_CYCLES = 5
"""k of eq. 1: number of newest cycles that count. 5 is ours: our text of the paper lacks the number."""


class IdlenessPhase(str, Enum):
    """How a program's present time is counted: as reasoning, as acting, or not at all (``NOTHING``)."""

    REASONING = "reasoning"
    ACTING = "acting"
    NOTHING = "nothing"


class Idleness(NamedTuple):
    """A program's reasoning and acting seconds up to its last event, and its phase since then (``counting``).

    The running interval is the time since the last event. The object stays valid until the program's next
    event, because only the length of the running interval depends on ``now``.
    """

    reasoning_s: float = 0.0
    """Seconds of the window spent in inference, without the running interval."""
    acting_s: float = 0.0
    """Seconds of the window spent in tool calls, without the running interval."""
    counting: IdlenessPhase = IdlenessPhase.NOTHING
    since_s: float = 0.0
    """Time at which the running interval began, in seconds on the same clock as ``now``."""

    def at(self, now: float) -> float:
        """Return the idleness ι in [0, 1] at ``now`` seconds, the running interval included.

        0.0 if nothing was counted yet. The paper does not define this case. But eq. 1 gives 0 during a
        program's first inference, so a new program also starts at 0.
        """
        reasoning_s, acting_s = self.reasoning_s, self.acting_s
        if self.counting is IdlenessPhase.ACTING:
            acting_s += max(0.0, now - self.since_s)
        elif self.counting is IdlenessPhase.REASONING:
            reasoning_s += max(0.0, now - self.since_s)
        total_s = reasoning_s + acting_s
        return acting_s / total_s if total_s > 0.0 else 0.0


INITIAL_IDLENESS = Idleness()
"""Idleness of a program that has never run."""


class IdlenessTracker:
    """Measures a program's idleness over the newest ``k`` cycles, the current one included.

    A new cycle begins when the first request after a gap runs, not when it arrives. So a request that is
    aborted before it runs begins no cycle.
    """

    def __init__(self, k: int = WINDOW_CYCLES) -> None:
        self._cycles: deque[list[float]] = deque(maxlen=k)
        """Reasoning and acting seconds of each cycle, the current one last."""
        self._counting = IdlenessPhase.NOTHING
        self._since_s = 0.0
        self._in_gap = False
        """Whether the inference of the current cycle is over."""

    def update(self, now: float, *, running: bool, live: bool) -> None:
        """Record that a request of the program arrived, ran, was preempted or left. ``running``: whether any
        of its requests runs now. ``live``: whether any is in the engine."""
        if self._counting is not IdlenessPhase.NOTHING:
            self._cycles[-1][self._counting is IdlenessPhase.ACTING] += max(0.0, now - self._since_s)
        self._since_s = now
        if running:
            if self._in_gap or not self._cycles:
                self._cycles.append([0.0, 0.0])
            self._counting, self._in_gap = IdlenessPhase.REASONING, False
        elif live or not self._cycles:
            # The time before a program's first inference is not a gap.
            self._counting = IdlenessPhase.NOTHING
        else:
            self._counting, self._in_gap = IdlenessPhase.ACTING, True

    def reading(self) -> Idleness:
        """Return a snapshot that gives the idleness at any time until the next event."""
        reasoning_s, acting_s = map(sum, zip(*self._cycles, strict=True)) if self._cycles else (0.0, 0.0)
        return Idleness(reasoning_s, acting_s, self._counting, self._since_s)

    def idleness(self, now: float) -> float:
        """Return the idleness ι in [0, 1] at ``now`` seconds, as ``Idleness.at`` does."""
        return self.reading().at(now)
