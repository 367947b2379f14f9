"""KV that a set of running requests will need, from how many tokens each has yet to write (Tetris §2.3).

Time is counted in engine steps: in each a decoding request writes a token. So a request
that has c tokens of context and may end after r more needs c + s tokens' KV at
step s < r and none from then on. Of a request with several equally likely r the
expected need is the mean. Of one of which nothing is known the present need stays.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

POINTS = (0, *(round(16 * 2 ** (quarter / 4)) for quarter in range(45)))
"""Steps from now at which the need is looked at, up to 32,768.

What ends between two has grown unseen: of short contexts and long outputs, foreseen exactly, the peak
comes out some 6 % too low. Were only powers of two looked at, it would be 15 %."""


class Growing(Protocol):
    """A request that runs, or would: ``RunningView`` is one."""

    @property
    def context_tokens(self) -> int:
        """Tokens whose KV it needs now."""
        ...

    @property
    def remaining(self) -> tuple[float, ...] | None:
        """Equally likely numbers of tokens it has yet to write; ``None``: nothing is known."""
        ...


class Growth(NamedTuple):
    """One, and little else of it."""

    context_tokens: int
    remaining: tuple[float, ...] | None
    shared_blocks: int = 0
    """Of the blocks it has, those that others have too."""


def needed_blocks(running: Iterable[Growing], block_size: int) -> list[float]:
    """KV blocks that these are expected to need, at each of ``POINTS``: O(requests × remaining lengths).

    Memory is taken by the block: of the last one half is unused on average.
    """
    # Of equally likely lives, by the last point that they reach: how many, and how many tokens they have now.
    lives = [0.0] * len(POINTS)
    tokens = [0.0] * len(POINTS)
    for view in running:
        context = view.context_tokens + block_size / 2
        if not view.remaining:
            tokens[-1] += context  # and no life, which would grow
            continue
        weight = 1.0 / len(view.remaining)
        for left in view.remaining:
            # Alive at a point means that it ends later.
            last = bisect_left(POINTS, left) - 1
            if last >= 0:
                lives[last] += weight
                tokens[last] += weight * context
    needed = [0.0] * len(POINTS)
    alive = held = 0.0
    for index in range(len(POINTS) - 1, -1, -1):
        alive += lives[index]
        held += tokens[index]
        needed[index] = (held + alive * POINTS[index]) / block_size
    return needed


def peak(needed: Iterable[float], within: float) -> float:
    """The most blocks needed at any of ``POINTS`` up to ``within`` ≥ 0 steps from now."""
    return max(blocks for point, blocks in zip(POINTS, needed, strict=True) if point <= within)


def shortage_in(needed: Sequence[float], blocks: float, within: float) -> int | None:
    """Steps until more than ``blocks`` are needed, up to ``within``; ``None``: not so soon.

    Between two points the need is taken to grow evenly.
    """
    before_at, before = 0, needed[0]
    if before > blocks:
        return 0
    for point, need in zip(POINTS[1:], needed[1:], strict=True):
        if need > blocks:
            at = before_at + (blocks - before) / (need - before) * (point - before_at)
            return int(at) if at <= within else None
        before_at, before = point, need
    return None
