"""Switching the policy of a running engine off and on again."""

from __future__ import annotations

from sojourn.wire_events import ProgramEnd
from sojourn_server.core.request_table import QueueState
from sojourn_server.programs.program_status import ProgramStatus
from virtual_engine import VirtualEngine, prompt


def placing_engine() -> tuple[VirtualEngine, list[str]]:
    """Return an engine with a running request, and the ids of three waiting ones: two that placement parks,
    and one without a program between them."""
    engine = VirtualEngine("sojourn", blocks=20)
    engine.admit(engine.arrive("a", prompt(60, 1)))
    waiting = [engine.arrive("b", prompt(60, 2)), engine.arrive(None, prompt(8, 3))]
    engine.wait(1.0)
    waiting.append(engine.arrive("c", prompt(60, 4)))
    engine.step()
    return engine, waiting


def states(engine: VirtualEngine, requests: list[str]) -> list[QueueState]:
    return [engine.program_scheduler.queue_place(request).state for request in requests]  # type: ignore[union-attr]


def test_off_releases_held_requests_and_on_holds_them_again() -> None:
    engine, waiting = placing_engine()
    held = [QueueState.PARKED, QueueState.OPEN, QueueState.PARKED]
    assert states(engine, waiting) == held
    assert engine.ask("policy", on=False) == {"policy": "off", "started_with": "sojourn"}
    assert states(engine, waiting) == [QueueState.OPEN] * 3
    assert [each for each in engine.queue() if each in waiting] == waiting, "vLLM's order, by arrival"
    assert engine.program("b").status is engine.status("c") is ProgramStatus.REASONING
    assert engine.reasons("to_device").count("given_up") == 2
    late = engine.arrive("d", prompt(60, 5))
    engine.wait(100.0)
    assert states(engine, [late]) == [QueueState.OPEN]
    assert engine.ask("stats")["policy"] == engine.ask("capabilities")["policy"] == "off"

    assert engine.ask("policy", on=True) == {"policy": "sojourn", "started_with": "sojourn"}
    engine.step()
    assert states(engine, waiting) == held
    assert engine.status("b") is ProgramStatus.GATED
    assert engine.reasons("policy") == ["off", "on"]


def test_a_program_that_ends_while_the_policy_is_off_has_no_place_afterwards() -> None:
    engine, _ = placing_engine()
    engine.ask("policy", on=False)
    engine.send(ProgramEnd(program_id="a", seq=-1))
    engine.ask("policy", on=True)
    assert engine.ask("program", program_id="a")["placed"] is None
