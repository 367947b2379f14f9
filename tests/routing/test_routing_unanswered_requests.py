"""The routing core: requests that nobody answered, and programs of which nothing is left but a name."""

from __future__ import annotations

from typing import Any

import pytest
from routing_builders import build_core, with_replicas
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_core import RoutingCore


def core(*replicas: str, **limits: Any) -> RoutingCore:
    return with_replicas(build_core(**limits), *replicas)


def ask(of: RoutingCore, name: str, program: str | None = "p", tenant: str = "t", now: float = 1.0) -> Any:
    return of.take(routing_events.RequestReceived(name, tenant, 100, program_id=program), now)


def home(of: RoutingCore, program: str = "p") -> str | None:
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


def test_programs_whose_requests_engines_refuse_do_not_fill_the_table() -> None:
    it = core("a")
    for number in range(50):
        ask(it, f"r{number}", f"p{number}")
        it.take(routing_events.RequestFailed(f"r{number}", "a"), 1.0)
        it.take(routing_events.RequestFinished(f"r{number}", answered=False), 1.0)
    ask(it, "open", "p0")
    assert [program.key[1] for program in it.programs.values()] == ["p0"]


def test_one_whose_other_request_is_open_or_that_had_a_turn_stays() -> None:
    it = core("a")
    ask(it, "r0")
    ask(it, "r1")
    it.take(routing_events.RequestFinished("r0", replica_id="a", answered=False), 2.0)
    assert home(it) == "a"
    it.take(routing_events.FirstByteSent("r1", "a"), 2.0)
    it.take(routing_events.RequestFinished("r1", 10), 3.0)  # its client left, and had something
    ask(it, "r2")
    it.take(routing_events.RequestFinished("r2", 0, "a", answered=False), 4.0)
    assert home(it) == "a"
    program = it.programs.get(("t", "p"))
    assert program is not None
    assert (program.turns, program.context_tokens) == (1, 110)
