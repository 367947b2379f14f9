"""What customers pay for: the limits of each plan."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plan:
    """Burst and sustained rate of one kind of customer."""

    name: str
    burst: float
    per_second: float


PLANS = {
    plan.name: plan
    for plan in (
        Plan("free", burst=2, per_second=1),
        Plan("team", burst=10, per_second=5),
        Plan("whale", burst=100, per_second=50),
    )
}


def plan_of(name: str) -> Plan:
    """The plan called ``name``. Raises ``KeyError`` that lists the known ones."""
    try:
        return PLANS[name]
    except KeyError:
        raise KeyError(f"no plan {name}; there are {', '.join(sorted(PLANS))}") from None
