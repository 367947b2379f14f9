"""What a hostile review of the lab found, and corners that nothing else holds to."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from simulator_crowded_workload import CROWDED_BLOCKS, crowded_workload
from simulator_small_runs import SmallRun
from simulator_small_workload import BLOCK, FlatLatency
from sojourn_server.simulator import simulation_run
from sojourn_server.simulator.run_log import RunLog, TurnLog
from sojourn_server.simulator.simulation_run import RunSpec
from sojourn_server.simulator.simulator_policies import Bound, policy_names
from sojourn_server.simulator.vllm_offload_transfers import VllmOffloadTransfers
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    TransferJob,
)

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

CROWD = 59
"""Under stock, one that was computing again what had been evicted is preempted before it is through."""

POLICIES = policy_names()


def turns_of(log: RunLog) -> list[TurnLog]:
    return [turn for program in log.programs for turn in program.turns]


@pytest.mark.parametrize("policy", POLICIES)
def test_corner_cases_are_played_to_their_end_and_add_up(policy: str):
    loop, programs = crowded_workload(CROWD)
    log = SmallRun(policy, loop, blocks=CROWDED_BLOCKS).log
    assert not log.notes
    assert log.hook_failures == log.refused_hints == 0
    lives = {life.program_id: life for life in log.programs}
    assert lives.keys() == programs.keys()
    for program_id, program in programs.items():
        assert [turn.output_tokens for turn in lives[program_id].turns] == [t.output for t in program.turns]
    for turn in turns_of(log):
        if not turn.preemptions:
            assert turn.device_tokens + turn.host_tokens + turn.computed_tokens == turn.prompt_tokens
        assert turn.regenerated_tokens <= turn.computed_tokens


def test_the_corner_cases_are_there():
    log = SmallRun("stock", crowded_workload(CROWD)[0], blocks=CROWDED_BLOCKS).log
    assert sum(turn.preemptions for turn in turns_of(log)) > 0
    assert any(turn.output_tokens == 1 for turn in turns_of(log))
    assert any(turn.prompt_tokens == 1 for turn in turns_of(log))
    assert any(turn.prompt_tokens % BLOCK == 1 and turn.device_tokens for turn in turns_of(log))
    assert any(program.parent for program in log.programs)


@pytest.mark.parametrize(("seed", "until_s"), [(CROWD, None), (CROWD, 2.6), (4, None), (6, 6.4)])
def test_what_is_computed_again_is_counted_once(
    seed: int, until_s: float | None, monkeypatch: pytest.MonkeyPatch
):
    """Against a count of blocks, one by one, as they are filled."""
    filled: set[bytes] = set()
    again = 0

    def watch(run: SmallRun) -> None:
        plan = run.engine.plan

        def watched() -> Any:
            nonlocal again
            planned = plan()
            for request_id, tokens in planned.num_scheduled_tokens.items():
                request = run.engine.scheduler.requests[request_id]
                end = request.num_computed_tokens
                for number in range((end - tokens) // BLOCK, end // BLOCK):
                    block = request.block_hashes[number]
                    # A block that ends with the last token can never be found, for that is always computed.
                    again += block in filled and number < (request.num_tokens - 1) // BLOCK
                    filled.add(block)
            return planned

        run.engine.plan = watched  # type: ignore[method-assign]

    monkeypatch.setattr(SmallRun, "_watch", watch)
    log = SmallRun("stock", crowded_workload(seed)[0], blocks=CROWDED_BLOCKS, until_s=until_s).log
    cut = [turn for turn in turns_of(log) if turn.admitted_s is not None and turn.finished_s is None]
    assert (until_s is None) == (not cut)
    # Of one that the end cut off, less than a block may lie beyond its last full one.
    counted = sum(turn.regenerated_tokens for turn in turns_of(log))
    assert again * BLOCK <= counted < again * BLOCK + (BLOCK * len(cut) or 1)
    assert again > 0


@pytest.mark.parametrize("bound", [Bound.FREE_IO, Bound.UNLIMITED])
@pytest.mark.parametrize("seed", [CROWD, 2])
def test_under_a_bound_nothing_is_computed_again(bound: Bound, seed: int):
    log = SmallRun(bound.value, crowded_workload(seed)[0], blocks=CROWDED_BLOCKS).log
    assert sum(turn.known_tokens for turn in turns_of(log)) > 0
    assert [turn.regenerated for turn in turns_of(log) if turn.regenerated] == []


def copy_job(request_id: str, blocks: int) -> Any:
    where = SimpleNamespace(block_ids=list(range(blocks)))
    return TransferJob(req_id=request_id, src_spec=where, dst_spec=where)


def test_a_load_waits_for_the_stores_of_the_blocks_it_overwrites():
    """vLLM's worker waits for the flush before it submits any load (offloading/worker.py)."""
    host = VllmOffloadTransfers(FlatLatency(), block_bytes=1_000_000)  # a second a block
    stores = OffloadingConnectorMetadata(load_jobs={}, store_jobs={1: copy_job("a/0", 3)})
    assert host.begin_step(stores, 0.0) == 0.0
    loads = OffloadingConnectorMetadata(load_jobs={2: copy_job("b/0", 2)}, store_jobs={}, jobs_to_flush={1})
    assert host.begin_step(loads, 1.0) == 4.0
    assert host.get_finished(5.9).finished_recving is None
    assert host.get_finished(6.0).finished_recving == {"b/0"}


@pytest.mark.parametrize("bound", [Bound.FREE_IO, Bound.UNLIMITED])
def test_a_bound_whose_memory_fills_up_says_that_it_is_none(
    bound: Bound, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    turns = [{"prompt_tokens": 400 + 110 * turn, "output_tokens": 10, "gap_s": 1.0} for turn in range(4)]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"program_id": f"p{n}", "turns": turns}) + "\n" for n in range(6)))
    spec = RunSpec(
        policy=bound.value, workload=str(trace), programs=6, rate_per_s=50.0, until_s=None, pool_tokens=1024
    )
    assert simulation_run.run_simulation(spec).notes == []
    monkeypatch.setattr(simulation_run, "UNBOUNDED_HOST_TOKENS", 640)
    log = simulation_run.run_simulation(spec)
    assert sum(turn.regenerated_tokens for turn in turns_of(log)) > 0
    assert any("no bound" in note for note in log.notes)
