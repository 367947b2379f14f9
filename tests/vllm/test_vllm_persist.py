"""A program's KV is written to disk beside vLLM's own scheduler: what is asked over HTTP, what follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from turns import arrive, prompt, turn_with_copies

Make = Callable[..., Any]
SHAPE = {"blocks": 41, "host_blocks": 60, "disk_blocks": 100, "own_tiers": True, "max_model_len": 640}


def persist(engine: Any) -> tuple[str, int, int]:
    told = engine.ask("persist", program_id="A")
    return told["state"], told["stored_tokens"], told["pending_tokens"]


def idle(engine: Any) -> int:
    """Steps that the engine takes though it has no request."""
    steps = 0
    while engine.scheduler.has_requests():
        arrive(engine, engine.plan())
        steps += 1
        assert steps < 50
    return steps


@pytest.mark.parametrize("policy", ["continuum", "observe", "mori"])
def test_what_is_on_the_device_is_written_without_another_request(make_engine: Make, policy: str) -> None:
    engine = make_engine(policy, **SHAPE)
    turn_with_copies(engine, "a1", prompt(1, 330), "A")
    idle(engine)
    assert persist(engine) == ("writing", 0, 320)
    assert 0 < idle(engine) < 10
    assert persist(engine) == ("done", 320, 0)
    assert engine.ask("persist", program_id="A")["context_tokens"] == 332
    assert idle(engine) == 0
    assert engine.ask("stats")["tiers"]["disk"]["used"] == 20


def test_parts_that_lie_on_the_device_in_host_memory_and_on_disk_are_one_context(make_engine: Make) -> None:
    engine = make_engine("continuum", **SHAPE)
    turn_with_copies(engine, "a1", prompt(1, 330), "A")
    persist(engine)
    idle(engine)
    turn_with_copies(engine, "a2", prompt(1, 500), "A")
    turn_with_copies(engine, "b1", prompt(2, 560), "B")  # which takes what A has on the device
    assert len(engine.scheduler.connector.planner.host) > 0
    while persist(engine)[0] == "writing":
        assert idle(engine)
    told = engine.ask("persist", program_id="A")
    assert told["context_tokens"] - told["stored_tokens"] < 2 * 16, "all but the last, unfinished block"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"own_tiers": False, "host_blocks": 0, "disk_blocks": 0}, "no sojourn connector"),
        ({"disk_blocks": 0}, "no disk below its host memory"),
    ],
)
def test_where_there_is_no_disk_the_reason_is_told(
    make_engine: Make, options: dict[str, Any], reason: str
) -> None:
    engine = make_engine("continuum", **{**SHAPE, **options})
    engine.add("a1", prompt(1, 330), program_id="A", max_tokens=2)
    engine.run()
    told = engine.ask("persist", program_id="A")
    assert (told["state"], told["context_tokens"]) == ("unsupported", 332)
    assert (told["stored_tokens"], told["pending_tokens"]) == (0, 0)
    assert reason in told["reason"]
    assert engine.ask("persist", program_id="nobody") is None
