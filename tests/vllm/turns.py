"""Prompts, events and questions of the tests on vLLM's scheduler."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
from sojourn_server.simulator import simulated_engine
from sojourn_server.simulator.simulated_engine import STOP_TOKEN
from sojourn_server.vllm.kv_connector import StepReport
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request


def prompt(start: int, tokens: int) -> list[int]:
    """Tokens that no prompt of another ``start`` has."""
    return list(range(start * 10_000, start * 10_000 + tokens))


def abandoned_branches(queue: Any, program_id: str) -> dict[float, int]:
    """Abandoned branches of a program, as time of last use → number of blocks."""
    lengths = {used_s: len(each.blocks) for used_s, each in queue._buckets.get(program_id, {}).items()}
    return {used_s: blocks for used_s, blocks in lengths.items() if used_s != math.inf}


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


def paths_settings(folder: Path, **changed: Any) -> dict[str, Any]:
    """Settings of the paths connector; a value of ``None`` leaves a setting out."""
    given = {
        "listen": f"unix:{folder / 'p.sock'}",
        "store": str(folder / "store"),
        "store_name": "p",
        "store_bytes": 1 << 24,
        "buffer_bytes": 1 << 24,
        **changed,
    }
    return {name: value for name, value in given.items() if value is not None}


def change_config(monkeypatch: Any, change: Callable[[Any], None]) -> None:
    """Let engines that are made from now on have a changed configuration of vLLM."""
    configure = simulated_engine._engine_vllm_config

    def configured(*options: Any) -> Any:
        config = configure(*options)
        change(config)
        return config

    monkeypatch.setattr(simulated_engine, "_engine_vllm_config", configured)


def last_turn(engine: Any, program: str) -> dict[str, Any]:
    """The ledger's row of a program's last turn."""
    turn: dict[str, Any] = engine.ask("program", program_id=program)["ledger"][-1]
    return turn


def planner(engine: Any) -> Any:
    """The planner of our host memory and disk."""
    return engine.scheduler.connector.planner


def no_load_is_left(engine: Any) -> bool:
    """Whether no block is loaded, or kept in host memory for that."""
    host = planner(engine)
    return not (any(entry.pins for entry in host.host) or host.loads or host._loading)


def running(engine: Any) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


def waiting(engine: Any) -> list[str]:
    """In the queue's order."""
    return [request.request_id for request in engine.scheduler.waiting]


def add_request(
    engine: Any,
    request_id: str,
    tokens: Sequence[int],
    *,
    hints: dict[str, Any] | None = None,
    params: Any = None,
    max_tokens: int = 1,
    aborts: bool = False,
    **fields: Any,
) -> Any:
    """Add a request with fields that ``engine.add`` does not know. ``hints``: its ``agentic_context``;
    ``params``: its ``kv_transfer_params``."""
    extra = {"agentic_context": json.dumps(hints)} if hints is not None else {}
    extra |= {"kv_transfer_params": params} if params is not None else {}
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, stop_token_ids=[STOP_TOKEN], extra_args=extra
    )
    fields = {"pooling_params": None, "block_hasher": engine.hash_blocks, **fields}
    request = Request(request_id, list(tokens), sampling, **fields)
    if aborts:
        request.abort_immediately = True  # not every release has it
    engine.scheduler.add_request(request)
    return request


def arrive(engine: Any, planned: Any, *loads: str, without: set[int] = frozenset()) -> None:
    """End a step with our host memory: all of its stores and writes to disk have ended, searches of the disk
    have found nothing, and these loads have ended, but for blocks ``without`` content."""
    jobs = planned.kv_connector_metadata.jobs
    results = OffloadResults(
        stored=dict.fromkeys(jobs.stores, CopyResult.MOVED),
        spilled={file.key: CopyResult.MOVED for file in jobs.spills},
        probed=dict.fromkeys(jobs.probes, (0, True)),
    )
    report = KVConnectorOutput(
        kv_connector_worker_meta=StepReport(results),
        finished_recving={*loads},
        invalid_block_ids={*without},
    )
    engine.update_from_output(planned, report)


def turn_with_copies(engine: Any, request_id: str, tokens: list[int], program: str | None) -> list[Any]:
    """Run a request to its end, and all copies. Returns the jobs of its steps."""
    engine.add(request_id, tokens, program_id=program, max_tokens=2)
    jobs = []
    while engine.scheduler.has_unfinished_requests() or engine.scheduler.connector.planner.under_way:
        planned = engine.plan()
        jobs.append(planned.kv_connector_metadata.jobs)
        arrive(engine, planned, *jobs[-1].loads)
    return jobs
