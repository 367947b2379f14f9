"""What coordinator and gateways on Ray are made of, each part by itself: no actor and no cluster."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from gateway_harness import until
from sojourn_server.gateway.http.engine_descriptions import EngineDescription, registration_event
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses
from sojourn_server.gateway.ray.coordinator_cache import INHERITED_TTL_S, ReplicaCache
from sojourn_server.gateway.ray.coordinator_checkpoint import (
    CheckpointWriter,
    CoordinatorCheckpoint,
    read_checkpoint,
    read_checkpoint_epoch,
)
from sojourn_server.gateway.ray.coordinator_messages import EngineRegistration, ReplicaInfo
from sojourn_server.gateway.ray.engine_registry import EngineRegistry
from sojourn_server.gateway.ray.message_router import GATEWAY_LEASE_S, MessageRouter
from sojourn_server.gateway.ray.open_requests import MAX_FAILURES, MAX_WAIT_WITHOUT_REPLICA_S, OpenRequests
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_from_preset import build_routing_core


def described(life: str = "1", ranks: int = 1) -> EngineDescription:
    return EngineDescription(ranks, life, 1000, 0, 0, 0, False, True)


def place(name: str, life: str = "1", *, health: str = "up", takes_new: bool = True) -> ReplicaInfo:
    return ReplicaInfo(name, f"http://{name}", None, described(life), health, True, takes_new)


def mail(post: MessageRouter, gateway_id: str) -> list[routing_events.AnyRoutingAction]:
    box = post.box(gateway_id)
    assert box is not None
    return list(box.since(0)[1])


# -- post ---------------------------------------------------------------------------


def test_an_action_goes_to_the_gateway_that_has_its_request() -> None:
    post = MessageRouter()
    for gateway in ("g", "h"):
        post.join(gateway, (), 0.0)
    post.add_request("h", "r")
    send = routing_events.SendRequest("r", "a", "home")
    post.send(send, [send], None)
    post.remove_request("r")
    cut = routing_events.AbortStream("r", "a")
    post.send(cut, [cut], "g")
    assert (mail(post, "g"), mail(post, "h")) == ([], [send])


def test_all_gateways_are_asked_to_look_at_a_replica() -> None:
    post = MessageRouter()
    for gateway in ("g", "h"):
        post.join(gateway, (), 0.0)
    probe = routing_events.ProbeReplica("a", "1")
    post.send(probe, [probe], "g")
    assert mail(post, "g") == mail(post, "h") == [probe]


@pytest.mark.parametrize(
    ("moved_from", "told_by", "heard"), [("a", "g", "h"), (None, "g", "g"), (None, None, "g")]
)
def test_a_release_goes_to_the_gateway_that_moves_the_program(
    moved_from: str | None, told_by: str | None, heard: str
) -> None:
    post = MessageRouter()
    for gateway in ("g", "h"):
        post.join(gateway, (), 0.0)
    post.add_request("h", "r")
    left = routing_events.ReleaseProgramKv("p", "a", "t")
    post.send(left, [routing_events.SendRequest("r", "b", "stolen", moved_from), left], told_by)
    assert mail(post, heard) == [left]


def test_an_order_to_yield_goes_to_the_gateway_of_the_urgent_request() -> None:
    post = MessageRouter()
    for gateway in ("g", "h"):
        post.join(gateway, (), 0.0)
    post.add_request("h", "u")
    order = routing_events.YieldPrograms("a", "t", "p", (("other", "q"),), "u")
    post.send(order, [order], "g")
    assert (mail(post, "g"), mail(post, "h")) == ([], [order])


def test_a_gateway_that_joins_anew_keeps_what_it_still_has() -> None:
    post = MessageRouter()
    assert post.join("g", ["r1"], 0.0)[1] == set(), "what it has is taken in one by one"
    post.add_request("g", "r1")
    post.add_request("g", "r2")
    box, gone = post.join("g", ["r1", "r3"], 1.0)
    assert (box.requests, gone) == ({"r1"}, {"r2"})
    assert box is post.box("g")


def test_a_silent_gateway_is_there_no_more() -> None:
    post = MessageRouter()
    post.join("g", (), 0.0)
    post.join("h", (), 1.0)
    post.add_request("g", "r")
    assert post.remove_silent_gateways(GATEWAY_LEASE_S - 0.1) == {}
    assert post.remove_silent_gateways(GATEWAY_LEASE_S) == {"g": ["r"]}
    assert list(post.gateways) == ["h"]
    post.remove_request("r")
    assert len(post) == 1


# -- register -----------------------------------------------------------------------


def registration(engine: str, host: str, life: str = "1", ranks: int = 1) -> EngineRegistration:
    return EngineRegistration(engine, f"http://{host}:1", described(life, ranks))


def test_an_engine_that_registers_again_changes_nothing() -> None:
    register = EngineRegistry()
    assert register.put(registration("e", "a", ranks=2)).changed
    again = register.put(registration("e", "a", ranks=2))
    assert (again.changed, again.left, again.replaced) == (False, [], [])
    assert [one.replica_id for one in again.places] == ["a:1/0", "a:1/1"]
    assert register.engine_of("a:1/1") == "e"


def test_another_life_and_ranks_that_are_no_more_are_left() -> None:
    register = EngineRegistry()
    register.put(registration("e", "a", ranks=2))
    fewer = register.put(registration("e", "a"))
    assert [one.replica_id for one in fewer.left] == ["a:1/0", "a:1/1"]
    other = register.put(registration("e", "a", life="2"))
    assert [(one.replica_id, one.instance) for one in other.left] == [("a:1", "1")]
    assert [one.instance for one in register.replicas_of("e")] == ["2"]


def test_an_address_is_one_engines() -> None:
    register = EngineRegistry()
    register.put(registration("e", "a"))
    assert register.put(registration("f", "b")).replaced == []
    assert register.put(registration("g", "a")).replaced == ["e"]
    assert [one.replica_id for one in register.remove("e")] == ["a:1"]
    assert (register.engine_of("a:1"), list(register.kept()), len(register)) == ("g", ["f", "g"], 2)


def test_an_engine_is_drained_once() -> None:
    register = EngineRegistry()
    register.put(registration("e", "a"))
    assert [register.drain("e"), register.drain("e")] == [True, False]
    register.remove("e")
    register.put(registration("e", "a"))
    assert register.drain("e"), "it is another one by then"


def test_gateways_are_shown_what_has_changed() -> None:
    preset = parse_cluster_preset('routing = "session-affinity"', source="test")
    core, register = build_routing_core(preset), EngineRegistry()
    entry = register.put(registration("e", "a"))
    assert not register.refresh_shown(core, preset.routing, 0.0), (
        "nobody is sent to whom the core does not know"
    )
    core.take(registration_event("a:1", entry.places[0].description), 0.0)
    assert register.refresh_shown(core, preset.routing, 0.0)
    assert not register.refresh_shown(core, preset.routing, 1.0)
    assert [(one.health, one.direct, one.takes_new) for one in register.shown] == [("up", True, True)]
    core.take(routing_events.ReplicaDrainStarted("a:1"), 2.0)
    assert register.refresh_shown(core, preset.routing, 2.0)
    assert [(one.direct, one.takes_new) for one in register.shown] == [(False, False)]
    assert register.version == 2


def test_what_is_kept_is_a_copy() -> None:
    register = EngineRegistry()
    register.put(registration("e", "a"))
    kept = register.kept()
    register.remove("e")
    assert list(EngineRegistry(kept).kept()) == ["e"]
    EngineRegistry(kept).remove("e")
    assert list(kept) == ["e"]


# -- checkpoints --------------------------------------------------------------------


def checkpoint(epoch: int, unix_s: float = 0.0) -> CoordinatorCheckpoint:
    return CoordinatorCheckpoint(epoch=epoch, unix_s=unix_s, core=None, engines={})


async def test_only_what_is_new_is_written_and_others_are_seen(tmp_path: Path) -> None:
    path = tmp_path / "c"
    made: list[CoordinatorCheckpoint] = []
    epochs: list[int] = []

    def copy() -> Generator[None, None, CoordinatorCheckpoint]:
        made.append(checkpoint(7, float(len(made))))
        yield
        return made[-1]

    it = CheckpointWriter(path, 0.001, copy, epochs.append)
    assert it.write(checkpoint(7))
    run = asyncio.ensure_future(it.run())
    await until(lambda: it.is_current)
    seen = len(epochs)
    await until(lambda: len(epochs) > seen + 3)
    assert len(made) == 1
    it.mark_changed()
    assert not it.is_current
    await until(lambda: it.is_current)
    assert read_checkpoint(path) == made[-1] == checkpoint(7, 1.0)
    assert CheckpointWriter(path, 1.0, copy, epochs.append).write(checkpoint(9))
    await until(lambda: epochs[-1] == 9)
    it.mark_changed()
    await until(lambda: it.is_current)
    run.cancel()
    assert read_checkpoint_epoch(path) == 9, "what a later one wrote stays"


async def test_what_cannot_be_written_is_tried_again(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "no folder").write_text("")

    def copy() -> Generator[None, None, CoordinatorCheckpoint]:
        yield
        return checkpoint(1)

    it = CheckpointWriter(tmp_path / "no folder" / "c", 0.001, copy, lambda epoch: None)
    run = asyncio.ensure_future(it.run())
    await until(lambda: caplog.text.count("cannot be written") > 1)
    assert not it.is_current
    (tmp_path / "no folder").unlink()
    await until(lambda: it.is_current)
    run.cancel()
    assert read_checkpoint_epoch(tmp_path / "no folder" / "c") == 1


# -- places -------------------------------------------------------------------------


def known() -> tuple[ReplicaCache, ReplicaAddresses, list[tuple[str, str]]]:
    replicas, gone = ReplicaAddresses(), list[tuple[str, str]]()
    return ReplicaCache(replicas, lambda *which: gone.append(which)), replicas, gone


def test_a_lost_or_restarted_replica_is_reported() -> None:
    places, replicas, gone = known()
    places.update([place("a"), place("b")], 1)
    places.update([place("a", "2")], 2)
    assert sorted(gone) == [("a", "1"), ("b", "1")]
    assert list(places) == [one.replica_id for one in replicas] == ["a"]
    places.update([], 2)
    assert list(places) == ["a"], "it is no newer"


def test_what_the_coordinator_before_knew_stays_for_a_while() -> None:
    places, replicas, gone = known()
    places.joined(0.0, another=True)
    places.update([place("a"), place("b")], 5)
    places.joined(100.0, another=True)
    places.update([place("a")], 0)
    assert (set(places), set(places.inherited)) == ({"a", "b"}, {"b"})
    places.expire_inherited(100.0 + INHERITED_TTL_S - 0.1)
    assert len(places) == 2
    places.expire_inherited(100.0 + INHERITED_TTL_S)
    assert list(places) == [one.replica_id for one in replicas] == ["a"]
    assert gone == [("b", "1")]


def test_the_same_coordinator_again_leaves_nothing_behind() -> None:
    places, _, gone = known()
    places.update([place("a"), place("b")], 5)
    places.joined(1.0, another=False)
    places.update([place("a")], 0)
    assert (list(places), gone) == (["a"], [("b", "1")])


# -- open requests ------------------------------------------------------------------


def asked(name: str, program: str | None = None, tenant: str = "t") -> routing_events.RequestReceived:
    return routing_events.RequestReceived(name, tenant, 10, program_id=program)


def test_those_that_are_over_are_not_there() -> None:
    it = OpenRequests()
    for name in ("r0", "r1"):
        it.add(asked(name, "p"), 0.0)
    it.remove("r0")
    it.remove("never came")
    assert list(it) == ["r1"]


def test_a_request_is_reported_in_its_current_state() -> None:
    it = OpenRequests()
    one = it.add(asked("r", "p"), 0.0)
    assert one.as_event(0.0) == one.asked
    one.sent_to, one.began = "a", True
    assert one.as_event(0.0) == routing_events.RequestSent("r", "a", "t", 10, program_id="p", began=True)
    assert it.sent_to("a") == [one]
    assert it.sent_to("b") == []


def test_a_gateway_decides_alone_without_the_coordinator() -> None:
    it = OpenRequests()
    busy = it.add(asked("busy"), 0.0)
    busy.sent_to = "a"
    one = it.add(asked("r", "p"), 0.0)
    places = {name: place(name) for name in ("a", "b", "c")}

    def decided(home: str | None = None, now: float = 0.0) -> Any:
        return it.decide(one, places, home, now)

    assert decided("a") == routing_events.SendRequest("r", "a", "coordinator_away"), (
        "home, though it has more to do"
    )
    assert decided("gone") == routing_events.SendRequest("r", "b", "coordinator_away", "gone")
    places["b"] = place("b", health="suspect", takes_new=False)
    assert decided().replica_id == "c"
    one.failed_at.append("c")
    assert decided().replica_id == "a", "rather a busy one than one that may be gone"
    places["a"] = place("a", health="draining", takes_new=False)
    assert decided().replica_id == "b"
    one.failed_at.append("b")
    assert decided() is None
    assert decided(now=MAX_WAIT_WITHOUT_REPLICA_S).code == "coordinator_away"
    one.failed_at.append("a")
    assert len(one.failed_at) == MAX_FAILURES
    assert decided().code == "replicas_failed"
