"""Placement in vLLM's own scheduler: parked requests, copies down and up, and liveness."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.policies.placement.placement_views import Tier

BLOCK = 16
SHAPE = {"blocks": 41, "host_blocks": 60, "own_tiers": True, "max_model_len": 640}
"""40 blocks of 16 tokens on the device."""


def prompt(start: int, tokens: int) -> list[int]:
    return list(range(start * 10_000, start * 10_000 + tokens))


class Worker:
    """An engine with a worker that moves contents as the real one promises to, as slowly as a test likes.

    A content is the hash of what is in a block; what is read anywhere is checked.
    """

    def __init__(
        self, engine: Any, clock: Any, *, step_s: float = 0.1, lag_steps: int = 1, load_steps: int = 0
    ) -> None:
        """``load_steps``: steps between that which orders a load and that in which it arrives."""
        self.engine, self.clock, self.step_s, self.lag_steps = engine, clock, step_s, lag_steps
        self.load_steps = load_steps
        self.loads: dict[str, tuple[int, list[tuple[Any, Any]]]] = {}
        """By request: when it arrives; copies, each with the hash that the request counts on."""
        self.answers: set[str] = set()
        """Requests whose loads had to end before this step."""
        self.blocks: dict[int, Any] = {}
        self.slots: dict[int, Any] = {}
        self.disk: dict[Any, Any] = {}
        self.stores: dict[int, tuple[int, list[Any]]] = {}
        self.files: list[tuple[str, Any]] = []
        self.counts: Counter[str] = Counter()
        self.steps = 0
        self.outputs: list[Any] = []
        self.results: Any = None

    def step(self, steps: int = 1) -> None:
        from sojourn_server.kv_offload.offload_jobs import OffloadResults
        from sojourn_server.vllm.kv_connector import StepReport
        from vllm.v1.outputs import KVConnectorOutput

        for _ in range(steps):
            self.clock.now += self.step_s
            self.steps += 1
            planned = self.engine.plan()
            self.results = OffloadResults()
            orders = planned.kv_connector_metadata
            if orders is not None:
                self._before_forward(orders.jobs)
            self._compute(planned)
            self._finish_copies()
            copies = KVConnectorOutput(
                kv_connector_worker_meta=StepReport(self.results), finished_recving=self._finish_loads()
            )
            self._take_in(planned, copies if orders is not None else None)

    def spend(self, seconds: float) -> None:
        """Let time pass as an engine does that has work left."""
        while seconds > 0:
            self.clock.now += min(10.0, seconds)
            seconds -= 10.0
            self.step()

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

    def _take_in(self, planned: Any, copies: Any) -> None:
        update = self.engine.scheduler.update_from_output

        def noted(*args: Any, **kwargs: Any) -> Any:
            outputs = update(*args, **kwargs)
            self.outputs += [(client, each) for client, told in outputs.items() for each in told.outputs]
            return outputs

        self.engine.scheduler.update_from_output = noted
        try:
            self.engine.update_from_output(planned, copies)
        finally:
            del self.engine.scheduler.update_from_output

    def _before_forward(self, jobs: Any) -> None:
        if jobs.settles:
            self.counts["settled"] += len(self.loads)
            self.answers |= self._finish_loads(at_once=True)
        for job, copies in jobs.awaited.items():
            self.stores.pop(job, None)
            self._copy_to_host(copies)
        self._copy_to_host(jobs.saves)
        for request_id, copies in jobs.loads.items():
            hashes = self.engine.scheduler.requests[request_id].block_hashes
            ids = self.engine.scheduler.kv_cache_manager.get_block_ids(request_id)[0]
            wanted = [(copy, hashes[ids.index(copy.block_id)]) for copy in copies]
            self.loads[request_id] = (self.steps + self.load_steps, wanted)
            self.blocks.update((copy.block_id, "half written") for copy in copies)
        for job, copies in jobs.stores.items():
            self.stores[job] = (self.steps + self.lag_steps, copies)
            self.slots.update((copy.slot, "half written") for copy in copies)
            self.counts["stored"] += len(copies)
        self.files += [("spill", file) for file in jobs.spills] + [("stage", file) for file in jobs.stages]
        self.slots.update((file.slot, "half read") for file in jobs.stages)

    def _copy_to_host(self, copies: Any) -> None:
        for copy in copies:
            self.slots[copy.slot] = self.blocks.get(copy.block_id, "nothing")
            self.counts["saved"] += 1

    def _finish_loads(self, *, at_once: bool = False) -> set[str]:
        arrived, self.answers = self.answers, set()
        arrived |= {name for name, (done, _) in self.loads.items() if at_once or done <= self.steps}
        for request_id in arrived & self.loads.keys():
            for copy, wanted in self.loads.pop(request_id)[1]:
                assert self.slots[copy.slot] == wanted, "a wrong token would follow"
                self.blocks[copy.block_id] = wanted
                self.counts["loaded"] += 1
        return arrived

    def _finish_copies(self) -> None:
        from sojourn_server.kv_offload.offload_jobs import CopyResult

        for job in [job for job, (done, _) in self.stores.items() if done <= self.steps]:
            self._copy_to_host(self.stores.pop(job)[1])
            self.results.stored[job] = CopyResult.MOVED
        for kind, file in self.files:
            if kind == "spill":
                assert self.slots[file.slot] == file.key
                self.disk[file.key] = self.slots[file.slot]
                self.results.spilled[file.key] = CopyResult.MOVED
            else:
                self.slots[file.slot] = self.disk[file.key]
                self.results.staged[file.key] = CopyResult.MOVED
        self.files.clear()

    def _compute(self, planned: Any) -> None:
        manager = self.engine.scheduler.kv_cache_manager
        for request_id, tokens in planned.num_scheduled_tokens.items():
            request = self.engine.scheduler.requests[request_id]
            size = self.engine.options.block_size
            ids = manager.get_block_ids(request_id)[0]
            end = request.num_computed_tokens  # this step's are counted already
            first = (end - tokens) // size
            for place in range(first):
                assert self.blocks[ids[place]] == request.block_hashes[place], "found under a wrong hash"
            for place in range(first, -(-end // size)):
                whole = (place + 1) * size <= end
                self.blocks[ids[place]] = request.block_hashes[place] if whole else "in part"


def running(engine: Any) -> set[str]:
    return {request.request_id for request in engine.scheduler.running}


def waits(engine: Any) -> list[str]:
    return [request.request_id for request in engine.scheduler.waiting]


def planner(engine: Any) -> Any:
    return engine.scheduler.connector.planner


def placed(engine: Any) -> dict[str, int]:
    return {tier: count for tier, count in engine.ask("stats")["placed"].items() if count}


def program(engine: Any, program_id: str) -> Any:
    return engine.ask("program", program_id=program_id)


def end(engine: Any, program_id: str, seq: int = 1) -> None:
    engine.tell({"seq": seq, "type": "program_end", "program_id": program_id})


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
    crowded.step(5)
    assert running(engine) == {"a1"}
    assert (waits(engine), len(engine.scheduler.waiting), bool(engine.scheduler.waiting)) == (
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
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    engine = crowded.engine
    crowded.engine.scheduler.sojourn.waiting.in_pair = in_pair
    params = SamplingParams(max_tokens=2, ignore_eos=True, extra_args={"kv_transfer_params": params})
    request = Request(
        request_id="b2",
        prompt_token_ids=prompt(2, 32),
        sampling_params=params,
        pooling_params=None,
        block_hasher=engine.hash_blocks,
        session_id="B",
    )
    engine.scheduler.add_request(request)
    crowded.step()
    assert ("b2" in running(engine)) is runs
    crowded.until_idle()
    assert program(engine, "B")["turns"] == 2


def test_the_peeked_request_is_popped_though_another_is_admitted_meanwhile() -> None:
    from sojourn_server.core.request_table import QueuePlace, QueueState
    from sojourn_server.vllm.waiting_queue import PolicyRequestQueue

    ranks, parked = {"seen": 2, "parked": 1, "last": 3}, {"parked"}

    def place(name: str) -> QueuePlace:
        state = QueueState.PARKED if name in parked else QueueState.OPEN
        return QueuePlace((ranks[name],), state)

    queue: Any = PolicyRequestQueue(SimpleNamespace(place=place))
    for name in ranks:
        queue.add_request(name)
    assert queue.peek_request() == "seen"
    parked.clear()
    queue.rekey("parked")
    assert [queue.pop_request() for _ in range(len(queue))] == ["seen", "parked", "last"]
    parked.add("last")
    queue.add_request("last")
    queue.rekey("seen")
    assert (list(queue), len(queue), bool(queue)) == (["last"], 1, False)
    with pytest.raises(IndexError):
        queue.peek_request()


# -- labels (M5) ---------------------------------------------------------------------------------------


def test_host_memory_keeps_idle_programs_longest() -> None:
    """§4.3.2: "CPU DRAM: … then busy, then idle"; the device has the last two the other way round."""
    from sojourn_server.vllm.offload_manager import host_eviction_rank

    busy, idle, cold, inactive = Tier
    assert sorted(Tier, key=host_eviction_rank) == [inactive, cold, busy, idle]
    assert host_eviction_rank(cold).until_written == host_eviction_rank(idle), (
        "it is not yet where it belongs"
    )


# -- down and up again ---------------------------------------------------------------------------------


def demoted(worker: Worker) -> None:
    """A had a turn of 30 blocks and acts; B's 20 take its place after a standstill."""
    worker.turn("a1", prompt(1, 480), "A")
    worker.clock.now += 10.0
    worker.turn("b1", prompt(2, 320), "B")
    assert placed(worker.engine) == {"device": 1, "host": 1}
    worker.step(5)


def test_a_demoted_program_is_stored_and_loaded_on_promotion(worker: Worker) -> None:
    demoted(worker)
    engine = worker.engine
    assert planner(engine).counts["stored"] == 30
    assert planner(engine).under_way == 0
    assert ranks(worker, "A") == {RetentionRank.IDLE: 30}
    worker.clock.now += 10.0
    worker.turn("a2", [*prompt(1, 480), *prompt(3, 40)], "A")
    tokens = program(engine, "A")["ledger"][-1]["tokens"]
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
    worker.step(5)
    return worker


def test_the_most_idle_program_goes_to_disk(on_disk: Worker) -> None:
    engine = on_disk.engine
    assert engine.scheduler.sojourn.program_scheduler.pool.disk_blocks == 80
    assert placed(engine) == {"device": 1, "disk": 1}
    assert program(engine, "A")["placed"] == "disk"
    assert planner(engine).counts["stored"] == 30
    on_disk.clock.now += 10.0
    on_disk.turn("a2", [*prompt(1, 480), *prompt(4, 16)], "A")
    tokens = program(engine, "A")["ledger"][-1]["tokens"]
    assert (tokens["device"] + tokens["host"], tokens["lost"]) == (480, {})
    assert program(engine, "A")["placed"] == "device"


def test_a_program_promoted_from_disk_is_read_from_disk(on_disk: Worker) -> None:
    engine = on_disk.engine
    assert len(on_disk.disk) == 30, "by order, though host memory has room"
    for entry in list(planner(engine).host):
        planner(engine).host.remove(entry)
    on_disk.clock.now += 10.0
    on_disk.turn("a2", [*prompt(1, 480), *prompt(4, 16)], "A")
    tokens = program(engine, "A")["ledger"][-1]["tokens"]
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

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("broken on purpose")

    broken_part = planner(engine).disk if hook == "fetch" else planner(engine)
    monkeypatch.setattr(broken_part, hook, broken)
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
    assert not list(program_scheduler.leased_programs), "a lease would block every further reset"
    engine.abort("s1")
    on_disk.clock.now += 10.0
    on_disk.turn("a2", [*prompt(1, 480), *prompt(4, 16)], "A")
    tokens = program(engine, "A")["ledger"][-1]["tokens"]
    assert (tokens["device"] + tokens["host"], tokens["lost"]) == (480, {})
    on_disk.until_idle()
    assert engine.ask("capabilities")["tiers"]["disk"]["shared"]
    assert engine.scheduler.reset_prefix_cache()
    assert program_scheduler.pool.disk_blocks == 0
    assert "shared" not in engine.ask("capabilities")["tiers"]["disk"], "nothing is written for others now"
    assert placed(engine).keys() <= {"device", "waiting"}


# -- storms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("asynchronous", [False, True])
def test_whatever_happens_what_is_loaded_was_computed_and_everybody_is_served(
    make_engine: Any, clock: Any, seed: int, asynchronous: bool
) -> None:
    engine = make_engine(
        "mori",
        blocks=60,
        block_size=4,
        max_num_batched_tokens=48,
        max_num_seqs=6,
        max_model_len=220,
        host_blocks=100,
        own_tiers=True,
        asynchronous=asynchronous,
    )
    worker = Worker(engine, clock, step_s=0.05, lag_steps=3, load_steps=2)
    draw = random.Random(seed)
    contexts: dict[str, list[int]] = {}
    stayed: set[str] = set()
    for number in range(1, 251):
        name = f"P{draw.randrange(8)}"
        context = contexts.get(name, [1, 2, 3, 4, 5, 6, 7, 8])
        if len(context) > 120:
            context = context[: draw.choice([8, 40])]
        context = [*context, *(draw.randrange(9, 30_000) for _ in range(draw.randint(5, 40)))]
        contexts[name] = context
        stranger = draw.random() < 0.1
        engine.add(
            f"r{number}", context, max_tokens=draw.randint(4, 40), program_id=None if stranger else name
        )
        stayed.add(f"r{number}")
        worker.step(draw.randint(0, 15))
        clock.now += draw.choice([0.0, 0.0, 3.0, 40.0])
        if draw.random() < 0.05 and engine.scheduler.requests:
            gone = draw.choice(sorted(engine.scheduler.requests))
            stayed.discard(gone)
            engine.abort(gone)
        if draw.random() < 0.05:
            end(engine, name, number)
            contexts.pop(name)
        if draw.random() < 0.02:
            engine.scheduler.reset_prefix_cache(reset_running_requests=True)
    worker.step_s = 0.5
    worker.until_idle(3000)
    served = {each.request_id for _, each in worker.outputs if each.finish_reason is not None}
    assert stayed <= served
    assert worker.counts["loaded"] > 50
    assert worker.counts["stored"] > 50
    assert engine.scheduler.sojourn.failures == 0
    assert not any(entry.pins for entry in planner(engine).host)
    assert len(engine.scheduler.waiting) == 0


# -- without programs -----------------------------------------------------------------------------


def test_priorities_and_placement_exclude_one_another(make_engine: Any) -> None:
    with pytest.raises(ValueError, match="scheduling-policy is priority"):
        make_engine("mori", scheduling_policy="priority", **SHAPE)
