"""vLLM's own manager of host memory with sojourn's order of eviction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from sojourn_server.launch.kv_options import CACHE_POLICY

CHUNKS = 6


class HostMemory:
    """vLLM's manager, and requests that store and load chunks named by numbers."""

    def __init__(self, **options: str) -> None:
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        self.manager = CPUOffloadingManager(CHUNKS, **options)
        self.policy = self.manager._policy
        self.policy.strict = True

    def begin(self, request_id: str, program_id: str | None, numbers: Iterable[int], group: int = 0) -> Any:
        """A request that finds or stores these chunks, and still runs."""
        from vllm.v1.kv_offload.base import ReqContext

        context, keys = ReqContext(req_id=request_id), [key(number, group) for number in numbers]
        for position, each in enumerate(keys):
            context.set_offload_key_position(each, position + 1)
        if program_id is not None and hasattr(self.policy, "arrived"):
            self.policy.arrived(request_id, program_id)
        self.manager.on_new_request(context)
        found = [each for each in keys if self.policy.get(each) is not None]
        if found:
            self.manager.prepare_load(found, context)
            self.manager.complete_load(found, context)
        if hasattr(self.policy, "request_admitted"):
            self.policy.request_admitted(program_id, [number.to_bytes(4, "big") for number in numbers])
        stored = self.manager.prepare_store(keys, context)
        assert stored is not None
        self.manager.complete_store(stored.keys_to_store, context)
        return context

    def turn(self, request_id: str, program_id: str | None, *numbers: int, group: int = 0) -> None:
        self.manager.on_request_finished(self.begin(request_id, program_id, numbers, group))

    @property
    def held(self) -> set[int]:
        return {number for number in range(100) if self.policy.get(key(number)) is not None}


def key(number: int, group: int = 0) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(4, "big"), group)


@pytest.fixture
def host() -> HostMemory:
    policy, module = CACHE_POLICY["eviction_policy"], CACHE_POLICY["cache_policy_module_path"]
    return HostMemory(cache_policy=policy, cache_policy_module_path=module)


def test_the_newest_kv_goes_first_if_its_program_has_ended(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 2, 3, 11, 21, 22}, "the end of B's context first"
    host.turn("d1", "D", 31, 32)
    assert host.held == {1, 2, 21, 22, 31, 32}, "then vLLM's order"


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


def test_what_others_use_too_stays_in_vllms_order(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("n1", None, 11)
    host.turn("b1", "B", 1, 21)  # a common first chunk
    host.policy.program_ended("B")
    host.turn("d1", "D", 31, 32)
    assert host.held == {1, 2, 3, 11, 31, 32}
    host.policy.program_ended("A")
    host.turn("e1", "E", 41, 42)
    assert host.held == {1, 11, 31, 32, 41, 42}


def test_a_program_that_goes_on_after_its_end_keeps_its_place_from_its_arrival(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12)
    host.policy.program_ended("B")
    host.policy.arrived("b2", "B")  # it waits, and has used nothing again
    host.turn("c1", "C", 21, 22, 23)
    assert host.held == {1, 11, 12, 21, 22, 23}
    host.policy.program_ended("B")
    host.turn("d1", "D", 31)
    assert host.held == {1, 11, 21, 22, 23, 31}, "it has ended again"


def test_what_a_running_request_uses_stays_although_its_first_program_ends(host: HostMemory) -> None:
    host.turn("z1", "Z", 31, 32)
    host.turn("b1", "B", 1, 2)
    host.begin("a1", "A", [1, 2, 3])
    host.policy.program_ended("B")
    host.turn("c1", "C", 21, 22, 23)
    assert host.held == {1, 2, 3, 21, 22, 23}


def test_a_turn_that_stores_nothing_leaves_its_program_the_only_user(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.turn("b2", "B", 11, 12)
    host.policy.program_ended("B")
    host.policy.program_ended("B")  # its end may be reported twice
    host.turn("c1", "C", 21, 22, 23)
    assert host.held == {1, 2, 3, 21, 22, 23}


def test_stores_that_end_after_the_program_count_as_its(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    late = host.begin("b1", "B", [11, 12, 13])
    host.policy.program_ended("B")
    host.manager.on_request_finished(late)
    host.turn("c1", "C", 21, 22, 23)
    assert host.held == {1, 2, 3, 21, 22, 23}


def test_without_a_program_that_has_ended_the_order_is_vllms(host: HostMemory) -> None:
    plain = HostMemory()
    for number in range(30):
        for each in (host, plain):
            each.turn(f"r{number}", f"P{number % 4}", *range(number % 7 * 10, number % 7 * 10 + number % 4))
        assert host.held == plain.held


def test_too_few_chunks_change_nothing(host: HostMemory) -> None:
    host.turn("b1", "B", 1, 2)
    host.turn("a1", "A", 11, 12, 13, 14)
    host.policy.program_ended("B")
    assert host.policy.evict(4, {key(11), key(12), key(13)}) is None
    assert host.held == {1, 2, 11, 12, 13, 14}
    evicted = host.policy.evict(3, {key(11), key(12), key(13)})
    assert [each for each, _ in evicted] == [key(2), key(1), key(14)]


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


def test_what_is_read_is_not_evicted(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.manager.prepare_load([key(13)], host.begin("x1", None, []))
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 2, 3, 13, 21, 22}


def test_nothing_is_kept_of_chunks_and_requests_that_are_gone(host: HostMemory) -> None:
    for number in range(300):
        host.turn(f"r{number}", f"P{number % 40}", *range(number % 90, number % 90 + 4))
        if number % 5 == 0:
            host.policy.program_ended(f"P{(number + 3) % 40}")
    policy = host.policy
    assert len(policy._owner) <= CHUNKS
    assert sum(map(len, policy._owned.values())) <= CHUNKS
    assert all(policy._owned.values())
    assert not policy._programs
    for number in range(12_000):
        policy.arrived(f"lost{number}", f"Q{number}")
        policy.program_ended(f"Q{number}")
    assert len(policy._ended) == 1000
    assert len(policy._programs) == 10_000
    host.manager.reset_cache()
    assert not policy._owner
    assert not policy._owned
    assert not policy._ended


@pytest.fixture
def engine(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Beside vLLM's connector as ``sojourn serve`` sets it up; the simulator's baselines keep LRU."""
    from sojourn_server.simulator import vllm_offload_transfers

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


def test_stock_and_sojourns_own_host_memory_do_without_it(make_engine: Any) -> None:
    stock = make_engine(None, blocks=41, host_blocks=60, max_model_len=640)
    assert type(stock.scheduler.connector.connector_scheduler.manager._policy).__name__ == "LRUCachePolicy"
    own = make_engine("continuum", blocks=41, host_blocks=60, own_tiers=True, max_model_len=640)
    assert own.scheduler.sojourn._cache_policy is None
