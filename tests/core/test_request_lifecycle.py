"""Requests that arrive, run and leave in unusual orders leave nothing behind."""

from __future__ import annotations

import pytest
from sojourn.ids import ProgramId
from sojourn_server.core.events_and_actions import (
    RequestAdmitted,
    RequestArrived,
    TurnFinished,
    TurnFinishReason,
)
from sojourn_server.core.request_hints import read_identity
from virtual_engine import VirtualEngine

P, Q = ProgramId("p"), ProgramId("q")


def arrival(request_id: str, program: str | None = "p") -> RequestArrived:
    return RequestArrived(request_id=request_id, identity=read_identity(program, None), prompt_tokens=8)


def finish(request_id: str, outcome: TurnFinishReason = TurnFinishReason.STOPPED) -> TurnFinished:
    return TurnFinished(request_id, outcome, (), 8, 2, (1, 2), (1, 2))


def test_an_id_that_arrives_again_ends_the_first_request() -> None:
    engine = VirtualEngine()
    scheduler = engine.program_scheduler
    scheduler.handle(arrival("r", "p"), engine.now)
    scheduler.handle(arrival("r", "q"), engine.now)
    assert scheduler.live_requests(P) == set()
    assert scheduler.live_requests(Q) == {"r"}


@pytest.mark.parametrize(
    "event",
    [finish("unknown"), RequestAdmitted("unknown", 0, 8, (1, 2), False)],
    ids=["finished", "admitted"],
)
def test_an_event_of_an_unknown_request_changes_nothing(event: TurnFinished | RequestAdmitted) -> None:
    engine = VirtualEngine()
    assert engine.program_scheduler.handle(event, engine.now) == []
    assert engine.program_scheduler.state.requests.states == {}


def test_only_the_last_request_of_a_program_ends_its_turn() -> None:
    engine = VirtualEngine()
    scheduler = engine.program_scheduler
    for request_id in ("a", "b"):
        scheduler.handle(arrival(request_id), engine.now)
        scheduler.handle(RequestAdmitted(request_id, 0, 8, (1, 2), False), engine.now)
    scheduler.handle(finish("a"), engine.now)
    assert scheduler.context(P) is None
    scheduler.handle(finish("b"), engine.now)
    assert scheduler.context(P) == (1, 2)


def test_a_failed_request_leaves_no_context() -> None:
    engine = VirtualEngine()
    scheduler = engine.program_scheduler
    scheduler.handle(arrival("a"), engine.now)
    scheduler.handle(RequestAdmitted("a", 0, 8, (1, 2), False), engine.now)
    scheduler.handle(finish("a", TurnFinishReason.ERROR), engine.now)
    assert scheduler.context(P) is None
    assert scheduler.state.requests.running_tokens == 0
