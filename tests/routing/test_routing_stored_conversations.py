"""Requests that continue a stored conversation: only the replica that stores it may serve them."""

from __future__ import annotations

from typing import Any

import pytest
from routing_builders import kv_lost, seen
from sojourn_server.policies.cluster_preset import load_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_from_preset import build_routing_core


def received(name: str, program: str, only: str | None = "a") -> routing_events.RequestReceived:
    return routing_events.RequestReceived(name, "t", 4000, program_id=program, only_replica_id=only)


def busy_core(preset: str) -> RoutingCore:
    """Replica ``a`` is full and has a queue, in which ``stored`` is last; ``b`` is idle."""
    core = build_routing_core(load_cluster_preset(preset))
    for name in "ab":
        core.take(seen(name, capacity_tokens=10_000, max_running=2), 0.0)
    for number in range(6):
        core.take(received(f"r{number}", f"p{number}"), 0.0)
    assert not core.take(received("stored", "conversation"), 0.0)
    return core


def ticks(core: RoutingCore, since_s: float) -> list[Any]:
    return [one for step in range(200) for one in core.take(routing_events.Tick(), since_s + step / 10)]


@pytest.mark.parametrize("preset", ["saga", "sojourn"])
def test_a_stored_conversation_waits_for_its_replica_and_no_other(preset: str) -> None:
    core = busy_core(preset)
    core.take(kv_lost(core, "conversation", "t", "a"), 0.1)
    core.take(routing_events.ReplicaDrainStarted("a"), 0.2)
    actions = ticks(core, 0.3)
    for request in list(core.requests.values()):
        actions += core.take(routing_events.RequestFinished(request.request_id), 30.0)
        actions += core.take(seen("a", capacity_tokens=10_000, max_running=2), 30.0)
    sent = [one for one in actions if isinstance(one, routing_events.SendRequest)]
    assert {one.replica_id for one in sent} == {"a"}
    assert "stored" in {one.request_id for one in sent}
    assert not any(isinstance(one, routing_events.RecallRequest) for one in actions)


@pytest.mark.parametrize("fault", ["failed", "gone"])
def test_a_stored_conversation_whose_replica_fails_is_rejected(fault: str) -> None:
    core = busy_core("saga")
    in_flight = [one.request_id for one in core.requests.values() if one.sent is not None]
    if fault == "failed":
        actions = core.take(routing_events.RequestFailed(in_flight[0], "a", computing=False), 0.1)
        expected = {in_flight[0]}
    else:
        actions = core.take(routing_events.ReplicaGone("a", "1"), 0.1)
        expected = {f"r{number}" for number in range(6)} | {"stored"}
    rejected = {one.request_id: one for one in actions if isinstance(one, routing_events.RejectRequest)}
    assert rejected.keys() == expected
    assert {(one.status, one.code) for one in rejected.values()} == {(502, "replicas_failed")}
    sent = [one.replica_id for one in actions if isinstance(one, routing_events.SendRequest)]
    assert set(sent) <= {"a"}


def test_a_stored_conversation_whose_replica_is_unknown_goes_anywhere() -> None:
    core = busy_core("saga")
    [sent] = core.take(received("late", "other", only="c"), 0.1)
    assert sent.replica_id == "b"
