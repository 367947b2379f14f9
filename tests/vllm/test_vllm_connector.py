"""The connector beside vLLM's own scheduler: what is saved, what is loaded, and that nothing is lost."""

from __future__ import annotations

from typing import Any

import pytest

BLOCK_TOKENS = 16


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


def turn(engine: Any, request_id: str, tokens: list[int], program: str | None) -> list[Any]:
    """Runs the request to its end; returns the orders of its steps."""
    engine.add(request_id, tokens, program_id=program, max_tokens=2)
    orders = []
    while engine.scheduler.has_unfinished_requests():
        orders.append(engine.step().planned.kv_connector_metadata.jobs)
    return orders


@pytest.fixture
def engine(make_engine: Any) -> Any:
    return make_engine("continuum", blocks=41, host_blocks=60, own_tiers=True, max_model_len=640)


def planner(engine: Any) -> Any:
    return engine.scheduler.connector.planner


@pytest.mark.parametrize("program", ["A", None])
def test_what_the_device_loses_is_saved_and_loaded_again(engine: Any, program: str | None) -> None:
    turn(engine, "a1", prompt(1, 480), program)
    saved = [copy for jobs in turn(engine, "b1", prompt(2, 480), "B") for copy in jobs.saves]
    assert len(saved) >= 20
    loads = turn(engine, "a2", [*prompt(1, 480), *prompt(3, 40)], program)[0].loads
    slots = {copy.block_id: copy.slot for copy in saved}
    assert {copy.slot for copy in loads["a2"]} <= set(slots.values())
    if program is not None:
        tokens = engine.ask("program", program_id="A")["ledger"][-1]["tokens"]
        assert tokens["host"] == len(loads["a2"]) * BLOCK_TOKENS
        assert tokens["device"] + tokens["host"] == 480
        assert tokens["lost"] == {}
    assert not planner(engine)._loading
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


def test_a_reset_forgets_what_is_below_the_device(engine: Any) -> None:
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    assert engine.scheduler.reset_prefix_cache(reset_connector=True)
    assert len(planner(engine).host) == 0
    assert not turn(engine, "a2", prompt(1, 480), "A")[0].loads


def test_where_the_queue_fails_nothing_below_is_trusted(make_engine: Any) -> None:
    engine = make_engine(
        "continuum", settings={"strict": False}, blocks=41, host_blocks=60, own_tiers=True, max_model_len=640
    )
    turn(engine, "a1", prompt(1, 480), "A")
    turn(engine, "b1", prompt(2, 480), "B")
    engine.scheduler.sojourn._queue.owners.taken = None  # the next block that is taken fails
    turn(engine, "c1", prompt(3, 480), "C")
    assert engine.scheduler.connector.off
    assert not turn(engine, "a2", prompt(1, 480), "A")[0].loads


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        ({"host_byte": 1}, "unknown tier setting 'host_byte'"),
        ({"host_bytes": "8GB"}, "expected a whole number of bytes"),
        ({"host_bytes": 100}, "expected at least a block"),
        ({"host_bytes": 1 << 30, "disk": "/d", "disk_bytes": 1 << 30}, "PYTHONHASHSEED"),
        ({"host_bytes": 1 << 30, "max_stage_wait_s": -1}, "max_stage_wait_s is -1"),
    ],
)
def test_wrong_settings_are_named(engine: Any, monkeypatch: Any, extra: dict[str, Any], said: str) -> None:
    from sojourn_server.vllm.settings import SettingsError
    from sojourn_server.vllm.tier_settings import TierSettings

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    scheduler = engine.scheduler
    monkeypatch.setattr(scheduler.vllm_config.kv_transfer_config, "kv_connector_extra_config", extra)
    with pytest.raises(SettingsError, match=said):
        TierSettings.read(scheduler.vllm_config, scheduler.kv_cache_config)
