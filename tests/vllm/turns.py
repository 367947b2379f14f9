"""Prompts, events and questions of the tests on vLLM's scheduler."""

from __future__ import annotations

from typing import Any


def prompt(start: int, tokens: int) -> list[int]:
    """Tokens that no prompt of another ``start`` has."""
    return list(range(start * 10_000, start * 10_000 + tokens))


def tool(program: str, seq: int = 1, call: str = "c", **fields: object) -> dict[str, object]:
    """The event that a program's tool starts."""
    return {
        "type": "tool_start",
        "program_id": program,
        "seq": seq,
        "call_id": call,
        "tool": "bash",
        **fields,
    }


def end(program: str, seq: int = 1000) -> dict[str, object]:
    """The event that a program ends."""
    return {"type": "program_end", "program_id": program, "seq": seq}


def last_turn(engine: Any, program: str) -> dict[str, Any]:
    """The ledger's row of a program's last turn."""
    turn: dict[str, Any] = engine.ask("program", program_id=program)["ledger"][-1]
    return turn


def running(engine: Any) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


def waiting(engine: Any) -> list[str]:
    """In the queue's order."""
    return [request.request_id for request in engine.scheduler.waiting]
