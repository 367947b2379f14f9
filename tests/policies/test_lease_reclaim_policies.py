"""Lease reclaim: C8's rule and its three cases."""

from __future__ import annotations

from dataclasses import replace

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.lease_reclaim_policies import (
    EvictionOrderReclaim,
    LaterProgramsReclaim,
    LatestProgramReclaim,
    LeaseReclaimPolicy,
)
from sojourn_server.policies.policy_views import LeaseView, ReclaimRequest

LATEST, PRINTED, LATER = (
    LatestProgramReclaim(), LatestProgramReclaim(spares_earlier=False), LaterProgramsReclaim()
)  # fmt: skip


def held(*rows: tuple[str, int, int], expires_s: float = 50.0, reload_s: float = 5.0) -> list[LeaseView]:
    """Leases as (program, rank, blocks)."""
    return [LeaseView(ProgramId(n), rank, expires_s, blocks, reload_s, False) for n, rank, blocks in rows]


def need(
    rank: int, blocks: int, *, running: bool = False, busy: bool = True, name: str = "me"
) -> ReclaimRequest:
    return ReclaimRequest(
        program_id=ProgramId(name), program_rank=rank, blocks=blocks, running=running, anything_running=busy
    )


THREE = held(("a", 1, 10), ("b", 2, 10), ("c", 3, 10))


@pytest.mark.parametrize(
    ("policy", "wanted", "given"),
    [
        (LATEST, need(0, 5), ("c",)),
        (LATEST, need(0, 11), ("c", "b")),
        (LATEST, need(1, 15), ("c", "b")),
        (LATEST, need(2, 10), ("c",)),
        # those behind it are too few, and something runs: all or nothing
        (LATEST, need(0, 31), None),
        (LATEST, need(2, 11), None),
        # nothing runs: the paper's deadlock
        (LATEST, need(2, 11, busy=False), ("c", "b")),
        (LATEST, need(9, 99, busy=False), ("c", "b", "a")),
        # it runs already: any lease costs less than a preemption
        (LATEST, need(9, 5, running=True), ("c",)),
        (LATEST, need(9, 99, running=True), ("c", "b", "a")),
        # as printed, the head of the queue takes the latest programs' leases until it fits
        (PRINTED, need(2, 5), ("c",)),
        (PRINTED, need(9, 11), ("c", "b")),
        (PRINTED, need(9, 99), ("c", "b", "a")),
        (LATER, need(1, 15), ("c", "b")),
        (LATER, need(1, 5), ("c",)),
        (LATER, need(1, 21), None),
        # and others after the engine stood idle
        (LATER, replace(need(9, 15, busy=False), idle_s=29.0), None),
        (LATER, replace(need(9, 15, busy=False), idle_s=30.0), ("c", "b")),
    ],
)
def test_the_latest_go_first_and_no_more_than_needed(
    policy: LeaseReclaimPolicy, wanted: ReclaimRequest, given: tuple[str, ...] | None
) -> None:
    """That no program takes its own leases is in the contract of all policies."""
    assert policy.release(wanted, THREE, 0.0) == given


def test_any_lease_gives_the_soonest_ending_and_only_as_many_as_needed() -> None:
    leases = [*held(("late", 1, 10), expires_s=90.0), *held(("soon", 9, 10), expires_s=10.0)]
    assert LeaseReclaimPolicy().release(need(5, 4), leases, 0.0) == ("soon",)
    assert LeaseReclaimPolicy().release(need(5, 14), leases, 0.0) == ("soon", "late")
    assert LeaseReclaimPolicy().release(need(5, 99), leases, 0.0) == ("soon", "late")


def test_leases_end_in_the_eviction_order_those_of_waiting_programs_last() -> None:
    scores = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.0}
    leases = [
        one._replace(score=(scores[one.program_id],)) for one in held(*((name, 1, 10) for name in scores))
    ]
    leases[3] = leases[3]._replace(waiting=True)
    policy = EvictionOrderReclaim()
    assert policy.release(need(1, 15, name="b"), leases, 0.0) == ("c", "a")
    assert policy.release(need(1, 25, name="b"), leases, 0.0) == ("c", "a", "d")
