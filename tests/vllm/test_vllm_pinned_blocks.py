"""Held blocks over vLLM's real block pool: what is shared is held once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


def reraise(error: Exception) -> None:
    raise error


class OneForAll:
    """All programs have the same score."""

    def standing(self, program_id: str, left: tuple[float, int] | None) -> tuple[float, ...]:
        return (0.0,)

    def score(self, standing: tuple[float, ...]) -> tuple[float, ...]:
        return standing


class Rig:
    """A pool of 600 blocks, all of them hashed and in use by a request that has just come to its end."""

    def __init__(self, by_program: bool = False) -> None:
        from sojourn_server.vllm.block_pool import PinnedBlocks
        from sojourn_server.vllm.free_block_queue import ProgramFreeBlockQueue
        from vllm.v1.core.block_pool import BlockPool
        from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

        self.pool = BlockPool(601, True, 16)
        self.queue = self.pool.free_block_queue = ProgramFreeBlockQueue(
            self.pool.free_block_queue,
            evicted=lambda *_: None,
            scorer=OneForAll() if by_program else None,
            failed=reraise,
        )
        self.held = PinnedBlocks(self.pool, self.queue)
        self.blocks = self.pool.get_new_blocks(600)
        for block in self.blocks:
            block_hash = make_block_hash_with_group_id(BlockHash(b"%032d" % block.block_id), 0)
            self.pool._insert_block_hash(block_hash, block, num_tokens=16)

    def end_requests(self) -> None:
        """Nobody but leases refers to a block any more."""
        self.pool.free_blocks(reversed(self.blocks))

    def turn_finished(
        self, program_id: Any, first: int, last: int, prefix: int = 0, rank: int = 0
    ) -> list[Any]:
        blocks = [*self.blocks[:prefix], *self.blocks[first:last]]
        self.queue.own(blocks, program_id)
        self.held.hold(program_id, blocks, rank)
        return blocks


def test_a_prefix_that_leases_share_is_counted_once() -> None:
    rig = Rig()
    for number in range(7):
        rig.turn_finished(f"P{number}", 180 + 10 * number, 190 + 10 * number, prefix=180)
    rig.end_requests()
    assert rig.held.blocks() == 250 == 600 - rig.pool.get_num_free_blocks()
    assert len(rig.held) == 7
    assert rig.held.freed_by == {"P0": 190, **{f"P{number}": 10 for number in range(1, 7)}}
    assert rig.held.count_unpinned(rig.blocks[:260]) == 10
    rig.held.release("P1")
    rig.turn_finished("P0", 180, 190, prefix=180, rank=9)  # as if it were the latest
    assert [rig.held.freed_by[f"P{number}"] for number in (0, 2, 3)] == [10, 190, 10]
    rig.turn_finished("P0", 180, 190, prefix=180, rank=-1)  # and the earliest
    assert [rig.held.freed_by[f"P{number}"] for number in (0, 2, 3)] == [190, 10, 10]
    for number in range(2, 7):
        rig.held.release(f"P{number}")
    assert (rig.held.freed_by, rig.held.blocks()) == ({"P0": 190}, 190)
    free = rig.pool.get_num_free_blocks()
    assert rig.held.release("P0")
    assert rig.pool.get_num_free_blocks() - free == 190
    assert (rig.held.blocks(), rig.held.freed_by, rig.held.release("P0")) == (0, {}, False)


def test_to_reclaim_a_lease_visits_its_blocks_alone() -> None:
    class Visited(list[Any]):
        def __iter__(self) -> Any:
            visited.extend(self[:])
            return super().__iter__()

    visited: list[Any] = []
    rig = Rig()
    for number in range(100):
        rig.turn_finished(f"P{number}", 0, 0, prefix=600, rank=number)
    rig.held._pinned = {name: Visited(blocks) for name, blocks in rig.held._pinned.items()}
    for number in range(3):
        assert rig.held.freed_by[f"P{number}"] == 600
        rig.held.release(f"P{number}")
    assert len(visited) == 3 * 600


def test_holding_again_gives_the_earlier_blocks_back() -> None:
    rig = Rig()
    rig.turn_finished("P", 0, 20)
    rig.turn_finished("P", 10, 40)
    rig.end_requests()
    assert rig.held.blocks() == rig.held.freed_by["P"] == 30
    assert {block.block_id for block in rig.blocks if block.ref_cnt} == set(range(11, 41))
    rig.held.release("P")
    assert rig.pool.get_num_free_blocks() == 600


@pytest.mark.parametrize("by_program", [False, True])
def test_a_drop_after_the_cache_was_reset_drops_nothing_and_loses_nothing(by_program: bool) -> None:
    rig = Rig(by_program)
    rig.turn_finished("P", 0, 300)
    rig.turn_finished("Q", 300, 600)
    rig.end_requests()
    rig.held.release("P")
    rig.held.release("Q")
    assert rig.pool.reset_prefix_cache()
    rig.held.drop("P")
    rig.held.drop("Q")
    assert len({block.block_id for block in rig.pool.get_new_blocks(600)} - {0, -1}) == 600


def test_a_drop_of_held_blocks_whose_hash_is_gone() -> None:
    rig = Rig(by_program=True)
    rig.turn_finished("P", 0, 3)
    rig.pool.evict_blocks({rig.blocks[1].block_id})
    rig.end_requests()
    rig.held.drop("P")
    assert [block.block_id for block in rig.queue.get_all_free_blocks()].count(2) == 1
    assert {block.block_id for block in rig.queue.popleft_n(3)} == {1, 2, 3}


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 4), st.sampled_from(["hold", "release", "drop"]), st.sets(st.integers(0, 9))
        ),
        max_size=25,
    )
)
def test_counts_agree_with_counting(script: list[tuple[int, str, set[int]]]) -> None:
    rig = Rig()
    model: dict[str, set[int]] = {}
    for number, what, chosen in script:
        program = f"P{number}"
        if what == "hold":
            rig.held.hold(program, [rig.blocks[index] for index in sorted(chosen)], rank=-number)
            model[program] = chosen
        elif what == "release":
            assert rig.held.release(program) == (model.pop(program, None) is not None)
        else:
            rig.held.drop(program)
            model.pop(program, None)
        holders = Counter(index for held in model.values() for index in held)
        assert rig.held.blocks() == len(holders)
        assert rig.held.count_unpinned(rig.blocks[:10]) == 10 - len(holders)
        earliest = Counter(max(name for name in model if index in model[name]) for index in holders)
        assert rig.held.freed_by == {name: earliest[name] for name in model}
        assert [block.ref_cnt - 1 for block in rig.blocks[:10]] == [holders[index] for index in range(10)]
