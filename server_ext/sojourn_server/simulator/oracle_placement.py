"""The policy ``sojourn`` with exact knowledge of each program's remaining work. It shows how much a better
order of programs could gain."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from sojourn_server.policies.placement.placement_policy import WaitingKey
from sojourn_server.policies.placement.placement_views import ProgramActivity, ProgramTierView
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement

from .simulated_clients import ActiveProgram
from .workloads.program_plans import ProgramPlan

MIN_LEFT_S = 0.25
"""Minimum for a program's remaining seconds of service, so that its worth is finite."""


class ProgramWork:
    """Seconds of service (running requests) that active programs have left, computed from their plans."""

    def __init__(
        self, active: Mapping[str, ActiveProgram], turn_service_s: Callable[[ProgramPlan], Sequence[float]]
    ) -> None:
        """``turn_service_s`` returns, for each turn of a program, the seconds that the turn takes alone on an
        engine, without its tools."""
        self._active = active
        self._turn_service_s = turn_service_s
        self._left_s: dict[str, list[float]] = {}
        """Program → for each turn, the seconds of service of this and all later turns."""
        self._total_s = 0.0

    @property
    def mean_s(self) -> float:
        """Mean seconds of service of the programs passed to ``left_s`` so far; 1 before the first."""
        return self._total_s / len(self._left_s) if self._left_s else 1.0

    def left_s(self, program_id: str) -> float | None:
        """Seconds of service of the program's current turn and all later turns; ``None`` if the program is
        over."""
        active = self._active.get(program_id)
        if active is None:
            return None
        left_s = self._left_s.get(program_id)
        if left_s is None:
            left_s = list(accumulate(reversed(self._turn_service_s(active.plan))))[::-1]
            self._left_s[program_id] = left_s
            self._total_s += left_s[0]
        return max(MIN_LEFT_S, left_s[active.turn])


@dataclass(frozen=True, slots=True, kw_only=True)
class OraclePlacement(ResidencyPricePlacement):
    """``ResidencyPricePlacement`` with exact remaining work instead of predictions.

    The worth of a program is the mean service of all programs ÷ the service that this program has left. All
    ready programs, new and returning ones, are admitted in ascending order of blocks × service left."""

    work: ProgramWork

    def worth(self, program: ProgramTierView) -> float:
        left_s = self.work.left_s(program.program_id)
        return 1.0 if left_s is None else self.work.mean_s / left_s

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        left_s = self.work.left_s(program.program_id) or 0.0
        behind = program.activity is not ProgramActivity.READY
        order = self.device_blocks(program) * left_s
        return (int(behind), order, program.waiting_since_s, program.program_id)
