"""Placement in vLLM's own scheduler: parked requests, copies down and up, and liveness."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from test_vllm_preemption_faults import Timed
from turns import add_request, last_turn, planner, prompt, running, waiting

BLOCK = 16
SHAPE = {"blocks": 41, "host_blocks": 60, "own_tiers": True, "max_model_len": 640}
"""40 blocks of 16 tokens on the device."""


class Worker(Timed):
    """An engine whose worker moves contents; what is read anywhere is checked."""

    def until_idle(self, most: int = 500) -> None:
        for _ in range(most):
            if not self.engine.scheduler.requests:
                return
            self.step()
        raise AssertionError(f"after {most} steps there are {sorted(self.engine.scheduler.requests)}")

    def turn(self, request_id: str, tokens: list[int], program: str | None, output: int = 2) -> Any:
        request = self.engine.add(request_id, tokens, program_id=program, max_tokens=output)
        self.until_idle()
        return request

    def rest(self) -> None:
        """Steps in which copies end."""
        for _ in range(5):
            self.step()


def placed(engine: Any) -> dict[str, int]:
    return {tier: count for tier, count in engine.ask("stats")["placed"].items() if count}


def program(engine: Any, program_id: str) -> Any:
    return engine.ask("program", program_id=program_id)


def ranks(worker: Worker, program_id: str) -> Counter[int]:
    """Of a program's blocks in host memory: which are reused first."""
    keys = worker.engine.scheduler.sojourn.program_scheduler.state.contexts.get(program_id)
    entries = map(planner(worker.engine).host.get, keys)
    return Counter(entry.rank for entry in entries if entry is not None)


@pytest.fixture
def worker(make_engine: Any, clock: Any) -> Worker:
    return Worker(make_engine("mori", **SHAPE), clock)


@pytest.fixture
def crowded(worker: Worker) -> Worker:
    """A's 30 blocks run for long, and B's 20 do not fit beside them."""
    worker.engine.add("a1", prompt(1, 480), program_id="A", max_tokens=100)
    worker.step()
    worker.engine.add("b1", prompt(2, 320), program_id="B", max_tokens=2)
    worker.step()
    return worker


# -- who is kept out -------------------------------------------------------------------------


def test_a_parked_request_costs_nothing_and_is_work_left(crowded: Worker) -> None:
    engine = crowded.engine
    free = engine.pool.get_num_free_blocks()
    crowded.rest()
    assert running(engine) == {"a1"}
    assert (waiting(engine), len(engine.scheduler.waiting), bool(engine.scheduler.waiting)) == (
        ["b1"],
        1,
        False,
    )
    assert engine.scheduler.has_unfinished_requests()
    assert engine.pool.get_num_free_blocks() == free
    assert planner(engine)._looked_up == {}, "its loads are not looked up"
    assert program(engine, "B")["status"] == "gated"
    assert placed(engine) == {"device": 1, "waiting": 1}


@pytest.mark.parametrize(
    ("in_pair", "params", "runs"),
    [(True, {"peer": 1}, True), (True, "x", False), (False, {"peer": 1}, False)],
)
def test_only_a_request_of_a_pair_is_not_parked(
    crowded: Worker, in_pair: bool, params: Any, runs: bool
) -> None:
    """Its pair's gateway has admitted it. A client's own ``kv_transfer_params`` pass nothing."""
    engine = crowded.engine
    engine.scheduler.sojourn.waiting.in_pair = in_pair
    add_request(engine, "b2", prompt(2, 32), params=params, max_tokens=2, session_id="B")
    crowded.step()
    assert ("b2" in running(engine)) is runs
    crowded.until_idle()
    assert program(engine, "B")["turns"] == 2


# -- down and up again ---------------------------------------------------------------------------------


def test_a_demoted_program_is_stored_and_loaded_on_promotion(worker: Worker) -> None:
    """A had a turn of 30 blocks and acts; B's 20 take its place after a standstill."""
    engine = worker.engine
    worker.turn("a1", prompt(1, 480), "A")
    worker.clock.now += 10.0
    worker.turn("b1", prompt(2, 320), "B")
    assert placed(engine) == {"device": 1, "host": 1}
    worker.rest()
    assert planner(engine).counts["stored"] == 30
    assert planner(engine).under_way == 0
    assert ranks(worker, "A") == {RetentionRank.IDLE: 30}
    worker.clock.now += 10.0
    worker.turn("a2", [*prompt(1, 480), *prompt(3, 40)], "A")
    tokens = last_turn(engine, "A")["tokens"]
    assert tokens["host"] == worker.counts["loaded"] * BLOCK == planner(engine).counts["loaded"] * BLOCK > 0
    assert tokens["device"] + tokens["host"] == 480
    assert tokens["lost"] == {}
    assert program(engine, "A")["placed"] == "device"
    assert program(engine, "B")["placed"] == "host"
    assert ranks(worker, "B") == {RetentionRank.IDLE: 20}, "B has gone down for it"
    assert set(ranks(worker, "A")) == {RetentionRank.WORTHLESS}


@pytest.fixture
def on_disk(make_engine: Any, clock: Any) -> Worker:
    """A has acted for so long that its 30 blocks belong on disk, for which B has run."""
    worker = Worker(make_engine("mori", **{**SHAPE, "disk_blocks": 80}), clock)
    worker.turn("a1", prompt(1, 480), "A")
    clock.now += 1000.0
    worker.turn("b1", prompt(2, 480), "B")
    worker.rest()
    return worker


def test_a_program_promoted_from_disk_is_read_from_disk(on_disk: Worker) -> None:
    engine = on_disk.engine
    assert placed(engine) == {"device": 1, "disk": 1}
    assert program(engine, "A")["placed"] == "disk"
    assert len(on_disk.disk) == 30, "by order, though host memory has room"
    assert ranks(on_disk, "A") == {RetentionRank.COLD: 30}
    for entry in list(planner(engine).host):
        planner(engine).host.remove(entry)
    on_disk.clock.now += 10.0
    on_disk.turn("a2", [*prompt(1, 480), *prompt(4, 16)], "A")
    tokens = last_turn(engine, "A")["tokens"]
    assert (tokens["device"] + tokens["host"], tokens["lost"]) == (480, {})
    assert planner(engine).counts["staged"] == tokens["host"] // BLOCK > 10
    assert engine.ask("stats")["tiers"]["disk"]["used"] == 60, "and B has gone there"


# -- failures ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hook", ["store", "set_rank", "fetch"])
def test_where_the_planner_fails_the_tiers_are_off_and_the_engine_goes_on(
    make_engine: Any, clock: Any, monkeypatch: pytest.MonkeyPatch, hook: str
) -> None:
    engine = make_engine("mori", settings={"strict": False}, **SHAPE)
    worker = Worker(engine, clock)
    monkeypatch.setattr(planner(engine).disk if hook == "fetch" else planner(engine), hook, None)
    for turn in range(3):
        for number, name in enumerate("ABC", start=1):
            tokens = [*prompt(number, 320), *prompt(10 * number + turn, 16 * turn)]
            request = worker.turn(f"{name}{turn}", tokens, name)
            assert request.num_output_tokens == 2
            clock.now += 10.0
    assert engine.scheduler.connector.off
    assert not engine.scheduler.sojourn._queue.broken
    assert engine.scheduler.sojourn.failures == 0, "the tiers' failure is not the adapter's"


def test_a_reset_that_vllm_refuses_moves_no_program(on_disk: Worker) -> None:
    """vLLM clears nothing while a request runs, so host memory and disk keep their KV and stay in use."""
    engine = on_disk.engine
    program_scheduler = engine.scheduler.sojourn.program_scheduler
    engine.add("s1", prompt(9, 32), max_tokens=200)
    on_disk.step()
    before = placed(engine)
    assert before["disk"] == 1
    assert not engine.scheduler.reset_prefix_cache()
    assert placed(engine) == before
    assert program_scheduler.pool.disk_blocks == 80
    assert program_scheduler.state.contexts.get("A")
    assert not list(program_scheduler.leases), "a lease would block every further reset"
    engine.abort("s1")
    on_disk.clock.now += 10.0
    on_disk.turn("a2", [*prompt(1, 480), *prompt(4, 16)], "A")
    tokens = last_turn(engine, "A")["tokens"]
    assert (tokens["device"] + tokens["host"], tokens["lost"]) == (480, {})
    on_disk.until_idle()
    assert engine.ask("capabilities")["tiers"]["disk"]["shared"]
    assert engine.scheduler.reset_prefix_cache()
    assert program_scheduler.pool.disk_blocks == 0
    assert "shared" not in engine.ask("capabilities")["tiers"]["disk"], "nothing is written for others now"
    assert placed(engine).keys() <= {"device", "waiting"}


def test_priorities_and_placement_exclude_one_another(make_engine: Any) -> None:
    with pytest.raises(ValueError, match="scheduling-policy is priority"):
        make_engine("mori", scheduling_policy="priority", **SHAPE)
