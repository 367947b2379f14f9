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

MAX_INTERVAL_S = 1e9
"""Longer intervals count as this many seconds, so that a clock jump cannot make the sums infinite."""


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
        """Return the idleness ι in [0, 1] at ``now`` seconds, the running interval included; never NaN.

        0.0 if nothing was counted yet. The paper does not define this case. But eq. 1 gives 0 during a
        program's first inference, so a new program also starts at 0.
        """
        reasoning_s, acting_s = self.reasoning_s, self.acting_s
        if self.counting is IdlenessPhase.ACTING:
            acting_s += _elapsed_s(self.since_s, now)
        elif self.counting is IdlenessPhase.REASONING:
            reasoning_s += _elapsed_s(self.since_s, now)
        total_s = reasoning_s + acting_s
        return acting_s / total_s if total_s > 0.0 else 0.0


INITIAL_IDLENESS = Idleness()
"""Idleness of a program that has never run."""


class IdlenessTracker:
    """Measures a program's idleness from the events of its requests, over the newest ``k`` cycles.

    A cycle is one inference and the gap after it. The current cycle is one of the ``k``. A new cycle begins
    when the first request after a gap runs, not when it arrives. So a request that is aborted before it runs
    begins no cycle. Events may be repeated or out of order, and the first ones may be missing. If ``now`` is
    earlier than at the last event (a clock jump), no time is counted for the interval, and the next interval
    begins at ``now``.
    """

    def __init__(self, k: int = WINDOW_CYCLES) -> None:
        self._live: dict[str, bool] = {}
        """The program's requests in the engine → whether the request runs."""
        self._counting = IdlenessPhase.NOTHING
        self._since_s = 0.0
        self._ran = False
        """Whether a request of the program has ever run. If not, there is no current cycle."""
        self._in_gap = False
        """Whether the inference of the current cycle is over."""
        self._reasoning_s = self._acting_s = 0.0
        """Reasoning and acting seconds of the current cycle."""
        self._earlier: deque[tuple[float, float]] = deque(maxlen=k - 1)
        """(reasoning, acting) seconds of the finished cycles in the window, oldest first."""

    def arrived(self, request_id: str, now: float) -> None:
        """Record that a request arrived and waits. The arrival ends the program's acting time."""
        self._pass_time(now)
        self._live.setdefault(request_id, False)
        self._count()

    def admitted(self, request_id: str, now: float) -> None:
        """Record that a request runs, for the first time or after a preemption. The request need not have
        been passed to ``arrived`` before."""
        self._pass_time(now)
        self._live[request_id] = self._ran = True
        if self._in_gap:
            self._earlier.append((self._reasoning_s, self._acting_s))
            self._reasoning_s = self._acting_s = 0.0
            self._in_gap = False
        self._count()

    def preempted(self, request_id: str, now: float) -> None:
        """Record that a running request was preempted and waits again. An unknown request is ignored."""
        self._pass_time(now)
        if request_id in self._live:
            self._live[request_id] = False
        self._count()

    def finished(self, request_id: str, now: float) -> None:
        """Record that a request was answered or aborted. If it was the program's last request in the engine,
        acting time begins."""
        self._pass_time(now)
        self._live.pop(request_id, None)
        self._count()

    def reading(self) -> Idleness:
        """Return a snapshot that gives the idleness at any time until the next event."""
        return Idleness(
            sum(reasoning_s for reasoning_s, _ in self._earlier) + self._reasoning_s,
            sum(acting_s for _, acting_s in self._earlier) + self._acting_s,
            self._counting,
            self._since_s,
        )

    def idleness(self, now: float) -> float:
        """Return the idleness ι in [0, 1] at ``now`` seconds, as ``Idleness.at`` does."""
        return self.reading().at(now)

    def _pass_time(self, now: float) -> None:
        if self._counting is IdlenessPhase.REASONING:
            self._reasoning_s += _elapsed_s(self._since_s, now)
        elif self._counting is IdlenessPhase.ACTING:
            self._acting_s += _elapsed_s(self._since_s, now)
        self._since_s = now

    def _count(self) -> None:
        if any(self._live.values()):
            self._counting = IdlenessPhase.REASONING
        elif self._live or not self._ran:
            # The time before a program's first inference is not a gap.
            self._counting = IdlenessPhase.NOTHING
        else:
            self._counting, self._in_gap = IdlenessPhase.ACTING, True


def _elapsed_s(since_s: float, now: float) -> float:
    """Seconds from ``since_s`` to ``now``, limited to 0 to ``MAX_INTERVAL_S``; 0.0 if either is NaN."""
    return min(max(0.0, now - since_s), MAX_INTERVAL_S)
