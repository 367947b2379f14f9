"""How long it would take to rebuild a context: from a measured profile, else learned while serving."""

from __future__ import annotations

from .costs import PrefillCurve

MIN_STEP_TOKENS = 64
"""Steps with fewer tokens say nothing of prefill speed."""

MIN_TOKENS_A_REQUEST = 8
"""Nor do steps in which nearly every request only decodes a token."""


class ReloadEstimate:
    """Prefill-Reload(r) of Continuum §4.1.

    With a ``PrefillCurve`` (C9) it is that curve. Without, it is the context
    divided by the prefill speed seen in the engine's own steps, a mean that
    leans to the recent ones; 0 until the first such step.
    """

    def __init__(self, curve: PrefillCurve | None = None, *, smoothing: float = 0.1) -> None:
        self._curve = curve
        self._smoothing = smoothing
        self._s_per_token: float | None = None

    def observe_step(self, tokens: int, seconds: float, requests: int = 1) -> None:
        """Learn from an engine step: ``tokens`` tokens of ``requests`` requests took ``seconds``."""
        if tokens < max(MIN_STEP_TOKENS, MIN_TOKENS_A_REQUEST * requests) or seconds <= 0:
            return
        sample = seconds / tokens
        if self._s_per_token is None:
            self._s_per_token = sample
        else:
            self._s_per_token += self._smoothing * (sample - self._s_per_token)

    @property
    def known(self) -> bool:
        """Whether there is a curve, or a step that it was learned from."""
        return self._curve is not None or self._s_per_token is not None

    def seconds(self, tokens: int) -> float:
        """Seconds to compute a context of ``tokens`` tokens from nothing."""
        if self._curve is not None:
            return self._curve.seconds(tokens)
        return tokens * self._s_per_token if self._s_per_token is not None else 0.0
