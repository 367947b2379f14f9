"""How many engines there should be."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sojourn_server.gateway.ray.coordinator import Coordinator
from sojourn_server.gateway.ray.coordinator_checkpoint import CoordinatorOptions
from sojourn_server.gateway.ray.coordinator_messages import DrainRequest, EngineRegistration, EngineStopped
from sojourn_server.gateway.ray.engine_autoscaler import (
    AutoscaleDecision,
    AutoscaleLimits,
    wanted_engines,
)
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing.routing_limits import RoutingLimits
from test_gateway_ray_components import described

LIMITS = AutoscaleLimits(min_engines=1, max_engines=4, shrink_after_s=100.0)


def test_more_at_once() -> None:
    assert wanted_engines(8_000, 10_000, AutoscaleDecision(1), LIMITS, 0.0).engines == 1
    assert wanted_engines(8_001, 10_000, AutoscaleDecision(1), LIMITS, 0.0).engines == 2
    assert wanted_engines(30_000, 10_000, AutoscaleDecision(1), LIMITS, 0.0).engines == 4
    assert wanted_engines(900_000, 10_000, AutoscaleDecision(1), LIMITS, 0.0).engines == 4


def test_fewer_after_a_while_and_one_at_a_time() -> None:
    wanted = AutoscaleDecision(4)
    for now, engines in ((0.0, 4), (99.0, 4), (100.0, 3), (150.0, 3), (200.0, 2), (300.0, 1), (900.0, 1)):
        wanted = wanted_engines(0, 10_000, wanted, LIMITS, now)
        assert wanted.engines == engines, now


def test_a_short_lull_changes_nothing() -> None:
    wanted = wanted_engines(0, 10_000, AutoscaleDecision(2), LIMITS, 0.0)
    wanted = wanted_engines(12_000, 10_000, wanted, LIMITS, 90.0)
    wanted = wanted_engines(0, 10_000, wanted, LIMITS, 110.0)
    assert wanted_engines(0, 10_000, wanted, LIMITS, 200.0).engines == 2
    assert wanted_engines(0, 10_000, wanted, LIMITS, 210.0).engines == 1


def test_without_an_engine_nothing_is_known() -> None:
    assert wanted_engines(10**9, 0, AutoscaleDecision(2), LIMITS, 0.0).engines == 2


def test_a_clock_that_steps_back_makes_nothing_shrink() -> None:
    wanted = wanted_engines(0, 10_000, AutoscaleDecision(2, 1_000.0), LIMITS, 0.0)
    assert wanted == AutoscaleDecision(2, 0.0)


@given(
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**5), st.floats(0, 50)), max_size=40),
    st.integers(-5, 9),
)
def test_it_stays_within_bounds_and_does_not_swing(steps: list[tuple[int, int, float]], first: int) -> None:
    wanted, now = AutoscaleDecision(first), 0.0
    for programs, engine, later in steps:
        now += later
        before, wanted = wanted.engines, wanted_engines(programs, engine, wanted, LIMITS, now)
        assert 1 <= wanted.engines <= 4
        if 1 <= before <= 4:
            assert wanted.engines >= before - 1
            if wanted.engines < before:  # what is left is not too little at once
                assert wanted_engines(programs, engine, wanted, LIMITS, now).engines == wanted.engines


# -- a new coordinator --------------------------------------------------------------


class Coordinators:
    """Coordinators one after the other, with a clock that stands still, and engines as supervisors know
    them."""

    def __init__(self, checkpoint: Path | None = None, *, most: int = 8) -> None:
        self.now_s = 1_000.0
        self._options = CoordinatorOptions(
            checkpoint=checkpoint, autoscale=AutoscaleLimits(max_engines=most, shrink_after_s=100.0)
        )
        self.wanted: dict[str, int] = {}
        """The number that each engine has heard; 0: none."""
        self.epochs: dict[str, int] = {}
        self.restart()

    def restart(self) -> None:
        """Start the next coordinator."""
        self.now_s += 1.0
        self.coordinator = Coordinator(
            parse_cluster_preset('routing = "session-affinity"', source="test"),
            RoutingLimits(),
            self._options,
            clock=lambda: self.now_s,
            wall=lambda: self.now_s,
        )

    async def register(self, *names: str) -> list[int]:
        """Register engines as their supervisors do; return the numbers that they know then."""
        for name in names:
            seen, wanted = self.epochs.get(name, 0), self.wanted.get(name, 0)
            told = EngineRegistration(name, f"http://{name}:1", described(), seen, wanted_engines=wanted)
            answer = await self.coordinator.register(told)
            self.epochs[name] = answer.epoch
            self.wanted[name] = answer.wanted_engines or wanted
        return [self.wanted[name] for name in names]

    async def wait(self, for_s: float, *names: str) -> set[int]:
        """Let time pass while these engines register; return all numbers that they have heard."""
        heard, end_s = set(), self.now_s + for_s
        while self.now_s < end_s:
            self.now_s += 1.0
            self.coordinator.tick()
            heard |= set(await self.register(*names))
        return heard


EIGHT = tuple(f"e{number}" for number in range(8))


@pytest.mark.parametrize("kept", [False, True])
async def test_a_new_coordinator_shrinks_only_after_a_while(kept: bool, tmp_path: Path) -> None:
    it = Coordinators(tmp_path / "c" if kept else None)
    it.wanted = dict.fromkeys(EIGHT, 8)
    it.epochs = dict.fromkeys(EIGHT, 7)
    for _ in range(2):
        it.restart()
        assert set(await it.register(*EIGHT)) == {8}, "also the first answer"
        assert await it.wait(99.0, *EIGHT) == {8}
    assert await it.wait(100.0, *EIGHT) == {8, 7}
    assert await it.wait(100.0, *EIGHT) == {7, 6}


async def test_a_new_coordinator_keeps_the_number_while_some_engines_still_start() -> None:
    it = Coordinators()
    it.wanted = dict.fromkeys(EIGHT[:5], 8)
    it.epochs = dict.fromkeys(EIGHT[:5], 7)
    assert await it.register(*EIGHT[:5]) == [8] * 5
    assert await it.wait(50.0, *EIGHT[:5]) == {8}


async def test_a_former_number_does_not_exceed_the_maximum() -> None:
    it = Coordinators(most=4)
    it.wanted, it.epochs = {"e0": 8}, {"e0": 7}
    assert await it.register("e0") == [4]


async def test_a_new_coordinator_continues_a_scale_down() -> None:
    it = Coordinators()
    it.wanted = dict.fromkeys(EIGHT[:4], 3)  # Serve is stopping e3, which still registers
    it.epochs = dict.fromkeys(EIGHT[:4], 7)
    assert await it.register(*EIGHT[:4], "e4") == [3] * 5


async def test_a_former_number_replaces_the_running_engines() -> None:
    it = Coordinators()
    assert await it.register("e0", "e1", "e2") == [1, 2, 3]  # new engines: they know no number
    it.wanted, it.epochs = {"e3": 2}, {"e3": 7}
    assert await it.register("e3", "e0") == [2, 2]


async def test_a_former_number_still_holds_after_demand_has_raised_that_of_new_engines() -> None:
    it = Coordinators()
    await it.register("e0")
    it.coordinator.core.demand_tokens = lambda: (1_500, 1_000)  # type: ignore[method-assign]
    assert await it.wait(2.0, "e0") == {2}
    it.wanted, it.epochs = it.wanted | {"e1": 5}, it.epochs | {"e1": 7}
    assert await it.register("e1") == [5]


@pytest.mark.parametrize("former", [0, 4])
async def test_the_first_registration_of_an_engine_does_not_undo_a_decision(former: int) -> None:
    it = Coordinators()
    it.wanted = dict.fromkeys(EIGHT[:4], former)
    it.epochs = dict.fromkeys(EIGHT[:4], 7)
    await it.register(*EIGHT[:4])
    assert await it.wait(102.0, *EIGHT[:4]) == {4, 3}
    assert await it.register("e4") == [3], "four engines and this one were heard in the last seconds"
    it.wanted["e5"], it.epochs["e5"] = 8, 7
    assert await it.register("e5") == [3]


async def test_engines_that_know_no_number_are_counted_while_they_register() -> None:
    it = Coordinators()
    assert (await it.register(*EIGHT))[-1] == 8
    assert await it.wait(99.0, *EIGHT) == {8}
    assert await it.wait(10.0, *EIGHT) == {8, 7}


async def test_the_number_grows_from_nothing_with_the_engines() -> None:
    it = Coordinators()
    assert [await it.register("e0"), await it.register("e1")] == [[1], [2]]


async def test_neither_drained_nor_silent_engines_are_counted() -> None:
    it = Coordinators()
    await it.coordinator.drain(DrainRequest("e0"))
    assert await it.register("e0", "e1", "e2") == [1, 1, 2]
    it.now_s += 5.0  # e2 was killed, and its successor comes before the coordinator misses it
    assert await it.register("e1", "e3") == [2, 2]


async def test_an_engine_that_comes_back_does_not_bring_an_outdated_number() -> None:
    it = Coordinators()
    await it.register("e0")
    it.wanted["e0"] = 8
    await it.coordinator.gone(EngineStopped("e0", "1", "it was silent"))
    await it.register("e0")
    assert await it.register("e1") == [2]


def test_serve_hears_no_number_while_none_is_known() -> None:
    pytest.importorskip("ray.serve")
    from sojourn_server.gateway.ray.deployments import EngineReplica, autoscaling_policy

    def policy(metrics: object) -> int:
        context = SimpleNamespace(aggregated_metrics=metrics, target_num_replicas=5)
        return autoscaling_policy(context)[0]  # type: ignore[arg-type]

    def stats(wanted: int) -> object:
        replica = SimpleNamespace(_supervisor=SimpleNamespace(wanted_engines=wanted))
        return EngineReplica.record_autoscaling_stats(replica)  # type: ignore[arg-type]

    assert stats(0) == {}, "a zero would lower Serve's average over time"
    assert stats(3) == {"wanted_engines": 3.0}
    assert [policy(None), policy({}), policy({"wanted_engines": {"a": 0.0}})] == [5, 5, 5]
    assert policy({"wanted_engines": {"a": 0.0, "b": 3.0}}) == 3
