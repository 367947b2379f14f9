"""Lease reclaim: C8's rule and its three cases."""

from __future__ import annotations

import pytest
from sojourn.ids import ProgramId
from sojourn_server.policies.lease_reclaim_policies import LatestProgramReclaim, LeaseReclaimPolicy
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


def test_nothing_held_is_nothing_given() -> None:
    for policy in (LATEST, LeaseReclaimPolicy()):
        assert policy.release(need(1, 1, running=True), [], 0.0) is None
        assert policy.release(need(1, 1, running=True, name="a"), held(("a", 1, 9)), 0.0) is None


def test_any_lease_gives_the_soonest_ending_and_only_as_many_as_needed() -> None:
    leases = [*held(("late", 1, 10), expires_s=90.0), *held(("soon", 9, 10), expires_s=10.0)]
    assert LeaseReclaimPolicy().release(need(5, 4), leases, 0.0) == ("soon",)
    assert LeaseReclaimPolicy().release(need(5, 14), leases, 0.0) == ("soon", "late")
    assert LeaseReclaimPolicy().release(need(5, 99), leases, 0.0) == ("soon", "late")
