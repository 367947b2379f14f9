"""Orders to yield, in the state machine alone. ``test_vllm_yielding.py`` has them in vLLM's scheduler."""

from __future__ import annotations

import pytest
from sojourn.ids import ProgramId
from sojourn_server.core.events_and_actions import RequestYields, StepCompleted, Tick, YieldOrdered
from sojourn_server.core.parked_requests import ParkedRequests
from sojourn_server.core.request_table import RequestState
from virtual_engine import VirtualEngine, prompt


def run(engine: VirtualEngine, program: str) -> str:
    request = engine.arrive(program, prompt(4, seed=1))
    engine.admit(request)
    return request


def order(engine: VirtualEngine, program: str, to: str) -> None:
    engine.program_scheduler.handle(YieldOrdered(ProgramId(program), ProgramId(to)), engine.now)


def step(engine: VirtualEngine) -> list[RequestYields]:
    """Plan a step, and return which requests must yield in it."""
    engine.program_scheduler.handle(StepCompleted(1, 0.01, 1), engine.now)
    actions = engine.program_scheduler.handle(Tick(), engine.now)
    return [action for action in actions if isinstance(action, RequestYields)]


def test_orders_to_one_program_take_different_requests_of_it() -> None:
    engine = VirtualEngine()
    running = [run(engine, "p") for _ in range(2)]
    urgent = [engine.arrive(name, prompt(4)) for name in ("t", "u", "v")]
    engine.now += 2.0
    for name in ("t", "u", "v"):
        order(engine, "p", name)
    assert step(engine) == []
    assert step(engine) == [RequestYields(*pair) for pair in zip(running, urgent, strict=False)]


def test_a_programs_requests_are_looked_through_once_a_step_however_many_orders_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every holder of a key may order: 256 orders and 500 waiting requests took 110 ms of each step."""
    looked_at: list[str] = []
    is_parked = ParkedRequests.is_parked

    def counted(parked: ParkedRequests, request_state: RequestState) -> bool:
        looked_at.append(request_state.request_id)
        return is_parked(parked, request_state)

    monkeypatch.setattr(ParkedRequests, "is_parked", counted)
    engine = VirtualEngine()
    for number in range(30):
        run(engine, f"p{number}")
    for _ in range(50):
        engine.arrive("urgent", prompt(4))
    for number in range(30):
        order(engine, f"p{number}", "urgent")  # none has run for long enough to yield
    for _ in range(2):
        looked_at.clear()
        step(engine)
        assert len(looked_at) <= 50
