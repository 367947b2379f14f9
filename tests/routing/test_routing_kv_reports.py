"""What engines report of the programs whose KV they have, and what a routing core makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from routing_builders import build_core, seen, with_replicas
from sojourn_server.routing.routing_events import (
    KvReported,
    ProgramEnded,
    RequestFinished,
    RequestReceived,
    ResidentKv,
    SendRequest,
)


def asks(core: Any, name: str, program: str, now: float, tokens: int = 100) -> str | None:
    """Replica to which a request is sent; ``None``: it waits."""
    sent = [
        one
        for one in core.take(RequestReceived(name, "t", tokens, program), now)
        if isinstance(one, SendRequest) and one.request_id == name
    ]
    return sent[0].replica_id if sent else None


def turn(core: Any, name: str, program: str, now: float) -> str:
    at = asks(core, name, program, now)
    assert at is not None
    core.take(RequestFinished(name, 10, at), now + 0.5)
    return at


def report(at: str, *programs: str, tokens: int = 110, age_s: float = 0.0, **more: Any) -> KvReported:
    rows = tuple(ResidentKv("t", program, tokens, 110, 1.0) for program in programs)
    return KvReported(replica_id=at, instance="1", programs=rows, age_s=age_s, **more)


def test_a_program_whose_kv_is_gone_is_cached_nowhere() -> None:
    """SAGA's affinity follows KV and not memory of KV: what an engine has evicted keeps no program there."""
    core = with_replicas(build_core(), "a", "b")
    home = turn(core, "r1", "p", 0.0)
    core.take(report(home, "p"), 2.0)
    assert core.home("t", "p") == home
    core.take(report(home, "p", tokens=20), 4.0)
    assert core.home("t", "p") is None, "most of its KV is gone"


def test_a_report_from_before_the_turn_ended_takes_no_home() -> None:
    core = with_replicas(build_core(), "a")
    turn(core, "r1", "p", 0.0)
    core.take(report("a", age_s=1.0), 1.0)
    assert core.home("t", "p") == "a"
    core.take(report("a", complete=False), 5.0)
    assert core.home("t", "p") == "a", "an incomplete report says nothing of others"
    core.take(report("a"), 5.0)
    assert core.home("t", "p") is None


def test_a_gateway_that_starts_learns_homes_from_the_engines() -> None:
    core = with_replicas(build_core(), "a", "b")
    core.take(report("b", "p", "q"), 1.0)
    assert [core.home("t", name) for name in "pq"] == ["b", "b"]
    assert asks(core, "r1", "p", 2.0) == "b"
    core.take(ProgramEnded("q", "t"), 3.0)
    assert core.home("t", "q") is None


@pytest.mark.parametrize("instance", ["0", "1"])
def test_a_report_of_another_life_or_of_an_unknown_replica_is_ignored(instance: str) -> None:
    core = with_replicas(build_core(), "b")
    core.take(seen("a", instance="2"), 0.0)
    core.take(KvReported(replica_id="a", instance=instance, programs=(ResidentKv("t", "p", 9, 9),)), 1.0)
    core.take(KvReported(replica_id="nowhere", instance="1", programs=(ResidentKv("t", "p", 9, 9),)), 1.0)
    assert core.home("t", "p") is None


def test_load_from_elsewhere_counts_once_two_reports_show_it() -> None:
    """Several gateways share engines and nothing else."""
    core = with_replicas(build_core(), "a", "b")
    busy = report("a", requests=3, request_tokens=900)
    core.take(busy, 1.0)
    assert core.replica_statuses()[0].load == 0.0, "its own requests may have ended meanwhile"
    core.take(busy, 3.0)
    assert core.replica_statuses()[0].load == 0.9
    assert asks(core, "r1", "p", 3.0) == "b"
    core.take(report("a"), 5.0)
    assert core.replica_statuses()[0].load == 0.0
