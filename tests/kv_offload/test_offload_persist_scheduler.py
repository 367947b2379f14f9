"""A program's KV is written out beside vLLM's own scheduler: what is asked over HTTP, what follows."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("vllm")

from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadJobs, OffloadResults

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

BLOCK_TOKENS = 16
SHAPE: dict[str, Any] = {"blocks": 41, "host_blocks": 60, "own_tiers": True, "max_model_len": 640}


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


def make(policy: str = "continuum", strict: bool = True, **options: Any) -> Any:
    from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

    settings = {"policy": policy, "strict": strict}
    return SimulatedEngine(SimulatedEngineOptions(sojourn=settings, **{**SHAPE, **options}), lambda: 1000.0)


def step(engine: Any) -> OffloadJobs:
    """Run a step whose jobs all succeed at once. No other engine has written to the disk."""
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.outputs import KVConnectorOutput

    planned = engine.plan()
    jobs: OffloadJobs = planned.kv_connector_metadata.jobs
    results = OffloadResults(
        probed=dict.fromkeys(jobs.probes, (0, True)),
        stored=dict.fromkeys(jobs.stores, CopyResult.MOVED),
        spilled={file.key: CopyResult.MOVED for file in jobs.spills},
    )
    engine.update_from_output(planned, KVConnectorOutput(kv_connector_worker_meta=StepReport(results)))
    return jobs


def turn(engine: Any, request_id: str, tokens: list[int], program: str) -> None:
    engine.add(request_id, tokens, program_id=program, max_tokens=2)
    while engine.scheduler.has_unfinished_requests():
        step(engine)


def persist(engine: Any, program: str = "A") -> tuple[str, int, int]:
    told = engine.ask("persist", program_id=program)
    return told["state"], told["stored_tokens"], told["pending_tokens"]


def idle(engine: Any) -> int:
    """Steps that the engine takes though it has no request."""
    steps = 0
    while engine.scheduler.has_requests():
        step(engine)
        steps += 1
        assert steps < 50
    return steps


@pytest.mark.parametrize("policy", ["continuum", "observe", "mori"])
def test_what_is_on_the_device_is_written_without_another_request(policy: str) -> None:
    engine = make(policy, disk_blocks=100)
    turn(engine, "a1", prompt(1, 330), "A")
    idle(engine)
    assert persist(engine) == ("writing", 0, 320)
    assert 0 < idle(engine) < 10
    assert persist(engine) == ("done", 320, 0)
    assert engine.ask("persist", program_id="A")["context_tokens"] == 332
    assert idle(engine) == 0
    assert engine.ask("stats")["tiers"]["disk"]["used"] == 20


def test_parts_that_lie_on_the_device_in_host_memory_and_on_disk_are_one_context() -> None:
    engine = make(disk_blocks=100)
    turn(engine, "a1", prompt(1, 330), "A")
    persist(engine)
    idle(engine)
    turn(engine, "a2", prompt(1, 500), "A")
    turn(engine, "b1", prompt(2, 560), "B")  # which takes what A has on the device
    assert len(engine.scheduler.connector.planner.host) > 0
    while persist(engine)[0] == "writing":
        assert idle(engine)
    told = engine.ask("persist", program_id="A")
    assert told["context_tokens"] - told["stored_tokens"] < 2 * BLOCK_TOKENS


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"own_tiers": False, "host_blocks": 0}, "no sojourn connector"),
        ({"disk_blocks": 0}, "no disk below its host memory"),
    ],
)
def test_where_there_is_no_disk_the_reason_is_told(options: dict[str, Any], reason: str) -> None:
    engine = make(**options)
    engine.add("a1", prompt(1, 330), program_id="A", max_tokens=2)
    engine.run()
    told = engine.ask("persist", program_id="A")
    assert told["state"] == "unsupported"
    assert reason in told["reason"]
    assert (told["context_tokens"], told["stored_tokens"], told["pending_tokens"]) == (332, 0, 0)
    assert engine.ask("persist", program_id="nobody") is None
