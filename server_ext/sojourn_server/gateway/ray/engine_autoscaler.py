"""Computes how many engines the KV of all accepted programs needs.

The coordinator, which decides for all gateways, uses this module. The number of gateways is fixed
(``RayConfig.gateways``).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from dataclasses import dataclass

AUTOSCALE_S = 1.0
"""Seconds between two computations of the wanted number of engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoscaleLimits:
    """Limits on the number of engines, and the rules for adding and removing engines. ``ray_config`` checks
    the values."""

    min_engines: int = 1
    max_engines: int = 1
    target_use: float = 0.8
    """Engines are added if programs need more than this fraction of the engines' KV capacity."""
    shrink_below_use: float = 0.6
    """An engine is removed only if programs need less than this fraction of the KV capacity that the
    remaining engines would have."""
    shrink_after_s: float = 300.0
    """Seconds for which the need must stay below ``shrink_below_use`` before an engine is removed. Engines
    take minutes to start, and lose their KV when they stop."""


@dataclass(frozen=True, slots=True)
class AutoscaleDecision:
    """A decision about the number of engines."""

    engines: int
    """Number of engines to run."""
    low_since_s: float | None = None
    """Time from which ``AutoscaleLimits.shrink_after_s`` counts; ``None``: demand is not low."""


def wanted_engines(
    programs_tokens: int,
    engine_tokens: int,
    before: AutoscaleDecision,
    limits: AutoscaleLimits,
    now: float,
) -> AutoscaleDecision:
    """Decide how many engines to run. The number grows at once by as many engines as needed. It shrinks by
    one after each ``shrink_after_s`` of low demand.

    ``programs_tokens``: total size of programs with a home, and of programs that wait for capacity.
    ``engine_tokens``: KV capacity of one engine in device and host memory. If it is 0 (unknown), the number
    stays the same, within ``limits``. ``before``: the last decision.
    """
    engines = min(max(before.engines, limits.min_engines), limits.max_engines)
    if engine_tokens <= 0:
        return AutoscaleDecision(engines)
    grown = math.ceil(programs_tokens / (engine_tokens * limits.target_use))
    if grown > engines:
        return AutoscaleDecision(min(grown, limits.max_engines))
    fewer = engines - 1
    if fewer < limits.min_engines or programs_tokens >= fewer * engine_tokens * limits.shrink_below_use:
        return AutoscaleDecision(engines)
    since_s = now if before.low_since_s is None or before.low_since_s > now else before.low_since_s
    if now - since_s >= limits.shrink_after_s:
        return AutoscaleDecision(fewer, now)
    return AutoscaleDecision(engines, since_s)


class _Basis(enum.Enum):
    """Where the wanted number of engines comes from."""

    UNKNOWN = enum.auto()
    """The configured minimum, or more if the demand known so far needs more."""
    RUNNING = enum.auto()
    """The number of running engines."""
    FORMER = enum.auto()
    """The number that an earlier coordinator wanted."""
    DEMAND = enum.auto()
    """Known demand. It has lowered the number, or raised it above the number of an earlier coordinator."""


class Autoscaler:
    """Decides every ``AUTOSCALE_S`` how many engines to run."""

    def __init__(self, limits: AutoscaleLimits, now: float) -> None:
        self._limits = limits
        self._decision = AutoscaleDecision(limits.min_engines)
        self._basis = _Basis.UNKNOWN
        self._last_s = now

    @property
    def engines(self) -> int:
        """Number of engines to run."""
        return self._decision.engines

    def hold(self, former: int, running: int) -> None:
        """Keep the number of engines that an earlier coordinator wanted, or else the number that run now.

        Called at an engine's first registration. A new coordinator knows no demand yet, and would otherwise
        remove running engines. No effect once the number follows known demand (``_Basis.DEMAND``).

        ``former``: number that an earlier coordinator wanted, as the engine reports it; 0: unknown. This
        number includes engines that have not started yet, and excludes engines that Serve is about to stop.
        ``running``: number of running engines, used until an engine reports ``former``.
        """
        if self._basis is _Basis.DEMAND or (self._basis is _Basis.FORMER and not former):
            return
        engines = min(max(former or running, self._limits.min_engines), self._limits.max_engines)
        if engines > self._decision.engines or (former and self._basis is _Basis.RUNNING):
            self._decision = AutoscaleDecision(engines)
            self._basis = _Basis.RUNNING
        if former:
            self._basis = _Basis.FORMER

    def update(self, demand_tokens: Callable[[], tuple[int, int]], engines: int, now: float) -> None:
        """Decide again if ``AUTOSCALE_S`` have passed. ``demand_tokens``: function that returns (KV tokens
        that programs need, KV capacity of all engines in tokens). ``engines``: number of registered
        engines."""
        if now - self._last_s < AUTOSCALE_S:
            return
        self._last_s = now
        needed, room = demand_tokens()
        before = self._decision
        self._decision = wanted_engines(needed, room // engines if engines else 0, before, self._limits, now)
        lowered, raised = self._decision.engines < before.engines, self._decision.engines > before.engines
        if lowered or (raised and self._basis is _Basis.FORMER):
            self._basis = _Basis.DEMAND
        elif raised and self._basis is _Basis.RUNNING:
            # Gateways may still be joining, so an earlier coordinator may have known of more demand.
            self._basis = _Basis.UNKNOWN
