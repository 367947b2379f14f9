"""Events about no request survive a coordinator that dies or hangs with them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_harness import until
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray import open_requests
from sojourn_server.gateway.ray.coordinated_routing_backend import CoordinatedRoutingBackend
from sojourn_server.gateway.ray.coordinator_messages import REQUESTLESS_EVENTS, CoordinatorUnavailable
from sojourn_server.gateway.ray.open_requests import UnconfirmedEvents
from sojourn_server.routing import routing_events
from test_gateway_ray_coordination import Cluster, Wire, cluster

ENDED = routing_events.ProgramEnded("p", "t")
DRAINED = routing_events.ReplicaDrainStarted("b:1")
STAYS = routing_events.ReplicaDrainCancelled("b:1")
DROPPED = routing_events.KvDropped("q", "t", "a:1")


class LossyWire(Wire):
    """Calls with events are not answered while ``fault`` is set."""

    fault = ""
    """``hangs``: nothing happens; ``dies``: the call fails; ``answer lost``: the call fails after the
    coordinator has processed the events."""
    lost = 0
    """Number of calls that were not answered."""

    async def report(self, report: m.ReportRequest) -> m.CoordinatorResponse:
        if not self.fault:
            return await super().report(report)
        self.lost += 1
        if self.fault == "hangs":
            await asyncio.Event().wait()
        if self.fault == "answer lost":
            await super().report(report)
        raise CoordinatorUnavailable("it ended")


def requestless(wire: Wire) -> list[routing_events.AnyRoutingEvent]:
    return [fact for tell in wire.told for fact in tell.facts if isinstance(fact, REQUESTLESS_EVENTS)]


def lossy(it: Cluster, fault: str) -> LossyWire:
    wire = it.wire = LossyWire(it.coordinator)
    wire.fault = fault
    return wire


async def disconnect(gateway: CoordinatedRoutingBackend, wire: LossyWire) -> None:
    """Have the gateway lose the coordinator, and join one that answers."""
    wire.fault = ""
    gateway._mark_disconnected()
    await until(lambda: gateway.joined)


async def test_events_in_hanging_calls_are_reported_again_in_their_order() -> None:
    async with cluster("a", "b") as it:
        wire = lossy(it, "hangs")
        gateway = await it.gateway()
        for number, event in enumerate((ENDED, DRAINED)):
            gateway.tell(event)
            gateway.tell(routing_events.RequestFinished(f"over{number}"))
            await until(lambda: wire.lost == number + 1)  # noqa: B023
        gateway.tell(DROPPED)
        gateway.tell(STAYS)
        it.unix_s += 1.0
        it.coordinator = wire.coordinator = it.another()
        await disconnect(gateway, wire)
        await gateway._flush_and_wait()
        assert requestless(wire) == [ENDED, DRAINED, DROPPED, STAYS]
        assert not [f for t in wire.told for f in t.facts if isinstance(f, routing_events.RequestFinished)]


async def test_events_in_a_call_that_fails_are_reported_again() -> None:
    async with cluster("a", "b") as it:
        wire = lossy(it, "dies")
        gateway = await it.gateway()
        gateway.tell(ENDED)
        gateway.tell(DRAINED)
        await until(lambda: wire.lost)
        wire.fault = ""
        await until(lambda: gateway.joined and requestless(wire) == [ENDED, DRAINED])
        health = {one.replica: one.health for one in await gateway.replicas()}
        assert health == {"a:1": "up", "b:1": "draining"}
        await disconnect(gateway, wire)
        await gateway._flush_and_wait()
        assert requestless(wire) == [ENDED, DRAINED], "they were confirmed"


async def test_events_of_a_coordinator_that_wants_a_join_are_reported_again() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        it.unix_s += 1.0
        it.coordinator = it.another()
        await it.coordinator.register(it.registration("a"))
        it.wire.coordinator = it.coordinator  # the gateway does not know it yet
        gateway.tell(ENDED)
        gateway._flush()
        await until(lambda: gateway.joined and gateway.epoch == it.coordinator.epoch)
        await gateway._flush_and_wait()
        assert requestless(it.wire) == [ENDED, ENDED], "the first time it was not processed"


async def test_events_that_were_processed_already_change_nothing_more() -> None:
    async with cluster("a", "b") as it:
        wire = lossy(it, "")
        gateway = await it.gateway()
        for name in ("p", "q"):
            await it.turn(gateway, name)
        await gateway._flush_and_wait()
        home = gateway.home("t", "q")
        assert home is not None
        dropped = routing_events.KvDropped("q", "t", home)
        wire.fault = "answer lost"
        for event in (ENDED, DRAINED, dropped):
            gateway.tell(event)
        await until(lambda: wire.lost)
        wire.fault = ""
        await until(lambda: requestless(wire) == [ENDED, DRAINED, dropped] * 2)
        assert [(one.program_id, one.replica) for one in await gateway.programs()] == [("q", None)]
        health = {one.replica: one.health for one in await gateway.replicas()}
        assert health == {"a:1": "up", "b:1": "draining"}


async def test_a_gateway_that_ends_keeps_events_of_its_calls() -> None:
    async with cluster("a", "b") as it:
        wire = lossy(it, "hangs")
        gateway = await it.gateway()
        gateway.tell(ENDED)
        await until(lambda: wire.lost)
        it.tasks[0].cancel()
        await asyncio.gather(*it.tasks, return_exceptions=True)
        wire.fault = ""
        it.tasks = [asyncio.ensure_future(gateway.run())]
        await until(lambda: requestless(wire) == [ENDED])


def ends(*names: str) -> list[Any]:
    return [routing_events.ProgramEnded(name, "t") for name in names]


def test_what_is_kept_is_bounded_and_the_oldest_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MAX_BUFFERED_EVENTS", 4)
    it = UnconfirmedEvents()
    for number, names in enumerate(("ab", "cd")):
        it.waiting += ends(*names)
        it.sent(number, it.take())
    it.confirm(0)
    it.confirm(0)
    it.waiting += [*ends("e"), routing_events.RequestFinished("r"), *ends("f", "g")]
    it.take_back()
    assert it.waiting == ends("c", "d", "e", "f")
    it.keep(ends("h")[0])
    it.take_back()
    assert it.waiting == ends("c", "d", "e", "f")
