"""KV that is loaded into the device before its request comes: into spare blocks only, with nothing left."""

from __future__ import annotations

from typing import Any

import pytest
from sojourn.ids import ProgramId
from turns import arrive, end, last_turn, no_load_is_left, prompt, turn_with_copies

A = ProgramId("A")
CONTEXT_TOKENS = 240
SHAPE = {
    "blocks": 161,
    "host_blocks": 400,
    "own_tiers": True,
    "max_model_len": 2560,
    "max_num_batched_tokens": 512,
}


class Ahead:
    """An engine whose device has lost program A's context to a program that has ended since."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.adapter = engine.scheduler.sojourn
        self.loads = self.adapter._prefetcher
        self.queue = self.adapter._queue
        self.planner = engine.scheduler.connector.planner
        self.turn("a1", prompt(1, CONTEXT_TOKENS), "A")
        self.turn("b1", prompt(2, 2400), "B")
        self.keys = list(self.adapter.program_scheduler.context(A))
        self.first = self.adapter._groups.cached_prefix(self.keys).hashes
        assert self.first < len(self.keys)
        engine.tell(end("B"))

    def turn(self, request_id: str, tokens: list[int], program: str | None) -> Any:
        """Run a request to its end. Returns the jobs of its first step."""
        return turn_with_copies(self.engine, request_id, tokens, program)[0]

    def begin(self, *, keep_s: float = 30.0) -> tuple[Any, str]:
        """Begin to load A's context. Returns the planned step and the load's name."""
        count = self.planner.loadable(self.keys[self.first :])
        assert 0 < count <= self.loads.budget(A)
        assert self.queue.spare_blocks(count, ()) == count
        self.loads.load(
            A, self.keys[: self.first + count], count, self.engine.scheduler.sojourn._clock() + keep_s
        )
        assert self.engine.scheduler.has_requests(), "else no step would learn of its end"
        planned = self.engine.plan()
        (name,) = planned.kv_connector_metadata.jobs.loads
        return planned, name

    def on_device(self) -> int:
        return self.adapter._groups.cached_prefix(self.keys).hashes

    def nothing_is_left(self) -> bool:
        pool = self.engine.pool
        all_are_free = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
        return no_load_is_left(self.engine) and not self.loads._loads and all_are_free


@pytest.fixture(params=[False, True], ids=["as they come", "one ahead"])
def ahead(make_engine: Any, request: Any) -> Ahead:
    return Ahead(make_engine("continuum", asynchronous=request.param, **SHAPE))


def test_what_was_loaded_is_found_and_belongs_to_its_program(ahead: Ahead) -> None:
    planned, name = ahead.begin()
    assert ahead.on_device() == ahead.first, "not before it has arrived"
    arrive(ahead.engine, planned, name)
    assert ahead.on_device() == len(ahead.keys)
    assert ahead.nothing_is_left()
    assert len(ahead.queue.owners.ahead) == len(ahead.keys) - ahead.first
    jobs = ahead.turn("a2", [*prompt(1, CONTEXT_TOKENS), *prompt(4, 40)], "A")
    assert not jobs.loads
    tokens = last_turn(ahead.engine, "A")["tokens"]
    assert (tokens["device"], tokens["host"], tokens["lost"]) == (CONTEXT_TOKENS, 0, {})
    assert not ahead.queue.owners.ahead
    assert not ahead.queue.owners.common, "A alone has used them"


def test_it_is_the_first_that_other_requests_overwrite(ahead: Ahead) -> None:
    """A hint that lies must cost nothing but spare blocks."""
    ahead.turn("c1", prompt(3, 320), "C")
    kept = list(ahead.adapter.program_scheduler.context(ProgramId("C")))
    planned, name = ahead.begin()
    arrive(ahead.engine, planned, name)
    spare = ahead.queue.spare_blocks(200, ())
    host = [ahead.planner.host.get(key) for key in ahead.keys[ahead.first :]]
    ranks = [entry.rank for entry in host]
    ahead.turn("d1", prompt(4, (spare + 5) * 16), None)
    assert [entry.rank for entry in host] == ranks, "host memory keeps the program's copies as before"
    assert ahead.on_device() < len(ahead.keys)
    assert len(ahead.adapter._groups.cached_prefix(kept).blocks) == len(kept)


def test_kv_of_living_programs_is_not_spare(ahead: Ahead) -> None:
    total = ahead.engine.pool.num_gpu_blocks - 1
    on_device = ahead.adapter._groups.cached_prefix(ahead.keys)
    kept = {block.block_id for block in on_device.blocks}
    assert ahead.queue.spare_blocks(total, kept) == total - len(kept)
    ahead.turn("c1", prompt(3, 320), "C")
    assert ahead.queue.spare_blocks(total, kept) <= total - len(kept) - 20
    assert ahead.loads.budget(A) == total // 8


def test_it_expires(ahead: Ahead, clock: Any) -> None:
    planned, name = ahead.begin(keep_s=10.0)
    arrive(ahead.engine, planned, name)
    clock.now += 9.0
    ahead.engine.step()
    assert ahead.on_device() == len(ahead.keys)
    clock.now += 2.0
    ahead.engine.step()
    assert ahead.on_device() == ahead.first
    assert not ahead.queue.owners.ahead
    assert not ahead.loads._filled
    assert ahead.nothing_is_left()


def test_a_copy_of_what_expires_ends_before_its_blocks_are_reused(ahead: Ahead, clock: Any) -> None:
    """Host memory may have lost the blocks since, so that the device's are copied again."""
    planned, name = ahead.begin(keep_s=10.0)
    arrive(ahead.engine, planned, name)
    for entry in list(ahead.planner.host):
        ahead.planner.host.remove(entry)
    ahead.adapter._offload.copy_ahead(ahead.adapter._groups.cached_prefix(ahead.keys).blocks[ahead.first :])
    planned = ahead.engine.plan()
    running = planned.kv_connector_metadata.jobs.stores
    assert len(running) == 1
    ahead.engine.update_from_output(planned)
    clock.now += 11.0
    planned = ahead.engine.plan()
    assert ahead.on_device() == ahead.first
    assert planned.kv_connector_metadata.jobs.awaited == running
    arrive(ahead.engine, planned)
    assert ahead.nothing_is_left()


def test_the_end_of_its_program_takes_it_back(ahead: Ahead) -> None:
    planned, name = ahead.begin()
    ahead.engine.tell(end("A"))
    arrive(ahead.engine, planned, name)
    assert ahead.on_device() <= ahead.first
    assert not ahead.queue.owners.ahead
    assert ahead.nothing_is_left()


def test_a_request_that_comes_meanwhile_waits_for_it(ahead: Ahead) -> None:
    planned, name = ahead.begin()
    ahead.engine.add("a2", [*prompt(1, CONTEXT_TOKENS), *prompt(4, 40)], program_id="A", max_tokens=2)
    arrive(ahead.engine, planned)
    planned = ahead.engine.plan()
    assert not planned.kv_connector_metadata.jobs.loads, "it is not loaded twice"
    arrive(ahead.engine, planned, name)
    ahead.engine.run()
    tokens = last_turn(ahead.engine, "A")["tokens"]
    assert tokens["device"] == CONTEXT_TOKENS
    assert ahead.nothing_is_left()


@pytest.mark.parametrize("begun", [False, True], ids=["ordered", "begun"])
def test_a_request_that_lacks_blocks_takes_those_of_the_load(ahead: Ahead, begun: bool) -> None:
    """No other request is preempted or loses KV for it. Its late results are no other load's."""
    if begun:
        planned, name = ahead.begin()
        blocks = {copy.block_id for copy in planned.kv_connector_metadata.jobs.loads[name]}
        arrive(ahead.engine, planned)
    else:
        count = len(ahead.keys) - ahead.first
        ahead.loads.load(A, ahead.keys, count, 1e9)
    free = ahead.engine.pool.get_num_free_blocks()
    ahead.engine.add("d1", prompt(5, free * 16 + 40), max_tokens=2)
    for _ in range(12):
        planned = ahead.engine.plan()
        settles = planned.kv_connector_metadata.jobs.settles
        assert begun or not planned.kv_connector_metadata.jobs.loads, "it is taken back"
        assert not planned.preempted_req_ids
        if not ahead.loads._loads:
            break
        arrive(ahead.engine, planned)
    assert not ahead.loads._loads
    assert settles == begun
    if begun:
        arrive(ahead.engine, planned, name, without=blocks)
    else:
        arrive(ahead.engine, planned)
    while ahead.engine.scheduler.has_unfinished_requests():
        planned = ahead.engine.plan()
        arrive(ahead.engine, planned, *planned.kv_connector_metadata.jobs.loads)
    assert ahead.nothing_is_left()
    assert not ahead.engine.scheduler.connector.off


@pytest.mark.parametrize("state", ["ordered", "begun", "filled"])
def test_a_reset_forgets_it(ahead: Ahead, state: str) -> None:
    """Also one that resets nothing while requests run: a load ahead of need is none."""
    if state == "ordered":
        ahead.loads.load(A, ahead.keys, len(ahead.keys) - ahead.first, 1e9)
    else:
        planned, name = ahead.begin()
        arrive(ahead.engine, planned, *([name] if state == "filled" else ()))
    assert ahead.engine.scheduler.reset_prefix_cache()
    assert ahead.on_device() == 0
    assert not ahead.loads._filled
    planned = ahead.engine.plan()
    assert not planned.kv_connector_metadata.jobs.loads
    if state == "begun":
        assert planned.kv_connector_metadata.jobs.settles
        arrive(ahead.engine, planned, name)
    assert ahead.nothing_is_left()
    assert ahead.on_device() == 0
    ahead.turn("a2", prompt(1, CONTEXT_TOKENS), "A")
    assert ahead.nothing_is_left()


@pytest.mark.parametrize("fails", [False, True], ids=["turned off", "an error at its end"])
def test_a_load_whose_tiers_go_off_leaves_nothing_held(
    make_engine: Any, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    ahead = Ahead(make_engine("continuum", {"strict": False}, **SHAPE))
    planned, name = ahead.begin()
    if fails:
        with monkeypatch.context() as patched:
            patched.setattr(ahead.engine.pool, "cache_full_blocks", None)
            arrive(ahead.engine, planned, name)
        assert ahead.on_device() == ahead.first
    else:
        arrive(ahead.engine, planned)
        ahead.engine.scheduler.connector.turn_off("a test")
        ahead.engine.add("d1", prompt(5, 40), max_tokens=1)
        arrive(ahead.engine, ahead.engine.plan(), name)
        ahead.engine.run()
    assert ahead.engine.scheduler.connector.off
    assert ahead.loads.budget(A) == 0
    assert ahead.nothing_is_left()
