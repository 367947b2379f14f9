"""How idle a program is: the share of its recent time that it spent in tools (M1; MORI §3.1, §4.2, eq. 1).

    ι = acting / (reasoning + acting),  both summed over the newest k cycles

A cycle is one inference and the tool call after it. The program *reasons* while one of its requests runs and
*acts* while none is in the engine. While its requests only wait, nothing counts: gates and queues are the
scheduler's doing, not the program's.

    request   arrives  admitted          finishes            arrives   admitted
    counts       |   –   | reasoning ······ | acting ··········· |   –    | reasoning ···
    cycle                 |<----------- one cycle ------------->|         |<-- the next

Several tools at once are one gap, the longest of them, since the next request comes when all are done.
Parallel requests are one inference: acting begins when the last of them is gone. A sub-agent is a program of
its own with a clock of its own, and a tool call of its parent's.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

WINDOW_CYCLES = 5
"""k of eq. 1: the newest cycles that count, as in all of the paper's experiments."""

MAX_INTERVAL_S = 1e9
"""No interval counts for more: a clock that jumps to infinity must not make every sum infinite."""


class IdlenessPhase(str, Enum):
    """What the present second counts as."""

    REASONING = "reasoning"
    ACTING = "acting"
    NOTHING = "nothing"


class Idleness(NamedTuple):
    """What a clock shows from one fact to the next: only the interval that runs now changes with time.

    So a snapshot that holds one need not be taken anew before something happens to its program.
    """

    reasoning_s: float = 0.0
    """Seconds of the window spent in inference, without the running interval."""
    acting_s: float = 0.0
    """Seconds of the window spent in tool calls, without the running interval."""
    counting: IdlenessPhase = IdlenessPhase.NOTHING
    since_s: float = 0.0
    """Time at which the running interval began, seconds on the clock that ``now`` is read from."""

    def at(self, now: float) -> float:
        """ι in [0, 1] at ``now`` seconds, the running interval included; never NaN, whatever ``now``.

        0.0 where nothing was counted yet. The paper does not say, but a program is about to reason when first
        seen, and eq. 1 gives 0 from its first moment on the device to the end of that inference.
        """
        reasoning_s, acting_s = self.reasoning_s, self.acting_s
        if self.counting is IdlenessPhase.ACTING:
            acting_s += _elapsed_s(self.since_s, now)
        elif self.counting is IdlenessPhase.REASONING:
            reasoning_s += _elapsed_s(self.since_s, now)
        total_s = reasoning_s + acting_s
        return acting_s / total_s if total_s > 0.0 else 0.0


INITIAL_IDLENESS = Idleness()
"""Idleness of a program that never ran."""


class IdlenessTracker:
    """A program's idleness, kept up to date by facts about its requests, in memory for ``k`` cycles.

    The cycle in progress is one of the k and takes its place when its inference first runs. Until then, while
    its request is gated, the k before it are what is known; a request that is given up before it ran opens no
    cycle and only interrupts the gap. Facts may come twice or out of order and a program's first may be
    missing. Where the time given with one lies before the last one's, as after a jump of the clock, no time
    has passed, and time goes on from there. Raises ``ValueError`` for ``k`` below 1.
    """

    __slots__ = (
        "_acting_s",
        "_counting",
        "_earlier",
        "_earlier_acting_s",
        "_earlier_reasoning_s",
        "_in_gap",
        "_k",
        "_live",
        "_ran",
        "_reasoning_s",
        "_running",
        "_since_s",
    )

    def __init__(self, k: int = WINDOW_CYCLES) -> None:
        if k < 1:
            raise ValueError(f"k is {k}; expected ≥ 1 cycle")
        self._k = k
        self._live: dict[str, bool] = {}
        """Its requests in the engine, and whether they run."""
        self._running = 0
        self._counting = IdlenessPhase.NOTHING
        self._since_s = 0.0
        self._ran = False
        """Some request of it has run: there is a cycle in progress."""
        self._in_gap = False
        """The inference of that cycle is over."""
        self._reasoning_s = self._acting_s = 0.0
        """Reasoning seconds of the cycle in progress."""
        self._earlier: list[tuple[float, float]] = []
        """(reasoning, acting) of the finished cycles in the window, oldest first; at most k − 1."""
        self._earlier_reasoning_s = self._earlier_acting_s = 0.0

    def arrived(self, request_id: str, now: float) -> None:
        """A request came and waits, gated or queued: a running tool call is over."""
        self._pass_time(now)
        self._live.setdefault(request_id, False)
        self._count()

    def admitted(self, request_id: str, now: float) -> None:
        """A request began to run, or runs again after a preemption. It need not have been seen before."""
        self._pass_time(now)
        if not self._live.get(request_id, False):
            self._live[request_id] = True
            self._running += 1
        self._ran = True
        if self._in_gap:
            self._next_cycle()
        self._count()

    def preempted(self, request_id: str, now: float) -> None:
        """A running request waits again. Unknown ones are ignored."""
        self._pass_time(now)
        if self._live.get(request_id, False):
            self._live[request_id] = False
            self._running -= 1
        self._count()

    def finished(self, request_id: str, now: float) -> None:
        """A request is gone, answered or given up; after the last one the program acts."""
        self._pass_time(now)
        if self._live.pop(request_id, False):
            self._running -= 1
        self._count()

    def reading(self) -> Idleness:
        """The clock's value until the next fact; O(1)."""
        return Idleness(
            self._earlier_reasoning_s + self._reasoning_s,
            self._earlier_acting_s + self._acting_s,
            self._counting,
            self._since_s,
        )

    def idleness(self, now: float) -> float:
        """ι in [0, 1] at ``now`` seconds, as ``Idleness.at`` says; O(1)."""
        return self.reading().at(now)

    def _pass_time(self, now: float) -> None:
        if self._counting is IdlenessPhase.REASONING:
            self._reasoning_s += _elapsed_s(self._since_s, now)
        elif self._counting is IdlenessPhase.ACTING:
            self._acting_s += _elapsed_s(self._since_s, now)
        self._since_s = now

    def _count(self) -> None:
        if self._running:
            self._counting = IdlenessPhase.REASONING
        elif self._live or not self._ran:
            # What went before a program's first inference is no gap of it.
            self._counting = IdlenessPhase.NOTHING
        else:
            self._counting, self._in_gap = IdlenessPhase.ACTING, True

    def _next_cycle(self) -> None:
        self._earlier.append((self._reasoning_s, self._acting_s))
        del self._earlier[: max(0, len(self._earlier) - (self._k - 1))]
        # Added up anew: adding the newest and taking off the oldest would gather rounding errors.
        self._earlier_reasoning_s = sum(reasoning_s for reasoning_s, _ in self._earlier)
        self._earlier_acting_s = sum(acting_s for _, acting_s in self._earlier)
        self._reasoning_s = self._acting_s = 0.0
        self._in_gap = False


def _elapsed_s(since_s: float, now: float) -> float:
    """Seconds from ``since_s`` to ``now``, within 0 to ``MAX_INTERVAL_S``; 0.0 where either is no number."""
    return min(max(0.0, now - since_s), MAX_INTERVAL_S)
