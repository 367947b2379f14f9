"""Estimates the seconds to bring a context back to the device: by copying, and by the faster of copying and
computing (``restore_s``). Policies use these times as the price of lost KV."""

from __future__ import annotations

from collections.abc import Callable


class HostLink:
    """The link between host memory and the device: its measured speeds, and the queued copies.

    ``assumed``: function that returns the assumed seconds to copy a token's KV, used if no copy was measured
    lately. The function returns ``None`` if there is no host memory or the link's speed is unknown.
    """

    def __init__(self, assumed: Callable[[], float | None]) -> None:
        self._assumed = assumed
        self._load_s_per_token: float | None = None
        self._store_s_per_token: float | None = None
        self.loads_queued_s = 0.0
        """Seconds until the queued copies to the device are done."""
        self.stores_queued_s = 0.0
        """Seconds until the queued copies to host memory are done."""

    def observe_loads(self, s_per_token: float | None, queued_s: float | None = None) -> None:
        """Store measurements of copies to the device: ``s_per_token``, seconds to copy a token's KV, and
        ``queued_s``, seconds that queued copies take. If ``queued_s`` is ``None``, its earlier value stays.

        If ``s_per_token`` is ``None`` (not measured), the assumed time applies again. If the last measured
        time stayed in use, a link that was slow once would be avoided for ever."""
        self._load_s_per_token = s_per_token
        if queued_s is not None:
            self.loads_queued_s = queued_s

    def observe_stores(self, s_per_token: float | None, queued_s: float) -> None:
        """Store measurements of copies to host memory. ``s_per_token``: seconds to copy a token's KV;
        ``None``: not measured, so the assumed time applies. ``queued_s``: seconds that queued copies take."""
        self._store_s_per_token, self.stores_queued_s = s_per_token, queued_s

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


def copies_back(compute_s: float, copy_s: float | None) -> bool:
    """Return whether copying a context back is at least as fast as computing it. True if a time is unknown.

    ``compute_s``: seconds to compute the context; 0: unknown. ``copy_s``: seconds to copy it; ``None``:
    unknown."""
    return copy_s is None or restore_s(compute_s, copy_s) == copy_s


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
