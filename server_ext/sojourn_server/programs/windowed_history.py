"""Histories of earlier tools, turns, outputs and waits, in bounded memory (Continuum §4.1, §4.2, §5.1; Tetris
§2.2).

All keep sliding windows. They have no clock, I/O or locks. Values are checked where they enter the server, so
only ``restore`` checks. ``snapshot`` returns JSON values.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from statistics import NormalDist
from typing import Annotated, Any, ClassVar, Generic, TypeVar

import msgspec

Amount = Annotated[float, msgspec.Meta(ge=0, le=sys.float_info.max)]
"""A finite number from 0 on, in a saved history."""

MAX_OUTPUT_TOKENS = 2**53
"""Maximum length of an output in tokens; floats are exact up to this number."""
_P95 = NormalDist().inv_cdf(0.95)
"""95th percentile of the standard normal distribution."""
ESTIMATE_SIGMA = 0.5
"""Standard deviation of a duration's logarithm, assumed if the client estimates only the median."""
MAX_ESTIMATE_SIGMA = 3.0
"""Maximum standard deviation of a duration's logarithm. It applies if the client's 95th percentile is very
high."""
PRIOR_BRANCH_BLOCKS, BRANCH_WINDOW_BLOCKS, BRANCH_STRIDE = 4096.0, 65536.0, 0.05
"""Numbers of ``BranchReuseRate``: weight of the initial share, in blocks; weight of the observed blocks above
which their weights are halved; smallest change of the share."""

Key = TypeVar("Key", bound=Hashable)
Entry = TypeVar("Entry")


def estimated_durations(median_s: float, p95_s: float | None, count: int) -> tuple[float, ...]:
    """Return ``count`` equally likely durations, ascending, of a log-normal with this median and 95th
    percentile.

    If ``p95_s`` is ``None``, infinite or below the median, the percentile counts as unknown, and the spread
    is ``ESTIMATE_SIGMA``. The result is empty unless the median is finite and above 0.
    """
    if not 0 < median_s < math.inf:
        return ()
    sigma = ESTIMATE_SIGMA
    if p95_s is not None and median_s <= p95_s < math.inf:
        sigma = min(MAX_ESTIMATE_SIGMA, math.log(p95_s / median_s) / _P95)
    normal = NormalDist()
    return tuple(median_s * math.exp(sigma * normal.inv_cdf((2 * i + 1) / (2 * count))) for i in range(count))


class SlidingWindow:
    """The newest ``most`` values, in order of arrival and sorted."""

    value_type: ClassVar[Any] = Amount
    """Type of the values in a saved window."""

    def __init__(self, most: int = 256) -> None:
        self.arrivals: deque[Any] = deque()
        self.ordered: list[Any] = []
        """The values, ascending. Read it at once: it changes with the next value."""
        self._most = most
        self._mean: float | None = 0.0

    def observe(self, value: float) -> None:
        """Add a value, and drop the oldest if the window is full."""
        if len(self.arrivals) == self._most:
            del self.ordered[bisect_right(self.ordered, self.arrivals.popleft()) - 1]
        self.arrivals.append(value)
        insort(self.ordered, value)
        self._mean = None

    def count(self) -> int:
        """Number of values in the window."""
        return len(self.arrivals)

    def mean(self) -> float:
        """The mean; 0.0 if there are no values (the paper initialises T̄, the queueing delay of evicted
        programs, as zero)."""
        if self._mean is None:
            self._mean = math.fsum(self.arrivals) / len(self.arrivals)
        return self._mean

    def snapshot(self) -> list[Any]:
        """The values in the window, oldest first."""
        return list(self.arrivals)

    def restore(self, document: Any) -> None:
        """Add the values of a ``snapshot``. Raises ``ValueError`` for other documents."""
        for value in checked(document, list[self.value_type]):  # type: ignore[name-defined]
            self.observe(value)


class SlidingMax(SlidingWindow):
    """Approximate maximum of the newest ``most`` values.

    The approximation, ``value``, changes only when the true maximum leaves the range from ``value / factor``
    to ``value``. So eviction keys computed with ``value`` rarely change. ``changes`` counts the changes of
    ``value``.
    """

    def __init__(self, most: int = 1000, factor: float = 1.5) -> None:
        super().__init__(most)
        self._factor = factor
        self.value = 0.0
        self.changes = 0

    def observe(self, value: float) -> None:
        super().observe(value)
        largest = self.ordered[-1]
        if largest > self.value or largest * self._factor < self.value:
            # ``value`` is set above the maximum, so that a slowly growing maximum rarely changes ``value``.
            self.value = largest * math.sqrt(self._factor)
            self.changes += 1


class TurnHistory(SlidingWindow):
    """Turn counts of the newest ``most`` finished programs (Continuum §4.1)."""

    value_type = Annotated[int, msgspec.Meta(ge=1, le=2**31)]

    def __init__(self, most: int = 1000) -> None:
        super().__init__(most)
        self._memoryfulness: float | None = None

    def observe(self, value: float) -> None:
        """Add a program that finished after ``value`` turns; 0 adds nothing."""
        if value:
            super().observe(value)
            self._memoryfulness = None

    def memoryfulness(self) -> float:
        """η = −Corr(k, N−k), in [-1, 1], over the turns k = 1..N of every finished program of N turns: minus
        the correlation of past and remaining turns.

        With fewer than two pairs or no variance, the result is 1.0, because the paper's cold start assumes a
        fully memoryful workload (§4.2).
        """
        if self._memoryfulness is None:
            # Sums over the pairs (x, y) = (k, N - k) of all programs have closed forms, in exact integers.
            turns = self.arrivals
            pairs = sum(turns)
            x = sum(n * (n + 1) // 2 for n in turns)
            y = x - pairs
            xx = sum(n * (n + 1) * (2 * n + 1) // 6 for n in turns)
            yy = sum(n * (n - 1) * (2 * n - 1) // 6 for n in turns)
            xy = sum(n * (n + 1) * (n - 1) // 6 for n in turns)
            var_x, var_y = pairs * xx - x * x, pairs * yy - y * y
            self._memoryfulness = 1.0
            if pairs > 1 and var_x > 0 and var_y > 0:
                correlation = (pairs * xy - x * y) / (math.sqrt(var_x) * math.sqrt(var_y))
                self._memoryfulness = max(-1.0, min(1.0, -correlation))
        return self._memoryfulness


class KeyedHistory(Generic[Key]):
    """The newest ``max_samples`` values of each of the ``max_keys`` most recently observed keys, and the
    newest ``max_all`` values of all keys together. So time and memory stay bounded even if clients invent
    keys."""

    key_type: ClassVar[Any] = str
    value_type: ClassVar[Any] = Amount
    """Types of keys and values in a saved history."""

    def __init__(self, max_samples: int = 1000, max_keys: int = 512, max_all: int = 20_000) -> None:
        self._max_samples = max_samples
        self._max_keys = max_keys
        self._windows: dict[Key, SlidingWindow] = {}
        """The least recently observed key comes first."""
        self._all = SlidingWindow(max_all)

    def observe(self, key: Key, value: float) -> None:
        """Add a value of ``key``."""
        self._all.observe(value)
        self._window(key).observe(value)

    def values(self, key: Key | None = None) -> Sequence[Any]:
        """The values of ``key``, ascending; empty for an unknown key. ``None``: the values of all keys. The
        result is a live view, not a copy. Read it at once, and do not keep or change it."""
        window = self._all if key is None else self._windows.get(key)
        return window.ordered if window is not None else ()

    def count(self, key: Key | None = None) -> int:
        """Number of ``values``."""
        return len(self.values(key))

    def mean(self, key: Key, least: int) -> float | None:
        """Mean of the values of ``key``; ``None`` if there are fewer than ``least``."""
        window = self._windows.get(key)
        return window.mean() if window is not None and window.count() >= least else None

    def quantiles(self, key: Key | None, count: int) -> tuple[float, ...]:
        """Return up to ``count`` of the ``values`` of ``key``, ascending.

        If there are at most ``count``, all are returned. Otherwise the result has equally spaced quantiles,
        with the maximum in place of the last quantile."""
        ordered = self.values(key)
        if len(ordered) <= count:
            return tuple(ordered)
        quantiles = (ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count - 1))
        return (*quantiles, ordered[-1])

    def snapshot(self) -> list[Any]:
        """Return [[key, values] of each key, values of all keys], keys and values oldest first."""
        keys = [[key, window.snapshot()] for key, window in self._windows.items()]
        return [msgspec.to_builtins(keys), self._all.snapshot()]

    def restore(self, document: Any) -> None:
        """Add the values of a ``snapshot``. Raises ``ValueError`` for other documents."""
        values = list[self.value_type]  # type: ignore[name-defined]
        keyed = tuple[self.key_type, values]  # type: ignore[name-defined]
        keys, newest = checked(document, tuple[list[keyed], values])
        for key, samples in keys:
            for value in samples:
                self._window(key).observe(value)
        for value in newest:
            self._all.observe(value)

    def _window(self, key: Key) -> SlidingWindow:
        return recent_entry(self._windows, key, lambda: SlidingWindow(self._max_samples), self._max_keys)


class ToolHistory(KeyedHistory[str]):
    """Durations of tool calls in seconds: S[f] of each tool f, and S of all tools (Continuum §4.2, §5.1)."""

    def durations(self, key: str | None = None) -> Sequence[float]:
        """The ``values`` of the tool ``key``; of all tools if ``None``."""
        return self.values(key)

    def slowest(self, keys: Sequence[str]) -> str | None:
        """The tool among ``keys`` with the longest median duration; ``None`` if ``keys`` is empty. A tool
        without recorded durations counts as the fastest."""

        def median_s(key: str) -> float:
            durations = self.values(key)
            return durations[len(durations) // 2] if durations else 0.0

        return max(keys, key=median_s, default=None)


class OutputLengthHistory(KeyedHistory[tuple[str | None, str | None]]):
    """Lengths of finished outputs in tokens, by agent type and by the tool that ran before the output;
    ``None`` for an unknown type or tool.

    Each output is added to up to three groups: outputs of its agent type after its tool, all outputs of its
    agent type, and all outputs.
    """

    key_type = tuple[str | None, str | None]
    value_type = Annotated[int, msgspec.Meta(ge=1, le=MAX_OUTPUT_TOKENS)]

    def __init__(self, max_samples: int = 500, max_keys: int = 512) -> None:
        super().__init__(max_samples, max_keys, max_samples)

    def observe_output(self, agent_type: str | None, tool: str | None, tokens: int) -> None:
        """Add an output of ``tokens`` tokens."""
        self._all.observe(tokens)
        if tool is not None:
            self._window((agent_type, tool)).observe(tokens)
        # The type's group is updated after the pair's group, so that the pair's group is dropped first.
        if agent_type is not None:
            self._window((agent_type, None)).observe(tokens)

    def sorted_lengths(self, agent_type: str | None, tool: str | None, least: int) -> Sequence[int]:
        """Return the output lengths in tokens, ascending, of the first group with at least ``least`` outputs:
        of this agent type after this tool, of this agent type, or all. Empty if no group has enough. The
        result is a live view, as of ``values``."""
        groups = (self.values((agent_type, tool)), self.values((agent_type, None)), self.values())
        return next((group for group in groups if len(group) >= least), ())


class BranchReuseRate:
    """Estimates the share of blocks of abandoned branches that are used again before they are evicted.

    An abandoned branch is the part of a program's earlier context that the program's next turn did not use.
    Older observations count less. While the share is low, such blocks are evicted early, and few can be used
    again. So a low estimate confirms itself, and rises only after memory was ample for a while. ``share``
    changes in steps of at least ``BRANCH_STRIDE``, so that eviction keys computed with it rarely change.
    ``changes`` counts the steps.
    """

    def __init__(self) -> None:
        self._reused, self._outcomes = 0.5 * PRIOR_BRANCH_BLOCKS, PRIOR_BRANCH_BLOCKS
        self._seen = (0, 0)
        self.share = 0.5
        self.changes = 0

    def observe(self, reused: int, evicted: int) -> None:
        """Update the share. ``reused``: number of blocks of abandoned branches that were used again since the
        start. ``evicted``: number of such blocks that were evicted unused since the start."""
        new = reused - self._seen[0]
        self._reused += new
        self._outcomes += new + evicted - self._seen[1]
        self._seen = (reused, evicted)
        while self._outcomes > BRANCH_WINDOW_BLOCKS:
            self._reused *= 0.5
            self._outcomes *= 0.5
        share = self._reused / self._outcomes
        if abs(share - self.share) >= BRANCH_STRIDE:
            self.share = share
            self.changes += 1


def recent_entry(table: dict[Key, Entry], key: Key, new: Callable[[], Entry], limit: int) -> Entry:
    """Return the entry of ``key``, made by ``new`` if it is missing, as the most recently used, which is the
    last of ``table``. If the table then has more than ``limit`` entries, the first one is removed."""
    entry = table.pop(key, None)
    if entry is None:
        entry = new()
    table[key] = entry
    if len(table) > limit:
        del table[next(iter(table))]
    return entry


def checked(document: Any, kind: Any) -> Any:
    """Return JSON values as an object of type ``kind``. Raises ``ValueError`` if they do not fit."""
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise ValueError(f"saved history: {error}") from None
