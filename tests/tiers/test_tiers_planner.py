"""The planner, rule by rule; its random lives are beside it."""

from __future__ import annotations

from sojourn_server.tiers.jobs import Fate, TierResults
from sojourn_server.tiers.planner import TierLimits, TierPlanner


def key(number: int) -> bytes:
    return b"%032d" % number


def answered(planner: TierPlanner) -> None:
    """One step whose spills succeed at once."""
    jobs = planner.take_jobs()
    spilled = {job: {file.key: Fate.MOVED for file in files} for job, files in jobs.spills.items()}
    planner.take_results(TierResults(spilled=spilled))


def test_what_is_on_disk_makes_way_before_what_is_not() -> None:
    """A spill used to count as a use: what was safe stayed, and what was not was lost with room on disk."""
    planner = TierPlanner(TierLimits(host_slots=100, disk_blocks=1000))
    planner.take_results(TierResults(on_disk=[]))
    for number in range(600):
        planner.evicted(key(number), 1)
        if number % 10 == 9:
            answered(planner)
    assert planner.counts["dropped"] == 0
    assert planner.counts["dropped_on_disk"] == 500
    assert all(planner.on_disk(key(number)) for number in range(500))


def test_a_step_is_asked_for_until_it_is_known_what_the_disk_holds() -> None:
    planner = TierPlanner(TierLimits(host_slots=4, disk_blocks=4))
    assert planner.has_orders
    planner.take_results(TierResults(on_disk=[key(1)]))
    assert not planner.has_orders
    assert planner.lookup("r", [key(1)], 0.0) is None, "it is being read"


def test_nobody_asks_for_ever() -> None:
    planner = TierPlanner(TierLimits(host_slots=4, disk_blocks=4))
    for _ in range(100):
        planner.take_jobs()
    assert not planner.has_orders


def test_the_state_adds_up() -> None:
    planner = TierPlanner(TierLimits(host_slots=4, disk_blocks=10))
    planner.take_results(TierResults(on_disk=[key(7), key(8)]))
    planner.evicted(key(1), 1)
    state = planner.state()
    assert state["host"] == {"used": 1, "free": 3}
    assert state["disk"] == {"used": 2, "free": 8}
    assert state["moves"] == {"saved": 1}
