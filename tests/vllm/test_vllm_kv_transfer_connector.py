"""The paths connector beside vLLM's own scheduler: what its hooks hand on; an error of ours ends nothing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sojourn_server.kv_offload.offload_jobs import OffloadResults
from sojourn_server.kv_transfer.transfer_jobs import AbortJob, PushJob, SaveJob, TransferJobs, TransferResults
from sojourn_server.vllm.kv_connector import MatchedTokens, StepOrders, StepReport
from sojourn_server.vllm.kv_transfer_connector import PathsConnector
from sojourn_server.vllm.pair_connector import PairConnector, copy_wait_s
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.outputs import KVConnectorOutput


@pytest.fixture
def engine(make_paths_engine: Any) -> Any:
    """vLLM's own scheduler with our connector's first half; the second is what the test says."""
    return make_paths_engine(None, blocks=65, max_model_len=1024)


def hits(planned: Any, blocks: int) -> TransferResults:
    """All fetches of a step have ended with so many blocks."""
    return TransferResults(ready={fetch.ask: blocks for fetch in planned.kv_connector_metadata.jobs.fetches})


def answer(engine: Any, planned: Any, reports: TransferResults | None = None, **output: Any) -> None:
    meta = StepReport(reports) if reports is not None else None
    engine.update_from_output(planned, KVConnectorOutput(kv_connector_worker_meta=meta, **output))


@pytest.mark.parametrize("broken", ["arrived", "ask", "allocated", "scheduled", "take_results", "finished"])
def test_an_error_of_ours_ends_nothing(engine: Any, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    monkeypatch.setattr(engine.scheduler.connector.planner, broken, None)
    engine.add("r", list(range(400)), max_tokens=3)
    not_filled = 0
    for _ in range(10):
        planned = engine.plan()
        orders = planned.kv_connector_metadata.jobs
        not_filled += len(orders.not_filled)
        ready = {fetch.ask: 2 for fetch in orders.fetches}
        answer(engine, planned, TransferResults(ready=ready), invalid_block_ids=set(orders.not_filled))
    assert not engine.scheduler.has_unfinished_requests()
    assert not_filled == (8 if broken == "allocated" else 0)


def test_a_worker_without_caches_does_nothing(engine: Any) -> None:
    scheduler_half = engine.scheduler.connector
    worker = PathsConnector(
        scheduler_half._vllm_config, KVConnectorRole.WORKER, scheduler_half._kv_cache_config
    )
    worker.handle_preemptions(engine.plan().kv_connector_metadata)
    worker.wait_for_layer_load("a")
    worker.save_kv_layer("a", SimpleNamespace(), None)  # type: ignore[arg-type]
    worker.wait_for_save()
    assert worker.get_finished(set()) == (None, None)
    assert worker.get_block_ids_with_load_errors() == set()
    assert worker.build_connector_worker_meta() is None
    worker.shutdown()


def test_a_cancelled_load_hides_no_block_that_a_transfer_did_not_fill(make_paths_engine: Any) -> None:
    engine = make_paths_engine("sojourn", None, 60, blocks=65, max_model_len=1024)
    scheduler = engine.scheduler
    worker = PairConnector(scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config)
    worker._worker = SimpleNamespace(
        take_sent=lambda: set(), take_received=lambda: {"b"}, take_not_filled=lambda: {5}, take_results=dict
    )
    worker.host_memory._worker = SimpleNamespace(
        take_loaded=lambda: ({"a"}, {5, 6}),
        take_results=lambda: OffloadResults(waited_s=2.5),
        is_broken=False,
    )
    host_memory = scheduler.connector.host_memory
    host_memory.planner.reject("a", [5, 6])
    host_memory.planner.take_jobs()
    host_memory.planner.cancel_load("a")  # then the request b gets a block of it
    output = KVConnectorOutput(
        finished_recving=worker.get_finished(set())[1],
        invalid_block_ids=worker.get_block_ids_with_load_errors(),
        kv_connector_worker_meta=worker.build_connector_worker_meta(),
    )
    assert copy_wait_s(output) == 2.5
    assert host_memory.end_loads(output) == set()
    assert (output.finished_recving, output.invalid_block_ids) == ({"b"}, {5})


@pytest.mark.parametrize("stored", [32, 96])
def test_only_the_match_that_is_loaded_is_kept(
    make_paths_engine: Any, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    engine = make_paths_engine("sojourn", None, 60, blocks=65, max_model_len=1024)
    request, connector = engine.add("r", list(range(400))), engine.scheduler.connector
    monkeypatch.setattr(connector.host_memory, "_match", lambda *_: (64, MatchedTokens()))
    monkeypatch.setattr(connector, "_match", lambda *_: (stored, MatchedTokens()))
    assert connector.get_num_new_matched_tokens(request, 0) == (max(64, stored), False)
    assert [bool(each.matches) for each in (connector.host_memory, connector)] == [stored < 64, stored > 64]


@pytest.mark.parametrize("told", [False, True], ids=["vLLM's cache alone", "connectors too"])
def test_after_a_reset_nothing_is_read_stored_or_pushed_until_a_restart(engine: Any, told: bool) -> None:
    """New weights are the usual reason: KV of the old ones is in the store under the same name."""
    connector = engine.scheduler.connector
    assert connector.pair_status.has_left_pair is False
    assert engine.scheduler.reset_prefix_cache(reset_connector=told)
    assert connector.has_pending_push_work(), "the worker has to hear of it"
    planned = engine.plan()
    assert planned.kv_connector_metadata.stop
    answer(engine, planned)
    assert connector.pair_status.has_left_pair
    engine.add("r", list(range(400)), max_tokens=20)
    pushed = {"do_remote_decode": True, "transfer": "t", "peer": "unix:/d"}
    expected = {"do_remote_prefill": True, "transfer": "t", "context": "c", "stored": 0}
    for name, params in (("p", pushed), ("d", expected)):
        request = engine.add(name, list(range(400)), max_tokens=1)
        request.kv_transfer_params = params
        connector.on_new_request(request)
    for _ in range(30):
        planned = engine.plan()
        assert not planned.kv_connector_metadata.stop, "said once"
        assert not planned.kv_connector_metadata.jobs
        answer(engine, planned)
    assert not engine.scheduler.has_requests()
    assert not len(connector.planner)


def test_what_waits_for_a_hit_when_the_cache_is_reset_is_computed(engine: Any) -> None:
    engine.add("waits", list(range(400)), max_tokens=2)
    engine.add("is here", list(range(400, 800)), max_tokens=2)
    planned = engine.plan()
    first, second = planned.kv_connector_metadata.jobs.fetches
    answer(engine, planned, TransferResults(ready={second.ask: 5}))
    assert engine.scheduler.reset_prefix_cache()
    planned = engine.plan()
    assert planned.num_scheduled_tokens == {"waits": 400, "is here": 400}
    orders = planned.kv_connector_metadata.jobs
    assert sorted(orders.ends) == [first.ask, second.ask]
    assert (orders.streams, orders.saves, orders.fetches) == ([], [], [])
    while engine.scheduler.has_requests():
        answer(engine, planned)
        planned = engine.plan()
        assert not planned.kv_connector_metadata.jobs.saves


def test_a_reset_before_a_measurement_can_leave_the_store_in_use(engine: Any) -> None:
    connector = engine.scheduler.connector
    options = dataclasses.replace(connector.settings.options, keep_on_reset=True)
    connector.settings = dataclasses.replace(connector.settings, options=options)
    connector._pool = None
    connector.bind_gpu_block_pool(engine.pool)
    assert engine.scheduler.reset_prefix_cache()
    engine.add("r", list(range(400)), max_tokens=2)
    assert engine.plan().kv_connector_metadata.jobs.fetches
    connector.reset_cache()
    assert engine.plan().kv_connector_metadata.stop


def test_told_to_stop_the_worker_ends_its_traffic_and_tells_of_no_paths(engine: Any, tmp_path: Path) -> None:
    half = engine.scheduler.connector
    worker = PathsConnector(half._vllm_config, KVConnectorRole.WORKER, half._kv_cache_config)
    rows = worker.settings.identity.block_bytes // worker.settings.per_full
    layers = worker.settings.identity.layers
    worker.register_kv_caches(
        {
            f"l{at}": torch.zeros(worker.settings.blocks, rows // layers, dtype=torch.uint8)
            for at in range(layers)
        }
    )
    try:
        assert worker.status() is not None
        keys, ids = [b"k" * 32], list(range(1, 5))
        step = TransferJobs(pushes=[PushJob("r", "c", "unix:/nobody", keys, ids)])
        worker.handle_preemptions(StepOrders(step))
        worker.wait_for_save()
        aborts = [AbortJob("c", "unix:/nobody")]
        worker.handle_preemptions(StepOrders(TransferJobs(holds=["r"], aborts=aborts), stop=True))
        worker.wait_for_save()
        assert worker.get_finished(set())[0] == {"r"}, "its blocks are free again"
        assert worker.status() is None
        worker._closing.join(10)
        assert not worker._closing.is_alive()
        late = SaveJob(request="s", place=0, key=keys[0], parent=b"", block_ids=ids)
        worker.handle_preemptions(StepOrders(TransferJobs(saves=[late])))
        worker.wait_for_save()
        assert not list((tmp_path / "store").glob("**/*.kv"))
    finally:
        worker.shutdown()


def test_half_a_turn_is_no_output_of_one_token(make_paths_engine: Any) -> None:
    """The prefill engine knows the program, computes its prompt, and learns nothing of its output."""
    engine = make_paths_engine("sojourn", blocks=65, max_model_len=1024)
    request = engine.add("r", list(range(400)), max_tokens=1, program_id="p")
    request.kv_transfer_params = {"do_remote_decode": True, "transfer": "t", "peer": "unix:/d"}
    engine.scheduler.connector.on_new_request(request)
    answer(engine, engine.plan(), TransferResults(ready={1: 0}))
    answer(engine, engine.plan())
    core = engine.scheduler.sojourn.program_scheduler
    [turn] = core.turns_of("p")
    assert (turn.outcome, turn.output_tokens) == ("prefilled", 0)
    program = core.program("p")
    assert (program.turns, program.context_tokens) == (1, 400)
    assert len(core.context("p")) == 25, "what the next prompt begins with"
