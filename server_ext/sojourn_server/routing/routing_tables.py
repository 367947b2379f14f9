"""The tables of an affinity core, which its parts share."""

from __future__ import annotations

from dataclasses import dataclass

from ..policies.fairness.fair_share import SharePolicy
from ..policies.routing.routing_policies import RoutingPolicy
from .home_change_log import HomeChangeLog
from .program_affinity import ProgramAffinity
from .replica_fleet import ReplicaFleet
from .resident_programs import ResidentPrograms, build_resident_programs
from .routed_programs import ProgramEstimator, RoutedProgram, RoutedProgramTable
from .routed_requests import RoutedRequestTable
from .routing_limits import RoutingCounters, RoutingLimits
from .tenant_accounting import TenantAccounting


@dataclass(slots=True)
class RoutingTables:
    """Replicas, programs, requests and tenants of one core."""

    fleet: ReplicaFleet
    programs: RoutedProgramTable
    expected: ProgramEstimator
    tenants: TenantAccounting
    residents: ResidentPrograms
    homes: ProgramAffinity
    requests: RoutedRequestTable
    counts: RoutingCounters

    def lives(self, program: RoutedProgram) -> bool:
        """Whether a program is in the table: its requests may outlive it."""
        return self.programs.get(program.key) is program


def build_routing_tables(
    routing: RoutingPolicy,
    sharing: SharePolicy,
    expected: ProgramEstimator,
    limits: RoutingLimits,
    counts: RoutingCounters,
    journal: HomeChangeLog,
) -> RoutingTables:
    """Empty tables."""
    fleet = ReplicaFleet(limits.send_below_load)
    tenants = TenantAccounting(sharing, fleet, expected, limits.slo_factor, limits.usual_life_s, counts)
    residents = build_resident_programs(routing)
    return RoutingTables(
        fleet,
        RoutedProgramTable(),
        expected,
        tenants,
        residents,
        ProgramAffinity(fleet, tenants, journal, residents),
        RoutedRequestTable(fleet, tenants, residents),
        counts,
    )
