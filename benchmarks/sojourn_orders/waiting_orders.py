"""Orders of waiting programs that the policy ``sojourn`` does not use, for ``policy_order.py``."""

from __future__ import annotations

from dataclasses import dataclass

from sojourn_server.policies.placement.placement_policy import WaitingKey
from sojourn_server.policies.placement.placement_views import ProgramActivity, ProgramTierView, Tier
from sojourn_server.policies.placement.residency_price import ResidencyPricePlacement


@dataclass(frozen=True, slots=True, kw_only=True)
class BySize(ResidencyPricePlacement):
    """As ``sojourn``, but any difference in size decides between new programs."""

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        # Without the arguments, ``super`` fails in a dataclass with slots.
        level, *rest = ResidencyPricePlacement.waiting_key(self, program, now)
        is_new = program.activity is ProgramActivity.READY and not program.returning
        is_new = is_new and program.tier is Tier.WAITING
        if not is_new:
            return (level, *rest)
        return (level, float(self.device_blocks(program)), program.waiting_since_s, program.program_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByWorth(ResidencyPricePlacement):
    """All programs that wait, new or not, enter in the order of blocks ÷ worth."""

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        order = self.device_blocks(program) / self.worth(program)
        return (_level(program), order, program.waiting_since_s, program.program_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class ByAttained(ResidencyPricePlacement):
    """Of all programs that wait, new or not, the one with the least service so far enters first."""

    def waiting_key(self, program: ProgramTierView, now: float) -> WaitingKey:
        return (_level(program), program.attained_s, program.waiting_since_s, program.program_id)


def _level(program: ProgramTierView) -> int:
    return int(program.activity is not ProgramActivity.READY)
