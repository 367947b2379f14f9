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
    """Whatever is ordered is done at once; the disk is empty at first."""
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.outputs import KVConnectorOutput

    planned = engine.plan()
    jobs: OffloadJobs = planned.kv_connector_metadata.jobs
    results = OffloadResults(
        on_disk=[] if not engine.scheduler.connector.planner.disk.known else None,
        stored=dict.fromkeys(jobs.stores, CopyResult.MOVED),
        spilled={job: {file.key: CopyResult.MOVED for file in files} for job, files in jobs.spills.items()},
    )
    engine.update_from_output(planned, KVConnectorOutput(kv_connector_worker_meta=StepReport(results)))
    return jobs


def turn(engine: Any, request_id: str, tokens: list[int], program: str) -> None:
    engine.add(request_id, tokens, program_id=program, max_tokens=2)
    while engine.scheduler.has_unfinished_requests():
        step(engine)


def persist(engine: Any, program: str = "A") -> tuple[str, int, int, int]:
    told = engine.ask("persist", program_id=program)
    return told["state"], told["stored_tokens"], told["pending_tokens"], told["bytes"]


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
    size = engine.scheduler.connector.settings.block_bytes
    assert persist(engine) == ("writing", 0, 320, 20 * size)
    assert 0 < idle(engine) < 10
    assert persist(engine) == ("done", 320, 0, 0)
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


def test_what_is_written_stays_when_the_program_is_told_to_have_left() -> None:
    """As its old engine hears it: by the end that exists."""
    engine = make(disk_blocks=100)
    turn(engine, "a1", prompt(1, 330), "A")
    persist(engine)
    idle(engine)
    engine.tell({"seq": 1, "type": "program_end", "program_id": "A", "status": "cancelled"})
    turn(engine, "b1", prompt(2, 560), "B")
    assert engine.ask("stats")["tiers"]["disk"]["used"] == 20
    assert engine.ask("program", program_id="A")["status"] == "ended"
    assert persist(engine)[:2] == ("done", 0), "of which blocks those were is forgotten"


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


# -- what an operator sets ---------------------------------------------------------------------


def rank_config(rank: int, *, dense: bool) -> Any:
    """vLLM's configuration of one of three data-parallel ranks, as its engine core makes it."""
    from vllm.config import ParallelConfig

    config = ParallelConfig(data_parallel_size=3)
    config.data_parallel_index = rank
    if dense:
        config.reconfigure_for_independent_dp_rank()
    else:
        config.data_parallel_rank = rank
    return config


def read_settings(engine: Any, monkeypatch: pytest.MonkeyPatch, parallel: Any = None, **extra: Any) -> Any:
    from sojourn_server.vllm.kv_connector_settings import KVOffloadSettings

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    config = engine.scheduler.vllm_config
    given = {"host_bytes": 1 << 30, **extra}
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", given)
    if parallel is not None:
        monkeypatch.setattr(config, "parallel_config", parallel)
    return KVOffloadSettings.read(config, engine.scheduler.kv_cache_config)


def test_a_name_makes_an_engine_read_what_lies_beside_its_own(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = {"disk": str(tmp_path), "disk_bytes": 1 << 30}
    engine = make()
    plain = read_settings(engine, monkeypatch, **disk)
    assert not plain.limits().shared
    store, sibling_stores = plain.open_disk(64, 1)
    assert sibling_stores is None
    store.close()
    named = read_settings(engine, monkeypatch, disk_name="one", **disk)
    assert named.limits().shared
    store, sibling_stores = named.open_disk(64, 1)
    assert store.path.name.endswith("-one")
    assert sibling_stores.leading([]).stores == 1, "the one without a name"
    store.close()
    assert read_settings(engine, monkeypatch).open_disk(64, 1) == (None, None)


@pytest.mark.parametrize(("dense", "names"), [(False, "one.0 one.1 one.2"), (True, "one one.1 one.2")])
def test_ranks_add_their_number_to_the_name_that_all_are_given(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, dense: bool, names: str
) -> None:
    """vLLM makes each rank of a dense model an engine of its own, which does not know the number of ranks."""
    engine, found = make(), []
    for rank in range(3):
        disk = {"disk": str(tmp_path), "disk_bytes": 1 << 30, "disk_name": "one"}
        settings = read_settings(engine, monkeypatch, rank_config(rank, dense=dense), **disk)
        found.append(settings.disk_name)
    assert found == names.split()
