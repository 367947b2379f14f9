"""Estimates the seconds to bring a context back to the device, which policies use as the price of lost KV."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .engine_profile import PrefillCurve


class LinkCosts(NamedTuple):
    """Measured costs of copies from the device to host memory (stores) and back (loads)."""

    store_s_per_token: float | None
    """Seconds to copy a token's KV; ``None`` before the first copy."""
    load_s_per_token: float | None
    stores_queued_s: float | None = None
    """Seconds until the queued copies are done; ``None``: not looked at."""
    loads_queued_s: float | None = None


class HostLink:
    """The link between host memory and the device: its measured speeds, and the queued copies.

    ``assumed``: function that returns the assumed seconds to copy a token's KV, used if no copy was measured
    lately. The function returns ``None`` if there is no host memory or the link's speed is unknown.
    """

    def __init__(self, assumed: Callable[[], float | None]) -> None:
        self._assumed = assumed
        self._load_s_per_token: float | None = None
        self._store_s_per_token: float | None = None
        self.loads_queued_s = self.stores_queued_s = 0.0

    def observe(self, costs: LinkCosts) -> None:
        """Store measurements. If a time per token is ``None``, the assumed one applies again. If the last
        measured one stayed in use, a link that was slow once would be avoided for ever."""
        self._load_s_per_token = costs.load_s_per_token
        if costs.loads_queued_s is not None:
            self.loads_queued_s = costs.loads_queued_s
        if costs.stores_queued_s is not None:
            self._store_s_per_token, self.stores_queued_s = costs.store_s_per_token, costs.stores_queued_s

    @property
    def load_s_per_token(self) -> float | None:
        """Seconds to copy a token's KV to the device; ``None`` if unknown."""
        return self._load_s_per_token if self._load_s_per_token is not None else self._assumed()

    @property
    def store_s_per_token(self) -> float | None:
        """Seconds to copy a token's KV to host memory; ``None`` if unknown."""
        return self._store_s_per_token if self._store_s_per_token is not None else self._assumed()

    def load_s(self, tokens: int) -> float | None:
        """Return the seconds to copy a context of ``tokens`` tokens back, including the wait for queued
        copies; ``None`` if unknown."""
        s_per_token = self.load_s_per_token
        return None if s_per_token is None else self.loads_queued_s + tokens * s_per_token


def restore_s(compute_s: float, copy_s: float | None) -> float:
    """Return the seconds to bring a context back to the device by the faster way, computing or copying. This
    is PrefillReload(r) of Continuum §4.1.

    ``compute_s``: seconds to compute the context; 0.0 if unknown. ``copy_s``: seconds to copy the context
    back, including the wait for queued copies. ``None``: no tier below the device, or its speed is unknown.
    If one time is unknown, the result is the other. With ``copy_s`` 0.0, the result is 0.0.
    """
    if copy_s is None:
        return compute_s
    return min(compute_s, copy_s) if compute_s > 0 else copy_s


MIN_STEP_TOKENS, MIN_TOKENS_A_REQUEST = 64, 8
"""Steps with fewer tokens, or fewer tokens per request, consist mostly of decoding. They do not count for the
prefill speed."""
SMOOTHING = 0.1
"""Weight of the newest prefill step in the mean seconds per token."""
GAP_WEIGHT = 1 / 32
"""Weight of the newest gap in ``hold_cost``. The first 32 gaps weigh the same."""
SHARE_WINDOW_S = 60.0
"""Seconds of engine steps over which ``prefill_share`` is averaged, with exponential weights."""
GROWTH_WINDOW_S = 600.0
"""Seconds of decode steps over which ``kv_read_share`` is averaged, with exponential weights. The contexts
must vary in this window."""
GROWTH_EVIDENCE = 30.0
"""Reduces ``kv_read_share`` while there is little evidence: the share is multiplied by
n / (n + ``GROWTH_EVIDENCE``). n is the number of recent decode steps times R² of the linear fit of their
durations to their context lengths."""
_ROUNDING = 1e-9
"""A variance below this share of the squared mean counts as a rounding error."""


class StepTimeEstimator:
    """Learns from engine steps how long a prefill takes, and on what the steps spend their time.

    ``seconds`` estimates PrefillReload(r), the seconds to compute a context again (Continuum §4.1). With a
    measured ``PrefillCurve``, the estimate is the value of the curve. Without a curve, it is the work of the
    tokens times the mean seconds per work of earlier prefill steps. The mean is exponentially weighted, and 0
    before the first such step.

    Work has the shape of Tetris' equation 1, c · S · (6D + S), without the half of its attention that a
    causal mask leaves out: a context of S tokens is the work of S + S² / 12D tokens without attention, since
    a token that attends to c others is the work of 1 + c / 6D. ``hidden_size`` is D; 0: a token's work does
    not grow with its context.
    """

    def __init__(self, curve: PrefillCurve | None = None, hidden_size: int = 0) -> None:
        self._curve = curve
        self._work_of_context = 1.0 / (6 * hidden_size) if hidden_size else 0.0
        """Work of attending to one token."""
        self._s_per_work: float | None = None
        self._busy_s = self._prefill_s = self._request_s = 0.0
        """Sums over recent steps, in which older steps weigh less: seconds, seconds spent on prompts, and
        seconds · requests."""
        self._decodes = [0.0] * 6
        """Sums over recent decode steps, in which older steps weigh less: number of steps, context tokens,
        seconds, tokens², seconds², and tokens · seconds."""
        self.hold_cost, self._gaps = 0.0, 0
        """What holding a context through a gap costs, as a share of what it saves, each gap at most 1."""

    def observe_step(self, tokens: int, seconds: float, requests: int = 1, kv_tokens: int = 0) -> None:
        """Learn from an engine step that computed ``tokens`` tokens of ``requests`` requests in ``seconds``
        seconds. ``kv_tokens``: total context length of these requests in tokens; 0: unknown."""
        if 0 < seconds < SHARE_WINDOW_S:
            kept = 1.0 - seconds / SHARE_WINDOW_S
            prompts_s = min(seconds, self.seconds(max(0, tokens - requests)))
            self._busy_s = self._busy_s * kept + seconds
            self._prefill_s = self._prefill_s * kept + prompts_s
            self._request_s = self._request_s * kept + seconds * requests
            if tokens < MIN_TOKENS_A_REQUEST * requests and kv_tokens > 0:
                read, kept = float(kv_tokens), 1.0 - seconds / GROWTH_WINDOW_S
                step = (1.0, read, seconds, read * read, seconds * seconds, read * seconds)
                self._decodes = [total * kept + new for total, new in zip(self._decodes, step, strict=True)]
        if tokens < max(MIN_STEP_TOKENS, MIN_TOKENS_A_REQUEST * requests) or seconds <= 0:
            return
        sample = seconds / self._work(tokens, requests, kv_tokens or tokens)
        if self._s_per_work is None:
            self._s_per_work = sample
        else:
            self._s_per_work += SMOOTHING * (sample - self._s_per_work)

    def observe_gap(self, gap_s: float, rebuild_s: float) -> None:
        """Learn from a gap after which computing the context again takes ``rebuild_s``; 0: unknown.

        Holding costs what another program would have done on the blocks. It saves each running program the
        time of computing."""
        saved_s = max(1.0, self.mean_running) * rebuild_s
        if not saved_s:
            return
        headroom = (1.0 - self.prefill_share) * (1.0 - self.kv_read_share)
        self._gaps += 1
        cost = min(1.0, headroom * max(0.0, gap_s) / saved_s)
        self.hold_cost += max(GAP_WEIGHT, 1 / self._gaps) * (cost - self.hold_cost)

    @property
    def kv_read_share(self) -> float:
        """Share of a decode step's time, 0 to 1, that is proportional to the total context length of the
        step's requests. Computed by least squares over recent steps; 0 while nothing is known.

        In this part of a step the device reads KV. With long contexts it is most of a step.
        """
        steps = self._decodes[0]
        if not steps:
            return 0.0
        kv_tokens, seconds, tokens_squared, seconds_squared, products = (
            total / steps for total in self._decodes[1:]
        )
        variance = tokens_squared - kv_tokens * kv_tokens
        seconds_variance = seconds_squared - seconds * seconds
        covariance = products - kv_tokens * seconds
        if (
            variance <= _ROUNDING * kv_tokens**2
            or seconds_variance <= _ROUNDING * seconds**2
            or covariance <= 0
        ):
            return 0.0
        explained = steps * min(1.0, covariance / variance * (covariance / seconds_variance))
        believed = explained / (explained + GROWTH_EVIDENCE)
        return min(1.0, believed * covariance / variance * kv_tokens / seconds)

    @property
    def prefill_share(self) -> float:
        """Share of the time of recent steps that computing prompts took, 0 to 1; 0 before any step."""
        return self._prefill_s / self._busy_s if self._busy_s else 0.0

    @property
    def mean_running(self) -> float:
        """Mean number of requests in recent steps, weighted by the steps' durations; 0 before any step."""
        return self._request_s / self._busy_s if self._busy_s else 0.0

    @property
    def known(self) -> bool:
        """Whether there is a curve or at least one learned step."""
        return self._curve is not None or self._s_per_work is not None

    def seconds(self, tokens: int) -> float:
        """Return the seconds to compute a context of ``tokens`` tokens from scratch; 0.0 while nothing is
        known."""
        if self._curve is not None:
            return self._curve.seconds(tokens)
        return self._work(tokens, 1, tokens) * self._s_per_work if self._s_per_work is not None else 0.0

    def _work(self, tokens: int, requests: int, kv_tokens: int) -> float:
        """Return the work of ``tokens`` new tokens at the ends of ``requests`` contexts, which have
        ``kv_tokens`` tokens together, the new ones included."""
        context = (kv_tokens - tokens / 2) / max(1, requests)
        return tokens * (1.0 + context * self._work_of_context)
