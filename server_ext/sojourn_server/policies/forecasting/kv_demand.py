"""KV demand of a set of running requests, from the expected remaining tokens of each; and the question
``forecast``: when will the requests run out of blocks (Tetris §2.3)?

Time is counted in engine steps. A decoding request writes one token per step. Let a request have c context
tokens, and end after r further tokens. At step s < r it needs KV for c + s tokens. From step r on it needs
none. If several values of r are equally likely, the expected demand is the mean over them. A request without
a prediction counts with its present demand at every step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

STEP_POINTS = (0, *(round(16 * 2 ** (quarter / 4)) for quarter in range(45)))
"""Steps from now at which demand is evaluated, up to 32,768.

A request that ends between two points counts only up to the earlier point, so the peak demand is
underestimated. With short contexts, long outputs and exact predictions the peak is 6 % too low. If the points
were the powers of two only, the peak would be 15 % too low.
"""


class GrowingRequest(Protocol):
    """A request that runs or might run, such as a ``RunningRequestView``."""

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV the request needs now."""
        ...

    @property
    def remaining(self) -> tuple[float, ...] | None:
        """Equally likely numbers of tokens that the request still generates; ``None``: unknown."""
        ...


class RequestGrowth(NamedTuple):
    """The data about one request that a demand forecast needs."""

    context_tokens: int
    remaining: tuple[float, ...] | None
    shared_blocks: int = 0
    """Number of the request's blocks that other requests use too."""


def needed_blocks(running: Iterable[GrowingRequest], block_size: float) -> list[float]:
    """Return the expected demand in blocks at each of ``STEP_POINTS``, in O(requests × remaining lengths).

    ``block_size``: tokens of context per block. Half a block is added per request, because on average half of
    its last block is unused.
    """
    # For each step point: the expected number of requests that end between this point and the next, and the
    # present tokens of these requests.
    ending_requests = [0.0] * len(STEP_POINTS)
    tokens = [0.0] * len(STEP_POINTS)
    for view in running:
        context = view.context_tokens + block_size / 2
        if not view.remaining:
            tokens[-1] += context  # not counted in ``ending_requests``, since the demand does not grow
            continue
        weight = 1.0 / len(view.remaining)
        for left in view.remaining:
            # A request is alive at a point if the request ends later.
            last = bisect_left(STEP_POINTS, left) - 1
            if last >= 0:
                ending_requests[last] += weight
                tokens[last] += weight * context
    needed = [0.0] * len(STEP_POINTS)
    alive = held = 0.0
    for index in range(len(STEP_POINTS) - 1, -1, -1):
        alive += ending_requests[index]
        held += tokens[index]
        needed[index] = (held + alive * STEP_POINTS[index]) / block_size
    return needed


def peak_demand_blocks(needed: Iterable[float], within: float) -> float:
    """Return the highest demand at any of ``STEP_POINTS`` up to ``within`` ≥ 0 steps from now."""
    return max(blocks for point, blocks in zip(STEP_POINTS, needed, strict=True) if point <= within)


def first_shortage_step(needed: Sequence[float], blocks: float, within: float) -> int | None:
    """Return the number of steps until demand exceeds ``blocks``; ``None``: not in the next ``within`` steps.

    Demand is interpolated linearly between two points.
    """
    before_at, before = 0, needed[0]
    if before > blocks:
        return 0
    for point, need in zip(STEP_POINTS[1:], needed[1:], strict=True):
        if need > blocks:
            at = before_at + (blocks - before) / (need - before) * (point - before_at)
            return int(at) if at <= within else None
        before_at, before = point, need
    return None


class KvDemandView(NamedTuple):
    """Expected demand of the running requests."""

    needed_blocks: Sequence[float]
    """Demand at each of ``STEP_POINTS``."""
    available_blocks: int
    """Free blocks plus all blocks of the running requests. A shared block counts once for each request that
    uses it."""


class ShortageForecastPolicy(Protocol):
    """Predicts in how many steps running requests run out of blocks; ``None``: not soon enough to act.

    After a prediction, the engine copies a likely victim's KV to host memory in advance, but preempts
    nothing. ``is_used``: whether the policy is asked. If not, no KV is copied in advance.
    """

    is_used: bool

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoShortageForecast:
    """No forecast: a shortage is handled when it occurs."""

    is_used: bool = False

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedDemandForecast:
    """Predicts the number of engine steps until expected demand exceeds the available blocks.

    Looks ``steps`` steps ahead. Raises ``ValueError`` for less than one step.
    """

    steps: int = 128
    is_used: bool = True

    def __post_init__(self) -> None:
        if not self.steps >= 1:
            raise ValueError(f"steps is {self.steps}; expected ≥ 1")

    def steps_until_shortage(self, demand: KvDemandView, now: float) -> int | None:
        return first_shortage_step(demand.needed_blocks, demand.available_blocks, self.steps)
