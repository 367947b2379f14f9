"""The Gittins index of a duration, such as a tool call's or a program's service."""

from __future__ import annotations

from collections.abc import Sequence

UNKNOWN_GAP_S = 5.0
"""Expected remaining seconds of a gap that has just begun and whose tool was never observed."""
MAX_GAP_S = 86_400.0
"""Maximum duration. Longer durations count as this maximum, because clients may report any number."""
MIN_SPENT_S = 0.25
"""Lower bound of the expected time by which an index divides, in seconds. Without a bound, an index would
depend on the exact moment of the query."""


def gittins_index(durations_s: Sequence[float], elapsed_s: float, chance: float = 1.0) -> float:
    """Return the Gittins index per second: the maximum over τ of P(remaining ≤ τ) / E[min(remaining, τ)]
    (J. Gittins, 1979). ``remaining`` is the time until the end, in seconds.

    ``durations_s``: equally likely total durations, ascending; the scheduler passes at most ``GAP_SAMPLES``
    quantiles (``core/tier_manager.py``). ``elapsed_s``: seconds that have passed. Each
    duration above ``elapsed_s`` gives one sample of ``remaining``: the difference. One more sample is added:
    max(largest sample, ``elapsed_s``). So if all durations are exceeded, the index is 1/elapsed_s. If
    ``durations_s`` is empty, the only sample is max(``UNKNOWN_GAP_S``, ``elapsed_s``).

    ``chance``: probability that it ends at all, as known at its begin; 0 gives 0. The longer it lasts, the
    more probable is that it never ends, because samples are used up and this probability is not.
    """
    if chance <= 0:
        return 0.0
    left = [min(duration_s, MAX_GAP_S) - elapsed_s for duration_s in durations_s if duration_s > elapsed_s]
    left = [remaining_s for remaining_s in left if remaining_s > 0]
    left.append(max(elapsed_s, UNKNOWN_GAP_S if not durations_s else left[-1] if left else 0.0))
    left.sort()
    never = (1.0 / chance - 1.0) * (len(durations_s) + 1)  # in samples
    count, spent_s, best = len(left) + never, 0.0, 0.0
    for ended, remaining_s in enumerate(left, 1):
        spent_s += remaining_s
        best = max(best, ended / max(spent_s + (count - ended) * remaining_s, MIN_SPENT_S * count))
    return best
