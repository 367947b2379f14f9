"""What goes wrong inside gateways and coordinator on Ray, each fault by itself: nobody else is to feel it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Generator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from gateway_harness import until
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.gateway.http.engine_descriptions import registration_event
from sojourn_server.gateway.ray import coordinated_routing_backend as deciders
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray.coordinated_routing_backend import (
    MAX_CALLS_IN_FLIGHT,
    CoordinatedRoutingBackend,
)
from sojourn_server.gateway.ray.coordinator_checkpoint import CheckpointWriter, CoordinatorCheckpoint
from sojourn_server.gateway.ray.engine_registry import EngineRegistry
from sojourn_server.gateway.ray.engine_supervisor import EngineSupervisor
from sojourn_server.metrics.rate_limited_log import LOG_INTERVAL_S, RateLimitedLog
from sojourn_server.policies.cluster_preset import ClusterPreset, parse_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_from_preset import build_routing_core
from test_gateway_ray_components import registration
from test_gateway_ray_coordination import AFFINE, Clock, Cluster, Wire, cluster

BEYOND = 10**30
"""More than msgpack has bytes for."""


@pytest.fixture
def frozen(monkeypatch: Any) -> None:
    """Clocks only go when they are moved: what is said now and then is said once, however long that takes."""
    monkeypatch.setattr(Clock, "__call__", lambda clock: clock.now)


# -- what cannot be written ---------------------------------------------------------


@pytest.mark.parametrize(
    "message",
    [
        m.ReportRequest("g", 1, 0, (routing_events.RequestReceived("r", "t", BEYOND),)),
        m.ReportRequest("g", 1, 0, (routing_events.RequestFinished("\ud800"),)),
        m.ReportRequest("g", 1, 0, (routing_events.RequestReceived("r", "t", object()),)),  # type: ignore[arg-type]
    ],
    ids=["integer", "text", "type"],
)
def test_a_message_that_has_no_bytes_is_an_error_of_its_own(message: m.ReportRequest) -> None:
    with pytest.raises(m.MessageEncodingError):
        m.encode_message(message)


async def test_that_is_no_reason_to_take_the_coordinator_for_away() -> None:
    from sojourn_server.gateway.ray.coordinator_actor import CoordinatorActorClient
    from sojourn_server.gateway.ray.ray_config import RayConfig

    with pytest.raises(m.MessageEncodingError):
        await CoordinatorActorClient(RayConfig(model="tiny")).report(
            m.ReportRequest("g", 1, 0, (routing_events.RequestFinished("r", BEYOND),))
        )


@pytest.mark.parametrize("knows_home", [False, True])
async def test_a_request_that_cannot_be_encoded_is_rejected_and_blocks_no_other(knows_home: bool) -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        decided: list[routing_events.AnyRoutingAction] = []
        if knows_home:
            await it.turn(gateway, "p")
        gateway.on_action = decided.append
        joins = gateway._join_number
        poison = it.ask(gateway, "p", output_tokens=BEYOND)
        innocent = it.ask(gateway, "q", tenant="other")
        refused = await asyncio.wait_for(poison.next(), 60)
        assert (refused.status, refused.code) == (400, "bad_request")
        assert "cannot be sent to the coordinator" in refused.message
        assert isinstance(await asyncio.wait_for(innocent.next(), 60), routing_events.SendRequest)
        assert decided[0] == refused
        assert (gateway.joined, gateway._join_number) == (True, joins)
        # While its client has not gone yet, others are told of to another coordinator.
        it.unix_s += 1.0
        it.coordinator = it.wire.coordinator = it.another()
        await it.engine("a")
        await until(lambda: gateway.joined and gateway.epoch == it.coordinator.epoch)
        assert it.coordinator.core.requests.by_id.keys() == {innocent.request_id}
        gateway.tell(routing_events.RequestFinished(poison.request_id))
        gateway.close(poison)
        assert isinstance(
            await asyncio.wait_for(it.ask(gateway, "late").next(), 60), routing_events.SendRequest
        )


@pytest.mark.usefixtures("frozen")
async def test_of_a_batch_only_the_unencodable_event_is_left_out(caplog: Any) -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()
        joins = gateway._join_number
        one, other = it.ask(gateway, "p"), it.ask(gateway, "q")
        for decisions in (one, other):
            await asyncio.wait_for(decisions.next(), 60)
        for name in ("e", "f"):
            gateway.tell(routing_events.ProgramEnded("\ud800", "t"))
            await gateway._flush_and_wait()
            gateway.tell(routing_events.ProgramEnded(name, "t"))
        gateway.tell(routing_events.RequestFinished(one.request_id, BEYOND, "a:1"))
        gateway.tell(routing_events.RequestFinished(other.request_id, 3, "a:1"))
        await gateway._flush_and_wait()
        assert await it.in_flight() == 0, "that it is over is told at least"
        assert {place.program_id: place.turns for place in await gateway.programs()} == {"p": 1, "q": 1}
        told = [fact for tell in it.wire.told for fact in tell.facts]
        assert [fact.program_id for fact in told if isinstance(fact, routing_events.ProgramEnded)] == [
            "e",
            "f",
        ]
        assert [tell.number for tell in it.wire.told] == list(range(len(it.wire.told)))
        assert gateway._join_number == joins
        assert caplog.text.count("ProgramEnded cannot be encoded") == 1


class BrokenWire(Wire):
    """Calls fail with something that nobody expects, as often as ``broken`` says."""

    broken = 0

    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        if self.broken and method in ("tell", "join"):
            self.broken -= 1
            raise RuntimeError("nobody expects this")
        return await super()._call(method, message, kind)


@pytest.mark.usefixtures("frozen")
async def test_any_other_error_of_a_call_is_taken_for_a_coordinator_that_is_away(
    caplog: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(deciders, "RETRY_S", 0.001)
    async with cluster("a", "b") as it:
        wire = it.wire = BrokenWire(it.coordinator)
        gateway = await it.gateway()
        wire.broken = 40
        decisions = it.ask(gateway, "p")
        assert isinstance(await asyncio.wait_for(decisions.next(), 60), routing_events.SendRequest)
        assert wire.broken == 0
        assert caplog.text.count(deciders.UNEXPECTED_RESPONSE) == 1
        assert caplog.text.count("programs with homes go on") == 1
        it.clock.now += LOG_INTERVAL_S
        wire.broken = 1
        it.ask(gateway, "q")
        await until(lambda: "39 more since" in caplog.text)


async def test_an_error_in_an_answer_is_repaired_by_joining_again() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        failing = [True]

        def decided(action: routing_events.AnyRoutingAction) -> None:
            if failing:
                failing.clear()
                raise RuntimeError("the books are broken")

        gateway.on_action = decided
        asked = [it.ask(gateway, f"p{number}") for number in range(5)]
        for decisions in asked:
            assert isinstance(await asyncio.wait_for(decisions.next(), 60), routing_events.SendRequest)
        await until(lambda: gateway.joined)
        assert gateway._join_number == 2


@pytest.mark.parametrize("exc_info", [False, True])
def test_a_repeated_line_is_logged_at_intervals_with_its_count(caplog: Any, exc_info: bool) -> None:
    now = [100.0]
    seldom = RateLimitedLog(logging.getLogger("test.seldom"), lambda: now[0], 10.0)
    for at in range(30):
        now[0] = 100.0 + at
        try:
            raise KeyError("x")
        except KeyError:
            seldom.log(logging.ERROR, "it failed at %d", at, exc_info=exc_info)
        seldom.log(logging.ERROR, "something else")
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("it")]
    more = " (9 more since the last one)"
    assert lines == ["it failed at 0", f"it failed at 10{more}", f"it failed at 20{more}"]
    assert ("KeyError" in caplog.text) is exc_info
    assert len(caplog.records) == 6


# -- engines that drain -------------------------------------------------------------


class Process:
    """Of an engine that is well."""

    engine_id = "a"
    code = None


async def test_an_engine_that_the_coordinator_does_not_know_is_not_ended_with_requests_on_it() -> None:
    async with cluster() as it:
        said: list[m.DrainResponse] = []

        class Ear(Wire):
            async def drain(self, drain: m.DrainRequest) -> m.DrainResponse:
                said.append(await super().drain(drain))
                return said[-1]

        supervisor = EngineSupervisor(Process(), Ear(it.coordinator), drain_s=600.0)  # type: ignore[arg-type]
        draining = asyncio.ensure_future(supervisor._drain_and_wait())
        await until(lambda: len(said) > 2)
        assert {(one.status, one.in_flight) for one in said} == {(m.ResponseStatus.JOIN, m.IN_FLIGHT_UNKNOWN)}
        gateway = CoordinatedRoutingBackend(it.wire, it.replicas, clock=it.clock)
        it.tasks.append(asyncio.ensure_future(gateway.run()))
        waiting = it.ask(gateway, "new")
        await until(lambda: gateway.joined and it.coordinator.core.waiting)
        await it.engine("a")
        await asyncio.wait_for(draining, 60)
        assert said[-1] == m.DrainResponse(it.coordinator.epoch, 0)
        assert [(place.health, place.takes_new) for place in gateway.places.values()] == [("draining", False)]
        assert not waiting.has_decision, "nobody is sent there in the moment in which it registers"
        await it.engine("b")
        assert (await asyncio.wait_for(waiting.next(), 60)).replica_id == "b:1"


async def test_another_life_of_an_engine_is_not_drained_for_the_one_before() -> None:
    async with cluster("b") as it:
        await it.wire.drain(m.DrainRequest("a"))
        await it.engine("a")
        await it.engine("a")
        health = {one.replica: one.health for one in (await it.wire.state()).replicas}
        assert health == {"a:1": "draining", "b:1": "up"}
        await it.engine("a", life="2")
        health = {one.replica: one.health for one in (await it.wire.state()).replicas}
        assert health == {"a:1": "up", "b:1": "up"}
        assert (await it.wire.drain(m.DrainRequest("a"))).status is m.ResponseStatus.OK
        health = {one.replica: one.health for one in (await it.wire.state()).replicas}
        assert health == {"a:1": "draining", "b:1": "up"}


async def test_all_ranks_of_an_engine_drain_and_those_that_come_later_too() -> None:
    async with cluster() as it:
        await it.engine("a", ranks=1)
        await it.wire.drain(m.DrainRequest("a"))
        await it.engine("a", ranks=3)
        assert {one.health for one in (await it.wire.state()).replicas} == {"draining"}


async def test_a_checkpoint_does_not_tell_an_engines_requests_in_flight(
    tmp_path: Path,
) -> None:
    async with cluster("a", checkpoint=tmp_path / "c") as it:
        gateway = await it.gateway()
        await it.turn(gateway, "p")
        running = it.ask(gateway, "p")
        await running.next()
        await it.written()
        it.coordinator = it.wire.coordinator = it.another()
        before_it_registers = await it.wire.drain(m.DrainRequest("a"))
        assert (before_it_registers.status, before_it_registers.in_flight) == (
            m.ResponseStatus.JOIN,
            m.IN_FLIGHT_UNKNOWN,
        )
        await it.engine("a")
        await until(lambda: gateway.joined and gateway.epoch == it.coordinator.epoch)
        assert await it.wire.drain(m.DrainRequest("a")) == m.DrainResponse(it.coordinator.epoch, 1)


async def test_a_superseded_coordinator_does_not_end_a_drain() -> None:
    async with cluster("a") as it:
        it.coordinator.deposed = True
        assert await it.wire.drain(m.DrainRequest("a")) == m.DrainResponse(
            it.coordinator.epoch, m.IN_FLIGHT_UNKNOWN, m.ResponseStatus.DEPOSED
        )


def test_that_an_engine_drains_is_forgotten_with_it() -> None:
    register = EngineRegistry()
    assert [register.drain("e"), register.drain("e"), register.drains("e")] == [True, False, True]
    register.put(registration("e", "a"))
    assert register.drains("e")
    assert register.has_registered("e")
    register.remove("e")
    assert not register.drains("e")
    assert not register.has_registered("e")


async def test_an_engine_that_never_registered_leaves_nothing_behind() -> None:
    async with cluster() as it:
        await it.wire.drain(m.DrainRequest("a"))
        await it.wire.engine_stopped(m.EngineStopped("a", "1", "stopped"))
        assert not it.coordinator.engines.drains("a")


# -- policies and the core ----------------------------------------------------------


class MadeUpFails:
    """Routes as another does, but for turns that nobody has asked about."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self.reads_prefixes = False

    def route(self, view: Any, *rest: Any) -> Any:
        if view.request_id.startswith("made-up"):
            raise ValueError("a policy's bug")
        return self._real.route(view, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def failing_preset() -> ClusterPreset:
    preset = parse_cluster_preset(AFFINE, source="test")
    object.__setattr__(preset, "routing", MadeUpFails(preset.routing))
    return preset


def test_a_policy_that_fails_at_a_made_up_turn_is_counted_and_gateways_ask() -> None:
    preset = failing_preset()
    core, register = build_routing_core(preset), EngineRegistry()
    entry = register.put(registration("e", "a"))
    core.take(registration_event("a:1", entry.places[0].description), 0.0)
    assert register.refresh_shown(core, preset.routing, 0.0)
    assert [one.direct for one in register.shown] == [False]
    assert core.counts.policy_failures == 1
    assert "a policy's bug" in core.counts.newest_policy_failure


async def test_time_goes_on_after_a_policy_that_fails_at_a_made_up_turn() -> None:
    async with cluster() as it:
        it.preset = failing_preset()
        it.coordinator = it.wire.coordinator = it.another()
        await it.engine("a")
        running = it.coordinator.begin()
        it.tasks.append(running)
        gateway = await it.gateway()
        counts = it.coordinator.core.counts
        before = counts.policy_failures
        await until(lambda: counts.policy_failures > before + 2)
        assert not running.done()
        assert isinstance(await asyncio.wait_for(it.ask(gateway, "p").next(), 60), routing_events.SendRequest)


@pytest.mark.usefixtures("frozen")
async def test_a_tick_that_fails_is_logged_now_and_then_and_others_follow(
    monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr("sojourn_server.gateway.ray.coordinator.TICK_S", 0.001)
    async with cluster("a") as it:
        ticks: list[int] = []

        def tick() -> None:
            ticks.append(1)
            raise KeyError("a bug")

        monkeypatch.setattr(it.coordinator, "tick", tick)
        running = it.coordinator.begin()
        await until(lambda: len(ticks) > 20)
        assert caplog.text.count("a tick failed") == 1
        it.clock.now += LOG_INTERVAL_S
        await until(lambda: caplog.text.count("a tick failed") == 2)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_that_a_coordinator_has_ended_is_logged(monkeypatch: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    async with cluster("a") as it:
        it.coordinator.deposed = True
        await asyncio.wait_for(it.coordinator.begin(), 60)
        await until(lambda: "it is superseded" in caplog.text)

        async def run() -> None:
            raise KeyError("a bug")

        monkeypatch.setattr(it.coordinator, "run", run)
        await asyncio.gather(it.coordinator.begin(), return_exceptions=True)
        await until(lambda: "it makes no progress" in caplog.text)
        assert "KeyError: 'a bug'" in caplog.text


def failing_at(it: Cluster, kind: type[routing_events.RoutingEvent], monkeypatch: Any) -> None:
    real = it.coordinator.core.take

    def take(fact: routing_events.AnyRoutingEvent, now: float) -> list[routing_events.AnyRoutingAction]:
        if isinstance(fact, kind):
            raise KeyError("a bug of the core's")
        return real(fact, now)

    monkeypatch.setattr(it.coordinator.core, "take", take)


@pytest.mark.usefixtures("frozen")
async def test_a_request_that_the_core_fails_at_is_refused(monkeypatch: Any, caplog: Any) -> None:
    async with cluster("a") as it:
        gateway, other = await it.gateway(), await it.gateway()
        failing_at(it, routing_events.RequestReceived, monkeypatch)
        asked = [it.ask(gateway, "p"), it.ask(gateway, "q"), it.ask(other, "r")]
        for decisions in asked:
            refused = await asyncio.wait_for(decisions.next(), 60)
            assert refused == routing_events.RejectRequest(
                decisions.request_id, 500, "gateway_failed", "the gateway failed; see its log"
            )
        assert caplog.text.count("the routing core failed at RequestReceived") == 1
        # So is one that a gateway says it has when it joins.
        late = routing_events.RequestReceived("late", "t", 10)
        answer = await it.coordinator.join(m.JoinRequest("g", 0, (late,)))
        assert [(type(one), getattr(one, "status", 0)) for one in answer.mail] == [
            (routing_events.RejectRequest, 500)
        ]


async def test_a_request_that_failed_and_that_the_core_fails_at_is_over(monkeypatch: Any) -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        waits, begun = it.ask(gateway, "p"), it.ask(gateway, "q")
        failing_at(it, routing_events.RequestFailed, monkeypatch)
        where = {
            decisions.request_id: (await asyncio.wait_for(decisions.next(), 60)).replica_id
            for decisions in (waits, begun)
        }
        gateway.tell(routing_events.FirstByteSent(begun.request_id, where[begun.request_id]))
        for decisions in (waits, begun):
            gateway.tell(routing_events.RequestFailed(decisions.request_id, where[decisions.request_id]))
        refused = await asyncio.wait_for(waits.next(), 60)
        assert (refused.status, refused.code) == (500, "gateway_failed")
        assert isinstance(await asyncio.wait_for(begun.next(), 60), routing_events.AbortStream)
        assert not waits.has_decision
        assert not begun.has_decision


@pytest.mark.usefixtures("frozen")
async def test_ticks_that_the_core_fails_at_are_logged_now_and_then(monkeypatch: Any, caplog: Any) -> None:
    async with cluster("a") as it:
        failing_at(it, routing_events.Tick, monkeypatch)
        for _ in range(50):
            it.coordinator.tick()
        assert caplog.text.count("the routing core failed at Tick") == 1
        it.clock.now += LOG_INTERVAL_S
        it.coordinator.tick()
        assert caplog.text.count("the routing core failed at Tick; please report this (49 more") == 1


async def test_requests_that_the_core_fails_to_end_have_no_owner(monkeypatch: Any) -> None:
    async with cluster("a") as it:
        await it.coordinator.join(m.JoinRequest("g", 0, (routing_events.RequestReceived("r", "t", 10),)))
        failing_at(it, routing_events.RequestFinished, monkeypatch)
        await it.coordinator.tell(
            m.ReportRequest("g", it.coordinator.epoch, 0, (routing_events.RequestFinished("r"),))
        )
        box = it.coordinator.post.box("g")
        assert box is not None
        assert box.requests == set()


async def test_a_checkpoint_that_cannot_be_made_is_not_the_last_one(tmp_path: Path, caplog: Any) -> None:
    made: list[int] = []

    def copy() -> Generator[None, None, CoordinatorCheckpoint]:
        yield
        made.append(len(made))
        if len(made) < 5:
            raise KeyError("a bug")
        number = BEYOND if len(made) < 10 else 7
        return CoordinatorCheckpoint(epoch=1, unix_s=number, core=None, engines={})

    it = CheckpointWriter(tmp_path / "c", 0.001, copy, lambda epoch: None)
    running = asyncio.ensure_future(it.run())
    await until(lambda: it.is_current)
    running.cancel()
    assert len(made) == 10
    assert 1 <= caplog.text.count("no checkpoint can be made") < 9


# -- gateways that join anew --------------------------------------------------------


async def test_a_batch_from_before_a_gateway_joined_anew_is_not_taken_for_a_new_one() -> None:
    async with cluster("a") as it:
        there = it.coordinator
        epoch = there.epoch
        await there.join(m.JoinRequest("g", 0, join=1))
        await there.tell(
            m.ReportRequest("g", epoch, 0, (routing_events.RequestReceived("r0", "t", 10),), join=1)
        )
        await there.join(m.JoinRequest("g", epoch, (routing_events.RequestReceived("r0", "t", 10),), join=2))
        stale = asyncio.ensure_future(
            there.tell(m.ReportRequest("g", epoch, 1, (routing_events.RequestFinished("nobody"),), join=1))
        )
        await asyncio.sleep(0)
        for number in range(2):
            asked = routing_events.RequestReceived(f"new{number}", "t", 10)
            answer = await there.tell(m.ReportRequest("g", epoch, number, (asked,), join=2))
            assert answer.status is m.ResponseStatus.OK
        assert there.core.requests.by_id.keys() == {"r0", "new0", "new1"}
        assert (await stale).status is m.ResponseStatus.JOIN
        assert (await there.listen(m.PollRequest("g", epoch, 0, -1, -1, 1))).status is m.ResponseStatus.JOIN


async def test_a_batch_that_waited_for_those_before_it_is_not_taken_in_after_a_new_join() -> None:
    async with cluster("a") as it:
        there = it.coordinator
        epoch = there.epoch
        await there.join(m.JoinRequest("g", 0, join=1))
        early = asyncio.ensure_future(
            there.tell(
                m.ReportRequest("g", epoch, 1, (routing_events.RequestReceived("early", "t", 10),), join=1)
            )
        )
        await asyncio.sleep(0)
        assert not early.done()
        # It is its turn, and before it goes on the gateway has joined anew.
        await there.tell(m.ReportRequest("g", epoch, 0, (), join=1))
        await there.join(m.JoinRequest("g", epoch, join=2))
        assert (await asyncio.wait_for(early, 60)).status is m.ResponseStatus.JOIN
        assert "early" not in there.core.requests.by_id


async def test_a_join_that_a_later_one_has_overtaken_changes_nothing() -> None:
    async with cluster("a") as it:
        there = it.coordinator
        asked = routing_events.RequestReceived("r", "t", 10)
        await there.join(m.JoinRequest("g", 0, (asked,), join=2))
        box = there.post.box("g")
        assert (await there.join(m.JoinRequest("g", 0, (), join=1))).status is m.ResponseStatus.JOIN
        assert there.post.box("g") is box
        assert "r" in there.core.requests.by_id
        assert (await there.join(m.JoinRequest("g", 0, (asked,), join=3))).status is m.ResponseStatus.OK


async def test_a_gateways_messages_have_the_number_of_its_join() -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()
        await it.turn(gateway, "p")
        gateway._mark_disconnected()
        await until(lambda: gateway.joined)
        await it.turn(gateway, "q")
        await gateway._flush_and_wait()
        box = it.coordinator.post.box(gateway.gateway_id)
        assert box is not None
        assert (box.join, {tell.join for tell in it.wire.told}) == (2, {1, 2})


class HangingWire(Wire):
    """What is told while ``hangs`` is never answered."""

    hangs = False

    async def report(self, report: m.ReportRequest) -> m.CoordinatorResponse:
        if self.hangs:
            await asyncio.Event().wait()
        return await super().report(report)


async def test_calls_to_a_superseded_coordinator_block_nothing(monkeypatch: Any) -> None:
    async with cluster("a", "b") as it:
        wire = it.wire = HangingWire(it.coordinator)
        gateway = await it.gateway()
        wire.hangs = True
        hanging = []
        for number in range(MAX_CALLS_IN_FLIGHT):
            hanging.append(it.ask(gateway, f"p{number}"))
            await until(lambda: len(gateway._sends) == len(hanging))
        wire.hangs = False
        gateway._mark_disconnected()
        await until(lambda: gateway.joined)
        for decisions in hanging:
            assert isinstance(await asyncio.wait_for(decisions.next(), 60), routing_events.SendRequest)
        # Asked at once, not with what is told from time to time.
        monkeypatch.setattr(deciders, "BATCH_S", 3600.0)
        assert isinstance(
            await asyncio.wait_for(it.ask(gateway, "new").next(), 60), routing_events.SendRequest
        )
        assert len(gateway._sends) <= 1


async def test_a_gateway_that_ends_leaves_no_call_behind() -> None:
    async with cluster("a", "b") as it:
        wire = it.wire = HangingWire(it.coordinator)
        gateway = await it.gateway()
        others = asyncio.all_tasks() - set(it.tasks)
        wire.hangs = True
        for number in range(MAX_CALLS_IN_FLIGHT):
            it.ask(gateway, f"p{number}")
            await until(lambda: len(gateway._sends) == number + 1)  # noqa: B023
        it.ask(gateway, "urgent")
        gateway.tell(routing_events.ProgramEnded("p", "t"))
        it.tasks[0].cancel()
        await asyncio.gather(*it.tasks, return_exceptions=True)
        assert (gateway._flush_later, gateway._flush_next) == (None, None)
        gateway.probed("a:1", "1", True)
        it.ask(gateway, "late")
        assert (gateway.joined, gateway._sends) == (False, set())
        await until(lambda: asyncio.all_tasks() <= others | {asyncio.current_task()})
        # What was not told yet is, by whoever goes on.
        wire.hangs = False
        it.tasks = [asyncio.ensure_future(gateway.run())]
        await until(lambda: gateway.joined)
        assert len(it.coordinator.core.requests.by_id) == MAX_CALLS_IN_FLIGHT + 2


async def test_a_gateway_that_is_ended_while_an_answer_comes_ends() -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()

        class Ends(Wire):
            async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
                if method == "join":
                    # The answer is there, and whoever waits for it has not gone on yet.
                    asyncio.get_running_loop().call_soon(running.cancel)
                return await super()._call(method, message, kind)

        it.tasks[0].cancel()
        await asyncio.gather(*it.tasks, return_exceptions=True)
        gateway._calls = Ends(it.coordinator)
        running = it.tasks[0] = asyncio.ensure_future(gateway.run())
        await asyncio.wait({running}, timeout=60)
        assert running.cancelled()


# -- messages -----------------------------------------------------------------------


def test_what_travels_is_written_so() -> None:
    asked = routing_events.RequestReceived("r", "t", 10, program_id="p")
    written = {
        "join": m.encode_message(m.JoinRequest("g", 5, (asked,), 2)),
        "tell": m.encode_message(
            m.ReportRequest("g", 5, 1, (routing_events.RequestFinished("r", 3, "a"),), acked=4, join=2)
        ),
        "listen": m.encode_message(m.PollRequest("g", 5, 4, 7, 8, 2)),
        "drained": m.encode_message(m.DrainResponse(5, m.IN_FLIGHT_UNKNOWN, m.ResponseStatus.JOIN)),
    }
    assert {name: msgspec.msgpack.decode(data) for name, data in written.items()} == {
        "join": {
            "gateway_id": "g",
            "seen_epoch": 5,
            "requests": [
                {
                    "fact": "Asked",
                    "request_id": "r",
                    "tenant": "t",
                    "context_tokens": 10,
                    "program_id": "p",
                }
            ],
            "join": 2,
        },
        "tell": {
            "gateway_id": "g",
            "epoch": 5,
            "number": 1,
            "facts": [{"fact": "Ended", "request_id": "r", "output_tokens": 3, "replica_id": "a"}],
            "probes": [],
            "acked": 4,
            "places_version": -1,
            "join": 2,
        },
        "listen": {
            "gateway_id": "g",
            "epoch": 5,
            "acked": 4,
            "version": 7,
            "places_version": 8,
            "join": 2,
            "settings": "",
            "checkpoint": "",
        },
        "drained": {"epoch": 5, "in_flight": -1, "status": "join"},
    }


async def test_gateways_without_join_numbers_are_still_accepted() -> None:
    """A coordinator lives on while gateways are replaced one by one."""
    old_join = m.decode_message(msgspec.msgpack.encode({"gateway_id": "g", "seen_epoch": 0}), m.JoinRequest)
    async with cluster("a") as it:
        epoch = it.coordinator.epoch
        for _ in range(2):
            assert (await it.coordinator.join(old_join)).status is m.ResponseStatus.OK
        told = {"gateway_id": "g", "epoch": epoch, "number": 0, "facts": []}
        answer = await it.coordinator.tell(m.decode_message(msgspec.msgpack.encode(told), m.ReportRequest))
        assert answer.status is m.ResponseStatus.OK


counts = st.integers(-(2**63), 2**64 - 1)
words = st.text(max_size=8)
some_facts = st.one_of(
    st.builds(
        routing_events.RequestReceived,
        words,
        words,
        counts,
        program_id=st.none() | words,
        output_tokens=counts,
    ),
    st.builds(routing_events.RequestSent, words, words, words, counts, began=st.booleans()),
    st.builds(routing_events.FirstByteSent, words, words),
    st.builds(routing_events.RequestFinished, words, counts, st.none() | words),
    st.builds(routing_events.RequestFailed, words, words, st.booleans()),
    st.builds(routing_events.ProgramEnded, words, words),
    st.builds(routing_events.ReplicaDrainStarted, words),
)


@settings(max_examples=40)
@given(words, counts, counts, st.lists(some_facts, max_size=4), counts)
def test_what_can_be_written_is_read_as_it_was(
    name: str, epoch: int, number: int, said: list[routing_events.AnyRoutingEvent], join: int
) -> None:
    tell = m.ReportRequest(name, epoch, number, tuple(said), acked=number, join=join)
    assert m.decode_message(m.encode_message(tell), m.ReportRequest) == tell
