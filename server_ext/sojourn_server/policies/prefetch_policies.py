"""Prefetch policies: when to load a prefix back before its program's next request, and how many blocks.

They implement mechanisms S5 (SAGA §4.3) and T4 (Tetris §2.3).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from .costs.reload_estimate import copies_back
from .policy_views import LoadAheadView, PrefetchView


class PrefetchTiming(NamedTuple):
    """Planned times of a prefetch, in engine time: the copy starts at ``at_s`` and should end by ``by_s``."""

    at_s: float
    by_s: float


class LoadAhead(NamedTuple):
    """Number of blocks to load into spare blocks of the device. A loaded block is given up if no request uses
    it within ``keep_s`` seconds."""

    blocks: int
    keep_s: float


NO_LOAD_AHEAD = LoadAhead(0, 0.0)
EARLY_SHARE = 0.25
"""Quantile of a tool's earlier durations at which a prefetched context should be there."""
MIN_GOES_ON = 0.5
"""Minimum probability of another turn for a prefetch. An unknown probability counts as high enough."""
MAX_RESERVE_SHARE = 0.05
"""Maximum share of the pool whose spare blocks are left to requests."""
MAX_LOAD_S = 0.5
"""Maximum seconds of copying in one prefetch. A load for a request waits at most this long behind a
prefetch."""
KEEP_S = 30.0
"""A loaded block is given up if no request uses it within this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPrefetch:
    """Never prefetches."""

    is_used: bool = False
    needs_successor: bool = True

    def plan(self, view: PrefetchView, now: float) -> PrefetchTiming | None:
        return None

    def load_ahead(self, view: LoadAheadView, now: float) -> LoadAhead:
        return NO_LOAD_AHEAD


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEndPrefetch:
    """Loads a program's context shortly before its tool may end (Tetris §2.3; mechanism T4).

    The copy is timed to end when the tool has run for the ``EARLY_SHARE`` quantile of its earlier durations.
    An earlier copy would only take blocks from other programs. If the view has no durations, the context is
    loaded at once.

    On the device, a context is loaded into spare blocks only. Some spare blocks stay free: as many as
    requests may take in one engine step, at most the share ``MAX_RESERVE_SHARE`` of the pool. Nothing is
    loaded into the device if other copies to the device are queued, or if computing is faster than copying.
    """

    to_device: bool = True
    """Whether contexts are loaded into the device too; false: from disk to host memory only."""
    is_used: bool = True
    needs_successor: bool = False

    def plan(self, view: PrefetchView, now: float) -> PrefetchTiming | None:
        if view.continuation_probability is not None and view.continuation_probability < MIN_GOES_ON:
            return None
        by_s = now
        if view.tool_durations_s:
            durations = view.tool_durations_s
            by_s = now + durations[min(len(durations) - 1, int(EARLY_SHARE * len(durations)))]
        return PrefetchTiming(max(now, by_s - view.reload_s), by_s)

    def load_ahead(self, view: LoadAheadView, now: float) -> LoadAhead:
        block_s = view.load_s_per_block
        if not self.to_device or view.queue_s > 0:
            return NO_LOAD_AHEAD
        reserve = min(view.reserve_blocks, int(MAX_RESERVE_SHARE * view.pool_blocks))
        blocks = min(view.host_blocks, view.spare_blocks - reserve)
        if block_s is not None and block_s > 0:
            blocks = int(min(blocks, MAX_LOAD_S / block_s))
        if blocks <= 0 or not copies_back(
            view.compute_s_per_block * blocks, None if block_s is None else block_s * blocks
        ):
            return NO_LOAD_AHEAD
        return LoadAhead(blocks, KEEP_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeliestSuccessorPrefetch(ToolEndPrefetch):
    """Loads the prefix of a program's likeliest next step shortly before its tool may end (SAGA §4.3).

    If the next step continues the program's own context, that context is loaded. Else the prefix learned for
    the step is loaded. The paper always loads at once. All else is as in ``ToolEndPrefetch``.
    """

    needs_successor: bool = True
