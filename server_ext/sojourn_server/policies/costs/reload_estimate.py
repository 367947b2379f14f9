"""Estimated time to rebuild a context, from a measured profile or learned from engine steps."""

from __future__ import annotations

from .engine_profile import PrefillCurve

MIN_STEP_TOKENS = 64
"""Steps with fewer tokens carry no information about prefill speed."""

MIN_TOKENS_A_REQUEST = 8
"""Steps with fewer tokens per request consist mostly of decoding and are ignored."""

SHARE_WINDOW_S = 60.0
"""Seconds of engine steps over which ``prefill_share`` is averaged, with exponential weights."""


class ReloadEstimate:
    """Estimate of PrefillReload(r), the seconds to compute a context again (Continuum §4.1).

    With a ``PrefillCurve`` (C9), the estimate is the value of the curve. Without a curve, it is the number of
    tokens times the mean seconds per token of earlier prefill steps. The mean is exponentially weighted, and
    0 before the first such step.
    """

    def __init__(self, curve: PrefillCurve | None = None, *, smoothing: float = 0.1) -> None:
        self._curve = curve
        self._smoothing = smoothing
        self._s_per_token: float | None = None
        self._busy_s = self._prefill_s = self._request_s = 0.0
        """Seconds of recent steps, of their part that computed prompts, and of all their requests together;
        older steps weigh less."""

    def observe_step(self, tokens: int, seconds: float, requests: int = 1) -> None:
        """Learn from an engine step that computed ``tokens`` tokens of ``requests`` requests in
        ``seconds``."""
        if 0 < seconds < SHARE_WINDOW_S:
            kept = 1.0 - seconds / SHARE_WINDOW_S
            prompts_s = min(seconds, self.seconds(max(0, tokens - requests)))
            self._busy_s = self._busy_s * kept + seconds
            self._prefill_s = self._prefill_s * kept + prompts_s
            self._request_s = self._request_s * kept + seconds * requests
        if tokens < max(MIN_STEP_TOKENS, MIN_TOKENS_A_REQUEST * requests) or seconds <= 0:
            return
        sample = seconds / tokens
        if self._s_per_token is None:
            self._s_per_token = sample
        else:
            self._s_per_token += self._smoothing * (sample - self._s_per_token)

    @property
    def prefill_share(self) -> float:
        """Share of the time of recent steps that computing prompts took, 0 to 1."""
        return self._prefill_s / self._busy_s if self._busy_s else 0.0

    @property
    def mean_running(self) -> float:
        """Mean number of requests in recent steps, weighted by the steps' durations; 0 before any step."""
        return self._request_s / self._busy_s if self._busy_s else 0.0

    @property
    def known(self) -> bool:
        """Whether there is a curve or at least one learned step."""
        return self._curve is not None or self._s_per_token is not None

    def seconds(self, tokens: int) -> float:
        """Seconds to compute a context of ``tokens`` tokens from scratch; 0.0 while nothing is known."""
        if self._curve is not None:
            return self._curve.seconds(tokens)
        return tokens * self._s_per_token if self._s_per_token is not None else 0.0
