"""Prefetch (``prefetch`` in presets): when is a program's prefix loaded back, and how much of it?"""

from __future__ import annotations

from dataclasses import dataclass

from .costs.reload_estimate import restore_s
from .policy_views import LoadAheadView, PrefetchView

EARLY_SHARE = 0.25
"""Quantile of a tool's earlier durations at which a prefetched context should be there."""
MIN_GOES_ON = 0.5
"""Minimum probability of another turn for a prefetch. An unknown probability counts as high enough."""
MAX_RESERVE_SHARE = 0.05
"""Maximum share of the pool whose spare blocks are left to requests."""
MAX_LOAD_S = 0.5
"""Maximum seconds of copying in one prefetch. A load for a request waits at most this long behind it."""
KEEP_S = 30.0
"""A loaded block is given up if no request uses it within this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchPolicy:
    """Decides when to load a program's prefix back before its next request, and how many blocks. Asked only
    about programs whose next step is predicted. The base never prefetches."""

    is_used = False
    """Whether the policy is asked."""

    def plan(self, view: PrefetchView, now: float) -> float | None:
        """Return the engine time at which the prefetch starts; ``None``: no prefetch. At this time, blocks on
        disk are read into host memory."""
        return None

    def load_ahead(self, view: LoadAheadView, now: float) -> int:
        """Return how many of the leading missing blocks to load from host memory into spare blocks of the
        device when the prefetch starts. They are kept for ``KEEP_S``."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class LikeliestSuccessorPrefetch(PrefetchPolicy):
    """Loads the prefix of a program's likeliest next step shortly before its tool may end (SAGA §4.3;
    mechanism S5).

    If the next step continues the program's own context, that context is loaded. Else the prefix learned for
    the step is loaded. The copy is timed to end when the tool has run for the ``EARLY_SHARE`` quantile of its
    earlier durations, where the paper loads at once: an earlier copy would only take blocks from other
    programs. If the view has no durations, the prefix is loaded at once.

    On the device, a prefix is loaded into spare blocks only. Some spare blocks stay free: as many as requests
    may take in one engine step, at most the share ``MAX_RESERVE_SHARE`` of the pool. Nothing is loaded into
    the device if other copies to the device are queued, or if computing is faster than copying.
    """

    is_used = True

    def plan(self, view: PrefetchView, now: float) -> float | None:
        if view.continuation_probability is not None and view.continuation_probability < MIN_GOES_ON:
            return None
        by_s, durations = now, view.tool_durations_s
        if durations:
            by_s += durations[min(len(durations) - 1, int(EARLY_SHARE * len(durations)))]
        return max(now, by_s - view.reload_s)

    def load_ahead(self, view: LoadAheadView, now: float) -> int:
        block_s = view.load_s_per_block
        reserve = min(view.reserve_blocks, int(MAX_RESERVE_SHARE * view.pool_blocks))
        blocks = min(view.host_blocks, view.spare_blocks - reserve)
        if block_s:
            blocks = int(min(blocks, MAX_LOAD_S / block_s))
        if view.queue_s > 0 or blocks <= 0:
            return 0
        if block_s is not None and restore_s(view.compute_s_per_block, block_s) != block_s:
            return 0  # computing is faster
        return blocks
