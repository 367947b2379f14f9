"""Histories of tools, programs and queues, in bounded memory (Continuum §4.1, §4.2, §5.1).

The classes are plain containers without a clock, I/O or locks.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_right, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Any, TypeVar

MAX_FLOAT = sys.float_info.max
"""The largest float. JSON may hold larger integers, which cannot become floats."""
MAX_TURNS = 2**31
"""Maximum number of turns of a program in a saved history; ``restore`` rejects more."""
MAX_SAMPLES = 20_000
"""Maximum number of durations kept for all tools together; the newest are kept."""

HISTORY_VERSION = 1
"""Version of the documents that ``snapshot`` writes and ``restore`` reads."""

_P95 = NormalDist().inv_cdf(0.95)
"""95th percentile of the standard normal distribution."""
ESTIMATE_SIGMA = 0.5
"""Standard deviation of a duration's logarithm, assumed if the client estimates only the median."""
MAX_ESTIMATE_SIGMA = 3.0
"""Maximum standard deviation of a duration's logarithm. It applies if the client's 95th percentile is very
high."""

Key = TypeVar("Key")
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


class ToolHistory:
    """Durations of tool calls in seconds: S[f] of each tool f, and S of all tools (Continuum §4.2, §5.1).

    The history keeps the newest ``max_samples_per_tool`` durations of each of the ``max_tools`` most recently
    observed tools. S has the newest ``MAX_SAMPLES`` durations of all tools together. So time and memory stay
    bounded even if clients invent tool names.
    """

    def __init__(self, max_samples_per_tool: int = 1000, max_tools: int = 512) -> None:
        self._max_samples = max_samples_per_tool
        self._max_tools = max_tools
        self._tools: OrderedDict[str, SortedWindow] = OrderedDict()
        self._all = SortedWindow(MAX_SAMPLES)

    def observe(self, key: str, duration_s: float) -> None:
        """Add a call of the tool ``key`` that took ``duration_s`` seconds. Raises ``ValueError`` for a
        duration that is negative, infinite or not a number."""
        duration_s = _seconds(duration_s)
        samples = recent_entry(self._tools, key, lambda: SortedWindow(self._max_samples), self._max_tools)
        samples.add(duration_s)
        self._all.add(duration_s)

    def count(self, key: str | None = None) -> int:
        """Number of recorded durations of the tool ``key`` (|S[f]|); 0 for an unknown tool. If ``key`` is
        ``None``, the durations of all tools are counted (|S|)."""
        return len(self.durations(key))

    def durations(self, key: str | None = None) -> Sequence[float]:
        """The durations of the tool ``key`` in seconds, ascending; empty for an unknown tool. If ``key`` is
        ``None``, the durations of all tools. The result is a live view, not a copy. Read it at once, and do
        not keep or change it."""
        if key is None:
            return self._all.ordered
        samples = self._tools.get(key)
        return samples.ordered if samples is not None else ()

    def quantiles(self, key: str | None, count: int) -> tuple[float, ...]:
        """Return up to ``count`` durations of the tool ``key`` (of all tools if ``None``), ascending.

        If at most ``count`` calls were recorded, all their durations are returned. Otherwise the durations
        are equally spaced quantiles, with the maximum in place of the last quantile."""
        ordered = self.durations(key)
        if len(ordered) <= count:
            return tuple(ordered)
        quantiles = (ordered[(2 * i + 1) * len(ordered) // (2 * count)] for i in range(count - 1))
        return (*quantiles, ordered[-1])

    def slowest(self, keys: Sequence[str]) -> str | None:
        """The tool among ``keys`` with the longest median duration; ``None`` if ``keys`` is empty. A tool
        without recorded durations counts as the fastest."""
        if len(keys) < 2:
            return keys[0] if keys else None
        return max(keys, key=self._median_s)

    def _median_s(self, key: str) -> float:
        durations = self.durations(key)
        return durations[len(durations) // 2] if durations else 0.0

    def snapshot(self) -> dict[str, Any]:
        """Return the history as a JSON-able document, tools and samples oldest first."""
        return {
            "version": HISTORY_VERSION,
            "tools": {key: list(samples.arrivals) for key, samples in self._tools.items()},
            "newest": list(self._all.arrivals),
        }

    @classmethod
    def restore(
        cls, document: Mapping[str, Any], max_samples_per_tool: int = 1000, max_tools: int = 512
    ) -> ToolHistory:
        """Restore a history from a ``snapshot``. The oldest entries beyond these limits are dropped. Raises
        ``ValueError`` for other documents."""
        history = cls(max_samples_per_tool, max_tools)
        tools = _checked(document, "tools", dict)
        for key, durations in list(tools.items())[-max_tools:]:
            if not isinstance(key, str) or not isinstance(durations, list):
                raise ValueError(f"tool history: entry {key!r} is not a list of durations")
            if durations:
                history._tools[key] = SortedWindow(
                    max_samples_per_tool, map(_seconds, durations[-max_samples_per_tool:])
                )
        newest = _checked(document, "newest", list)
        history._all = SortedWindow(MAX_SAMPLES, map(_seconds, newest[-MAX_SAMPLES:]))
        return history


class TurnHistory:
    """Turn counts of the newest ``max_programs`` finished programs (Continuum §4.1). The class computes the
    workload's memoryfulness from them: minus the correlation of past and remaining turns."""

    def __init__(self, max_programs: int = 1000) -> None:
        self._turns: deque[int] = deque()
        self._max_programs = max_programs
        # Sums over the pairs (x, y) = (k, N - k) of all programs. They are integers, so subtracting an old
        # program's part is exact.
        self._pairs = self._x = self._y = self._xx = self._yy = self._xy = 0

    def observe(self, total_turns: int) -> None:
        """Add a program that finished after ``total_turns`` turns; 0 adds nothing. Raises ``ValueError`` for
        a negative number."""
        if total_turns < 0:
            raise ValueError(f"a program with {total_turns} turns; expected ≥ 0")
        if total_turns == 0:
            return
        if len(self._turns) == self._max_programs:
            self._add(self._turns.popleft(), -1)
        self._turns.append(total_turns)
        self._add(total_turns, +1)

    def count(self) -> int:
        """Number of finished programs in the history."""
        return len(self._turns)

    def mean_turns(self) -> float:
        """Mean turns of finished programs; 0.0 if there are none."""
        return self._pairs / len(self._turns) if self._turns else 0.0

    def memoryfulness(self) -> float:
        """η = −Corr(k, N−k), in [-1, 1], over the turns k = 1..N of every finished program of N turns.

        With fewer than two pairs or no variance, the result is 1.0, because the paper's cold start assumes a
        fully memoryful workload (§4.2).
        """
        var_x = self._pairs * self._xx - self._x * self._x
        var_y = self._pairs * self._yy - self._y * self._y
        if self._pairs < 2 or var_x <= 0 or var_y <= 0:
            return 1.0
        covariance = self._pairs * self._xy - self._x * self._y
        correlation = covariance / (math.sqrt(var_x) * math.sqrt(var_y))
        return max(-1.0, min(1.0, -correlation))

    def snapshot(self) -> dict[str, Any]:
        """Return the history as a JSON-able document, oldest program first."""
        return {"version": HISTORY_VERSION, "turns": list(self._turns)}

    @classmethod
    def restore(cls, document: Mapping[str, Any], max_programs: int = 1000) -> TurnHistory:
        """Restore a history from a ``snapshot``, with the newest ``max_programs`` programs. Raises
        ``ValueError`` for other documents."""
        history = cls(max_programs)
        for turns in _checked(document, "turns", list)[-max_programs:]:
            if not isinstance(turns, int) or isinstance(turns, bool) or turns > MAX_TURNS:
                raise ValueError(f"turn history: {turns!r:.80} is not a number of turns up to {MAX_TURNS}")
            history.observe(turns)
        return history

    def _add(self, n: int, sign: int) -> None:
        """Add (``sign`` 1) or remove (``sign`` −1) a program of ``n`` turns. This takes O(1), since the sums
        over k = 1..n have closed forms."""
        self._pairs += sign * n
        self._x += sign * (n * (n + 1) // 2)
        self._y += sign * (n * (n - 1) // 2)
        self._xx += sign * (n * (n + 1) * (2 * n + 1) // 6)
        self._yy += sign * (n * (n - 1) * (2 * n - 1) // 6)
        self._xy += sign * (n * (n + 1) * (n - 1) // 6)


class SlidingMean:
    """Mean of the newest ``window`` values. One use is T̄, the queueing delay of evicted programs (Continuum
    §4.2)."""

    def __init__(self, window: int = 256) -> None:
        self._values: deque[float] = deque(maxlen=window)
        self._mean: float | None = 0.0

    def observe(self, value: float) -> None:
        """Add a value, and drop the oldest if the window is full. Raises ``ValueError`` for an infinite value
        or NaN."""
        if not -MAX_FLOAT <= value <= MAX_FLOAT:
            raise ValueError(f"observed {value!r:.80}; expected a finite number")
        self._values.append(value)
        self._mean = None

    def count(self) -> int:
        """Number of values in the window."""
        return len(self._values)

    def snapshot(self) -> list[float]:
        """The values in the window, oldest first."""
        return list(self._values)

    @classmethod
    def restore(cls, values: list[float]) -> SlidingMean:
        """Return a mean with these values, oldest first."""
        mean = cls()
        for value in values:
            mean.observe(value)
        return mean

    def mean(self) -> float:
        """The mean; 0.0 if there are no values (the paper initialises T as zero)."""
        if self._mean is None:
            # The sum is computed anew, since a running sum would keep the rounding errors of large values.
            count = len(self._values)
            try:
                self._mean = math.fsum(self._values) / count
            except OverflowError:  # clients may report any number
                self._mean = math.fsum(value / count for value in self._values)
        return self._mean


class SlidingMax:
    """Approximate maximum of the newest ``window`` values.

    The approximation, ``value``, changes only when the true maximum leaves the range from ``value / factor``
    to ``value``. So eviction keys computed with ``value`` rarely change. ``changes`` counts the changes of
    ``value``.
    """

    def __init__(self, window: int = 1000, factor: float = 1.5) -> None:
        self._window = window
        self._factor = factor
        self._seen = 0
        self._falling: deque[tuple[int, float]] = deque()
        """The values that are larger than all later values, each with its number in order of arrival."""
        self.value = 0.0
        self.changes = 0

    def observe(self, value: float) -> None:
        """Add a value. Raises ``ValueError`` unless finite and ≥ 0."""
        value = non_negative(value, "a value")
        while self._falling and self._falling[-1][1] <= value:
            self._falling.pop()
        self._falling.append((self._seen, value))
        self._seen += 1
        if self._falling[0][0] < self._seen - self._window:
            self._falling.popleft()
        largest = self._falling[0][1]
        if largest > self.value or largest * self._factor < self.value:
            # ``value`` is set above the maximum, so that a slowly growing maximum rarely changes ``value``.
            self.value = largest * math.sqrt(self._factor)
            self.changes += 1

    def snapshot(self) -> dict[str, Any]:
        """Return the state as a JSON-able document."""
        return {
            "version": HISTORY_VERSION,
            "seen": self._seen,
            "falling": [list(entry) for entry in self._falling],
            "value": self.value,
            "changes": self.changes,
        }

    @classmethod
    def restore(cls, document: Any, window: int = 1000, factor: float = 1.5) -> SlidingMax:
        """Restore the state from a ``snapshot``. Raises ``ValueError`` for other documents."""
        sliding = cls(window, factor)
        falling = _checked(document, "falling", list)
        sliding._seen, sliding.changes = _checked(document, "seen", int), _checked(document, "changes", int)
        sliding.value = _seconds(document.get("value"))
        for entry in falling[-window:]:
            if not isinstance(entry, list) or len(entry) != 2 or not isinstance(entry[0], int):
                raise ValueError(f"history: {entry!r} is not a number and its value")
            sliding._falling.append((entry[0], _seconds(entry[1])))
        return sliding


class BranchReuseRate:
    """Estimates the share of blocks of abandoned branches that are used again before they are evicted.

    An abandoned branch is the part of a program's earlier context that the program's next turn did not use.
    Older observations count less. While the share is low, such blocks are evicted early, and few can be used
    again. So a low estimate confirms itself, and rises only after memory was ample for a while. ``share``
    changes in steps of at least ``stride``, so that eviction keys computed with it rarely change. ``changes``
    counts the steps.
    """

    def __init__(
        self, *, at_first: float = 0.5, weight: float = 4096.0, window: float = 65536.0, stride: float = 0.05
    ) -> None:
        """``at_first``: initial share, which counts as much as ``weight`` observed blocks. When the observed
        blocks weigh more than ``window`` together, their weights are halved."""
        self._reused = at_first * weight
        self._outcomes = weight
        self._window = window
        self._stride = stride
        self._seen = (0, 0)
        self.share = at_first
        self.changes = 0

    def observe(self, reused: int, evicted: int) -> None:
        """Update the share. ``reused``: number of blocks of abandoned branches that were used again since the
        start. ``evicted``: number of such blocks that were evicted unused since the start."""
        if (reused, evicted) == self._seen:
            return
        self._reused += reused - self._seen[0]
        self._outcomes += reused - self._seen[0] + evicted - self._seen[1]
        self._seen = (reused, evicted)
        while self._outcomes > self._window:
            self._reused *= 0.5
            self._outcomes *= 0.5
        share = self._reused / self._outcomes
        if abs(share - self.share) >= self._stride:
            self.share = share
            self.changes += 1


class SortedWindow:
    """The newest ``most`` values, both in order of arrival and sorted."""

    __slots__ = ("_most", "arrivals", "ordered")

    def __init__(self, most: int, values: Iterable[float] = ()) -> None:
        self._most = most
        self.arrivals: deque[Any] = deque(values, most)
        self.ordered: list[Any] = sorted(self.arrivals)

    def add(self, value: float) -> None:
        """Add a value, and drop the oldest if the window is full."""
        if len(self.arrivals) == self._most:
            del self.ordered[bisect_right(self.ordered, self.arrivals.popleft()) - 1]
        self.arrivals.append(value)
        insort(self.ordered, value)


def recent_entry(table: OrderedDict[Key, Entry], key: Key, new: Callable[[], Entry], limit: int) -> Entry:
    """Return the entry of ``key``, made by ``new`` if it is missing, as the most recently used entry. If the
    table then has more than ``limit`` entries, the least recently used one is removed."""
    entry = table.get(key)
    if entry is None:
        entry = table[key] = new()
        if len(table) > limit:
            table.popitem(last=False)
    table.move_to_end(key)
    return entry


def non_negative(value: object, what: str) -> float:
    """Return ``value`` as a float. Raises ``ValueError`` unless ``value`` is a finite number ≥ 0. ``what``:
    name of the value in the error message."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= MAX_FLOAT:
        raise ValueError(f"{what} is {value!r:.80}; expected a finite number ≥ 0")
    return float(value)


def _seconds(value: object) -> float:
    return non_negative(value, "a duration in seconds")


def _checked(document: Mapping[str, Any], field: str, kind: type) -> Any:
    if not isinstance(document, Mapping):
        raise ValueError(f"history: a {type(document).__name__}; expected an object")
    version = document.get("version")
    if version != HISTORY_VERSION:
        raise ValueError(f"history: version {version!r:.80}; expected {HISTORY_VERSION}")
    value = document.get(field)
    if not isinstance(value, kind):
        raise ValueError(f"history: field {field!r} is missing or not a {kind.__name__}")
    return value
