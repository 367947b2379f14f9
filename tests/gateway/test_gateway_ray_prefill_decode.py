"""Prefill and decode engines behind a coordinator, without Ray: who is sent where, and what outlives what."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import until
from sojourn_server.gateway.http.engine_descriptions import (
    STORAGE_READ,
    EngineDescription,
    LinkStats,
    PairCapabilities,
)
from sojourn_server.gateway.ray import coordinator_messages as m
from sojourn_server.gateway.ray.coordinator import Coordinator
from sojourn_server.gateway.ray.engine_process import EngineFailed, EngineProcess
from sojourn_server.gateway.ray.engine_supervisor import EngineSupervisor
from sojourn_server.routing import routing_events
from sojourn_server.routing.pair_core import PairCore
from sojourn_server.routing.routing_events import PairEngineRegistered, PairRole, SendRequestToPair
from sojourn_server.routing.routing_from_preset import PrefillDecodeRules
from sojourn_server.routing.routing_limits import RoutingLimits
from test_gateway_ray_coordination import AFFINE, Clock, Cluster, running
from test_gateway_ray_engine_supervisor import Ear

FAKE = [sys.executable, str(Path(__file__).with_name("fake_pair_engine_process.py")), "{host}", "{port}"]


class Pairs(Cluster):
    """Engines whose names begin with p are prefill engines, those with d decode engines."""

    read_side = "shorter"

    def another(self) -> Coordinator:
        rules = PrefillDecodeRules(self.read_side)
        return Coordinator(rules, RoutingLimits(), self.options, clock=self.clock, wall=lambda: self.unix_s)

    async def engine(self, name: str, life: str = "1", **more: Any) -> m.RegistrationResponse:
        most, model = more.pop("max_running", 0), more.pop("model", "tiny")
        described = EngineDescription(1, life, 10_000, 0, most, 0, False, True, model=model)
        links = {STORAGE_READ: LinkStats(0, seconds, 0)} if (seconds := more.pop("queued_s", None)) else {}
        told: dict[str, Any] = {"block_s": 0.01, "block_bytes": 4096, "block_tokens": 64, **more}
        paths = PairCapabilities(
            role=PairRole.PREFILL if name.startswith("p") else PairRole.DECODE,
            peer=f"tcp:{name}:9",
            node=f"node-{name}",
            epoch=f"e{life}",
            **told,
        )
        url = f"http://{name}:1"
        return await self.wire.register(m.EngineRegistration(name, url, described, 0, paths, links))

    async def sent(self, decisions: Any) -> SendRequestToPair:
        """Where a request is sent."""
        found = await asyncio.wait_for(decisions.next(), 60)
        assert isinstance(found, SendRequestToPair), found
        return found

    async def health(self) -> dict[str, str]:
        return {one.replica: one.health for one in (await self.wire.state()).pairs}

    async def restarts(self) -> None:
        """The coordinator ends, and another one begins, which knows nothing."""
        self.unix_s += 5.0
        self.coordinator = self.another()
        self.wire.coordinator = self.coordinator


@asynccontextmanager
async def pairs(*engines: str, checkpoint: Path | None = None) -> AsyncIterator[Pairs]:
    async with running(Pairs(Clock(), checkpoint, AFFINE), engines) as made:
        yield made


async def test_a_request_goes_to_a_pair_and_its_program_is_at_home_nowhere() -> None:
    async with pairs("p1", "d1") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "prog")
        sent = await it.sent(decisions)
        assert sent == SendRequestToPair(
            decisions.request_id, "d1:1", "pair", prefill_id="p1:1", peer="tcp:d1:9", epoch="e1"
        )
        assert gateway.home("t", "prog") is None
        shown = {one.replica: one for one in await gateway.replicas()}
        assert {name: (one.role, one.node, one.in_flight) for name, one in shown.items()} == {  # type: ignore[attr-defined]
            "p1:1": ("prefill", "node-p1", 1),
            "d1:1": ("decode", "node-d1", 1),
        }
        gateway.tell(routing_events.PrefillFinished(decisions.request_id, "p1:1"))
        gateway.tell(routing_events.FirstByteSent(decisions.request_id, "d1:1"))
        await gateway._flush_and_wait()
        assert {one.replica: one.in_flight for one in await gateway.replicas()} == {"p1:1": 0, "d1:1": 1}
        gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, replica_id="d1:1"))
        await gateway._flush_and_wait()
        [program] = await gateway.programs()
        assert (program.replica, program.turns, program.context_tokens) == (None, 1, 105)


async def test_two_gateways_share_the_books() -> None:
    async with pairs("p1", "p2", "d1", "d2") as it:
        one, other = await it.gateway(), await it.gateway()
        first, second = await it.sent(it.ask(one, None)), await it.sent(it.ask(other, None))
        assert {first.prefill_id, second.prefill_id} == {"p1:1", "p2:1"}
        assert {first.replica_id, second.replica_id} == {"d1:1", "d2:1"}


async def test_no_more_than_it_runs_at_once_are_sent_to_a_decode_engine() -> None:
    async with pairs("p1") as it:
        await it.engine("d1", max_running=2)
        gateway = await it.gateway()
        first, second, third = (it.ask(gateway, None) for _ in range(3))
        for decisions in (first, second):
            await it.sent(decisions)
        await gateway._flush_and_wait()
        assert not third.has_decision
        shown = {one.replica: one.load for one in await gateway.replicas()}
        assert shown == {"p1:1": 0.02, "d1:1": 1.0}
        gateway.tell(routing_events.RequestFinished(first.request_id, 5, replica_id="d1:1"))
        assert (await it.sent(third)).replica_id == "d1:1"


async def test_what_waits_for_a_link_decides_who_reads() -> None:
    for slow, share in (("p1", 1.0), ("d1", 0.0)):
        async with pairs("p1", "d1") as it:
            gateway = await it.gateway()
            decisions = it.ask(gateway, "prog")
            sent = await it.sent(decisions)
            gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, replica_id=sent.replica_id))
            gateway.close(decisions)
            await it.engine(slow, queued_s=0.5)
            assert (await it.sent(it.ask(gateway, "prog"))).decode_share == share


@pytest.mark.parametrize("lost", ["p1:1", "d1:1"])
async def test_a_failed_engine_gets_nothing_until_it_reports_again(lost: str) -> None:
    async with pairs("p1", "d1") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "prog")
        await it.sent(decisions)
        gateway.tell(routing_events.RequestFailed(decisions.request_id, lost))
        await gateway._flush_and_wait()
        assert (await it.health())[lost] == "suspect"
        await it.engine("p2")
        await it.engine("d2")
        sent = await it.sent(decisions)
        assert lost not in (sent.prefill_id, sent.replica_id)
        await it.engine(lost[:2])
        assert set((await it.health()).values()) == {"up"}


async def test_an_engine_that_is_gone_costs_a_request_another_pair() -> None:
    async with pairs("p1", "d1") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "prog")
        await it.sent(decisions)
        await it.wire.engine_stopped(m.EngineStopped("d1", "1", "its process ended"))
        waiting = it.ask(gateway, None)
        await gateway._flush_and_wait()
        assert not waiting.has_decision, "another one comes: whoever asks meanwhile waits for it"
        await it.engine("d2")
        assert {(await it.sent(one)).replica_id for one in (decisions, waiting)} == {"d2:1"}


async def test_a_coordinator_that_begins_anew_costs_no_request(tmp_path: Path) -> None:
    async with pairs("p1", "d1", checkpoint=tmp_path / "c") as it:
        gateway = await it.gateway()
        on_its_way, began = it.ask(gateway, "prog"), it.ask(gateway, "prog")
        for decisions in (on_its_way, began):
            await it.sent(decisions)
        gateway.tell(routing_events.PrefillFinished(began.request_id, "p1:1"))
        gateway.tell(routing_events.FirstByteSent(began.request_id, "d1:1"))
        await gateway._flush_and_wait()
        await it.restarts()
        await until(lambda: gateway.epoch == it.coordinator.epoch and gateway.joined)
        new = it.ask(gateway, None)
        await gateway._flush_and_wait()
        assert not new.has_decision, "no engine has registered yet"
        for name in ("p1", "d1"):
            await it.engine(name)
        assert (await it.sent(new)).replica_id == "d1:1"
        in_flight = {one.replica: one.in_flight for one in (await it.wire.state()).pairs}
        assert in_flight == {"p1:1": 2, "d1:1": 3}
        # What it did not choose it sends elsewhere, or cuts, all the same.
        await it.wire.engine_stopped(m.EngineStopped("d1", "1", "its process ended"))
        await it.engine("d2")
        assert (await it.sent(on_its_way)).replica_id == "d2:1"
        assert isinstance(await asyncio.wait_for(began.next(), 60), routing_events.AbortStream)
        for decisions in (on_its_way, began, new):
            gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, replica_id="d2:1"))
            gateway.close(decisions)
        await gateway._flush_and_wait()
        assert not [flight for flight in it.coordinator.core.requests if flight != began.request_id]


async def test_a_request_that_was_taken_back_meanwhile_is_asked_for_anew() -> None:
    async with pairs("p1", "d1") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "prog")
        await it.sent(decisions)
        await it.restarts()
        await until(lambda: gateway.epoch == it.coordinator.epoch and gateway.joined)
        assert it.coordinator.core.requests[decisions.request_id].adopted
        gateway._mark_disconnected()
        # It failed while no coordinator was there.
        gateway.requests[decisions.request_id].wait(it.clock())
        await until(lambda: gateway.joined)
        await it.engine("p1")
        await it.engine("d1")
        assert (await it.sent(decisions)).replica_id == "d1:1"


async def test_while_the_coordinator_is_away_gateways_make_pairs_themselves() -> None:
    async with pairs("p1", "d1", "d2") as it:
        gateway = await it.gateway(fallback_s=0.0)
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        first, second = it.ask(gateway, "prog"), it.ask(gateway, "prog")
        sent = [await it.sent(first), await it.sent(second)]
        assert {one.replica_id for one in sent} == {"d1:1", "d2:1"}
        assert {(one.prefill_id, one.reason) for one in sent} == {("p1:1", "coordinator_away")}
        assert {one.peer for one in sent} == {"tcp:d1:9", "tcp:d2:9"}
        assert {one.role for one in await gateway.replicas()} == {"prefill", "decode"}  # type: ignore[attr-defined]
        gateway.tell(routing_events.RequestFailed(first.request_id, sent[0].replica_id))
        assert (await it.sent(first)).replica_id == sent[1].replica_id
        it.wire.coordinator = it.coordinator
        await until(lambda: gateway.joined)
        await until(lambda: len(it.coordinator.core.requests) == 2)
        assert {flight.decode_id for flight in it.coordinator.core.requests.values()} == {sent[1].replica_id}


async def test_without_an_engine_of_each_role_no_request_is_sent() -> None:
    async with pairs("d1") as it:
        gateway = await it.gateway(fallback_s=0.0)
        it.wire.coordinator = None
        await until(lambda: not gateway.joined)
        decisions = it.ask(gateway, "prog")
        await asyncio.sleep(0.5)  # two sweeps
        assert not decisions.has_decision


async def test_an_engine_that_fits_no_other_is_sent_nothing_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with pairs("p1", "d1") as it:
        for _ in range(3):
            await it.engine("d2", block_bytes=8192)
            await it.engine("d3", model="other")
        assert set(await it.health()) == {"p1:1", "d1:1"}
        told = [record.getMessage() for record in caplog.records if "gets no requests" in record.getMessage()]
        assert len(told) == 2
        assert "its Full Blocks are of 8,192 bytes and 64 tokens; expected 4,096 and 64" in told[0]
        assert "it serves 'other'; expected 'tiny'" in told[1]
        await it.engine("d2")
        assert "d2:1" in await it.health()


ODD = {"block_bytes": 8192}


@pytest.mark.parametrize("odd", [["d9"], ["d9", "d8"], ["p9", "d9"]])
async def test_an_odd_engine_that_registers_first_after_a_restart_keeps_no_other_out(odd: list[str]) -> None:
    async with pairs("p1", "d1", "d2") as it:
        gateway = await it.gateway()
        for name in odd:
            await it.engine(name, **ODD)
        assert set(await it.health()) == {"p1:1", "d1:1", "d2:1"}
        await it.restarts()
        for name in (*odd, "p1", "d1", "d2"):
            await it.engine(name, **(ODD if name in odd else {}))
        for name in ("p1", "d1", "d2", *odd):  # each is heard of once a second
            await it.engine(name, **(ODD if name in odd else {}))
        assert await it.health() == dict.fromkeys(["p1:1", "d1:1", "d2:1"], "up")
        await until(lambda: gateway.joined)
        assert (await it.sent(it.ask(gateway, None))).prefill_id == "p1:1"


async def test_only_more_engines_of_which_pairs_can_be_made_turn_those_away_that_are_there() -> None:
    async with pairs("d1") as it:
        for name in ("d7", "d8"):
            await it.engine(name, **ODD)
        assert set(await it.health()) == {"d1:1"}, "no pair could be made of the others"
        await it.engine("p1")
        await it.engine("d2")
        await it.engine("p9", **ODD)
        assert await it.health() == dict.fromkeys(["d1:1", "p1:1", "d2:1"], "up"), "they are not more"
        await it.engine("d9", **ODD)
        for name in ("p1", "d1", "d2"):
            await it.engine(name)
        assert await it.health() == {"d9:1": "up"}
        for name in ("d7", "d8", "p9"):
            await it.engine(name, **ODD)
        assert await it.health() == dict.fromkeys(["d9:1", "d7:1", "d8:1", "p9:1"], "up")


async def test_what_runs_on_engines_that_are_outnumbered_ends_there() -> None:
    async with pairs("p1", "d1") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, None)
        await it.sent(decisions)
        gateway.tell(routing_events.PrefillFinished(decisions.request_id, "p1:1"))
        gateway.tell(routing_events.FirstByteSent(decisions.request_id, "d1:1"))
        await gateway._flush_and_wait()
        for name in ("p8", "d8", "d9"):
            await it.engine(name, **ODD)
        assert await it.health() == {"p1:1": "draining", "d1:1": "draining", "d9:1": "up"}
        for name in ("p1", "d1", "p8", "d8"):
            await it.engine(name, **(ODD if name[1] in "89" else {}))
        assert await it.health() == {"d1:1": "draining", "p8:1": "up", "d8:1": "up", "d9:1": "up"}
        assert (await it.sent(it.ask(gateway, None))).prefill_id == "p8:1"
        assert not decisions.has_decision, "its stream goes on"
        gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, replica_id="d1:1"))
        await gateway._flush_and_wait()
        await it.engine("d1")
        assert set(await it.health()) == {"p8:1", "d8:1", "d9:1"}
        # The others have become more again: they are not drained, nobody has asked for that.
        for name in ("p1", "d1", "d2", "p2"):
            await it.engine(name)
        for name in ("p1", "d1", "d2", "p2"):
            await it.engine(name)
        assert {name for name, health in (await it.health()).items() if health == "up"} == {
            "p1:1", "d1:1", "d2:1", "p2:1"
        }  # fmt: skip


async def test_an_engine_that_is_drained_and_was_outnumbered_is_drained_still() -> None:
    async with pairs("p1", "d1", "d2") as it:
        gateway = await it.gateway()
        request_states = [it.ask(gateway, None) for _ in range(2)]
        assert {(await it.sent(decisions)).replica_id for decisions in request_states} == {
            "d1:1",
            "d2:1",
        }
        await it.wire.drain(m.DrainRequest("d1"))
        for name in ("p7", "d7", "d8", "d9"):
            await it.engine(name, **ODD)
        assert (await it.health())["d2:1"] == "draining"
        for name in ("d7", "d8"):
            await it.engine(name, **ODD)
        await it.wire.engine_stopped(m.EngineStopped("d7", "1", "its process ended"))
        await it.wire.engine_stopped(m.EngineStopped("d8", "1", "its process ended"))
        it.clock.now += 2.0
        for name in ("p1", "d1", "d2"):
            await it.engine(name)
        assert {name: (await it.health())[name] for name in ("p1:1", "d1:1", "d2:1")} == {
            "p1:1": "up", "d1:1": "draining", "d2:1": "up"
        }  # fmt: skip


async def test_engines_that_were_sent_nothing_and_are_silent_no_longer_count() -> None:
    async with pairs("p1", "d1", "d2") as it:
        for name in ("p8", "d8"):
            await it.engine(name, **ODD)
        it.clock.now += 5.0
        await it.wire.engine_stopped(m.EngineStopped("d2", "1", "its process ended"))
        it.clock.now += 6.0
        await it.engine("d9", **ODD)
        assert set(await it.health()) == {"p1:1", "d1:1"}, "the others were not heard of for 11 s"


async def test_an_engine_that_reports_no_paths_is_sent_nothing() -> None:
    async with pairs("p1") as it:
        described = EngineDescription(1, "1", 10_000, 0, 0, 0, False, True)
        await it.wire.register(m.EngineRegistration("x", "http://x:1", described))
        assert set(await it.health()) == {"p1:1"}


async def test_an_engine_that_is_drained_is_left_by_all() -> None:
    async with pairs("p1", "d1", "d2") as it:
        gateway = await it.gateway()
        decisions = it.ask(gateway, "prog")
        sent = await it.sent(decisions)
        name = sent.replica_id[:2]
        drained = await it.wire.drain(m.DrainRequest(name))
        assert (drained.in_flight, (await it.health())[sent.replica_id]) == (1, "draining")
        assert {(await it.sent(it.ask(gateway, None))).replica_id for _ in range(3)} != {sent.replica_id}
        gateway.tell(routing_events.RequestFinished(decisions.request_id, 5, replica_id=sent.replica_id))
        await gateway._flush_and_wait()
        assert (await it.wire.drain(m.DrainRequest(name))).in_flight == 0
        await it.restarts()
        assert (await it.wire.drain(m.DrainRequest(name))).status is m.ResponseStatus.JOIN
        await it.engine(name)
        assert await it.health() == {sent.replica_id: "draining"}


async def test_another_coordinators_homes_are_left_aside(tmp_path: Path) -> None:
    one = Cluster(Clock(), tmp_path / "c", AFFINE)
    await one.engine("a")
    await one.written()
    async with pairs("p1", "d1", checkpoint=tmp_path / "c") as it:
        assert it.coordinator.epoch > one.coordinator.epoch
        assert set(await it.health()) == {"p1:1", "d1:1"}


# -- the core ---------------------------------------------------------------------------


def test_a_request_that_others_sent_is_in_no_books_until_it_is_sent_again() -> None:
    it = PairCore(expects_engines=True)
    it.take(routing_events.RequestSent("a", "d1", "t", 100, program_id="prog", prefill_id="p1"), 0.0)
    for name in ("p1", "d1", "d2"):
        role = PairRole.PREFILL if name == "p1" else PairRole.DECODE
        it.take(PairEngineRegistered(name, "1", role, name, 10_000, 0.01, f"tcp:{name}:1"), 0.0)
    assert len(it.pairs.in_flight) == 0
    assert it.waiting == 0
    it.take(routing_events.PrefillFinished("a", "p1"), 1.0)
    assert it.take(routing_events.ReplicaGone("p1", "1"), 1.0) == []
    assert it.take(routing_events.ReplicaGone("d1", "1"), 1.0) == []
    assert it.waiting == 1
    [sent] = it.take(PairEngineRegistered("p2", "1", PairRole.PREFILL, "p2", 10_000, 0.01, "tcp:p2:1"), 2.0)
    assert (sent.prefill_id, sent.replica_id) == ("p2", "d2")  # type: ignore[attr-defined,union-attr]
    assert len(it.pairs.in_flight) == 1
    it.take(routing_events.RequestFinished("a", 5, "d2"), 3.0)
    assert (len(it.pairs.in_flight), it.waiting, it.requests) == (0, 0, {})
    assert it.programs.get(("t", "prog")).turns == 1


def test_a_request_that_waits_and_was_sent_meanwhile_waits_no_more() -> None:
    it = PairCore(expects_engines=True)
    assert it.take(routing_events.RequestReceived("a", "t", 100), 0.0) == []
    it.take(routing_events.RequestSent("a", "d1", "t", 100), 1.0)
    assert (it.waiting, len(it.pairs.in_flight)) == (0, 0)
    it.take(routing_events.RequestFinished("a", 5, "d1"), 2.0)
    assert not it.requests


def test_a_request_is_where_its_gateway_reports_it() -> None:
    it = PairCore(expects_engines=True)
    for name in ("p1", "p2", "d1"):
        role = PairRole.DECODE if name == "d1" else PairRole.PREFILL
        it.take(PairEngineRegistered(name, "1", role, name, 10_000, 0.01, f"tcp:{name}:1"), 0.0)
    [sent] = it.take(routing_events.RequestReceived("a", "t", 100), 0.0)
    other = {"p1": "p2", "p2": "p1"}[sent.prefill_id]  # type: ignore[attr-defined,union-attr]
    it.take(routing_events.RequestSent("a", "d1", "t", 100, prefill_id=other), 1.0)
    [_, again] = it.take(routing_events.RequestFailed("a", other), 2.0)
    assert isinstance(again, SendRequestToPair)
    assert again.prefill_id == sent.prefill_id  # type: ignore[attr-defined,union-attr]
    it.take(routing_events.RequestFinished("a", 5, "d1"), 3.0)
    assert (len(it.pairs.in_flight), it.waiting) == (0, 0)


def test_requests_for_engines_that_do_not_come_are_rejected_in_the_end() -> None:
    it = PairCore(limits=RoutingLimits(wait_s=10.0), expects_engines=True)
    it.take(routing_events.RequestReceived("a", "t", 100), 0.0)
    assert it.take(routing_events.Tick(), 9.0) == []
    [refused] = it.take(routing_events.Tick(), 10.0)
    assert (refused.status, refused.code) == (503, "no_room")  # type: ignore[union-attr]


# -- the process ------------------------------------------------------------------------


def process(path: Path, command: list[str], role: PairRole) -> EngineProcess:
    return EngineProcess(command, engine_id="e", host="127.0.0.1", log_dir=path, role=role)


async def test_an_engine_registers_its_paths_and_sends_each_link_report_once(tmp_path: Path) -> None:
    ear = Ear()
    it = EngineSupervisor(process(tmp_path, [*FAKE, "decode"], PairRole.DECODE), ear, drain_s=60.0)  # type: ignore[arg-type]
    await it.start()
    await until(lambda: any(told.links for told in ear.registered))
    first = ear.registered[0]
    assert first.paths is not None
    assert (first.paths.role, first.paths.block_tokens) == (PairRole.DECODE, 64)
    assert first.description.instance == f"{it.process.instance} {first.paths.epoch}"
    assert not first.links
    seen = len(ear.registered)
    assert ear.registered[seen - 1].links[STORAGE_READ].queued_s == 0.25
    await until(lambda: len(ear.registered) > seen)
    assert not ear.registered[seen].links
    gone: list[m.EngineStopped] = []

    async def hear(told: m.EngineStopped) -> m.RegistrationResponse:
        gone.append(told)
        return m.RegistrationResponse(7)

    ear.engine_stopped = hear  # type: ignore[method-assign]
    await it.stop()
    assert [one.instance for one in gone] == [first.description.instance]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ([*FAKE, "decode"], "it is a decode engine; expected a prefill engine"),
        (
            [sys.executable, str(Path(__file__).with_name("fake_engine_process.py")), "{host}", "{port}"],
            "it reports no KV paths; expected an engine started with --role",
        ),
    ],
)
async def test_an_engine_that_can_be_in_no_pair_does_not_start(
    tmp_path: Path, command: list[str], said: str
) -> None:
    it = process(tmp_path, command, PairRole.PREFILL)
    with pytest.raises(EngineFailed, match=said):
        await it.start()
    assert it.code is not None
