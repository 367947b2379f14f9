"""The routing core: requests that nobody answered, and programs of which nothing is left but a name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from routing_builders import build_core, with_replicas
from sojourn_server.routing import bounded_program_table, routing_events
from sojourn_server.routing.affinity_core import AffinityCore
from sojourn_server.routing.bounded_program_table import BoundedProgramTable
from sojourn_server.routing.pair_core import PairCore
from sojourn_server.routing.routed_programs import RoutedProgram
from sojourn_server.routing.routing_limits import RoutingLimits


def core(*replicas: str, **limits: Any) -> AffinityCore:
    return with_replicas(build_core(**limits), *replicas)


def pair_core(**limits: Any) -> PairCore:
    return PairCore(limits=RoutingLimits(**limits))


def ask(of: AffinityCore, name: str, program: str | None = "p", tenant: str = "t", now: float = 1.0) -> Any:
    return of.take(routing_events.RequestReceived(name, tenant, 100, program_id=program), now)


def home(of: AffinityCore, program: str = "p") -> str | None:
    found = of.programs.get(("t", program))
    return found.home if found is not None else None


@pytest.mark.parametrize("answered", [False, None])
def test_a_program_that_got_no_answer_keeps_no_room(answered: bool | None) -> None:
    it = core("a")
    ask(it, "r0")
    assert it.fleet.get("a").homed_tokens == 100  # type: ignore[union-attr]
    it.take(routing_events.RequestFinished("r0", replica_id="a", answered=answered), 2.0)
    assert it.fleet.get("a").homed_tokens == 0  # type: ignore[union-attr]
    assert it.programs.get(("t", "p")) is None, "it would be kept for half an hour"
    assert [one for one in it.journal.since(1, "", tuple).changes if one.replica_id is None]


def test_programs_whose_requests_engines_refuse_do_not_fill_the_table() -> None:
    it = core("a")
    for number in range(50):
        ask(it, f"r{number}", f"p{number}")
        it.take(routing_events.RequestFailed(f"r{number}", "a"), 1.0)
        it.take(routing_events.RequestFinished(f"r{number}", answered=False), 1.0)
    ask(it, "open", "p0")
    assert [program.key[1] for program in it.programs] == ["p0"]


def test_one_whose_other_request_is_open_or_that_had_a_turn_stays() -> None:
    it = core("a")
    ask(it, "r0")
    ask(it, "r1")
    it.take(routing_events.RequestFinished("r0", replica_id="a", answered=False), 2.0)
    assert home(it) == "a"
    it.take(routing_events.FirstByteSent("r1", "a"), 2.0)
    it.take(
        routing_events.RequestFinished("r1", 10, answered=None), 3.0
    )  # its gateway is gone, and the client had something
    ask(it, "r2")
    it.take(routing_events.RequestFinished("r2", 0, "a", answered=False), 4.0)
    assert home(it) == "a"
    program = it.programs.get(("t", "p"))
    assert program is not None
    assert (program.turns, program.context_tokens) == (1, 110)


def test_one_that_is_given_up_in_the_queue_of_its_replica_leaves_too() -> None:
    it = core("a", send_below_load=0.05)
    ask(it, "busy", None)
    assert ask(it, "r0") == []
    assert home(it) == "a"
    it.take(routing_events.RequestFinished("r0", answered=False), 2.0)
    assert home(it) is None


def test_what_was_sent_to_a_replica_that_never_registers_goes_elsewhere() -> None:
    it = core("a", lease_s=10.0)
    it.take(routing_events.RequestSent("r0", "dead", "t", 100, program_id="p"), 1.0)
    it.take(routing_events.RequestSent("r1", "dead", "t", 100, began=True), 1.0)
    it.take(routing_events.ReplicaRegistered("a", "1", 1000), 9.0)
    assert it.take(routing_events.Tick(), 10.0) == []
    did = it.take(routing_events.Tick(), 11.0)
    assert [
        (type(one), one.request_id)
        for one in did
        if not isinstance(one, (routing_events.ReleaseProgramKv, routing_events.ProbeReplica))
    ] == [
        (routing_events.AbortStream, "r1"),
        (routing_events.SendRequest, "r0"),
    ]
    assert not it.requests.unregistered_requests


def test_a_flood_of_one_tenants_programs_displaces_no_other_tenants() -> None:
    programs: BoundedProgramTable[RoutedProgram] = BoundedProgramTable(most=10)

    def add(tenant: str, name: str, now: float) -> RoutedProgram | None:
        new = RoutedProgram((tenant, name), None, None, now, now)
        return programs.find_or_add(new.key, lambda: new, now)[1]

    add("a", "victim", 0.0)
    for number in range(100):
        forgotten = add("b", str(number), 1.0)
        assert forgotten is None or forgotten.key == ("b", str(number - 9))
    assert programs.get(("a", "victim")) is not None
    assert len(programs) == 10
    for program in programs:
        program.in_flight = program.tenant == "b"
    forgotten = add("b", "one more", 2.0)
    assert forgotten is not None
    assert forgotten.key == ("a", "victim"), "nobody else is without a request"


def test_programs_silent_for_long_are_found_behind_one_whose_turn_has_just_ended() -> None:
    it = core("a", silent_program_s=100.0)
    ask(it, "long", "first", now=1.0)
    ask(it, "r0", "p", now=2.0)
    it.take(routing_events.RequestFinished("r0", 1, "a"), 3.0)
    it.take(routing_events.RequestFinished("long", 1, "a"), 90.0)
    it.take(routing_events.ReplicaRegistered("a", "1", 1000), 104.0)
    it.take(routing_events.Tick(), 104.0)
    assert home(it) is None
    assert home(it, "first") == "a"


@pytest.mark.parametrize("build", [core, pair_core])
def test_a_tick_removes_a_bounded_number_of_silent_programs(
    build: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_program_table, "MAX_EXPIRED_PROGRAMS", 4)
    it = build(silent_program_s=100.0, lease_s=1e9)
    for number in range(10):
        key = ("t", f"p{number}")
        it.programs.add(RoutedProgram(key, None, None, 0.0, 0.0, turns=1))
    left = []
    for _ in range(4):
        it.take(routing_events.Tick(), 101.0)
        left.append(len(it.programs))
    assert left == [6, 2, 0, 0]


def test_what_another_core_would_have_to_know_is_counted() -> None:
    it = core("a", "b")
    ask(it, "r0")
    happened: list[tuple[Any, bool]] = [
        (routing_events.Tick(), False),
        (routing_events.ReplicaRegistered("a", "1", 1000), False),
        (routing_events.ReplicaRegistered("a", "1", 1001), True),
        (routing_events.ReplicaDrainStarted("b"), True),
        (routing_events.RequestFinished("r0", 5, "a"), True),
        (routing_events.Tick(), False),
    ]
    for fact, changes in happened:
        before = it.changes
        it.take(fact, 2.0)
        assert (it.changes > before) == changes, fact
    before = it.changes
    it.take(routing_events.Tick(), 10_000.0)
    assert it.changes > before, "the program is forgotten"
