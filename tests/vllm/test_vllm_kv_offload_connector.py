"""The connector beside vLLM's own scheduler: what is saved, what is loaded, and that nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cache_group_specs import WINDOW, window_spec
from sojourn_server.metrics.live_frame import ProgramRow

BLOCK_TOKENS = 16


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


def turn(engine: Any, request_id: str, tokens: list[int], program: str | None) -> list[Any]:
    """Runs the request to its end and carries out all stores. Returns the orders of its steps."""
    from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.outputs import KVConnectorOutput

    engine.add(request_id, tokens, program_id=program, max_tokens=2)
    orders = []
    while engine.scheduler.has_unfinished_requests() or planner(engine).under_way:
        planned = engine.plan()
        orders.append(planned.kv_connector_metadata.jobs)
        results = OffloadResults(stored=dict.fromkeys(orders[-1].stores, CopyResult.MOVED))
        report = KVConnectorOutput(
            kv_connector_worker_meta=StepReport(results), finished_recving=set(orders[-1].loads)
        )
        engine.update_from_output(planned, report)
    return orders


def arrive(engine: Any, planned: Any, *request_ids: str, without: set[int] = frozenset()) -> None:
    """The end of a step, of its stores, and of these requests' loads."""
    from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.outputs import KVConnectorOutput

    stores = planned.kv_connector_metadata.jobs.stores
    report = KVConnectorOutput(
        kv_connector_worker_meta=StepReport(OffloadResults(stored=dict.fromkeys(stores, CopyResult.MOVED))),
        finished_recving={*request_ids},
        invalid_block_ids={*without},
    )
    engine.update_from_output(planned, report)


def nothing_is_left(engine: Any) -> bool:
    connector, below = engine.scheduler.connector, planner(engine)
    pinned = any(entry.pins for entry in below.host._by_slot.values())
    return not (
        pinned or below.loads.by_request or below.loads.keys or connector._waiting or connector._group_loads
    )


@pytest.fixture(params=[False, True], ids=["as they come", "one ahead"])
def engine(make_engine: Any, request: Any) -> Any:
    shape = {"blocks": 41, "host_blocks": 60, "max_model_len": 640}
    return make_engine("continuum", own_tiers=True, asynchronous=request.param, **shape)


@pytest.fixture
def loading(engine: Any) -> Any:
    """A step in which the request ``a2`` loads most of its 480 + 40 tokens."""
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    planned = engine.plan()
    assert len(planned.kv_connector_metadata.jobs.loads["a2"]) > 10
    return planned


def planner(engine: Any) -> Any:
    return engine.scheduler.connector.planner


@pytest.mark.parametrize("program", ["A", None])
def test_what_the_device_loses_is_saved_and_loaded_again(engine: Any, program: str | None) -> None:
    turn(engine, "a1", prompt(1, 480), program)
    saved = [copy for jobs in turn(engine, "b1", prompt(2, 480), "B") for copy in jobs.saves]
    assert len(saved) >= 20
    if program is not None:
        shown = msgspec.convert(engine.ask("snapshot")["programs"], list[ProgramRow])
        [row] = [row for row in shown if row.program_id == "A"]
        assert row.host_blocks == pytest.approx(len(saved), abs=2), "every second block is looked up"
        assert row.disk_blocks == 0
    loads = turn(engine, "a2", [*prompt(1, 480), *prompt(3, 40)], program)[0].loads
    slots = {copy.block_id: copy.slot for copy in saved}
    assert {copy.slot for copy in loads["a2"]} <= set(slots.values())
    if program is not None:
        tokens = engine.ask("program", program_id="A")["ledger"][-1]["tokens"]
        assert tokens["host"] == len(loads["a2"]) * BLOCK_TOKENS
        assert tokens["device"] + tokens["host"] == 480
        assert tokens["lost"] == {}
    assert nothing_is_left(engine)
    tiers = engine.ask("stats")["tiers"]
    assert tiers["host"]["used"] == len(planner(engine).host) > 0
    assert tiers["moves"]["loaded"] == len(loads["a2"])
    told = engine.ask("drain_metrics")
    assert [{"tier": "host", "state": "used"}, tiers["host"]["used"]] in told["gauges"]["sojourn_tier_blocks"]


def test_what_an_ended_program_left_is_the_first_that_host_memory_reuses(make_engine: Any) -> None:
    engine = make_engine("continuum", blocks=41, host_blocks=30, own_tiers=True, max_model_len=640)
    turn(engine, "a1", prompt(1, 240), "A")
    turn(engine, "b1", prompt(2, 240), "B")
    engine.tell({"seq": 1, "type": "program_end", "program_id": "B"})
    turn(engine, "c1", prompt(3, 560), "C")
    turn(engine, "d1", prompt(4, 160), "D")
    loads = turn(engine, "a2", [*prompt(1, 240), *prompt(5, 16)], "A")[0].loads
    assert len(loads["a2"]) == 15, "C's took the place of B's, which is nobody's"


def test_a_request_that_does_not_fit_leaves_no_pins_behind(engine: Any) -> None:
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.add("c1", prompt(3, 560), max_tokens=30, program_id="C")
    engine.step()
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    engine.step()
    assert planner(engine)._looked_up.keys() <= {"a2"}
    engine.abort("a2")
    engine.run()
    engine.step()
    assert not any(entry.pins for entry in planner(engine).host)


@pytest.mark.parametrize("said", [{}, {"reset_connector": True}])
def test_a_reset_forgets_what_is_below_the_device(engine: Any, said: dict[str, bool]) -> None:
    """Also where vLLM would clear the device alone: new weights are the reason for either."""
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    assert engine.scheduler.reset_prefix_cache(**said)
    assert len(planner(engine).host) == 0
    assert not turn(engine, "a2", prompt(1, 480), "A")[0].loads


def test_where_the_queue_fails_nothing_below_is_trusted(make_engine: Any) -> None:
    engine = make_engine(
        "continuum", settings={"strict": False}, blocks=41, host_blocks=60, own_tiers=True, max_model_len=640
    )
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    queue = engine.scheduler.sojourn._queue
    queue.owners.remove_reused = (
        None  # the next block that is taken fails: in the midst of an admission with hits
    )
    loads = turn(engine, "a2", [*prompt(1, 480), *prompt(4, 40)], "A")[0].loads
    assert queue.broken
    assert len(loads["a2"]) > 10, "what was found before that was true"
    assert engine.scheduler.connector.off
    turn(engine, "c1", prompt(3, 480), "C")
    assert not turn(engine, "b2", prompt(2, 480), "B")[0].loads


def test_capabilities_tell_what_is_below_the_device(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    shape = {"blocks": 41, "max_model_len": 640, "settings": {"strict": False}}
    engine = make_engine("mori", host_blocks=60, disk_blocks=100, own_tiers=True, **shape)
    size = engine.scheduler.connector.settings.block_bytes
    told = {
        "connector": "SimulatedTierConnector",  # ours, as the lab has it
        "on": True,
        "off_because": None,
        "host": {"blocks": 60, "bytes": 60 * size},
        "disk": {"blocks": 100, "bytes": 100 * size},
    }
    assert engine.ask("capabilities")["tiers"] == told
    with caplog.at_level("ERROR", logger="vllm.sojourn"):
        for error in (KeyError("x"), KeyError("x"), ValueError("y"), KeyError("x")):
            engine.scheduler.connector.handle_failure(error)
    logged = [one.exc_info[0] for one in caplog.records if "a hook of" in one.message]
    assert logged == [KeyError, ValueError], "a lasting defect does not fill the log, and hides no other"
    off = {"on": False, "off_because": "an internal error of sojourn (KeyError)"}
    assert engine.ask("capabilities")["tiers"] == {**told, **off}
    engine.scheduler.connector.turn_off("something else")
    assert engine.ask("capabilities")["tiers"] == {**told, **off}, "the first reason is the reason"


def test_capabilities_tell_of_a_connector_that_is_not_ours_and_of_none(make_engine: Any) -> None:
    assert make_engine("continuum", blocks=41, max_model_len=640).ask("capabilities")["tiers"] is None
    told = make_engine("infercept", blocks=41, max_model_len=640, host_blocks=60).ask("capabilities")["tiers"]
    assert (told["connector"], told["on"], told["disk"]) == ("OffloadingConnector", True, None)
    assert told["host"]["blocks"] is None
    assert told["host"]["bytes"] > 0


OFF = {"saga": ["prefetch"], "tetris": ["early copies"], "mori": ["placement"], "continuum": []}
"""Mechanisms that need host memory which sojourn manages, by policy."""


@pytest.mark.parametrize("connector", [None, "OffloadingConnector", "SojournConnector"])
@pytest.mark.parametrize("policy", OFF)
def test_an_engine_tells_what_is_off_without_our_host_memory(
    make_engine: Any, caplog: pytest.LogCaptureFixture, policy: str, connector: str | None
) -> None:
    """At its start, and in its capabilities. A policy that places programs does not start there."""
    from sojourn_server.vllm.plugin_settings import SettingsError

    shape = {"blocks": 41, "max_model_len": 640}
    if connector is not None:
        shape |= {"host_blocks": 60, "own_tiers": connector == "SojournConnector"}
    if policy == "mori" and connector != "SojournConnector":
        with pytest.raises(SettingsError, match="policy mori places programs in host memory, and"):
            make_engine(policy, {"allow_missing_tiers": False}, **shape)
    with caplog.at_level("INFO", logger="vllm.sojourn"):
        missing = make_engine(policy, **shape).ask("capabilities")["missing"]
    lines = [record for record in caplog.records if " off: " in record.getMessage()]
    if connector == "SojournConnector" or not OFF[policy]:
        assert missing is None
        assert not lines
        return
    assert missing["mechanisms"] == OFF[policy]
    assert (connector or "--kv-host-gib") in missing["because"]
    (line,) = lines
    assert line.levelname == ("INFO" if connector is None else "WARNING")
    assert (
        line.getMessage() == f"sojourn: policy {policy}: off: {OFF[policy][0]}, because {missing['because']}"
    )


def test_a_request_runs_when_its_blocks_have_arrived(engine: Any, loading: Any) -> None:
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    slots = planner(engine).host._by_slot
    engine.add("c1", prompt(3, 32), max_tokens=9, program_id="C")
    planned = loading
    for _ in range(4):  # others compute meanwhile
        assert "a2" not in planned.num_scheduled_tokens
        assert engine.scheduler.requests["a2"].status.name == "WAITING_FOR_REMOTE_KVS"
        assert all(slots[copy.slot].pins for copy in copies)
        arrive(engine, planned)
        planned = engine.plan()
    assert planned.num_scheduled_tokens.keys() == {"c1"}
    arrive(engine, planned, "a2")
    planned = engine.plan()
    assert planned.num_scheduled_tokens["a2"] == 40
    arrive(engine, planned)
    engine.run()
    tokens = engine.ask("program", program_id="A")["ledger"][-1]["tokens"]
    assert tokens["host"] == len(copies) * BLOCK_TOKENS
    assert tokens["device"] + tokens["host"] == 480
    assert nothing_is_left(engine)


@pytest.mark.parametrize("place", [0, 3])
def test_what_was_not_filled_is_computed_and_counts_as_computed(
    engine: Any, loading: Any, place: int
) -> None:
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    keys = list(engine.scheduler.requests["a2"].block_hashes)
    on_device = 480 // BLOCK_TOKENS - len(copies)
    arrive(engine, loading, "a2", without={copies[place].block_id})
    assert planner(engine).host.get(keys[on_device + place]) is None, "else it would be tried for ever"
    assert planner(engine).host.get(keys[on_device + place + 1]) is not None, "the others are as good as ever"
    moved = planner(engine).counts["loaded"]
    assert moved == len(copies) - 1
    planned = engine.plan()
    again = planned.kv_connector_metadata.jobs.loads
    if on_device or place:  # what had arrived before it counts
        assert not again
        assert planned.num_scheduled_tokens["a2"] == 520 - (on_device + place) * BLOCK_TOKENS
    arrive(engine, planned, *again)
    engine.run()
    tokens = engine.ask("program", program_id="A")["ledger"][-1]["tokens"]
    assert tokens["host"] == place * BLOCK_TOKENS
    assert nothing_is_left(engine)
    hashed = planner(engine).leading(keys[:30])
    assert hashed <= 30


@pytest.mark.parametrize("fails", [False, True])
def test_an_aborted_request_keeps_its_blocks_until_its_load_has_ended(
    engine: Any, loading: Any, fails: bool
) -> None:
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    free = engine.pool.get_num_free_blocks()
    engine.abort("a2")
    assert engine.pool.get_num_free_blocks() == free, "they are being written"
    assert engine.scheduler.has_requests(), "else nobody would hear of the end"
    arrive(engine, loading)
    arrive(engine, engine.plan(), "a2", without={copy.block_id for copy in copies} if fails else set())
    assert not engine.scheduler.requests
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    assert not any(engine.pool.blocks[copy.block_id].block_hash for copy in copies), "nobody has read them"
    assert nothing_is_left(engine)
    turn(engine, "a3", prompt(1, 480), "A")


def test_requests_of_one_prefix_load_it_once(engine: Any, loading: Any) -> None:
    """As sub-agents with one context do."""
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    free = engine.pool.get_num_free_blocks()
    engine.add("d1", [*prompt(1, 480), *prompt(5, 20)], max_tokens=2, program_id="D")
    arrive(engine, loading)
    for _ in range(3):
        planned = engine.plan()
        assert not planned.kv_connector_metadata.jobs.loads
        assert not planned.num_scheduled_tokens
        assert engine.pool.get_num_free_blocks() == free, "it holds nothing"
        arrive(engine, planned)
    arrive(engine, engine.plan(), "a2")
    engine.run()
    assert planner(engine).counts["loaded"] == len(copies)
    assert engine.ask("program", program_id="D")["ledger"][-1]["tokens"]["device"] == 480
    assert nothing_is_left(engine)


def test_a_request_does_not_wait_for_the_load_of_one_that_has_gone(engine: Any, loading: Any) -> None:
    engine.add("d1", [*prompt(1, 480), *prompt(5, 20)], max_tokens=2, program_id="D")
    engine.abort("a2")
    arrive(engine, loading)
    planned = engine.plan()
    assert not planned.kv_connector_metadata.jobs.loads
    arrive(engine, planned, "a2")
    planned = engine.plan()
    assert len(planned.kv_connector_metadata.jobs.loads["d1"]) > 10, "nobody has it on the device"
    arrive(engine, planned, "d1")
    engine.run()
    assert nothing_is_left(engine)


def test_a_reset_of_what_is_not_in_use_fails_while_a_request_loads(engine: Any, loading: Any) -> None:
    """As while one computes: vLLM says so and resets nothing."""
    assert not engine.scheduler.reset_prefix_cache()
    arrive(engine, loading, "a2")
    engine.run()
    assert nothing_is_left(engine)
    assert engine.scheduler.reset_prefix_cache()
    assert len(planner(engine).host) == 0


@pytest.mark.parametrize("asynchronous", [False, True], ids=["as they come", "one ahead"])
@pytest.mark.parametrize("policy", ["saga-paper", "continuum"])  # vLLM's victim, and the latest program's
def test_a_running_request_takes_the_blocks_of_one_that_loads(
    make_engine: Any, policy: str, asynchronous: bool
) -> None:
    """Otherwise one that runs alone would preempt itself, step after step. The load is repeated later."""
    shape = {"blocks": 41, "host_blocks": 60, "max_model_len": 640}
    engine = make_engine(policy, own_tiers=True, asynchronous=asynchronous, **shape)
    turn(engine, "c0", prompt(9, 20), "C")
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.add("c1", prompt(3, 40), max_tokens=300, program_id="C")
    arrive(engine, engine.plan())
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    planned = engine.plan()
    assert planned.kv_connector_metadata.jobs.loads["a2"]
    engine.add("d1", prompt(5, 224), max_tokens=2)  # which needs more than is left
    while engine.scheduler.requests["a2"].status.name == "WAITING_FOR_REMOTE_KVS":
        arrive(engine, planned)
        planned = engine.plan()
        assert len(planned.num_scheduled_tokens) == 1, "c1 alone runs"
    assert planned.num_scheduled_tokens == {"c1": 1}, "what a2 gave up goes to none behind it in this step"
    assert not planned.preempted_req_ids
    assert planned.kv_connector_metadata.jobs.settles, "the blocks may be written until then"
    told = [
        (each["kind"], each["program_id"], each["reason"]) for each in engine.ask("decisions")["decisions"]
    ]
    assert [each for each in told if each[0] == "preempt"] == [("preempt", "A", "load")]
    arrive(engine, planned, "a2")
    orders = turn(engine, "e1", prompt(6, 20), None)
    assert not engine.scheduler.requests
    assert sum(len(jobs.loads.get("a2", ())) for jobs in orders) > 10
    assert nothing_is_left(engine)


def test_admission_knows_of_requests_that_load(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs while the first of two returning programs loads; the second is not let in as if alone."""
    from sojourn_server.core.events_and_actions import AdmissionRequested

    engine = make_engine("continuum", own_tiers=True, blocks=41, host_blocks=80, max_model_len=640)
    for number, name in enumerate(("A", "B", "C"), 1):
        turn(engine, f"{name}1", prompt(number, 400), name)
    asked, program_scheduler = {}, engine.scheduler.sojourn.program_scheduler
    handle = program_scheduler.handle

    def noted(event: Any, now: float) -> Any:
        if isinstance(event, AdmissionRequested):
            asked.setdefault(event.request_id, event.anything_running)
        return handle(event, now)

    monkeypatch.setattr(program_scheduler, "handle", noted)
    for number, name in enumerate(("A", "B"), 1):
        engine.add(f"{name}2", [*prompt(number, 400), *prompt(7, 20)], max_tokens=2, program_id=name)
    planned = engine.plan()
    assert planned.kv_connector_metadata.jobs.loads
    assert not planned.num_scheduled_tokens
    assert asked == {"A2": False, "B2": True}


@pytest.mark.parametrize("connector_too", [False, True])
@pytest.mark.parametrize("state", ["loading", "loaded", "aborted"])
def test_a_reset_of_all_gives_up_what_is_being_loaded(
    engine: Any, loading: Any, state: str, connector_too: bool
) -> None:
    """As for new weights: what arrives later is not used, and its end is nobody else's."""
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    arrive(engine, loading, *(["a2"] if state == "loaded" else []))
    if state == "aborted":
        engine.abort("a2")
    assert engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=connector_too)
    assert engine.pool.get_num_free_blocks() == engine.pool.num_gpu_blocks - 1
    planned = engine.plan()
    assert planned.kv_connector_metadata.jobs.settles == (state != "loaded"), "they may be written until then"
    assert not planned.num_scheduled_tokens or state == "loaded", "else one answer would do for two loads"
    if state != "loaded":
        arrive(engine, planned, "a2", without={copy.block_id for copy in copies})
        planned = engine.plan()
    assert not planned.kv_connector_metadata.jobs.loads
    assert not planned.kv_connector_metadata.jobs.settles
    assert sum(planned.num_scheduled_tokens.values()) == (0 if state == "aborted" else 520)
    arrive(engine, planned)
    engine.run()
    if state != "aborted":
        assert engine.ask("program", program_id="A")["ledger"][-1]["tokens"]["host"] == 0
    assert not engine.scheduler.requests
    assert nothing_is_left(engine)


def test_vllms_number_of_running_loads_does_not_count_a_load_that_was_given_up(engine: Any) -> None:
    scheduler = engine.scheduler
    if not hasattr(scheduler, "_kv_fetch_stages"):
        pytest.skip("this vLLM does not count loads")
    scheduler._kv_fetch_stages = {}  # as in an engine with statistics
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    arrive(engine, engine.plan())
    assert scheduler._kv_fetch_counts["in_progress"] == 1
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    assert set(scheduler._kv_fetch_counts.values()) == {0}


def test_the_end_of_a_load_that_was_given_up_is_not_that_of_the_next_in_its_blocks(
    engine: Any, loading: Any
) -> None:
    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    connector = engine.scheduler.connector
    arrive(engine, loading)
    connector.cancel_load("a2")
    from vllm.v1.outputs import KVConnectorOutput

    reused, other = copies[0].block_id, copies[1].block_id
    loads = planner(engine).loads.by_request
    loads["x"] = loads["a2"]._replace(entries=[], block_ids=[reused])
    output = KVConnectorOutput(finished_recving={"a2", "b"}, invalid_block_ids={reused, other})
    connector.drop_cancelled(output)
    assert output.finished_recving == {"b"}
    assert output.invalid_block_ids == {reused}, "it may be the other load that failed"
    assert not connector._cancelled


def test_one_workers_failed_copy_for_a_cancelled_load_is_not_its_blocks_next_owners(
    engine: Any, loading: Any
) -> None:
    from vllm.v1.outputs import KVConnectorOutput

    copies = loading.kv_connector_metadata.jobs.loads["a2"]
    connector = engine.scheduler.connector
    arrive(engine, loading)
    connector.cancel_load("a2")
    first = KVConnectorOutput(invalid_block_ids={copies[0].block_id, 39})
    connector.drop_cancelled(first)
    assert first.invalid_block_ids == {39}
    assert connector._cancelled == {"a2"}, "the other worker has not answered yet"
    last = KVConnectorOutput(finished_recving={"a2"})
    connector.drop_cancelled(last)
    assert not last.finished_recving
    assert not connector._cancelled


def test_equal_tokens_with_another_image_or_salt_are_other_blocks() -> None:
    """KV is stored and found under vLLM's hashes; the simulated engine's own know tokens only."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)

    def keys(image: str | None = None, salt: str | None = None) -> list[bytes]:
        place = PlaceholderRange(offset=100, length=4)
        images = [MultiModalFeatureSpec(None, "image", image, place)] if image is not None else None
        params = SamplingParams()
        request = Request(
            "x", prompt(1, 480), params, None, mm_features=images, cache_salt=salt, block_hasher=hasher
        )
        return list(request.block_hashes)

    assert len(keys()) == 30
    assert keys("one") == keys("one")
    assert keys("one")[:6] == keys()[:6], "before the image"
    assert not set(keys("one")[6:]) & {*keys(), *keys("two")}
    assert not set(keys(salt="another user")) & set(keys())


def test_a_program_that_is_preempted_loads_as_any_other(engine: Any) -> None:
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=40, program_id="A")
    engine.step()
    engine.step()
    engine.step()
    request = engine.scheduler.requests["a2"]
    assert request.status.name == "RUNNING"
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    turn(engine, "c1", prompt(3, 480), "C")
    engine.run()
    assert request.num_preemptions == 1
    assert request.num_output_tokens == 40
    assert nothing_is_left(engine)


def test_with_vllms_own_connector_too_nothing_built_on_blocks_that_were_not_filled_is_found(
    make_engine: Any,
) -> None:
    engine = make_engine("continuum", blocks=41, host_blocks=60, max_model_len=640)
    engine.add("a1", prompt(1, 480), max_tokens=2, program_id="A")
    engine.plan()
    block_ids = engine.scheduler.kv_cache_manager.get_block_ids("a1")[0]
    engine.scheduler.sojourn.evict_unfilled({block_ids[3]})
    named = [engine.pool.blocks[block_id].block_hash is not None for block_id in block_ids[:30]]
    assert named == [True] * 3 + [False] * 27


@pytest.mark.parametrize(("loads_async", "arrived"), [(False, 20), (True, 20), (True, 3), (True, 0)])
def test_what_a_foreign_connector_loads_counts_as_host_tokens(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, loads_async: bool, arrived: int
) -> None:
    """``arrived``: of the 20 blocks behind the 10 on the device."""
    from vllm.v1.outputs import KVConnectorOutput

    engine = make_engine("continuum", blocks=41, host_blocks=60, max_model_len=640)
    connector, scheduler = engine.scheduler.connector, engine.scheduler
    scheduler.recompute_kv_load_failures = True
    engine.add("a1", prompt(1, 160), max_tokens=2, program_id="A")
    engine.run()
    loads = iter([20 * BLOCK_TOKENS, 0])
    monkeypatch.setattr(connector, "get_num_new_matched_tokens", lambda *_: (next(loads), loads_async))
    monkeypatch.setattr(connector, "update_state_after_alloc", lambda *_: None)
    monkeypatch.setattr(connector, "update_connector_output", lambda _: None)
    request = engine.add("a2", prompt(1, 520), max_tokens=2, program_id="A")
    planned = engine.plan()
    if loads_async:
        assert not planned.num_scheduled_tokens
        filled = scheduler.kv_cache_manager.get_block_ids("a2")[0][10:30]
        report = KVConnectorOutput(finished_recving={"a2"}, invalid_block_ids={*filled[arrived:]})
        engine.update_from_output(planned, report)
        planned = engine.plan()
    assert planned.num_scheduled_tokens["a2"] == 520 - (10 + arrived) * BLOCK_TOKENS
    engine.update_from_output(planned)
    engine.run()
    assert request.is_finished()
    tokens = engine.ask("program", program_id="A")["ledger"][-1]["tokens"]
    assert (tokens["device"], tokens["host"]) == (160, arrived * BLOCK_TOKENS)
    ledger = engine.ask("stats")["ledger"]
    assert (ledger["device_tokens"], ledger["host_tokens"]) == (160, arrived * BLOCK_TOKENS)


HOOKS = ["lookup", "load", "take_jobs", "take_loaded", "take_results", "abandon", "plan_save"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_is_not_the_engines_failure(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    from sojourn_server.kv_offload.offload_jobs import OffloadResults
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import KVConnectorOutput

    engine = make_engine(
        "continuum", settings={"strict": False}, blocks=41, host_blocks=60, own_tiers=True, max_model_len=640
    )
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    assert planner(engine).store([(b"k" * 32, 1)]) == 1, "a copy whose result never comes"

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(planner(engine), hook, broken)
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    rejected: dict[str, list[int]] = {}
    while engine.scheduler.has_unfinished_requests():
        planned = engine.plan()
        orders = planned.kv_connector_metadata
        rejected |= orders.rejected
        engine.update_from_output(
            planned,
            KVConnectorOutput(
                kv_connector_worker_meta=StepReport(OffloadResults()),
                finished_recving={*orders.rejected, *orders.jobs.loads},
                invalid_block_ids={block_id for ids in orders.rejected.values() for block_id in ids},
            ),
        )
    assert engine.scheduler.connector.off
    assert not engine.scheduler.sojourn._queue.broken, "the order of reuse has not failed"
    assert bool(rejected.get("a2")) == (hook in ("load", "take_jobs")), "who waits must hear of it"
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.update_from_output(engine.plan(), KVConnectorOutput())
    assert planner(engine).storing_blocks
    assert not engine.scheduler.has_requests(), "a pause completes"


def test_a_paused_engine_goes_on_until_its_copies_have_ended(engine: Any) -> None:
    """vLLM unmaps the device's KV when a paused engine has no work, as for /sleep."""
    from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
    from sojourn_server.vllm.kv_connector import StepReport
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import KVConnectorOutput

    turn(engine, "a1", prompt(1, 480), "A")
    scheduler = engine.scheduler
    connector, below = scheduler.connector, planner(engine)
    assert below.store([(b"k" * 32, 1)]) == 1
    running = engine.plan()
    [store] = running.kv_connector_metadata.jobs.stores
    engine.update_from_output(running, KVConnectorOutput())
    assert not connector.has_pending_push_work(), "an idle engine does not spin"
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):
        scheduler.set_pause_state(state)
        assert scheduler.has_requests()
    ended = engine.plan()
    report = StepReport(OffloadResults(stored={store: CopyResult.MOVED}))
    engine.update_from_output(ended, KVConnectorOutput(kv_connector_worker_meta=report))
    assert not connector.has_pending_push_work()


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The connector's warnings; vLLM's loggers hand nothing on to pytest."""
    from sojourn_server.vllm import kv_offload_connector

    said: list[str] = []
    logger = SimpleNamespace(warning=lambda text, *values: said.append(text % values))
    monkeypatch.setattr(kv_offload_connector, "logger", logger)
    return said


def test_a_pause_completes_if_a_copy_does_not_end(engine: Any, clock: Any, warnings: list[str]) -> None:
    from sojourn_server.vllm.kv_offload_connector import PAUSE_WAIT_S
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.outputs import KVConnectorOutput

    turn(engine, "a1", prompt(1, 480), "A")
    scheduler = engine.scheduler
    assert planner(engine).store([(b"k" * 32, 1)]) == 1
    for _ in range(2):  # each pause waits anew
        warnings.clear()
        scheduler.set_pause_state(PauseState.PAUSED_NEW)
        engine.update_from_output(engine.plan(), KVConnectorOutput())  # vLLM reports the ended request
        began = clock.now
        while scheduler.has_requests():
            engine.update_from_output(engine.plan(), KVConnectorOutput())
            clock.now += 1.0
            assert clock.now <= began + PAUSE_WAIT_S
        assert clock.now == began + PAUSE_WAIT_S
        assert not scheduler.has_requests()
        (line,) = warnings
        assert "have not ended" in line
        scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.add("more", prompt(3, 40), max_tokens=1)
        while scheduler.has_unfinished_requests():
            engine.update_from_output(engine.plan(), KVConnectorOutput())
        clock.now += 100.0


def test_a_reset_of_a_paused_engine_ends_the_copies_of_a_worker_in_its_process(
    engine: Any, monkeypatch: pytest.MonkeyPatch, warnings: list[str]
) -> None:
    """Such an engine makes no steps between a pause and the unmapping of KV for sleep."""
    from sojourn_server.vllm import compat
    from sojourn_server.vllm.kv_offload_connector import PAUSE_WAIT_S, SojournConnector
    from vllm.v1.core.sched.interface import PauseState

    waits: list[float] = []

    def wait_for_copies(timeout_s: float) -> bool:
        waits.append(timeout_s)
        return len(waits) == 1

    worker_side = object.__new__(SojournConnector)
    worker_side._worker = SimpleNamespace(wait_for_copies=wait_for_copies)  # type: ignore[assignment]
    monkeypatch.setattr(compat, "has_kv_transfer_group", lambda: True, raising=False)
    monkeypatch.setattr(compat, "get_kv_transfer_group", lambda: worker_side, raising=False)
    connector = engine.scheduler.connector
    assert connector.reset_cache()
    assert not waits, "an engine that goes on keeps its memory"
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    assert connector.reset_cache()
    assert waits == [PAUSE_WAIT_S]
    assert not warnings
    assert connector.reset_cache()
    (line,) = warnings
    assert "have not ended" in line


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"host_byte": 1}, "unknown connector setting 'host_byte'"),
        ({"host_bytes": "8GB"}, "expected a whole number of bytes"),
        ({"host_bytes": 100}, "expected at least one block"),
        ({"host_bytes": 1 << 30, "disk": "/d", "disk_bytes": 1 << 30}, "PYTHONHASHSEED"),
        ({"host_bytes": 1 << 30, "max_stage_wait_s": -1}, "max_stage_wait_s is -1"),
    ],
)
def test_wrong_settings_are_named(engine: Any, monkeypatch: Any, extra: dict[str, Any], said: str) -> None:
    from sojourn_server.vllm.kv_connector_settings import KVOffloadSettings
    from sojourn_server.vllm.plugin_settings import SettingsError

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler.vllm_config.kv_transfer_config, "kv_connector_extra_config", extra)
    with pytest.raises(SettingsError, match=said):
        KVOffloadSettings.read(scheduler.vllm_config, scheduler.kv_cache_config)


@pytest.mark.parametrize(
    ("extra", "model", "draft", "asked"),
    [
        ({}, {}, None, None),
        ({"kv_layout": "BLHNC"}, {}, None, "BLHNC"),
        ({"kv_layout": "BLHNC"}, {"layer_types": ["full_attention"] * 4}, None, "BLHNC"),
        ({"kv_layout": "BLHNC"}, {"layer_types": ["sliding_attention", "full_attention"]}, None, None),
        ({"kv_layout": "BLHNC"}, {"sliding_window_pattern": 6}, None, None),
        ({"kv_layout": "BLHNC"}, {"hybrid_layer_pattern": [0, 1]}, None, None),
        ({"kv_layout": "BLHNC"}, {"swa_num_key_value_heads": 8}, None, None),
        ({"kv_layout": "BLHNC"}, {}, object(), None),
    ],
)
def test_vllm_is_asked_for_the_layout_of_the_settings_where_layers_are_alike(
    engine: Any, monkeypatch: Any, extra: dict[str, Any], model: dict[str, Any], draft: Any, asked: str | None
) -> None:
    from sojourn_server.vllm.kv_offload_connector import SojournConnector
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer.kv_connector == SojournConnector.__name__
    monkeypatch.setattr(transfer, "kv_connector_extra_config", extra)
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**model)),
        speculative_config=draft,
    )
    assert get_kv_connector_cache_layout(config) == asked


def test_on_rocm_vllm_is_asked_for_no_layout(engine: Any, monkeypatch: Any) -> None:
    from sojourn_server.vllm.kv_offload_connector import SojournConnector
    from vllm.platforms import current_platform

    config = engine.scheduler.vllm_config
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", {"kv_layout": "BLHNC"})
    assert SojournConnector.get_required_kvcache_layout(config) == "BLHNC"
    monkeypatch.setattr(current_platform, "is_rocm", lambda: True)
    assert SojournConnector.get_required_kvcache_layout(config) is None


def test_a_wrong_layout_is_named_before_the_connector_is_made(engine: Any, monkeypatch: Any) -> None:
    from sojourn_server.vllm.plugin_settings import SettingsError
    from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout

    config = engine.scheduler.vllm_config
    monkeypatch.setattr(config.kv_transfer_config, "kv_connector_extra_config", {"kv_layout": 3})
    with pytest.raises(SettingsError, match="kv_layout is 3; expected the name of a KV cache layout"):
        get_kv_connector_cache_layout(config)


def test_with_blocks_outermost_layers_of_two_sizes_would_be_refused() -> None:
    """Why no such model is asked for this layout: the groups that vLLM makes then are not ours to copy."""
    from unittest.mock import MagicMock

    import torch
    from sojourn_server.vllm.kv_connector_checks import check_groups
    from sojourn_server.vllm.plugin_settings import SettingsError
    from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
    from vllm.v1.kv_cache_layout import KVCacheLayout

    try:  # since 0.33
        from vllm.v1.core import kv_cache_planning as planning
    except ImportError:
        from vllm.v1.core import kv_cache_utils as planning

    def check(layout: KVCacheLayout) -> None:
        config = MagicMock()
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
        config.attention_config.hisparse_config = config.speculative_config = None
        cache = config.cache_config
        cache.get_resolved_kv_cache_layout.return_value = layout
        cache.num_gpu_blocks_override = cache.prefix_cache_retention_interval = None
        common: dict[str, Any] = {"block_size": 16, "dtype": torch.bfloat16}
        full = FullAttentionSpec(num_kv_heads=4, head_size=512, **common)
        window = SlidingWindowSpec(num_kv_heads=16, head_size=256, sliding_window=1024, **common)
        specs = {f"layer {n}": full if n % 6 == 5 else window for n in range(12)}
        groups = planning.get_kv_cache_groups(config, specs)
        check_groups(planning.get_kv_cache_config_from_groups(config, groups, 2**30), windows=True)

    check(KVCacheLayout.LBNHC)
    with pytest.raises(SettingsError):
        check(KVCacheLayout.BLHNC)


def test_more_host_memory_than_there_is_is_named_with_whose_it_is(engine: Any, monkeypatch: Any) -> None:
    from sojourn_server.launch.machine_memory import MachineMemory
    from sojourn_server.vllm import kv_connector_checks
    from sojourn_server.vllm.kv_connector_settings import KVOffloadSettings
    from sojourn_server.vllm.plugin_settings import SettingsError

    scheduler, caches = engine.scheduler, engine.scheduler.kv_cache_config
    monkeypatch.setattr(caches, "kv_cache_tensors", [SimpleNamespace(size=64 * caches.num_blocks)])
    memory = MachineMemory(total_bytes=1 << 20, available_bytes=0, owner="the control group of this process")
    monkeypatch.setattr(kv_connector_checks, "read_memory", lambda: memory)
    extra: dict[str, Any] = {"host_bytes": 1 << 20}
    monkeypatch.setattr(scheduler.vllm_config.kv_transfer_config, "kv_connector_extra_config", extra)
    assert KVOffloadSettings.read(scheduler.vllm_config, caches).host_slots == (1 << 20) // 64
    extra["host_bytes"] += 1
    with pytest.raises(SettingsError, match="expected at most what the control group of this process has"):
        KVOffloadSettings.read(scheduler.vllm_config, caches)


def test_adapters_are_refused_with_a_disk(engine: Any, monkeypatch: Any) -> None:
    """A block's key has an adapter's name and not its weights: other weights of that name found its KV."""
    from sojourn_server.vllm.kv_connector_settings import KVOffloadSettings
    from sojourn_server.vllm.plugin_settings import SettingsError

    monkeypatch.setenv("PYTHONHASHSEED", "0")
    scheduler, caches = engine.scheduler, engine.scheduler.kv_cache_config
    extra: dict[str, Any] = {"host_bytes": 1 << 30}
    monkeypatch.setattr(scheduler.vllm_config.kv_transfer_config, "kv_connector_extra_config", extra)
    monkeypatch.setattr(scheduler.vllm_config, "lora_config", object())
    assert KVOffloadSettings.read(scheduler.vllm_config, caches).disk is None
    extra |= {"disk": "/d", "disk_bytes": 1 << 30}
    with pytest.raises(SettingsError, match=r"adapters are enabled \(--enable-lora\).* KV on disk does not"):
        KVOffloadSettings.read(scheduler.vllm_config, caches)


# -- several KV cache groups -------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["as they come", "one ahead"])
def windows(make_engine: Any, request: Any) -> Any:
    """An engine whose model has a group with windows of ``WINDOW`` tokens beside full attention."""
    return make_engine(
        "continuum",
        blocks=75,
        host_blocks=150,
        max_model_len=640,
        own_tiers=True,
        asynchronous=request.param,
        other_groups=(window_spec(),),
    )


def in_host(engine: Any, group: int) -> int:
    """The number of blocks of one group in host memory."""
    return sum(entry.key.endswith(group.to_bytes(4, "big")) for entry in planner(engine).host)


def test_of_windows_the_end_of_a_context_is_saved_and_loaded(windows: Any) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    assert in_host(windows, 0) >= 480 // BLOCK_TOKENS
    most = 2 * (WINDOW // BLOCK_TOKENS + 1)
    assert in_host(windows, 1) <= most, "of A's, and of B's as far as they are copied ahead"
    orders = turn(windows, "a2", [*prompt(1, 480), *prompt(3, 40)], "A")
    assert len(orders[0].loads["a2"]) == 480 // BLOCK_TOKENS + WINDOW // BLOCK_TOKENS
    tokens = windows.ask("program", program_id="A")["ledger"][-1]["tokens"]
    assert tokens["host"] == 480
    assert tokens["lost"] == {}
    assert nothing_is_left(windows)


def test_a_context_that_begins_to_leave_the_device_leaves_it_as_a_whole(windows: Any) -> None:
    """What is left of it on the device is no prefix cache hit, and would be missing in host memory."""
    turn(windows, "a1", prompt(1, 480), "A")
    context = windows.scheduler.sojourn.program_scheduler.context("A")
    turn(windows, "x1", prompt(2, 352), None)
    here = [windows.pool.get_cached_block(each, [group]) for each in context for group in (0, 1)]
    assert 0 < sum(block is not None for block in here) < 34, "a part has been evicted"
    turn(windows, "a2", [*prompt(1, 480), *prompt(3, 40)], "A")
    tokens = windows.ask("program", program_id="A")["ledger"][-1]["tokens"]
    assert tokens["host"] + tokens["device"] == 480


def run(engine: Any, request_id: str, tokens: list[int], program: str, max_tokens: int = 2) -> None:
    """Run a request to its end. All copies end with the step that orders them."""
    engine.add(request_id, tokens, program_id=program, max_tokens=max_tokens)
    steps = 0
    while (engine.scheduler.has_unfinished_requests() or planner(engine).under_way) and (
        steps := steps + 1
    ) < 400:
        planned = engine.plan()
        arrive(engine, planned, *planned.kv_connector_metadata.jobs.loads)


def found_in_host(engine: Any, program: str) -> int:
    tokens: int = engine.ask("program", program_id=program)["ledger"][-1]["tokens"].get("host", 0)
    return tokens


def test_a_next_prompt_without_the_last_output_continues_from_the_last_prompt(windows: Any) -> None:
    """As with a chat template that drops a turn's reasoning. The output is longer than the window."""
    run(windows, "a1", prompt(1, 330), "A", max_tokens=2 * WINDOW)
    run(windows, "b1", prompt(2, 480), "B")
    run(windows, "a2", [*prompt(1, 325), *prompt(3, 40)], "A")
    assert found_in_host(windows, "A") == 320
    assert nothing_is_left(windows)


def test_a_common_beginning_of_prompts_is_found_from_the_third_program_on(windows: Any) -> None:
    """The second one computes it again, since only the ends of contexts have been saved."""
    for name, host in (("A", 0), ("B", 0), ("C", 320)):
        run(windows, f"{name}1", [*prompt(1, 320), *prompt(ord(name), 160)], name)
        assert found_in_host(windows, name) == host
        run(windows, f"x{name}", prompt(ord(name) + 100, 560), f"X{name}")
    assert nothing_is_left(windows)


@pytest.mark.parametrize("group", [0, 1])
def test_a_load_that_fails_in_one_group_is_computed(windows: Any, group: int) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    request = windows.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    planned = windows.plan()
    assert "a2" in planned.kv_connector_metadata.jobs.loads
    ids = windows.scheduler.kv_cache_manager.get_block_ids("a2")
    arrive(windows, planned, "a2", without={ids[group][29]})
    computed = steps = 0
    while windows.scheduler.has_unfinished_requests() and (steps := steps + 1) < 50:
        planned = windows.plan()
        computed += planned.num_scheduled_tokens.get("a2", 0)
        arrive(windows, planned, *planned.kv_connector_metadata.jobs.loads)
    assert request.num_output_tokens == 2
    # What failed is not found again. The end of the first prompt, one hit before, has been saved too.
    assert computed >= 520 - 464
    assert found_in_host(windows, "A") == 464
    assert nothing_is_left(windows)
    assert windows.scheduler.sojourn.failures == 0


def test_of_two_requests_with_one_context_one_loads_it(windows: Any) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    context = [*prompt(1, 480), *prompt(4, 8)]
    requests = [windows.add(name, context, max_tokens=2, program_id="A") for name in ("a2", "a3")]
    loads, steps = [], 0
    while windows.scheduler.has_unfinished_requests() and (steps := steps + 1) < 50:
        planned = windows.plan()
        loads += planned.kv_connector_metadata.jobs.loads
        arrive(windows, planned, *planned.kv_connector_metadata.jobs.loads)
    assert loads == ["a2"]
    assert [request.num_output_tokens for request in requests] == [2, 2]
    assert nothing_is_left(windows)


def test_windows_of_a_preempted_request_are_saved_while_another_of_its_program_ends(windows: Any) -> None:
    """Of a program, the end of one turn is remembered; what a preempted request will load is wanted too."""
    windows.add("a1", prompt(1, 320), program_id="A", max_tokens=40)
    windows.update_from_output(windows.plan())
    manager = windows.scheduler.sojourn._offload
    groups, request = manager._groups, windows.scheduler.requests["a1"]
    context = groups.context_keys(request.block_hashes, 0, 320)
    key = context.window_keys(320)[0]
    manager._ends.forget("A")
    assert manager._is_behind_window(key)
    blocks = [block for of_group in groups.used_by(request) for block in of_group if block.block_hash]
    manager.keep_preempted("A", blocks, request.block_hashes)
    assert not manager._is_behind_window(key)
    manager.release_preempted("A", ())
    assert manager._is_behind_window(key)


def test_a_window_block_whose_copy_runs_is_not_overwritten_before_its_end(windows: Any) -> None:
    """No request will continue from it any more. Host memory has its key all the same."""
    windows.add("a1", prompt(1, 320), program_id="A", max_tokens=40)
    windows.update_from_output(windows.plan())
    scheduler = windows.scheduler
    manager, request = scheduler.sojourn._offload, scheduler.requests["a1"]
    _, of_window = manager._groups.used_by(request)
    [block, other] = [each for each in of_window if each.block_hash is not None][-2:]
    manager.copy_ahead([block])
    running = windows.plan().kv_connector_metadata.jobs.stores
    assert [copy.block_id for copies in running.values() for copy in copies] == [block.block_id]
    manager._ends.forget("A")
    assert manager._is_behind_window(manager._groups.key_of(block))
    manager.save([block, other], scheduler.sojourn._queue.owners)
    assert planner(windows)._jobs.awaited == running
    assert planner(windows).host.get(manager._groups.key_of(other)) is None, "it is not worth a copy"


def test_programs_that_never_end_leave_a_bounded_memory_of_windows(make_engine: Any) -> None:
    """As under ``observe``, where the end of a program moves nothing."""
    engine = make_engine(
        "observe", blocks=75, host_blocks=40, max_model_len=640, own_tiers=True, other_groups=(window_spec(),)
    )
    for number in range(60):
        turn(engine, f"r{number}", prompt(number, 160), f"p{number}")
        engine.tell({"type": "program_end", "program_id": f"p{number}", "seq": 1})
    ends = engine.scheduler.sojourn._offload._ends
    assert 0 < len(ends._users) <= 75 + 40


def test_with_tiers_off_no_window_is_remembered(windows: Any) -> None:
    windows.scheduler.sojourn._offload.turn_off("a test")
    for number in range(5):
        turn(windows, f"r{number}", prompt(number, 160), f"p{number}")
    assert not windows.scheduler.sojourn._offload._ends._users


def test_missed_windows_are_looked_for_once_while_a_request_waits(windows: Any) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    request = windows.add("a2", [*prompt(1, 400), *prompt(4, 40)], max_tokens=2, program_id="A")
    connector, asked = windows.scheduler.connector, []
    find = connector._report_missed_windows
    connector._report_missed_windows = lambda *given: asked.append(given) or find(*given)
    first = connector.get_num_new_matched_tokens(request, 0)
    assert connector.get_num_new_matched_tokens(request, 0) == first
    assert len(asked) == 1


def test_a_prefetch_of_windows_tells_what_host_memory_has(windows: Any) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    hashes = windows.scheduler.sojourn.program_scheduler.context("A")
    manager = windows.scheduler.sojourn._offload
    on_device = manager._groups.cached_prefix(hashes).hashes
    assert on_device < len(hashes)
    assert manager.fetch(hashes, on_device) == (0, 0, 0)
    unknown = [bytes(32)] * len(hashes)
    assert manager.fetch(unknown, 0) == (0, len(hashes), 0)


def test_an_error_while_blocks_of_several_groups_are_ordered_ends_no_step(
    windows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn(windows, "a1", prompt(1, 480), "A")
    turn(windows, "b1", prompt(2, 480), "B")
    request = windows.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    connector = windows.scheduler.connector
    monkeypatch.setattr(connector, "strict", False)
    monkeypatch.setattr(type(connector), "_blocks_to_fill", lambda *_: 1 / 0)
    steps = 0
    while windows.scheduler.has_unfinished_requests() and (steps := steps + 1) < 50:
        planned = windows.plan()
        meta = planned.kv_connector_metadata
        failed = {block_id for ids in meta.rejected.values() for block_id in ids}
        arrive(windows, planned, *meta.jobs.loads, *meta.rejected, without=failed)
    assert request.num_output_tokens == 2
    assert connector.off


@pytest.mark.parametrize("failing", [False, True])
def test_of_a_model_with_windows_alone_nothing_is_loaded(
    make_engine: Any, monkeypatch: Any, failing: bool
) -> None:
    """vLLM puts one placeholder in the place of all blocks behind a window. A load of a whole context would
    write into it. If it failed, vLLM would compute other requests again, into the placeholder."""
    from sojourn_server.simulator import simulated_engine

    monkeypatch.setattr(simulated_engine, "FullAttentionSpec", lambda **fields: window_spec())
    engine = make_engine("continuum", blocks=41, host_blocks=200, own_tiers=True, max_model_len=640)
    turn(engine, "a1", prompt(1, 480), "A")
    for other in range(2, 6):
        turn(engine, f"b{other}", prompt(other, 480), "B")
    running = engine.add("c1", prompt(7, 80), max_tokens=40)
    for _ in range(20):
        arrive(engine, engine.plan())
    placeholders = [block.is_null for block in engine.scheduler.kv_cache_manager.get_blocks("c1").blocks[0]]
    assert any(placeholders)
    engine.add("a2", [*prompt(1, 480), *prompt(6, 40)], max_tokens=2, program_id="A")
    planned = engine.plan()
    loads = planned.kv_connector_metadata.jobs.loads
    filled = [copy.block_id for copies in loads.values() for copy in copies]
    arrive(engine, planned, *loads, without={*filled} if failing else set())
    assert running.num_computed_tokens > 80, "it goes on where it was"
    assert 0 not in filled
    assert "no layer" in engine.ask("capabilities")["tiers"]["off_because"]
