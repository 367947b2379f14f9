"""The connector beside vLLM's own scheduler: what is saved, what is loaded, and that nothing is lost."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from cache_group_specs import WINDOW, chunk_spec, serve_alone, window_spec
from sojourn_server.core.events_and_actions import AdmissionRequested
from sojourn_server.kv_offload.offload_jobs import CopyResult, OffloadResults
from sojourn_server.metrics.live_frame import ProgramRow
from sojourn_server.simulator import simulated_engine, tier_transfers
from sojourn_server.vllm import kv_offload_connector
from sojourn_server.vllm.kv_connector import StepReport
from sojourn_server.vllm.kv_offload_connector import PAUSE_WAIT_S, SojournConnector
from sojourn_server.vllm.plugin_settings import SettingsError
from turns import arrive, no_load_is_left, planner, prompt
from turns import turn_with_copies as turn
from vllm.distributed.kv_transfer.kv_connector.utils import get_kv_connector_cache_layout
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.outputs import KVConnectorOutput

BLOCK_TOKENS = 16


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
    assert no_load_is_left(engine)
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
        "disk": {"blocks": 100, "bytes": 100 * size, "shared": True},
    }
    assert engine.ask("capabilities")["tiers"] == told
    with caplog.at_level("ERROR", logger="vllm.sojourn"):
        for error in (KeyError("x"), KeyError("x"), ValueError("y"), KeyError("x")):
            engine.scheduler.connector.handle_failure(error)
    logged = [one.exc_info[0] for one in caplog.records if "a hook of" in one.message]
    assert logged == [KeyError, ValueError], "a lasting defect does not fill the log, and hides no other"
    off = {
        "on": False,
        "off_because": "an internal error of sojourn (KeyError)",
        "disk": {"blocks": 100, "bytes": 100 * size},
    }
    assert engine.ask("capabilities")["tiers"] == {**told, **off}
    engine.scheduler.connector.turn_off("something else")
    assert engine.ask("capabilities")["tiers"] == {**told, **off}, "the first reason is the reason"


OFF = {"saga": ["prefetch"], "tetris": ["early copies"], "mori": ["placement"], "continuum": []}
"""Mechanisms that need host memory which sojourn manages, by policy."""


@pytest.mark.parametrize("connector", [None, "OffloadingConnector", "SojournConnector"])
@pytest.mark.parametrize("policy", OFF)
def test_an_engine_tells_what_is_off_without_our_host_memory(
    make_engine: Any, caplog: pytest.LogCaptureFixture, policy: str, connector: str | None
) -> None:
    """At its start, and in its capabilities. A policy that places programs does not start there."""
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


@pytest.mark.parametrize("fails", [False, True], ids=["", "the hook fails"])
@pytest.mark.parametrize("by_client", [True, False], ids=["aborted", "by a step before its preemption"])
def test_a_request_that_ends_while_it_loads_keeps_its_blocks(
    engine: Any, loading: Any, by_client: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = engine.scheduler
    if fails:
        scheduler.connector.strict = False
        monkeypatch.setattr(planner(engine), "abandon", None)
    request, free = scheduler.requests["a2"], engine.pool.get_num_free_blocks()
    if by_client:
        engine.abort("a2")
    else:  # with several steps under way, an earlier one may sample the stop token
        scheduler.kv_holding_waiting.remove_request(request)
        request.status = type(request.status).FINISHED_STOPPED
        scheduler._free_request(request)
    assert engine.pool.get_num_free_blocks() == free
    arrive(engine, loading, "a2")
    assert engine.pool.get_num_free_blocks() > free
    assert not scheduler.requests
    assert no_load_is_left(engine)


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
    assert no_load_is_left(engine)


def test_admission_knows_of_requests_that_load(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing runs while the first of two returning programs loads; the second is not let in as if alone."""
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


@pytest.mark.parametrize(("loads_async", "arrived"), [(False, 20), (True, 20), (True, 3), (True, 0)])
def test_what_a_foreign_connector_loads_counts_as_host_tokens(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, loads_async: bool, arrived: int
) -> None:
    """``arrived``: of the 20 blocks behind the 10 on the device."""
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
    ledger = engine.ask("stats")
    assert (ledger["device_tokens"], ledger["host_tokens"]) == (160, arrived * BLOCK_TOKENS)


HOOKS = ["lookup", "load", "take_jobs", "end_loads", "take_results", "abandon", "plan_save"]


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_that_fails_is_not_the_engines_failure(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    engine = make_engine(
        "continuum", settings={"strict": False}, blocks=41, host_blocks=60, own_tiers=True, max_model_len=640
    )
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    assert planner(engine).store([(b"k" * 32, 1)]) == 1, "a copy whose result never comes"

    monkeypatch.setattr(planner(engine), hook, None)
    engine.add("a2", [*prompt(1, 480), *prompt(4, 40)], max_tokens=2, program_id="A")
    rejected: dict[str, list[int]] = {}
    while engine.scheduler.has_unfinished_requests():
        planned = engine.plan()
        orders = planned.kv_connector_metadata
        rejected |= orders.jobs.rejected
        engine.update_from_output(
            planned,
            KVConnectorOutput(
                kv_connector_worker_meta=StepReport(OffloadResults()),
                finished_recving={*orders.jobs.rejected, *orders.jobs.loads},
                invalid_block_ids={block_id for ids in orders.jobs.rejected.values() for block_id in ids},
            ),
        )
    assert engine.scheduler.connector.off
    assert not engine.scheduler.sojourn._queue.broken, "the order of reuse has not failed"
    assert bool(rejected.get("a2")) == (hook in ("load", "take_jobs")), "who waits must hear of it"
    engine.scheduler.set_pause_state(PauseState.PAUSED_NEW)
    engine.update_from_output(engine.plan(), KVConnectorOutput())
    assert planner(engine).storing_blocks
    assert not engine.scheduler.has_requests(), "a pause completes"


def test_a_pause_waits_for_copies_that_have_not_ended_but_not_for_ever(engine: Any, clock: Any) -> None:
    """vLLM unmaps the device's KV when a paused engine has no work, as for /sleep."""
    warnings: list[str] = []
    log = SimpleNamespace(log=lambda level, text, *values: warnings.append(text % values))
    engine.scheduler.connector._failure_log = log  # without its limit of the rate
    turn(engine, "a1", prompt(1, 480), "A")
    scheduler = engine.scheduler
    assert planner(engine).store([(b"k" * 32, 1)]) == 1
    running = engine.plan()
    [store] = running.kv_connector_metadata.jobs.stores
    engine.update_from_output(running, KVConnectorOutput())
    assert not scheduler.has_requests(), "an idle engine does not spin"
    for state in (PauseState.PAUSED_NEW, PauseState.PAUSED_ALL):  # each pause waits anew
        warnings.clear()
        scheduler.set_pause_state(state)
        began = clock.now
        while scheduler.has_requests():
            engine.update_from_output(engine.plan(), KVConnectorOutput())
            clock.now += 1.0
            assert clock.now <= began + PAUSE_WAIT_S
        assert clock.now == began + PAUSE_WAIT_S
        (line,) = {*warnings}
        assert "have not ended" in line
        scheduler.set_pause_state(PauseState.UNPAUSED)
        engine.add("more", prompt(3, 40), max_tokens=1)
        while scheduler.has_requests():
            engine.update_from_output(engine.plan(), KVConnectorOutput())
        clock.now += 100.0
    scheduler.set_pause_state(PauseState.PAUSED_ALL)
    assert scheduler.has_requests()
    ended = StepReport(OffloadResults(stored={store: CopyResult.MOVED}))
    engine.update_from_output(engine.plan(), KVConnectorOutput(kv_connector_worker_meta=ended))
    assert not scheduler.has_requests()


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
    transfer = engine.scheduler.vllm_config.kv_transfer_config
    assert transfer.kv_connector == SojournConnector.__name__
    monkeypatch.setattr(transfer, "kv_connector_extra_config", {"host_bytes": 1, **extra})
    config = SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(hf_text_config=SimpleNamespace(**model)),
        speculative_config=draft,
    )
    assert get_kv_connector_cache_layout(config) == asked


# -- host memory under "auto" ----------------------------------------------------------


@pytest.fixture
def make_auto_engine(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes an engine whose host memory is ``auto``, at most ``most`` blocks."""

    def make(policy: str, *, most: int, **options: Any) -> Any:
        def config(options: Any, page_bytes: int) -> Any:
            transfer = tier_transfers.tier_transfer_config(most, page_bytes, 0)
            extra = transfer.kv_connector_extra_config
            extra |= {"host_bytes": "auto", "host_bytes_max": extra["host_bytes"]}
            return transfer

        monkeypatch.setattr(simulated_engine, "_transfer_config", config)
        return make_engine(policy, blocks=41, max_model_len=640, **options)

    return make


@pytest.mark.parametrize(("most", "blocks"), [(1000, 4 * 41), (60, 60)])
def test_auto_is_four_times_the_device_or_what_is_free(
    make_auto_engine: Any, most: int, blocks: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="vllm.sojourn"):
        engine = make_auto_engine("continuum", most=most)
    (line,) = [one.getMessage() for one in caplog.records if "(auto)" in one.getMessage()]
    assert ("4 times" if most == 1000 else "half of the memory") in line
    assert engine.ask("capabilities")["tiers"]["host"]["blocks"] == blocks
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    assert turn(engine, "a2", [*prompt(1, 480), *prompt(3, 40)], "A")[0].loads["a2"]


@pytest.mark.parametrize("why", ["too little memory", "an unsupported model"])
def test_an_engine_without_host_memory_starts_under_auto_and_says_why(
    make_auto_engine: Any, why: str
) -> None:
    shape: dict[str, Any] = {"most": 100, "other_groups": (chunk_spec(),)}
    said = "this model has 2 groups of KV caches"
    if why == "too little memory":
        shape, said = {"most": 0}, "host_bytes (--kv-host-gib) is 0; expected at least one block"
    engine = make_auto_engine("continuum", **shape)
    tiers = engine.ask("capabilities")["tiers"]
    assert (tiers["on"], tiers["host"]["blocks"]) == (False, 0)
    assert said in tiers["off_because"]
    for request_id in ("a1", "a2"):
        assert not turn(engine, request_id, prompt(1, 240), "A")[0].loads
    with pytest.raises(SettingsError, match="the engine has no host memory for KV"):
        make_auto_engine("mori", settings={"allow_missing_tiers": False}, **shape)


@pytest.mark.parametrize("broken", [False, True], ids=["from the start", "by a copy that fails"])
def test_a_worker_without_host_memory_turns_it_off_in_the_next_step(
    make_auto_engine: Any, monkeypatch: pytest.MonkeyPatch, broken: bool
) -> None:
    def cannot_pin(*args: Any) -> Any:
        raise RuntimeError("CUDA cannot pin 1 GiB")

    engine = make_auto_engine("continuum", most=100)
    scheduler = engine.scheduler
    worker = kv_offload_connector.SojournConnector(
        scheduler.vllm_config, KVConnectorRole.WORKER, scheduler.kv_cache_config
    )
    monkeypatch.setattr(kv_offload_connector, "open_device_backend", cannot_pin)
    if broken:
        nothing = SimpleNamespace(is_broken=True, begin_step=cannot_pin, take_results=lambda: None)
        monkeypatch.setattr(worker, "_open_worker", lambda caches: nothing)
    worker.register_kv_caches({})
    engine.add("a1", prompt(1, 480), program_id="A", max_tokens=2)
    planned = engine.plan()
    worker.handle_preemptions(planned.kv_connector_metadata)
    report = KVConnectorOutput(kv_connector_worker_meta=worker.build_connector_worker_meta())
    engine.update_from_output(planned, report)
    tiers = engine.ask("capabilities")["tiers"]
    said = "a copy of KV to host memory has failed" if broken else "CUDA cannot pin 1 GiB"
    assert (tiers["on"], tiers["off_because"]) == (False, said)
    if not broken:
        assert worker.build_connector_worker_meta() is None
        assert worker.get_finished(set()) == (None, None)
    turn(engine, "a2", prompt(1, 480), "A")


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
    assert no_load_is_left(windows)


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


def test_programs_that_never_end_leave_a_bounded_memory_of_windows(make_engine: Any) -> None:
    """As under ``observe``, where the end of a program moves nothing."""
    engine = make_engine(
        "observe", blocks=75, host_blocks=40, max_model_len=640, own_tiers=True, other_groups=(window_spec(),)
    )
    for number in range(60):
        turn(engine, f"r{number}", prompt(number, 160), f"p{number}")
        engine.tell({"type": "program_end", "program_id": f"p{number}", "seq": 1})
    ends = planner(engine).ends
    assert 0 < len(ends._users) <= 40


def test_of_a_model_with_windows_alone_nothing_is_loaded(make_engine: Any, monkeypatch: Any) -> None:
    """vLLM puts one placeholder in the place of all blocks behind a window. A load of a whole context would
    write into it. If it failed, vLLM would compute other requests again, into the placeholder."""
    serve_alone(monkeypatch, window_spec)
    engine = make_engine("continuum", blocks=41, host_blocks=200, own_tiers=True, max_model_len=640)
    assert "no layer" in engine.ask("capabilities")["tiers"]["off_because"]
    turn(engine, "a1", prompt(1, 480), "A")
    for other in range(2, 6):
        turn(engine, f"b{other}", prompt(other, 480), "B")
    assert not turn(engine, "a2", [*prompt(1, 480), *prompt(6, 40)], "A")[0].loads
