"""The replay under ``lru`` is vLLM's block pool: it finds the hits that the engine found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from sojourn_server.simulator.limits.belady import replay_belady
from sojourn_server.simulator.limits.block_accesses import (
    AccessLog,
    AccessRecorder,
    BlockAccess,
    BlockAccessKind,
    prepare_access_sequence,
)
from sojourn_server.simulator.limits.eviction_replay import replay_evictions
from sojourn_server.simulator.limits.replay_eviction_orders import LruEvictionOrder
from sojourn_server.simulator.simulated_engine import SimulatedEngine, SimulatedEngineOptions

BLOCK = 4


class Recorder:
    """Notes every allocation and release of a bare engine, and the hits of every admission."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.log = AccessLog(pool_blocks=engine.options.blocks - 1, block_size=engine.options.block_size)
        self.hits: list[int] = []
        self.resumed = 0
        self.held_twice = 0
        """Equal cached blocks seen."""
        self._numbers: dict[str, int] = {}
        self._requests: list[Any] = []
        self._held: dict[int, tuple[int, int]] = {}
        self._pool = engine.pool
        manager = engine.scheduler.kv_cache_manager
        self._groups = manager.coordinator.single_type_managers
        allocate, free = manager.allocate_slots, manager.free

        def allocate_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, *args, **kwargs)
            if blocks is not None:
                self._allocated(request, kwargs.get("num_new_computed_tokens", 0))
            return blocks

        def free_slots(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._freed(request)
            return free(request, *args, **kwargs)

        manager.allocate_slots, manager.free = allocate_slots, free_slots

    def finish(self, owners: dict[str, str]) -> AccessLog:
        ids: dict[bytes, int] = {}
        for name in self._numbers:
            request = self._requests[self._numbers[name]]
            self.log.chains.append([ids.setdefault(key, len(ids)) for key in request.block_hashes])
            self.log.prompt_blocks.append((request.num_prompt_tokens - 1) // self.log.block_size)
            self.log.owners.append(owners[name])
        return self.log

    def _allocated(self, request: Any, hit_tokens: int) -> None:
        number = self._numbers.setdefault(request.request_id, len(self._numbers))
        if number == len(self._requests):
            self._requests.append(request)
        cached = self._pool.cached_block_hash_to_block._cache.values()
        self.held_twice += sum(isinstance(blocks, dict) for blocks in cached)
        now = self._now(request)
        if number not in self._held:
            self.hits.append(hit_tokens // self.log.block_size)
            self.resumed += request.num_preemptions > 0
            self.log.accesses.append(BlockAccess(BlockAccessKind.ADMIT, number, *now))
        elif now != self._held[number]:
            self.log.accesses.append(BlockAccess(BlockAccessKind.GROW, number, *now))
        self._held[number] = now

    def _freed(self, request: Any) -> None:
        number = self._numbers.get(request.request_id)
        if number is not None and self._held.pop(number, None) is not None:
            self.log.accesses.append(BlockAccess(BlockAccessKind.FREE, number, 0, 0))

    def _now(self, request: Any) -> tuple[int, int]:
        (group,) = self._groups
        return len(group.req_to_blocks[request.request_id]), group.num_cached_block.get(request.request_id, 0)


def run_random_programs(seed: int, *, blocks: int, chunk: int) -> Recorder:
    rng = random.Random(seed)
    engine = SimulatedEngine(
        SimulatedEngineOptions(
            blocks=blocks, block_size=BLOCK, max_num_batched_tokens=chunk, max_num_seqs=6, max_model_len=512
        ),
        clock=lambda: 0.0,
    )
    recorder = Recorder(engine)
    system = [rng.randrange(100, 110) for _ in range(rng.choice([0, 10, 40]))]
    contexts = {f"p{i}": system + [rng.randrange(100, 103)] * 5 for i in range(7)}
    owners: dict[str, str] = {}
    busy: dict[str, str] = {}
    longest = (blocks - 1) * BLOCK
    for turn in range(60):
        for program in sorted(contexts):
            if program in busy or rng.random() < 0.5:
                continue
            if rng.random() < 0.1:  # the conversation is cut back
                contexts[program] = contexts[program][: rng.randrange(4, len(contexts[program]) + 1)]
            prompt = contexts[program] + [rng.randrange(100, 103) for _ in range(rng.randrange(1, 24))]
            prompt = prompt[: longest - 30]
            name = f"{program}/{turn}"
            owners[name], busy[program] = program, name
            outputs = rng.randrange(1, 28)
            engine.add(name, prompt, max_tokens=outputs)
            if rng.random() < 0.2:  # another asks the same, and gets the same answer at the same time
                owners[f"{name}/twin"] = f"{program}/twin"
                engine.add(f"{name}/twin", prompt, max_tokens=outputs)
            contexts[program] = prompt + [7] * rng.randrange(0, 20)
        for _ in range(rng.randrange(1, 12)):
            done = set(engine.step().finished)
            busy = {program: name for program, name in busy.items() if name not in done}
        if busy and rng.random() < 0.1:
            program = min(busy)
            engine.abort(busy.pop(program))
    engine.run()
    recorder.finish(owners)
    return recorder


@pytest.mark.parametrize("seed", range(12))
def test_lru_finds_what_the_engine_found(seed: int) -> None:
    recorder = run_random_programs(seed, blocks=70 + 10 * (seed % 3), chunk=(16, 64, 512)[seed % 3])

    replayed = replay_evictions(recorder.log, LruEvictionOrder())

    assert replayed.hit_blocks == recorder.hits
    assert replayed.overflow_blocks == replayed.given_back_tokens == 0
    assert 0 < replayed.hit_tokens < replayed.asked_tokens
    assert replay_belady(recorder.log).regenerated_tokens <= replayed.regenerated_tokens


def test_the_workload_above_is_a_hard_one() -> None:
    """Evictions that hurt, preemptions, equal blocks held twice: or the parity test would prove little."""
    recorders = [
        run_random_programs(s, blocks=70 + 10 * (s % 3), chunk=(16, 64, 512)[s % 3]) for s in range(4)
    ]
    replays = [replay_evictions(recorder.log, LruEvictionOrder()) for recorder in recorders]

    assert sum(recorder.resumed for recorder in recorders) >= 5
    assert sum(result.regenerated_tokens for result in replays) > 1000
    assert sum(recorder.held_twice for recorder in recorders) > 0


def test_whoever_was_preempted_when_the_run_ends_is_named_as_far_as_it_had_come() -> None:
    engine = SimulatedEngine(
        SimulatedEngineOptions(blocks=21, block_size=BLOCK, max_num_seqs=4, max_model_len=76), lambda: 0.0
    )
    recorder = AccessRecorder(20, BLOCK)
    for name in ("a/0", "b/0"):
        engine.add(name, range(ord(name[0]) * 100, ord(name[0]) * 100 + 9), max_tokens=60)
    requests = engine.scheduler.requests
    while not any(request.num_preemptions for request in requests.values()):
        planned = engine.plan()
        recorder.step(planned, requests)
        engine.update_from_output(planned)
    (away,) = [request for request in requests.values() if request.num_preemptions]
    assert away.num_computed_tokens == 0
    log = recorder.close(requests)
    assert len(log.chains[log.requests.index(away.request_id)]) > 5
    prepare_access_sequence(log)
