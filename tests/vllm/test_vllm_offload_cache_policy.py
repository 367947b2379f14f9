"""vLLM's own manager of host memory with sojourn's order of eviction."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
import torch
from sojourn_server.kv_offload.host_block_pool import RetentionRank
from sojourn_server.launch.kv_options import CACHE_POLICY, VLLM_CONNECTOR
from sojourn_server.policies.preset import load_preset
from sojourn_server.simulator import vllm_offload_transfers
from sojourn_server.vllm import offload_cache_policy
from sojourn_server.vllm.cpu_offload_worker import CpuOffloadWorker
from sojourn_server.vllm.plugin_settings import missing_tiers
from sojourn_server.vllm.program_offload_connector import ProgramOffloadingManager
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    ReqContext,
    make_offload_key,
)
from vllm.v1.kv_offload.cpu.common import CPULoadStoreSpec
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

CHUNKS = 6
SETTINGS = {
    "cache_policy": CACHE_POLICY["eviction_policy"],
    "cache_policy_module_path": CACHE_POLICY["cache_policy_module_path"],
}


class HostMemory:
    """vLLM's manager, and requests that store and load chunks named by numbers."""

    def __init__(self, chunks: int = CHUNKS, **options: str) -> None:
        self.manager = CPUOffloadingManager(chunks, **options)
        self.policy: Any = self.manager._policy
        self.policy.strict = True

    def turn(self, request_id: str, program_id: str | None, *numbers: int, group: int = 0) -> None:
        """A request that finds or stores these chunks."""
        keys = [key(number, group) for number in numbers]
        context, is_ours = context_of(request_id, keys), hasattr(self.policy, "arrived")
        if program_id is not None and is_ours:
            self.policy.arrived(request_id, program_id)
        self.manager.on_new_request(context)
        found = [each for each in keys if self.policy.get(each) is not None]
        if found:
            self.manager.prepare_load(found, context)
            self.manager.complete_load(found, context)
        if is_ours:
            self.policy.request_admitted(program_id, [each[:-4] for each in keys])
        stored = self.manager.prepare_store(keys, context)
        self.manager.complete_store(stored.keys_to_store, context)
        self.manager.on_request_finished(context)

    @property
    def held(self) -> set[int]:
        return {number for number in range(100) if self.policy.get(key(number)) is not None}


def key(number: int, group: int = 0) -> bytes:
    return make_offload_key(number.to_bytes(4, "big"), group)


def context_of(request_id: str, keys: Iterable[bytes] = ()) -> Any:
    context = ReqContext(req_id=request_id)
    for position, each in enumerate(keys):
        context.set_offload_key_position(each, position + 1)
    return context


@pytest.fixture
def host() -> HostMemory:
    return HostMemory(**SETTINGS)


class Model:
    """What each chunk is worth, by the users of its content. Checks every eviction of a policy."""

    def __init__(self, host: HostMemory) -> None:
        self.host, self.policy = host, host.policy
        self.users: dict[bytes, set[str | None]] = {}
        self.ranks: dict[str, RetentionRank] = {}
        self.ended: list[str] = []
        self.waiting: list[str] = []
        self.evictions: list[int] = []
        self.newcomer = RetentionRank.PLAIN
        self.policy.rank = lambda name: self.ranks.get(name, RetentionRank.PLAIN)
        evict = self.policy.evict

        def checked(n: int, protected: set[bytes]) -> Any:
            before = {each for each, chunk in self.policy.chunks.items() if chunk.ref_cnt == 0} - protected
            worth, used = {each: self.worth(each) for each in before}, dict(self.policy._ranks)
            evicted = evict(n, protected)
            gone = {each for each, _ in evicted or ()}
            assert len(gone) == (n if sum(w <= self.newcomer for w in worth.values()) >= n else 0)
            assert gone <= before
            plain = RetentionRank.PLAIN
            short = sum(w <= plain for w in worth.values()) < n  # then vLLM's order holds for those above too
            for each in gone:
                assert worth[each] <= self.newcomer
                for left in before - gone:
                    assert worth[each] <= worth[left] or (short and worth[left] == plain)
                    if worth[each] == worth[left] == plain:
                        assert used[each] < used[left], "in vLLM's order"
                self.users.pop(each, None)
            self.evictions += [worth[each] for each in gone]
            return evicted

        self.policy.evict = checked

    def worth(self, each: bytes) -> int:
        users = self.users.get(each, {None})
        owner = next(iter(users)) if len(users) == 1 else None
        if owner in self.ended:
            return self.ended.index(owner) - 1000
        if owner in self.waiting:
            return RetentionRank.WANTED
        return RetentionRank.PLAIN if owner is None else self.ranks.get(owner, RetentionRank.PLAIN)

    def arrived(self, request_id: str, name: str) -> None:
        self.policy.arrived(request_id, name)
        self.waiting.append(name)
        self.ended = [each for each in self.ended if each != name]

    def admitted(self, name: str | None, keys: list[bytes]) -> None:
        self.policy.request_admitted(name, [each[:-4] for each in keys])
        self.waiting = [each for each in self.waiting if each != name]
        for each in keys:
            if each in self.users:
                self.users[each].add(name)

    def end(self, name: str) -> None:
        self.policy.program_ended(name)
        self.waiting = [each for each in self.waiting if each != name]
        self.ended += [name] if name not in self.ended else []


@pytest.mark.parametrize("seed", range(12))
def test_the_lowest_rank_goes_first_within_it_vllms_order_and_nothing_for_a_lower_rank(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Programs and others come, share chunks, wait, change rank, end and come back; loads pin chunks."""
    monkeypatch.setattr(offload_cache_policy, "MAX_WANTED_SHARE", 1.0)
    draw, plain, idle = random.Random(seed), RetentionRank.PLAIN, RetentionRank.IDLE
    ranks = [plain, *[idle] * 9] if seed % 2 else [each for each in RetentionRank if each <= idle]
    model = Model(host := HostMemory(40, **SETTINGS))
    running: list[tuple[Any, str | None, list[bytes]]] = []
    loads: list[tuple[Any, list[bytes]]] = []
    finished: set[str] = set()
    for number in range(600):
        name = draw.choice([None, *"ABCDEFGH"]) if not seed % 2 else draw.choice("ABCDEFGH")
        start = 100 * (ord(name) if name else draw.randrange(60))
        shared = draw.choice((0, 0, 2))
        keys = [key(each) for each in (*range(shared), *range(start, start + draw.randint(1, 6)))]
        context = context_of(f"r{number}", keys)
        if name is not None:
            model.arrived(f"r{number}", name)
        host.manager.on_new_request(context)
        for _ in range(draw.randrange(2)):
            model.ranks[draw.choice("ABCDEFGH")] = draw.choice(ranks)
        if name is not None and draw.random() < 0.2:
            continue  # it waits
        found = [each for each in keys if (chunk := host.policy.get(each)) is not None and chunk.is_ready]
        if found:
            host.manager.prepare_load(found, context)
            loads.append((context, found))
        model.admitted(name, keys)
        host.policy.stores_for(f"r{number}")
        model.newcomer = model.ranks.get(name, RetentionRank.PLAIN)
        stored = host.manager.prepare_store(keys, context)
        if stored is not None:
            host.manager.complete_store(stored.keys_to_store, context)
        running.append((context, name, keys))
        while loads and draw.random() < 0.6:
            done, loaded = loads.pop(0)
            host.manager.complete_load(loaded, done)
        if draw.random() < 0.1:
            model.end(draw.choice("ABCDEFGH"))
        while len(running) > 6 or (running and draw.random() < 0.5):
            done, name, keys = running.pop(0)
            if not any(done is context for context, _ in loads):
                host.manager.on_request_finished(done)
                finished.add(done.req_id)
                for each in keys:
                    if host.policy.get(each) is not None:
                        model.users.setdefault(each, set()).add(name)
    assert sum(map(len, host.policy._owned.values())) <= len(host.policy._owner) <= 40, "of what is there"
    assert all(host.policy._owned.values())
    assert host.policy._programs.keys() <= {f"r{number}" for number in range(600)} - finished
    lively = {plain, idle} if seed % 2 else {each for each in RetentionRank if each <= plain}
    assert {*lively, -1000} <= set(model.evictions)


def test_of_an_ended_program_the_end_of_its_context_goes_first(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 2, 3, 11, 21, 22}


def test_the_cost_of_an_eviction_does_not_grow_with_what_is_worth_more() -> None:
    host = HostMemory(5000, **SETTINGS)
    host.policy.rank = lambda name: RetentionRank.IDLE
    for number in range(50):
        host.turn(f"r{number}", f"P{number}", *range(100 * number, 100 * number + 99))
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    host.turn("s", None, *range(10_000, 10_060))
    sys.setprofile(count)
    try:
        host.turn("t", None, 20_000)
    finally:
        sys.setprofile(None)
    assert calls < 4000, "less than one for each chunk that is kept"


def test_a_request_that_finds_chunks_uses_those_of_all_cache_groups(host: HostMemory) -> None:
    """A model with windows or states beside full attention has a chunk in each group."""
    host.policy.groups = 2
    owner = host.policy._owner
    both = [key(1, group) for group in range(2)]
    host.turn("a1", "A", 1)
    host.turn("a2", "A", 1, group=1)
    assert [owner[each] for each in both] == ["A", "A"]
    host.policy.request_admitted("B", [b"\0\0\0\1"])
    assert [owner[each] for each in both] == [None, None], "of several programs"


class NoDefaults(dict[Any, Any]):
    def setdefault(self, *_: Any) -> Any:
        raise RuntimeError


def test_an_error_of_ours_leaves_vllms_order(
    host: HostMemory, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.policy.strict = False
    monkeypatch.setattr(host.policy, "_owner", NoDefaults(host.policy._owner))
    host.turn("c1", "C", 21, 22)  # evicts 13 and 12, and fails when it ends
    host.turn("d1", "D", 31, 32)
    assert host.held == {1, 11, 21, 22, 31, 32}, "3 and 2, the least recently used"
    assert caplog.text.count("it is vLLM's from now on") == 1


def test_nothing_is_kept_of_chunks_and_requests_that_are_gone(host: HostMemory) -> None:
    policy = host.policy
    for number in range(12_000):
        policy.arrived(f"lost{number}", f"Q{number}")
        policy.program_ended(f"Q{number}")
    assert len(policy._ended) == 1000
    assert len(policy._programs) == 10_000
    host.manager.reset_cache()
    assert not policy._owner
    assert not policy._owned
    assert not policy._ended


def test_what_a_forgotten_program_left_can_be_loaded(
    host: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_cache_policy, "MAX_ENDED_PROGRAMS", 1)
    host.turn("a1", "A", 1)
    host.policy.program_ended("A")
    host.policy.waits("A")  # a request of it was preempted
    assert host.policy.evict(0, set()) == []
    host.policy.program_ended("B")
    host.turn("c1", "C", 1)
    assert host.held == {1}


# -- ranks, and what is worth more than a newcomer -------------------------------------------


def fill(host: HostMemory, *names: str) -> None:
    """Store two chunks of each program, as if admitted before: nobody waits."""
    for number, name in enumerate(names):
        host.turn(f"{name}{number}", name, 10 * number + 1, 10 * number + 2)


def test_what_a_waiting_request_will_load_stays_until_its_admission_or_a_minute(
    host: HostMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offload_cache_policy, "MAX_WANTED_SHARE", 0.5)
    now = [0.0]
    host.policy.clock = lambda: now[0]
    fill(host, "A", "B", "D")
    host.policy.arrived("a9", "A")
    host.policy.stores_for("n")  # of no program
    assert host.policy.evict(2, set()) is not None
    assert host.held == {1, 2, 21, 22}, "A's are older, but wanted"
    assert host.policy.held_chunks("A") == 2
    host.policy.request_admitted("A", [])
    assert [each for each, _ in host.policy.evict(1, set())] == [key(2)]
    host.policy.waits("D")
    host.policy.waits("A")
    assert host.policy.evict(1, set()) is None
    monkeypatch.setattr(offload_cache_policy, "MAX_WANTED_SHARE", 0.4)
    assert [each for each, _ in host.policy.evict(1, set())] == [key(1)], "D has waited for longer"
    host.manager.reset_cache()
    fill(host, "A", "B", "D")
    host.policy.arrived("a9", "A")
    now[0] = 61.0
    host.policy.arrived("a10", "A")
    now[0] = 120.0
    assert host.policy.evict(1, set()) is not None
    assert host.held == {1, 2, 11, 21, 22}, "a minute from the newest request on"
    now[0] = 122.0
    assert host.policy.evict(2, set()) is not None
    assert host.held == {11, 21, 22}


class Manager:
    """Our manager of host memory beside its policy, as the connector's spec makes them."""

    def __init__(self) -> None:
        self.manager = ProgramOffloadingManager(num_chunks=CHUNKS, **SETTINGS)

    def store(self, request_id: str, *numbers: int, end: bool = True) -> list[bytes]:
        context = context_of(request_id)
        stored = self.manager.prepare_store([key(number) for number in numbers], context)
        if end:
            self.manager.complete_store(stored.keys_to_store, context)
        return list(stored.keys_to_store)

    def lookup(self, number: int, request_id: str = "r") -> str:
        return str(self.manager.lookup(key(number), context_of(request_id)).name)


@pytest.mark.parametrize(
    ("policy", "off"),
    [
        ("observe", None),
        ("sojourn", None),
        ("mori", None),
        ("saga", ["prefetch"]),
        ("tetris", ["early copies"]),
    ],
)
def test_policies_say_what_is_off_with_vllms_connector(policy: str, off: list[str] | None) -> None:
    missing = missing_tiers(load_preset(policy), VLLM_CONNECTOR, allowed=False)
    assert (missing.mechanisms if missing is not None else None) == off


def test_chunks_that_could_not_be_loaded_are_not_found_again() -> None:
    host = Manager()
    host.store("a", 1, 2, 3)
    context = context_of("b")
    for failed in (True, False):
        loaded = [key(1), key(2)] if failed else [key(3)]
        host.manager.prepare_load(loaded, context)
        host.manager.failed |= {"b"} if failed else set()
        host.manager.complete_load(loaded, context)
    assert [host.lookup(number) for number in (1, 2, 3)] == ["MISS", "MISS", "HIT"]
    assert host.store("c", 1, 2) == [key(1), key(2)], "they are stored again"
    assert host.store("d", 4, 5, 6) == [key(4), key(5), key(6)], "no chunk of host memory is lost"
    moves = host.manager.state()["moves"]
    assert (moves["discarded"], moves["loaded"], moves["stored"]) == (2, 1, 8)


def test_a_lookup_is_undecided_for_two_seconds_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    host = Manager()
    host.store("a", 1, end=False)
    for now[0], found in ((0.0, "HIT_PENDING"), (1.9, "HIT_PENDING"), (2.1, "MISS")):
        assert host.lookup(1) == found
    assert host.lookup(1, "other") == "HIT_PENDING"


def test_a_request_without_room_stores_nothing_more() -> None:
    """What follows is useless without the chunks before it."""
    host = Manager()
    host.store("a", *range(CHUNKS), end=False)
    assert host.store("b", 11) == []
    host.manager.complete_store([key(number) for number in range(CHUNKS)], context_of("a"))
    assert host.store("b", 12) == []
    host.manager.on_request_finished(context_of("b"))
    assert host.store("b", 12) == [key(12)]
    assert host.manager.state()["moves"]["no_room"] == 1


def test_the_worker_copies_parts_of_chunks_and_reports_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three groups, two of which share a tensor, and chunks of three blocks: what is loaded was stored."""
    tensors = [torch.randint(-128, 127, (20, page), dtype=torch.int8) for page in (8, 6)]
    refs = [[CanonicalKVCacheRef(0, 8)], [CanonicalKVCacheRef(0, 5)], [CanonicalKVCacheRef(1, 6)]]
    caches = CanonicalKVCaches([CanonicalKVCacheTensor(each, each.shape[1]) for each in tensors], refs)
    worker = CpuOffloadWorker(caches, blocks_per_chunk=3, chunks=9)

    def end(job: int) -> set[int]:
        worker.wait({job})
        assert [(each.job_id, each.success) for each in worker.get_finished()] == [(job, True)]
        return worker.take_failed()

    # Blocks 2 to 6 of the first group lie in three chunks, 0 and 1 of the third in one.
    stored = GPULoadStoreSpec([1, 2, 3, 4, 5, 6, 7], group_sizes=[5, 0, 2], block_indices=[2, 0, 0])
    chunks = CPULoadStoreSpec([8, 1, 4, 6])
    before = [each.clone() for each in tensors]
    assert worker.submit_store(1, stored, chunks)
    assert end(1) == set()
    there = GPULoadStoreSpec([11, 12, 13, 14, 15, 16, 17], group_sizes=[5, 0, 2], block_indices=[2, 0, 0])
    assert worker.submit_load(2, chunks, there)
    assert end(2) == set()
    assert np.array_equal(tensors[0][11:16], before[0][1:6])
    assert np.array_equal(tensors[1][16:18], before[1][6:8])
    assert np.array_equal(tensors[0][:11], before[0][:11])
    part = GPULoadStoreSpec(
        [0], group_sizes=[1, 0, 0], block_indices=[4, 0, 0]
    )  # the middle of the second chunk
    assert worker.submit_load(3, CPULoadStoreSpec([1]), part)
    assert end(3) == set()
    assert np.array_equal(tensors[0][0], before[0][3])
    monkeypatch.setattr(worker, "copy", lambda *_, **__: 1 / 0)
    assert worker.submit_store(4, stored, chunks)
    assert end(4) == {4}
    monkeypatch.undo()
    assert worker.submit_load(5, chunks, there)
    assert end(5) == {5}, "its chunks could not be filled"
    assert worker.submit_store(6, stored, chunks)
    assert end(6) == set()
    assert worker.submit_load(7, chunks, there)
    assert end(7) == set()
    worker.shutdown()


@pytest.fixture
def engine(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Beside vLLM's connector as ``sojourn serve`` sets it up; the simulator's baselines keep LRU."""
    make = vllm_offload_transfers.vllm_offload_transfer_config

    def with_policy(*args: int) -> Any:
        config = make(*args)
        config.kv_connector_extra_config |= CACHE_POLICY
        return config

    monkeypatch.setattr(vllm_offload_transfers, "vllm_offload_transfer_config", with_policy)
    return make_engine("continuum", blocks=41, host_blocks=60, max_model_len=640)


def test_an_engine_beside_vllms_connector_tells_it_of_requests_and_programs(engine: Any) -> None:
    policy = engine.scheduler.sojourn._cache_policy
    assert policy is engine.scheduler.connector.connector_scheduler.manager._policy
    engine.add("a1", list(range(1, 200)), max_tokens=2, program_id="A")
    engine.plan()
    assert policy._programs == {"a1": "A"}
    hashes = engine.scheduler.requests["a1"].block_hashes
    for block_hash in hashes[:3]:  # as if an earlier turn's chunks were there
        policy._owner[block_hash + bytes(4)] = "B"
    engine.scheduler.sojourn._admitted("a1", 0, 0.0)
    assert set(policy._owner.values()) == {None}
    engine.abort("a1")
    engine.tell({"seq": 1, "type": "program_end", "program_id": "A"})
    engine.plan()
    assert list(policy._ended) == ["A"]
