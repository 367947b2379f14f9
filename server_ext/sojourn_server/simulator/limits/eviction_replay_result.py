"""What one eviction order lost over one fixed access sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

ReplayProgress = Callable[[int, int], None]
"""Called now and then with (entries done, entries in all), and once at the end."""

PROGRESS_INTERVAL = 2048
"""Entries between two calls."""


class EvictionReplayResult(msgspec.Struct, kw_only=True):
    """Tokens are whole blocks times the block size; only blocks a cache may be asked for are counted."""

    order: str
    admissions: int = 0
    asked_tokens: int = 0
    """Looked up when requests were admitted, and reached before they were freed."""
    hit_tokens: int = 0
    computed_tokens: int = 0
    """Asked for, not found, hence computed: first-time, regenerated and duplicated ones."""
    regenerated_tokens: int = 0
    """Of these, such as had been computed before, by any request, and were lost since: what a better
    order could have spared."""
    duplicated_tokens: int = 0
    """Of these, such as were in the cache at that moment: computed a second time because the engine looks
    only when it admits a request, whatever the order. The optimum has none by definition."""
    regenerated_by_owner: dict[str, int] = msgspec.field(default_factory=dict)
    """Program → tokens regenerated for it; programs without any are left out."""
    regenerated_by_request: list[int] = msgspec.field(default_factory=list)
    """Tokens regenerated for each request of the log."""
    hit_blocks: list[int] = msgspec.field(default_factory=list)
    """Of each admission, in order of the log: leading blocks reused."""
    given_back_tokens: int = 0
    """Reused ones let go again, because the recorded run had nothing there yet and the space was needed."""
    overflow_blocks: int = 0
    """The most blocks by which the sequence did not fit the pool, whatever was evicted; 0 in a sound log."""
    over_belady: float | None = None
    """``regenerated_tokens`` over those of the offline optimum: SAGA's competitive ratio (§7, Definition 3).
    None where the optimum is 0 and this is not, or where nobody has compared."""
    note: str = ""

    def regenerated_since(self, sent_s: Sequence[float], since_s: float) -> int:
        """Tokens regenerated for requests that were sent from ``since_s`` on; ``sent_s`` has the time of each
        request of the log."""
        if since_s <= 0:
            return self.regenerated_tokens
        times = zip(self.regenerated_by_request, sent_s, strict=True)
        return sum(lost for lost, at_s in times if at_s >= since_s)


class EvictionReplayCounters:
    """Counts blocks while a replay runs, and turns them into tokens at its end."""

    def __init__(self, requests: int) -> None:
        self.asked = 0
        self.computed = 0
        self.regenerated = 0
        self.duplicated = 0
        self.given_back = 0
        self.overflow = 0
        self.by_request = [0] * requests
        self.hits: list[int] = []

    def result(
        self, order: str, block_size: int, owners: list[str], owner_of: list[int]
    ) -> EvictionReplayResult:
        """``owner_of`` has the place in ``owners`` of each request's program."""
        by_owner: dict[str, int] = {}
        for owner, lost in zip(owner_of, self.by_request, strict=True):
            if lost:
                by_owner[owners[owner]] = by_owner.get(owners[owner], 0) + lost * block_size
        return EvictionReplayResult(
            order=order,
            admissions=len(self.hits),
            asked_tokens=self.asked * block_size,
            hit_tokens=(self.asked - self.computed) * block_size,
            computed_tokens=self.computed * block_size,
            regenerated_tokens=self.regenerated * block_size,
            duplicated_tokens=self.duplicated * block_size,
            regenerated_by_owner=by_owner,
            regenerated_by_request=[lost * block_size for lost in self.by_request],
            hit_blocks=self.hits,
            given_back_tokens=self.given_back * block_size,
            overflow_blocks=self.overflow,
        )
