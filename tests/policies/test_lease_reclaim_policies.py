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

LATEST = LatestProgramReclaim()


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
    ("wanted", "given"),
    [
        (need(0, 5), ("c",)),
        (need(0, 10), ("c",)),
        (need(0, 11), ("c", "b")),
        (need(0, 30), ("c", "b", "a")),
        (need(1, 15), ("c", "b")),
        (need(2, 10), ("c",)),
        # those behind it are too few, and something runs: all or nothing
        (need(0, 31), None),
        (need(2, 11), None),
        (need(3, 1), None),
        # nothing runs: the paper's deadlock
        (need(2, 11, busy=False), ("c", "b")),
        (need(9, 25, busy=False), ("c", "b", "a")),
        (need(9, 99, busy=False), ("c", "b", "a")),
        # it runs already: any lease costs less than a preemption
        (need(9, 5, running=True), ("c",)),
        (need(9, 99, running=True), ("c", "b", "a")),
        # never its own
        (need(3, 10, running=True, name="c"), ("b",)),
        (need(3, 99, busy=False, name="c"), ("b", "a")),
    ],
)
def test_the_latest_go_first_and_no_more_than_needed(
    wanted: ReclaimRequest, given: tuple[str, ...] | None
) -> None:
    assert LATEST.release(wanted, THREE, 0.0) == given


@pytest.mark.parametrize("rank", [0, 2, 9])
def test_as_printed_the_head_of_the_queue_takes_the_latest_programs_leases_until_it_fits(rank: int) -> None:
    printed = LatestProgramReclaim(spares_earlier=False)
    assert printed.release(need(rank, 5), THREE, 0.0) == ("c",)
    assert printed.release(need(rank, 11), THREE, 0.0) == ("c", "b")
    assert printed.release(need(rank, 99), THREE, 0.0) == ("c", "b", "a")


def test_any_lease_gives_the_soonest_ending_and_only_as_many_as_needed() -> None:
    leases = [*held(("late", 1, 10), expires_s=90.0), *held(("soon", 9, 10), expires_s=10.0)]
    assert LeaseReclaimPolicy().release(need(5, 4), leases, 0.0) == ("soon",)
    assert LeaseReclaimPolicy().release(need(5, 14), leases, 0.0) == ("soon", "late")
    assert LeaseReclaimPolicy().release(need(5, 99), leases, 0.0) == ("soon", "late")


def test_of_later_programs_the_latest_give_way_and_others_after_the_engine_stood_idle() -> None:
    policy = LaterProgramsReclaim()
    assert policy.release(need(1, 15), THREE, 0.0) == ("c", "b")
    assert policy.release(need(1, 5), THREE, 0.0) == ("c",)
    assert policy.release(need(1, 21), THREE, 0.0) is None, "and not for nothing"
    for idle_s, given in ((29.0, None), (30.0, ("c", "b"))):
        idle = replace(need(9, 15, busy=False), idle_s=idle_s)
        assert policy.release(idle, THREE, 0.0) == given


def test_leases_end_in_the_eviction_order_those_of_waiting_programs_last() -> None:
    scores = {"a": 3.0, "b": 1.0, "c": 2.0, "d": 0.0}
    leases = [
        one._replace(score=(scores[one.program_id],)) for one in held(*((name, 1, 10) for name in scores))
    ]
    leases[3] = leases[3]._replace(waiting=True)
    policy = EvictionOrderReclaim()
    assert policy.release(need(1, 15, name="b"), leases, 0.0) == ("c", "a")
    assert policy.release(need(1, 25, name="b"), leases, 0.0) == ("c", "a", "d")
