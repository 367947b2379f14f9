"""Gateways and one coordinator without Ray: who decides, and what happens while nobody can be asked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest
from gateway_harness import until
from sojourn_server.gateway.http import status_routes
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.gateway_app import Gateway, GatewayOptions
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses
from sojourn_server.gateway.http.tenant_keys import TenantKeys
from sojourn_server.gateway.ray import coordinator
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray.coordinated_routing_backend import CoordinatedRoutingBackend
from sojourn_server.gateway.ray.coordinator import Coordinator
from sojourn_server.gateway.ray.coordinator_checkpoint import (
    CoordinatorOptions,
    read_checkpoint,
    read_checkpoint_epoch,
)
from sojourn_server.gateway.ray.coordinator_messages import CoordinatorClient, CoordinatorUnavailable
from sojourn_server.gateway.ray.engine_registry import VOTE_TIMEOUT_S
from sojourn_server.gateway.ray.message_router import GATEWAY_LEASE_S
from sojourn_server.gateway.ray.open_requests import MAX_WAIT_WITHOUT_REPLICA_S
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_limits import RoutingLimits

AFFINE = 'routing = "session-affinity"'


class Clock:
    """Goes as clocks do, but for when it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._began_s = time.monotonic()

    def __call__(self) -> float:
        return self.now + time.monotonic() - self._began_s


class Wire(CoordinatorClient):
    """Calls of the coordinator that is there now, through the bytes that would travel."""

    def __init__(self, coordinator: Coordinator | None) -> None:
        self.coordinator = coordinator
        self.told: list[m.ReportRequest] = []

    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        if self.coordinator is None:
            raise CoordinatorUnavailable("nobody is there")
        there = self.coordinator
        call = getattr(there, method)
        answer = await (
            call(m.decode_message(m.encode_message(message), type(message)))
            if message is not None
            else call()
        )
        if self.coordinator is not there:
            raise CoordinatorUnavailable("it ended meanwhile")
        return m.decode_message(m.encode_message(answer), kind)

    async def report(self, report: m.ReportRequest) -> m.CoordinatorResponse:
        self.told.append(report)
        return await super().report(report)


class Cluster:
    """A coordinator, the gateways that ask it, and engines that exist in name only."""

    def __init__(
        self, clock: Clock, checkpoint: Path | None, preset: str, limits: RoutingLimits | None = None
    ) -> None:
        self.clock = clock
        self.limits = limits or RoutingLimits()
        self.preset = parse_cluster_preset(preset, source="test")
        self.options = CoordinatorOptions(checkpoint=checkpoint, checkpoint_s=0.01)
        self.unix_s = 5_000.0
        self.tasks: list[asyncio.Task[None]] = []
        self.coordinator = self.another()
        self.wire = Wire(self.coordinator)
        self.requests = 0
        self.replicas = ReplicaAddresses()
        """As the newest gateway keeps them."""

    def another(self) -> Coordinator:
        """One that takes over from the checkpoint."""
        return Coordinator(self.preset, self.limits, self.options, clock=self.clock, wall=lambda: self.unix_s)

    def registration(self, name: str, life: str = "1", **more: Any) -> m.EngineRegistration:
        """The registration of an engine that has not heard of a coordinator yet."""
        of = {"ranks": 1, "capacity_tokens": 10_000, "host_tokens": 0, "max_running": 0, **more}
        described = EngineDescription(
            instance=life, max_context_tokens=0, shares_disk=False, speaks_sojourn=True, **of
        )
        return m.EngineRegistration(name, f"http://{name}:1", described)

    async def engine(self, name: str, life: str = "1", **more: Any) -> m.RegistrationResponse:
        """Register an engine with the present coordinator."""
        return await self.wire.register(self.registration(name, life, **more))

    async def gateway(self, **more: Any) -> CoordinatedRoutingBackend:
        """One more, that has joined."""
        self.replicas = ReplicaAddresses()
        routing_backend = CoordinatedRoutingBackend(self.wire, self.replicas, clock=self.clock, **more)
        self.tasks.append(asyncio.ensure_future(routing_backend.run()))
        await until(lambda: routing_backend.joined and routing_backend.places)
        return routing_backend

    def ask(
        self, routing_backend: CoordinatedRoutingBackend, program: str | None, tenant: str = "t", **more: Any
    ) -> Any:
        """Ask for a request of 100 tokens; its ticket."""
        self.requests += 1
        return routing_backend.open(
            routing_events.RequestReceived(f"r{self.requests}", tenant, 100, program_id=program, **more)
        )

    async def turn(self, routing_backend: CoordinatedRoutingBackend, program: str, tenant: str = "t") -> str:
        """A whole turn; where it was."""
        decisions = self.ask(routing_backend, program, tenant)
        sent = await asyncio.wait_for(decisions.next(), 60)
        assert isinstance(sent, routing_events.SendRequest)
        routing_backend.tell(routing_events.FirstByteSent(decisions.request_id, sent.replica_id))
        routing_backend.tell(
            routing_events.RequestFinished(decisions.request_id, 5, replica_id=sent.replica_id)
        )
        routing_backend.close(decisions)
        return sent.replica_id

    async def in_flight(self) -> int:
        return sum(one.in_flight for one in (await self.wire.state()).replicas)

    async def written(self) -> None:
        """Until the checkpoint is of everything that was told."""
        checkpoints = self.coordinator.checkpoints
        assert checkpoints is not None
        run = asyncio.ensure_future(checkpoints.run())
        await until(lambda: checkpoints.is_current)
        run.cancel()


@asynccontextmanager
async def cluster(
    *engines: str, checkpoint: Path | None = None, preset: str = AFFINE, limits: RoutingLimits | None = None
) -> AsyncIterator[Cluster]:
    async with running(Cluster(Clock(), checkpoint, preset, limits), engines) as made:
        yield made


AnyCluster = TypeVar("AnyCluster", bound=Cluster)


@asynccontextmanager
async def running(made: AnyCluster, engines: Iterable[str]) -> AsyncIterator[AnyCluster]:
    """A cluster with these engines, until its gateways have ended."""
    patched = pytest.MonkeyPatch()
    # A poll of a coordinator that was replaced ends only then.
    patched.setattr(coordinator, "LONG_POLL_S", 0.3)
    try:
        for name in engines:
            await made.engine(name)
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        patched.undo()


async def test_a_known_home_is_used_without_asking_and_reported_afterwards() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        home = await it.turn(gateway, "p")
        decisions = it.ask(gateway, "p")
        assert decisions.has_decision  # before anything could have been asked
        sent = await decisions.next()
        assert (sent.replica_id, sent.reason) == (home, "home")
        await until(
            lambda: any(
                isinstance(f, routing_events.RequestSent) for tell in it.wire.told for f in tell.facts
            )
        )
        await until(it.in_flight)
        gateway.tell(routing_events.RequestFinished(decisions.request_id, replica_id=home))

        async def over() -> bool:
            return not await it.in_flight()

        await until(over)
        assert (await gateway.programs())[0].turns == 2


async def test_another_gateway_learns_of_homes() -> None:
    async with cluster("a", "b") as it:
        one, other = await it.gateway(), await it.gateway()
        told: list[Any] = []
        other.on_affinity_change = lambda key, home: told.append((key, home[0]))
        home = await it.turn(one, "p")
        await until(lambda: other.home("t", "p") == home)
        assert told == [(("t", "p"), home)]
        assert other.home("u", "p") is None, "another tenant's program of this id is another one"
        assert await it.turn(other, "p") == home
        one.tell(routing_events.ProgramEnded("p", "t"))
        await until(lambda: other.home("t", "p") is None)


async def test_policies_that_do_not_keep_turns_at_home_are_always_asked() -> None:
    for preset, direct in ((AFFINE, True), ('routing = "round-robin"', False), ('routing = "random"', False)):
        async with cluster("a", "b", preset=preset) as it:
            gateway = await it.gateway()
            assert {place.direct for place in gateway.places.values()} == {direct}


class SlowWire(Wire):
    """What is told arrives once ``arrives`` is set."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.arrives = asyncio.Event()
        self.on_their_way = self.most_on_their_way = 0

    async def report(self, report: m.ReportRequest) -> m.CoordinatorResponse:
        self.on_their_way += 1
        self.most_on_their_way = max(self.most_on_their_way, self.on_their_way)
        await self.arrives.wait()
        self.on_their_way -= 1
        return await super().report(report)


async def test_simultaneous_requests_go_in_one_message_and_do_not_wait_for_a_slow_call() -> None:
    async with cluster("a", "b") as it:
        wire = it.wire = SlowWire(it.coordinator)
        gateway = await it.gateway()
        first = [it.ask(gateway, f"p{number}") for number in range(50)]
        await until(lambda: wire.on_their_way == 1)
        second = [it.ask(gateway, f"q{number}") for number in range(50)]
        await until(lambda: wire.on_their_way == 2)
        # With two calls on their way the next goes with what is told from time to time, were they never
        # answered.
        third = [it.ask(gateway, f"r{number}") for number in range(50)]
        await until(lambda: wire.on_their_way == 3)
        wire.arrives.set()
        for decisions in (*first, *second, *third):
            assert isinstance(await asyncio.wait_for(decisions.next(), 60), routing_events.SendRequest)
        asked = [
            sum(isinstance(fact, routing_events.RequestReceived) for fact in tell.facts) for tell in wire.told
        ]
        assert sum(asked) == 150
        assert max(asked) == 50
        assert wire.most_on_their_way == 3


async def test_a_full_replica_is_asked_about() -> None:
    async with cluster("a", preset=f"{AFFINE}\nsend_below_load = 0.015") as it:
        gateway = await it.gateway()
        await it.turn(gateway, "p")
        first, second = it.ask(gateway, "p"), it.ask(gateway, "p")
        await first.next()
        await second.next()
        replica = it.coordinator.core.fleet.get("a:1")
        assert replica is not None
        await until(lambda: replica.in_flight.keys() == {"r2", "r3"})
        it.coordinator.tick()
        await until(lambda: not gateway.places["a:1"].direct)
        third = it.ask(gateway, "p")
        assert not third.has_decision
        gateway.tell(routing_events.RequestFinished(first.request_id, replica_id="a:1"))
        gateway.tell(routing_events.RequestFinished(second.request_id, replica_id="a:1"))
        assert isinstance(await asyncio.wait_for(third.next(), 60), routing_events.SendRequest)


# -- the coordinator does not answer --------------------------------------------------------


async def test_while_it_is_away_known_homes_go_on_and_new_programs_are_placed_here() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway(fallback_s=3.0)
        home = await it.turn(gateway, "p")
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        assert await it.turn(gateway, "p") == home
        new = [it.ask(gateway, f"n{number}") for number in range(4)]
        await asyncio.sleep(0.6)
        assert not any(decisions.has_decision for decisions in new)
        it.clock.now += 3.0
        sent = [await asyncio.wait_for(decisions.next(), 60) for decisions in new]
        assert sorted(one.replica_id for one in sent) == ["a:1", "a:1", "b:1", "b:1"]
        assert {one.reason for one in sent} == {"coordinator_away"}
        # And where they are is told to the next one.
        it.coordinator = it.wire.coordinator = it.another()
        await it.engine("a")
        await it.engine("b")
        await until(lambda: gateway.joined)
        assert await it.in_flight() == 4
        placed = {place.program_id: place.replica for place in await gateway.programs()}
        assert placed == {f"n{number}": one.replica_id for number, one in enumerate(sent)}


async def test_while_it_is_away_failed_requests_go_elsewhere_three_times() -> None:
    async with cluster("a", "b", "c", "d") as it:
        gateway = await it.gateway()
        home = await it.turn(gateway, "p")
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        decisions = it.ask(gateway, "p")
        been = []
        for _ in range(3):
            sent = await asyncio.wait_for(decisions.next(), 60)
            been.append(sent.replica_id)
            gateway.tell(routing_events.RequestFailed(decisions.request_id, sent.replica_id))
        assert been[0] == home
        assert len(set(been)) == 3
        refused = await asyncio.wait_for(decisions.next(), 60)
        assert (refused.status, refused.code) == (502, "replicas_failed")
        begun = it.ask(gateway, "p")
        sent = await begun.next()
        gateway.tell(routing_events.FirstByteSent(begun.request_id, sent.replica_id))
        gateway.tell(routing_events.RequestFailed(begun.request_id, sent.replica_id))
        assert isinstance(await asyncio.wait_for(begun.next(), 60), routing_events.AbortStream)


async def test_what_was_placed_here_while_it_was_away_goes_elsewhere_once_its_engine_is_gone() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway(fallback_s=0.0)
        it.wire.coordinator = None
        decisions = it.ask(gateway, "p")
        first = await asyncio.wait_for(decisions.next(), 60)
        assert first.reason == "coordinator_away"
        it.wire.coordinator = it.coordinator
        await until(lambda: gateway.joined)
        # The engine's supervisor reports its end before the gateway does.
        await it.coordinator.gone(m.EngineStopped(first.replica_id.removesuffix(":1"), "1", "it ended"))
        await until(lambda: first.replica_id not in gateway.places)
        gateway.tell(routing_events.RequestFailed(decisions.request_id, first.replica_id))
        second = await asyncio.wait_for(decisions.next(), 60)
        assert isinstance(second, routing_events.SendRequest)
        assert second.replica_id != first.replica_id


async def test_while_it_is_away_the_time_at_a_lost_engine_is_no_time_of_waiting() -> None:
    async with cluster("a") as it:
        gateway = await it.gateway(fallback_s=0.0)
        decisions = it.ask(gateway, "p")
        sent = await asyncio.wait_for(decisions.next(), 60)
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        it.clock.now += 100.0
        gateway.tell(routing_events.RequestFailed(decisions.request_id, sent.replica_id))
        assert not decisions.has_decision, "it ran for 100 s and waits since then"
        it.clock.now += MAX_WAIT_WITHOUT_REPLICA_S
        refused = await asyncio.wait_for(decisions.next(), 60)
        assert refused.code == "coordinator_away"


class HeldWire(Wire):
    """The answer to a call comes once the event of its method in ``answers`` is set."""

    def __init__(self, coordinator: Coordinator) -> None:
        super().__init__(coordinator)
        self.answers: dict[str, asyncio.Event] = {}
        self.held = 0
        """Number of answers that had to wait."""

    async def _call(self, method: str, message: Any, kind: type[m.Message]) -> m.Message:
        answer = await super()._call(method, message, kind)
        if method in self.answers:
            self.held += 1
            await self.answers[method].wait()
        return answer


@pytest.mark.parametrize("waited", [True, False])
async def test_what_is_placed_here_while_a_join_is_on_its_way_goes_elsewhere_too(waited: bool) -> None:
    async with cluster("a", "b") as it:
        wire = it.wire = HeldWire(it.coordinator)
        gateway = await it.gateway(fallback_s=3600.0)
        wire.coordinator = None
        await until(lambda: not gateway.joined)
        gateway._fallback_s = 3600.0 if waited else 0.0
        decisions = it.ask(gateway, "p") if waited else None  # the join reports it
        wire.answers["join"] = asyncio.Event()
        wire.coordinator = it.coordinator
        await until(lambda: wire.held)
        gateway._fallback_s = 0.0
        decisions = decisions or it.ask(gateway, "p")
        first = await asyncio.wait_for(decisions.next(), 60)
        assert first.reason == "coordinator_away"
        wire.answers.pop("join").set()
        await until(lambda: gateway.joined)
        await gateway._flush_and_wait()
        assert not decisions.has_decision, "what was decided before this was reported does not count"
        sent = it.coordinator.core.sent_request(decisions.request_id)
        assert sent is not None
        assert sent.replica_id == first.replica_id
        # The engine's supervisor reports its end before the gateway does.
        await it.coordinator.gone(m.EngineStopped(first.replica_id.removesuffix(":1"), "1", "it ended"))
        await until(lambda: first.replica_id not in gateway.places)
        gateway.tell(routing_events.RequestFailed(decisions.request_id, first.replica_id))
        second = await asyncio.wait_for(decisions.next(), 60)
        assert isinstance(second, routing_events.SendRequest)
        assert second.replica_id != first.replica_id


async def test_a_decision_that_overtakes_the_answer_to_a_report_is_not_lost() -> None:
    async with cluster("a", "b") as it:
        wire = it.wire = HeldWire(it.coordinator)
        gateway = await it.gateway(fallback_s=0.0)
        wire.coordinator = None
        await until(lambda: not gateway.joined)
        wire.answers = {"join": asyncio.Event(), "tell": asyncio.Event()}
        wire.coordinator = it.coordinator
        await until(lambda: wire.held)
        decisions = it.ask(gateway, "p")
        first = await asyncio.wait_for(decisions.next(), 60)
        wire.answers.pop("join").set()
        await until(lambda: it.coordinator.core.is_open(decisions.request_id))
        await it.coordinator.gone(m.EngineStopped(first.replica_id.removesuffix(":1"), "1", "it ended"))
        await until(lambda: first.replica_id not in gateway.places)
        wire.answers.pop("tell").set()
        await gateway._flush_and_wait()
        gateway.tell(routing_events.RequestFailed(decisions.request_id, first.replica_id))
        second = await asyncio.wait_for(decisions.next(), 60)
        assert isinstance(second, routing_events.SendRequest)
        assert second.replica_id != first.replica_id


async def test_a_restart_keeps_homes_and_sent_and_waiting_requests(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    async with cluster("a", "b", checkpoint=path, preset=f"{AFFINE}\nsend_below_load = 0.05") as it:
        gateway = await it.gateway()
        homes = {f"p{number}": await it.turn(gateway, f"p{number}") for number in range(20)}
        running = [it.ask(gateway, f"p{number}") for number in range(10)]
        for decisions in running:
            sent = await asyncio.wait_for(decisions.next(), 60)
            gateway.tell(routing_events.FirstByteSent(decisions.request_id, sent.replica_id))
        waiting = [it.ask(gateway, f"w{number}") for number in range(12)]
        await until(lambda: it.coordinator.core.waiting > 0)
        waits = {decisions.request_id for decisions in waiting if not decisions.has_decision}
        await it.written()
        old = it.coordinator
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        it.unix_s += 1.0
        it.coordinator = it.wire.coordinator = it.another()
        assert it.coordinator.epoch > old.epoch
        assert it.coordinator.restored >= 20
        await until(lambda: gateway.joined and gateway.epoch == it.coordinator.epoch)
        core = it.coordinator.core
        assert {name for name, one in core.requests.by_id.items() if one.sent_s is None} == waits
        assert all(core.requests.by_id[decisions.request_id].began for decisions in running)
        # Whether the engines are still there is not known: nobody new goes there until they register.
        late = it.ask(gateway, "late")
        await gateway._flush_and_wait()
        assert {one.health for one in (await it.wire.state()).replicas} == {"suspect"}
        assert not late.has_decision
        await it.engine("a")
        await it.engine("b")
        for decisions in running:
            where = gateway.requests[decisions.request_id].sent_to
            gateway.tell(routing_events.RequestFinished(decisions.request_id, replica_id=where))
        for decisions in waiting:
            if decisions.request_id in waits:
                sent = await asyncio.wait_for(decisions.next(), 60)
                gateway.tell(routing_events.RequestFinished(decisions.request_id, replica_id=sent.replica_id))
        assert isinstance(await asyncio.wait_for(late.next(), 60), routing_events.SendRequest)
        assert {name: await it.turn(gateway, name) for name in homes} == homes


async def test_what_a_new_coordinator_was_not_left_gateways_still_know() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        homes = {f"p{number}": await it.turn(gateway, f"p{number}") for number in range(10)}
        it.unix_s += 1.0
        it.coordinator = it.wire.coordinator = it.another()
        assert it.coordinator.restored == 0
        await until(lambda: gateway.joined and gateway.epoch == it.coordinator.epoch)
        assert {name: await it.turn(gateway, name) for name in homes} == homes
        await it.engine("a")
        await until(lambda: gateway.places.inherited.keys() == {"b:1"})
        assert {name: await it.turn(gateway, name) for name in homes} == homes
        # The other one never comes back.
        it.clock.now += 10.0
        await until(lambda: gateway.places.keys() == {"a:1"})
        assert {await it.turn(gateway, name) for name in homes} == {"a:1"}


async def test_of_two_coordinators_the_later_one_counts(tmp_path: Path) -> None:
    # Engines register once here; on a slow machine that would be too long ago for the second one.
    async with cluster("a", "b", checkpoint=tmp_path / "c", limits=RoutingLimits(lease_s=3600.0)) as it:
        gateway = await it.gateway()
        first = it.coordinator
        home = await it.turn(gateway, "p")
        await it.written()
        second = it.another()
        assert second.epoch > first.epoch
        assert read_checkpoint_epoch(tmp_path / "c") == second.epoch
        it.wire.coordinator = second
        await until(lambda: gateway.joined and gateway.epoch == second.epoch)
        assert await it.turn(gateway, "p") == home
        # What the first one says no longer counts, and it hears of it.
        it.wire.coordinator = first
        await until(lambda: first.deposed)
        assert gateway.epoch == second.epoch
        assert not gateway.joined
        refused = await first.register(
            m.EngineRegistration("x", "http://x:1", EngineDescription(1, "1", 9, 0, 0, 0, False, True))
        )
        assert refused.status is m.ResponseStatus.DEPOSED
        assert (await first.drain(m.DrainRequest("a"))).status is m.ResponseStatus.DEPOSED
        it.wire.coordinator = second
        await until(lambda: gateway.joined)
        assert await it.turn(gateway, "p") == home


async def test_a_coordinator_finds_a_later_one_in_the_file(tmp_path: Path) -> None:
    async with cluster("a", checkpoint=tmp_path / "c") as it:
        first, second = it.coordinator, it.another()
        run = asyncio.ensure_future(first.run())
        await until(lambda: first.deposed)
        await asyncio.wait_for(run, 60)
        kept = read_checkpoint(tmp_path / "c")
        assert kept is not None
        assert kept.epoch == second.epoch


async def test_a_file_that_is_no_checkpoint_is_left_aside(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(b"\x00nonsense")
    async with cluster("a", checkpoint=tmp_path / "c") as it:
        assert it.coordinator.restored == 0
        assert read_checkpoint_epoch(tmp_path / "c") == it.coordinator.epoch


# -- what travels -------------------------------------------------------------------


async def test_batches_are_taken_in_once_and_in_their_order() -> None:
    async with cluster("a") as it:
        joined = await it.coordinator.join(m.JoinRequest("g", 0))

        def tell(number: int, *said: routing_events.AnyRoutingEvent) -> m.ReportRequest:
            return m.ReportRequest("g", joined.epoch, number, said)

        early = asyncio.ensure_future(it.coordinator.tell(tell(1, routing_events.RequestFinished("r", 1))))
        await asyncio.sleep(0)
        assert not early.done()
        asked = await it.coordinator.tell(tell(0, routing_events.RequestReceived("r", "t", 10)))
        assert [type(one) for one in asked.mail] == [routing_events.SendRequest]
        await asyncio.wait_for(early, 60)
        assert await it.in_flight() == 0
        again = await it.coordinator.tell(tell(0, routing_events.RequestReceived("r", "t", 10)))
        assert again.mail == asked.mail  # it has not said that it got it
        assert await it.in_flight() == 0
        assert (
            await it.coordinator.tell(m.ReportRequest("stranger", joined.epoch, 0, ()))
        ).status is m.ResponseStatus.JOIN
        assert (
            await it.coordinator.tell(m.ReportRequest("g", joined.epoch - 1, 2, ()))
        ).status is m.ResponseStatus.JOIN


async def test_a_request_whose_decision_was_lost_on_its_way_gets_it_again() -> None:
    async with cluster("a") as it:
        await it.coordinator.join(m.JoinRequest("g", 0))
        asked = routing_events.RequestReceived("r", "t", 10, program_id="p")
        first = await it.coordinator.tell(m.ReportRequest("g", it.coordinator.epoch, 0, (asked,)))
        again = await it.coordinator.join(m.JoinRequest("g", it.coordinator.epoch, (asked,)))
        assert again.mail == first.mail
        assert await it.in_flight() == 1
        nothing = await it.coordinator.join(m.JoinRequest("g", it.coordinator.epoch))
        assert nothing.mail == ()
        assert await it.in_flight() == 0


async def test_requests_of_a_gateway_that_is_gone_are_over() -> None:
    async with cluster("a") as it:
        await it.coordinator.join(m.JoinRequest("g", 0, (routing_events.RequestReceived("r", "t", 10),)))
        it.clock.now += GATEWAY_LEASE_S / 2
        it.coordinator.tick()
        assert await it.in_flight() == 1
        it.clock.now += GATEWAY_LEASE_S / 2
        it.coordinator.tick()
        assert await it.in_flight() == 0


async def test_deadlines_survive_clocks_that_differ() -> None:
    async with cluster("a") as it:
        routing_backend = CoordinatedRoutingBackend(it.wire, ReplicaAddresses(), clock=lambda: 7.0)
        it.tasks.append(asyncio.ensure_future(routing_backend.run()))
        await until(lambda: routing_backend.joined)
        await asyncio.wait_for(it.ask(routing_backend, "p", deadline_s=37.0).next(), 60)
        program = it.coordinator.core.programs.get(("t", "p"))
        assert program is not None
        assert program.deadline_s == pytest.approx(it.clock() + 30.0, abs=20.0)


async def test_a_recall_that_comes_after_the_first_byte_is_too_late() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        home = await it.turn(gateway, "p")
        other = "b:1" if home == "a:1" else "a:1"

        def mail(*actions: routing_events.AnyRoutingAction) -> None:
            gateway._receive(
                m.CoordinatorResponse(gateway.epoch, mail_from=gateway._last_mail_number + 1, mail=actions)
            )

        first, second = it.ask(gateway, "p"), it.ask(gateway, "p")
        for decisions in (first, second):
            await decisions.next()
        gateway.tell(routing_events.FirstByteSent(first.request_id, home))
        for decisions in (first, second):
            mail(
                routing_events.RecallRequest(decisions.request_id, home),
                routing_events.SendRequest(decisions.request_id, other, "made_way"),
            )
        assert not first.has_decision
        assert [type(await second.next()) for _ in range(2)] == [
            routing_events.RecallRequest,
            routing_events.SendRequest,
        ]
        mail(routing_events.AbortStream(first.request_id, other))
        assert not first.has_decision
        mail(routing_events.AbortStream(first.request_id, home))
        assert isinstance(await first.next(), routing_events.AbortStream)


# -- engines ------------------------------------------------------------------------


async def test_the_word_of_an_engines_deployment_counts_at_once() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        home = await it.turn(gateway, "p")
        begun, waits = it.ask(gateway, "p"), it.ask(gateway, "p")
        for decisions in (begun, waits):
            await decisions.next()
        gateway.tell(routing_events.FirstByteSent(begun.request_id, home))

        async def all_known() -> bool:
            return await it.in_flight() == 2

        await until(all_known)
        engine = home.removesuffix(":1")
        await it.wire.engine_stopped(m.EngineStopped(engine, "another life", "x"))
        assert len((await it.wire.state()).replicas) == 2
        await it.wire.engine_stopped(m.EngineStopped(engine, "1", "x"))
        assert isinstance(await asyncio.wait_for(begun.next(), 60), routing_events.AbortStream)
        sent = await asyncio.wait_for(waits.next(), 60)
        assert sent.replica_id != home
        await until(lambda: home not in gateway.places)
        await until(lambda: gateway.home("t", "p") == sent.replica_id)


@pytest.mark.parametrize("spare", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_that_ends_at_an_engine_just_reported_gone_is_over(stream: bool, spare: bool) -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "p")
        assert (await asyncio.wait_for(decisions.next(), 60)).replica_id == "a:1"
        if spare:
            await it.engine("b")
        decisions.mark_answered()
        if stream:
            gateway.tell(routing_events.FirstByteSent(decisions.request_id, "a:1"))
        # The coordinator learns that the engine is gone before it learns of the answer, and decides anew.
        await it.coordinator.gone(m.EngineStopped("a", "1", "its process ended"))
        if stream and spare:
            await until(lambda: decisions.superseded)
        where = None if decisions.superseded else "a:1"
        if not stream:
            gateway.tell(routing_events.FirstByteSent(decisions.request_id, "a:1"))
        gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, where, answered=True))
        gateway.close(decisions)
        await gateway._flush_and_wait()
        core, request_id = it.coordinator.core, decisions.request_id
        assert not core.is_open(request_id)
        assert core.waiting == 0
        await it.engine("b")
        assert await it.in_flight() == 0
        box = it.coordinator.post.box(gateway.gateway_id)
        assert box is not None
        assert box.requests == set()
        assert it.coordinator.post._owner == {}


async def test_of_a_request_that_is_rejected_nothing_stays_although_its_gateway_has_it_no_more() -> None:
    async with cluster(limits=RoutingLimits(wait_s=5.0)) as it:
        await it.coordinator.join(m.JoinRequest("g", 0))
        asked = routing_events.RequestReceived("r", "t", 10)
        await it.coordinator.tell(m.ReportRequest("g", it.coordinator.epoch, 0, (asked,)))
        it.clock.now += 5.0
        it.coordinator.tick()
        box = it.coordinator.post.box("g")
        assert box is not None
        assert [type(one) for one in box.since(0)[1]] == [routing_events.RejectRequest]
        assert (box.requests, it.coordinator.post._owner) == (set(), {})


async def test_a_silent_engine_is_gone_only_if_no_gateway_reaches_it() -> None:
    async with cluster("a") as it:
        one, other = await it.gateway(), await it.gateway()
        probed: list[str] = []
        for gateway in (one, other):
            gateway.on_control_action = lambda told, who=gateway: probed.append(who.gateway_id)  # type: ignore[misc]
        it.clock.now += 5.0
        await it.engine("a")
        it.clock.now += 5.0
        it.coordinator.tick()
        assert (await it.wire.state()).replicas[0].health == "up"
        it.clock.now += 5.0
        it.coordinator.tick()
        await until(lambda: len(probed) == 2)
        assert (await it.wire.state()).replicas[0].health == "suspect"
        one.probed("a:1", "1", False)
        await one._flush_and_wait()
        it.coordinator.tick()
        assert len((await it.wire.state()).replicas) == 1
        other.probed("a:1", "1", True)
        await other._flush_and_wait()
        it.coordinator.tick()
        assert (await it.wire.state()).replicas[0].health == "up"
        # Silent again, and this time one does not reach it and the other never says.
        it.clock.now += 10.0
        it.coordinator.tick()
        await until(lambda: len(probed) == 4)
        one.probed("a:1", "1", False)
        await one._flush_and_wait()
        it.coordinator.tick()
        assert len((await it.wire.state()).replicas) == 1
        it.clock.now += VOTE_TIMEOUT_S
        for gateway in (one, other):
            box = it.coordinator.post.box(gateway.gateway_id)
            assert box is not None
            box.heard_s = it.clock()
        it.coordinator._end_liveness_votes(it.clock())
        assert (await it.wire.state()).replicas == []


async def test_an_engine_that_registers_is_not_gone_because_a_gateway_cannot_reach_it() -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, None)
        await asyncio.wait_for(decisions.next(), 60)
        probed: list[Any] = []
        gateway.on_control_action = probed.append
        gateway.tell(routing_events.RequestFailed(decisions.request_id, "a:1"))
        await until(lambda: probed)
        gateway.probed("a:1", "1", False)
        await gateway._flush_and_wait()
        it.coordinator.tick()
        assert [one.health for one in (await it.wire.state()).replicas] == ["suspect"]
        await it.engine("a")
        assert [one.health for one in (await it.wire.state()).replicas] == ["up"]


async def test_another_life_at_the_same_address_has_nothing_of_the_one_before() -> None:
    async with cluster("a") as it:
        gateway = await it.gateway()
        await it.turn(gateway, "p")
        await gateway._flush_and_wait()
        await it.engine("a", life="2")
        await until(lambda: gateway.places["a:1"].instance == "2")
        await until(lambda: gateway.home("t", "p") is None)
        await it.engine("a2", life="3")
        # The same address under another engine's name: the first cannot be there any more.
        of = EngineDescription(1, "4", 10_000, 0, 0, 0, False, True)
        await it.wire.register(m.EngineRegistration("a3", "http://a2:1", of))
        assert sorted(it.coordinator.engines.kept()) == ["a", "a3"]


async def test_ranks_are_replicas_of_one_engine() -> None:
    async with cluster() as it:
        await it.engine("a", ranks=2)
        gateway = await it.gateway()
        assert sorted(gateway.places) == ["a:1/0", "a:1/1"]
        assert [address.rank for address in it.replicas] == [0, 1]
        await it.wire.engine_stopped(m.EngineStopped("a", "1", "x"))
        await until(lambda: not gateway.places)


async def test_an_engine_without_kv_is_left_aside() -> None:
    async with cluster("a") as it:
        await it.engine("b", capacity_tokens=0)
        assert [one.replica for one in (await it.wire.state()).replicas] == ["a:1"]


async def test_an_engine_that_is_drained_is_left_by_all() -> None:
    async with cluster("a", "b") as it:
        gateway = await it.gateway()
        home = await it.turn(gateway, "p")
        running = it.ask(gateway, "p")
        await running.next()
        await until(it.in_flight)
        engine = home.removesuffix(":1")
        assert (await it.wire.drain(m.DrainRequest(engine))).in_flight == 1
        await it.engine(engine)  # it goes on saying that it lives
        await until(lambda: not gateway.places[home].direct)
        gateway.tell(routing_events.RequestFinished(running.request_id, replica_id=home))
        await gateway._flush_and_wait()
        assert (await it.wire.drain(m.DrainRequest(engine))).in_flight == 0
        decisions = it.ask(gateway, "p")
        sent = await asyncio.wait_for(decisions.next(), 60)
        assert (sent.replica_id != home, sent.moved_from) == (True, home)
        assert (await it.wire.drain(m.DrainRequest(engine))).in_flight == 0


async def test_a_drain_is_cancelled_while_its_engine_is_away() -> None:
    async with cluster("a", "b") as it:
        routing_backend = await it.gateway()
        options = GatewayOptions(policy="test", admin_key="root")
        gateway = Gateway(routing_backend, it.replicas, TenantKeys(), options, GatewayMetrics())
        transport = httpx.ASGITransport(app=gateway.app(list))
        root, url = {"Authorization": "Bearer root"}, "http://gateway/sojourn/v1/replicas/a:1"
        async with httpx.AsyncClient(transport=transport, headers=root) as http:
            assert (await http.post(f"{url}/drain")).json()["health"] == "draining"
            await it.wire.engine_stopped(m.EngineStopped("a", "1", "lost"))
            await until(lambda: it.replicas.get("a:1") is None)
            answer = await http.post(f"{url}/stay")
            assert (answer.status_code, answer.json()) == (200, None)
        await it.engine("a")
        health = {one.replica: one.health for one in (await it.wire.state()).replicas}
        assert health == {"a:1": "up", "b:1": "up"}


async def test_the_gateway_that_moves_a_program_also_tells_its_old_replica() -> None:
    async with cluster("a", "b") as it:
        one, other = await it.gateway(), await it.gateway()
        told: dict[str, list[Any]] = {"one": [], "other": []}
        one.on_control_action, other.on_control_action = told["one"].append, told["other"].append
        home = await it.turn(one, "p")
        await until(lambda: other.home("t", "p") == home)
        await it.wire.drain(m.DrainRequest(home.removesuffix(":1")))
        await until(lambda: not other.places[home].direct)
        await it.turn(other, "p")
        await until(lambda: told["other"])
        assert [type(left) for left in told["other"]] == [routing_events.ReleaseProgramKv]
        assert told["one"] == []


async def test_engines_receive_the_wanted_number() -> None:
    async with cluster("a") as it:
        assert (await it.engine("a")).wanted_engines == 1


async def test_routes_without_a_key_seldom_ask_the_coordinator_and_for_no_programs(monkeypatch: Any) -> None:
    async with cluster("a") as it:
        routing_backend = await it.gateway()
        await it.turn(routing_backend, "p")
        gateway = Gateway(
            routing_backend, it.replicas, TenantKeys(), GatewayOptions(policy="test"), GatewayMetrics()
        )
        asked: list[str] = []
        real = it.wire._call

        async def call(method: str, message: Any, kind: Any) -> Any:
            asked.append(method)
            return await real(method, message, kind)

        monkeypatch.setattr(it.wire, "_call", call)
        transport = httpx.ASGITransport(app=gateway.app(list))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            monkeypatch.setattr(status_routes, "REUSE_S", 1e9)
            answers = await asyncio.gather(*(http.get(path) for path in ("/health", "/metrics") * 20))
            assert {answer.status_code for answer in answers} == {200}
            assert asked.count("state") == 1
            monkeypatch.setattr(status_routes, "REUSE_S", 0.0)
            await http.get("/health")
            assert asked.count("state") == 2
        assert "programs" not in asked
        assert (await it.wire.state()).programs == []
        assert [one.program_id for one in await routing_backend.programs()] == ["p"]


async def test_who_asks_for_programs_in_a_loop_costs_the_coordinator_a_listing_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A listing of 100,000 programs takes the coordinator 0.1 s. With 60 queries of one tenant, another's
    request waited for 52 s."""
    async with cluster("a") as it:
        routing_backend = await it.gateway()
        keys = {"tk": "t", "uk": "u"}
        gateway = Gateway(
            routing_backend, it.replicas, TenantKeys(keys), GatewayOptions(policy="test"), GatewayMetrics()
        )
        listed = 0
        real = it.wire.programs

        async def programs() -> Any:
            nonlocal listed
            listed += 1
            return await real()

        monkeypatch.setattr(it.wire, "programs", programs)
        for program, tenant in (("p", "t"), ("q", "t"), ("p", "u")):
            await it.turn(routing_backend, program, tenant)
        transport = httpx.ASGITransport(app=gateway.app(list))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:

            async def get(path: str, key: str) -> httpx.Response:
                return await http.get(
                    f"/sojourn/v1/programs{path}", headers={"Authorization": f"Bearer {key}"}
                )

            paths = (("", "tk"), ("?limit=1", "tk"), ("/q", "tk"), ("/q", "uk"))
            answers = await asyncio.gather(*(get(*path) for path in paths * 20))
            assert listed <= 2
            found, one, detail, foreign = answers[:4]
            assert [program["program_id"] for program in found.json()["programs"]] == ["q", "p"]
            assert (one.json()["shown"], one.json()["total"]) == (1, 2)
            assert (detail.json()["tenant"], detail.json()["turns"]) == ("t", 1)
            assert foreign.status_code == 404
            await it.turn(routing_backend, "r")
            assert (await get("/r", "tk")).status_code == 200  # no earlier listing answers
