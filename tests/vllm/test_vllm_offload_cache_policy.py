"""vLLM's own manager of host memory with sojourn's order of eviction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pytest

CHUNKS = 6


class Known(NamedTuple):
    program_id: str | None


class Programs:
    """The only question that the policy asks of ``ProgramScheduler``."""

    def __init__(self) -> None:
        self.of: dict[str, str | None] = {}

    def request(self, request_id: str) -> Known | None:
        return Known(self.of[request_id]) if request_id in self.of else None


class HostMemory:
    """vLLM's manager, and requests that store and load chunks named by numbers."""

    def __init__(self) -> None:
        from sojourn_server.launch.kv_offload_options import CACHE_POLICY
        from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

        options = {"cache_policy": CACHE_POLICY["eviction_policy"]}
        module = {"cache_policy_module_path": CACHE_POLICY["cache_policy_module_path"]}
        self.manager = CPUOffloadingManager(CHUNKS, **options, **module)
        self.policy = self.manager._policy
        self.programs = Programs()
        self.policy.follow(self.programs)

    def begin(self, request_id: str, program_id: str | None, numbers: Iterable[int]) -> Any:
        """A request that finds or stores these chunks. Its program is asked for now, as it will leave."""
        from vllm.v1.kv_offload.base import ReqContext

        context, keys = ReqContext(req_id=request_id), [key(number) for number in numbers]
        for position, each in enumerate(keys):
            context.set_offload_key_position(each, position + 1)
        self.programs.of[request_id] = program_id
        self.manager.on_new_request(context)
        found = [each for each in keys if self.policy.get(each) is not None]
        if found:
            self.manager.prepare_load(found, context)
            self.manager.complete_load(found, context)
        stored = self.manager.prepare_store(keys, context)
        assert stored is not None
        self.manager.complete_store(stored.keys_to_store, context)
        del self.programs.of[request_id]
        return context

    def turn(self, request_id: str, program_id: str | None, *numbers: int) -> None:
        self.manager.on_request_finished(self.begin(request_id, program_id, numbers))

    @property
    def held(self) -> set[int]:
        return {number for number in range(100) if self.policy.get(key(number)) is not None}


def key(number: int) -> bytes:
    from vllm.v1.kv_offload.base import make_offload_key

    return make_offload_key(number.to_bytes(4, "big"), 0)


@pytest.fixture
def host() -> HostMemory:
    return HostMemory()


def test_the_newest_kv_goes_first_if_its_program_has_ended(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 2, 3, 11, 21, 22}, "the end of B's context first"
    host.turn("d1", "D", 31, 32)
    assert host.held == {1, 2, 21, 22, 31, 32}, "then vLLM's order"


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


def test_a_program_that_goes_on_after_its_end_keeps_its_place(host: HostMemory) -> None:
    host.turn("b1", "B", 11, 12)
    host.policy.program_ended("B")
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b2", "B", 11, 12, 13)
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 11, 12, 13, 21, 22}


def test_stores_that_end_after_the_program_count_as_its(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    late = host.begin("b1", "B", [11, 12, 13])
    host.policy.program_ended("B")
    host.manager.on_request_finished(late)
    host.turn("c1", "C", 21, 22, 23)
    assert host.held == {1, 2, 3, 21, 22, 23}


def test_without_a_program_that_has_ended_the_order_is_vllms(host: HostMemory) -> None:
    from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager

    plain = HostMemory.__new__(HostMemory)
    plain.manager, plain.programs = CPUOffloadingManager(CHUNKS), Programs()
    plain.policy = plain.manager._policy
    for number in range(30):
        for each in (host, plain):
            each.turn(f"r{number}", f"P{number % 4}", *range(number % 7 * 10, number % 7 * 10 + number % 4))
        assert host.held == plain.held


def test_no_room_changes_nothing(host: HostMemory) -> None:
    host.turn("b1", "B", *range(CHUNKS))
    host.policy.program_ended("B")
    keys = {key(number) for number in range(CHUNKS)}
    assert host.policy.evict(1, keys) is None
    assert host.held == set(range(CHUNKS))


def test_what_is_read_is_not_evicted(host: HostMemory) -> None:
    host.turn("a1", "A", 1, 2, 3)
    host.turn("b1", "B", 11, 12, 13)
    host.policy.program_ended("B")
    host.manager.prepare_load([key(13)], host.begin("x1", None, []))
    host.turn("c1", "C", 21, 22)
    assert host.held == {1, 2, 3, 13, 21, 22}


def test_nothing_is_kept_of_chunks_that_are_gone(host: HostMemory) -> None:
    for number in range(300):
        host.turn(f"r{number}", f"P{number % 40}", *range(number % 90, number % 90 + 4))
        if number % 5 == 0:
            host.policy.program_ended(f"P{(number + 3) % 40}")
    policy = host.policy
    assert len(policy._owner) <= CHUNKS
    assert sum(map(len, policy._owned.values())) + len(policy._ended) <= CHUNKS
    for number in range(5000):
        policy.program_ended(f"Q{number}")
    assert len(policy._ended_programs) == 1000
    host.manager.reset_cache()
    assert not policy._owner
    assert not policy._owned
    assert not policy._ended


def test_an_engine_beside_vllms_connector_has_it_and_tells_it_of_programs_that_end(make_engine: Any) -> None:
    engine = make_engine("continuum", blocks=41, host_blocks=60, max_model_len=640)
    policy = engine.scheduler.sojourn._cache_policy
    assert policy is engine.scheduler.connector.connector_scheduler.manager._policy
    engine.add("a1", list(range(1, 200)), max_tokens=2, program_id="A")
    engine.plan()
    assert policy._program_scheduler.request("a1").program_id == "A"
    engine.abort("a1")
    engine.tell({"seq": 1, "type": "program_end", "program_id": "A"})
    engine.plan()
    assert list(policy._ended_programs) == ["A"]


def test_stock_and_sojourns_own_host_memory_do_without_it(make_engine: Any) -> None:
    stock = make_engine(None, blocks=41, host_blocks=60, max_model_len=640)
    assert type(stock.scheduler.connector.connector_scheduler.manager._policy).__name__ == "LRUCachePolicy"
    own = make_engine("continuum", blocks=41, host_blocks=60, own_tiers=True, max_model_len=640)
    assert own.scheduler.sojourn._cache_policy is None
