"""The queue of free blocks alone, against a naive model of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

ScoreOf = Callable[[str, bool], Any]
BLOCKS = 14
PROGRAMS = [f"P{number}" for number in range(20)]


def make_blocks(count: int) -> list[Any]:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    return [KVCacheBlock(number) for number in range(count)]


def make_queue(
    blocks: Sequence[Any], score: Callable[[str, bool], Any] | None = None, evicted: Any = None
) -> Any:
    from sojourn_server.vllm.free_queue import ProgramFreeQueue
    from vllm.v1.core.kv_cache_utils import FreeKVCacheBlockQueue

    return ProgramFreeQueue(
        FreeKVCacheBlockQueue(list(blocks)), evicted=evicted or (lambda *_: None), score=score
    )


def give_hash(block: Any) -> None:
    from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

    block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"%032d" % block.block_id), 0))


def cached(queue: Any, count: int, program_id: str) -> list[Any]:
    """``count`` blocks taken from the queue, hashed and owned by the program."""
    blocks = queue.popleft_n(count)
    for block in blocks:
        give_hash(block)
    queue.own(blocks, program_id)
    return blocks


def ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


# --- each defect once --------------------------------------------------------


def test_a_program_that_ends_after_a_reset_leaves_no_block_behind() -> None:
    """Free, bucketed blocks lose hash and owner; the next allocation got the list's fake end for a block."""
    blocks = make_blocks(4)
    queue = make_queue(blocks, score=lambda program_id, left: (0.0,))
    queue.append_n(cached(queue, 4, "P"))
    for block in blocks:
        block.reset_hash()
    assert sorted(queue.disown("P")) == [0, 1, 2, 3]
    assert ids(queue.popleft_n(1)) != [-1]
    assert {queue.popleft().block_id, *ids(queue.popleft_n(2))} < {0, 1, 2, 3}
    assert queue.num_free_blocks == 0
    with pytest.raises(ValueError, match="No free blocks"):
        queue.popleft()


def test_the_last_programs_end_leaves_hashed_orphans_at_the_end() -> None:
    queue = make_queue(make_blocks(5), score=lambda program_id, left: (0.0,))
    queue.append_n(cached(queue, 3, "P"))
    queue.disown("P")
    assert ids(queue.get_all_free_blocks()) == [3, 4, 0, 1, 2]
    assert ids(queue.popleft_n(5)) == [3, 4, 0, 1, 2]


def test_forget_all_after_a_reset_keeps_the_order_of_reuse() -> None:
    scores = {"P": (2.0,), "Q": (1.0,)}
    queue = make_queue(make_blocks(5), score=lambda program_id, left: scores[program_id])
    both = [*cached(queue, 2, "P"), *cached(queue, 2, "Q")]
    queue.append_n(both)
    before = ids(queue.get_all_free_blocks())
    assert before == [4, 2, 3, 0, 1]
    for block in both:
        block.reset_hash()
    queue.forget_all()
    assert queue.owned_blocks() == 0
    assert queue.disown("P") == []
    assert sorted(ids(queue.get_all_free_blocks())) == sorted(before)
    assert ids(queue.popleft_n(5)) == [2, 3, 0, 1, 4]


def test_many_changes_of_score_lose_no_bucket() -> None:
    """Tidying the heap while a bucket is being filled dropped that bucket."""
    queue = make_queue(make_blocks(3), score=lambda program_id, left: (0.0,))
    first, second = cached(queue, 2, "P")
    for _ in range(500):
        queue.append(first)
        queue.rescore("P")
        queue.append(second)
        queue.remove(first)
        queue.remove(second)
    queue.append_n([first, second])
    assert len(queue._heap) < 200
    assert ids(queue.popleft_n(3)) == [2, 0, 1]


def test_what_a_turn_did_without_goes_before_what_any_turn_used() -> None:
    """A program's abandoned branch was kept for as long as the program was worth keeping."""
    queue = make_queue(make_blocks(7), score=lambda program_id, left: (-1.0 if left else ord(program_id),))
    old = cached(queue, 2, "Q")
    queue.append_n(old)
    queue.leave_behind("Q", 5.0)  # its next turn began anew
    assert queue.left("Q") == (5.0, 2)
    queue.append_n([*cached(queue, 2, "Q"), *cached(queue, 2, "P")])
    assert ids(queue.get_all_free_blocks()) == [6, *ids(old), 4, 5, 2, 3]
    queue.remove(old[0])  # another turn goes back to that branch
    assert (queue.left_reused, queue.left_evicted) == (1, 0)
    queue.append(old[0])
    assert ids(queue.popleft_n(7)) == [6, 1, 4, 5, 2, 3, 0]
    assert (queue.left_reused, queue.left_evicted) == (1, 1)


def test_owning_again_costs_the_same_however_many_programs_share() -> None:
    queue = make_queue(make_blocks(100))
    blocks = queue.popleft_n(100)
    for block in blocks:
        give_hash(block)
    for number in range(400):
        queue.own(blocks, f"P{number}")
    spent_s = []
    for number in range(50):
        started = time.perf_counter()
        queue.own(blocks, f"P{number}")
        spent_s.append(time.perf_counter() - started)
    assert min(spent_s) < 0.0005  # it took 3.6 ms; a fraction of it even on a busy machine


def test_blocks_of_very_many_programs_are_no_longer_counted_per_program() -> None:
    evictions: list[tuple[int, bool]] = []
    queue = make_queue(
        make_blocks(4),
        score=lambda program_id, left: (0.0,),
        evicted=lambda block, owner, score: evictions.append((block.block_id, isinstance(owner, str))),
    )
    prefix = queue.popleft_n(2)
    own = cached(queue, 1, "P0")
    for block in prefix:
        give_hash(block)
    for number in range(16):
        queue.own(prefix, f"P{number}")
    assert len(queue.owners(0)) == 16
    for number in range(16, 1000):
        queue.own(prefix, f"P{number}")
    assert queue._owned == {"P0": {own[0].block_id: None}}
    assert queue.owned_blocks() == 3
    queue.append_n([*prefix, *own])
    for number in range(1000):
        assert queue.disown(f"P{number}") == (ids(own) if number == 0 else [])
    assert ids(queue.popleft_n(4)) == [3, 2, 0, 1]  # still shared, so still last
    assert evictions == [(0, False), (1, False)]
    assert queue.owned_blocks() == 0


def test_the_walk_after_a_cursor_is_lazy() -> None:
    scores = {"P": (2.0,), "Q": (1.0,)}
    queue = make_queue(make_blocks(8), score=lambda program_id, left: scores[program_id])
    queue.append_n([*cached(queue, 2, "P"), *cached(queue, 2, "Q")])
    order = queue.get_all_free_blocks()
    assert ids(order) == [4, 5, 6, 7, 2, 3, 0, 1]
    assert ids(queue.iter_blocks_after(None)) == ids(order)
    for position, block in enumerate(order):
        assert ids(queue.iter_blocks_after(block)) == ids(order[position + 1 :])
    walk = queue.iter_blocks_after(None)
    assert next(walk) is order[0]
    queue.remove(order[7])  # not visited yet, so not copied yet
    assert ids(walk) == ids(order[1:7])


# --- against a model ---------------------------------------------------------


class QueueMachine(RuleBasedStateMachine):
    """Every operation on the queue and on a model that keeps plain lists."""

    by_program = False

    def __init__(self) -> None:
        super().__init__()
        self.scores = {program_id: (0.0, float(n)) for n, program_id in enumerate(PROGRAMS)}
        self.blocks = make_blocks(BLOCKS)
        self.evictions: list[int] = []
        self.queue = make_queue(
            self.blocks,
            score=self.score if self.by_program else None,
            evicted=lambda block, owner, score: self.evictions.append(block.block_id),
        )
        self.list = list(range(BLOCKS))
        self.buckets: dict[tuple[str, bool], list[int]] = {}
        self.left = [0, 0]
        self.used_s: dict[str, float] = {}
        self.owners: dict[int, set[str]] = {}
        self.many: set[int] = set()
        self.taken: list[int] = []

    # what the model knows

    def score(self, program_id: str, left: bool) -> tuple[float, ...]:
        score, rank = self.scores[program_id]
        return (score - 1.5 * left, rank)

    def order(self) -> list[int]:
        names = sorted(self.buckets, key=lambda name: self.score(*name) if name[0] else (float("inf"),))
        return [*self.list, *(block_id for name in names for block_id in self.buckets[name])]

    def bucket_name(self, block_id: int) -> tuple[str, bool] | None:
        if not self.by_program or self.blocks[block_id].block_hash is None:
            return None
        owners = self.owners.get(block_id, set())
        if block_id in self.many or len(owners) > 1:
            return ("", False)
        return (next(iter(owners)), False) if owners else None

    def take_out(self, block_id: int) -> None:
        for line in (self.list, *self.buckets.values()):
            if block_id in line:
                line.remove(block_id)
        self.buckets = {name: bucket for name, bucket in self.buckets.items() if bucket}

    def file(self, block_id: int) -> None:
        name = self.bucket_name(block_id)
        (self.list if name is None else self.buckets.setdefault(name, [])).append(block_id)

    def refile(self, block_ids: Iterable[int]) -> None:
        """Of these, blocks in a bucket that is not theirs any more go to where they belong."""
        for block_id in block_ids:
            name = next((n for n, bucket in self.buckets.items() if block_id in bucket), None)
            belongs = self.bucket_name(block_id)
            if name is None or (belongs is not None and name[0] == belongs[0]):
                continue
            self.take_out(block_id)
            if self.blocks[block_id].block_hash is None:
                self.list.insert(0, block_id)
            else:
                self.file(block_id)

    def popped(self, expected: list[int], got: list[Any]) -> None:
        assert ids(got) == expected
        heard = [
            block_id
            for block_id in expected
            if (self.owners.get(block_id) or block_id in self.many)
            and self.blocks[block_id].block_hash is not None
        ]
        assert self.evictions == heard
        self.evictions.clear()
        for block_id in expected:
            self.left[1] += any(block_id in bucket for name, bucket in self.buckets.items() if name[1])
            self.take_out(block_id)
            self.owners.pop(block_id, None)
            self.many.discard(block_id)
            self.blocks[block_id].reset_hash()
        self.taken += expected

    # what can happen

    @initialize()
    def some_are_in_use(self) -> None:
        self.popleft_n_of(BLOCKS // 2)

    def popleft_n_of(self, count: int) -> None:
        expected = self.order()[:count]
        self.popped(expected, self.queue.popleft_n(count))

    @rule(data=st.data())
    def popleft_n(self, data: st.DataObject) -> None:
        self.popleft_n_of(data.draw(st.integers(0, len(self.order()))))

    @precondition(lambda self: self.order())
    @rule()
    def popleft(self) -> None:
        self.popped(self.order()[:1], [self.queue.popleft()])

    @precondition(lambda self: not self.order())
    @rule()
    def popleft_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="No free blocks"):
            self.queue.popleft()

    @precondition(lambda self: self.order())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.order()))
        self.left[0] += any(block_id in bucket for name, bucket in self.buckets.items() if name[1])
        self.queue.remove(self.blocks[block_id])
        self.take_out(block_id)
        self.taken.append(block_id)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def hash_and_own(self, data: st.DataObject) -> None:
        chosen = data.draw(st.lists(st.sampled_from(self.taken), unique=True))
        for block_id in chosen:
            if self.blocks[block_id].block_hash is None:
                give_hash(self.blocks[block_id])
        self.own_by(chosen, data.draw(st.lists(st.sampled_from(PROGRAMS), max_size=3)))

    @rule(data=st.data())
    def own_anything(self, data: st.DataObject) -> None:
        """Blocks in use and free ones; a free block that had no owner stays where it is."""
        chosen = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True))
        self.own_by(chosen, data.draw(st.lists(st.sampled_from(PROGRAMS), max_size=20, unique=True)))

    def own_by(self, block_ids: list[int], program_ids: list[str]) -> None:
        for program_id in program_ids:
            self.queue.own([self.blocks[block_id] for block_id in block_ids], program_id)
            for block_id in block_ids:
                if block_id in self.many:
                    continue
                owners = self.owners.setdefault(block_id, set())
                alone = len(owners) == 1 and program_id not in owners
                owners.add(program_id)
                if len(owners) > 16:
                    self.many.add(block_id)
                    del self.owners[block_id]
                # Only a second owner changes where it belongs; what else changed meanwhile (a lost hash)
                # is not looked at again.
                if alone:
                    self.refile([block_id])

    @rule(program_id=st.sampled_from(PROGRAMS))
    def disown(self, program_id: str) -> None:
        left = [block_id for block_id, owners in self.owners.items() if program_id in owners]
        for block_id in left:
            self.owners[block_id].discard(program_id)
        orphans = [block_id for block_id in left if not self.owners[block_id]]
        left = [
            block_id for block_id in left if len(self.owners[block_id]) <= 1
        ]  # only these belong elsewhere
        for block_id in orphans:
            del self.owners[block_id]
        before = ids(self.queue.get_all_free_blocks())
        assert sorted(self.queue.disown(program_id)) == sorted(orphans)
        # Which of them comes first is the queue's affair; where they are filed is not.
        after = ids(self.queue.get_all_free_blocks())
        hashed = lambda block_id: self.blocks[block_id].block_hash is not None  # noqa: E731
        self.refile(sorted((b for b in left if b in before and hashed(b)), key=after.index))
        self.refile(sorted((b for b in left if b in before and not hashed(b)), key=after.index, reverse=True))

    @rule(program_id=st.sampled_from(PROGRAMS), used_s=st.integers(0, 9))
    def leave_behind(self, program_id: str, used_s: float) -> None:
        left = self.buckets.pop((program_id, False), [])
        if left:
            self.buckets.setdefault((program_id, True), []).extend(left)
            self.used_s.setdefault(program_id, used_s)
        self.queue.leave_behind(program_id, used_s)

    @rule(program_id=st.sampled_from(PROGRAMS), score=st.integers(-3, 3))
    def rescore(self, program_id: str, score: int) -> None:
        self.scores[program_id] = (float(score), self.scores[program_id][1])
        self.queue.rescore(program_id)

    @rule(shift=st.sampled_from([-1.0, 1.0]), odd=st.booleans())
    def rescore_many(self, shift: float, odd: bool) -> None:
        """What scores are measured in has changed: those of many programs at once, and their order."""
        for number, program_id in enumerate(PROGRAMS):
            if number % 2 == odd:
                score, rank = self.scores[program_id]
                self.scores[program_id] = (score + shift, rank)
        assert set(self.queue.programs()) == {name for name, _ in self.buckets if name}
        for name in self.queue.programs():
            self.queue.rescore(name)

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        block_id = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.queue.append(self.blocks[block_id])
        self.file(block_id)

    @rule(data=st.data())
    def append_n(self, data: st.DataObject) -> None:
        for block_id in (chosen := self.choose(data)):
            self.file(block_id)
        self.queue.append_n([self.blocks[block_id] for block_id in chosen])

    @rule(data=st.data())
    def prepend_n(self, data: st.DataObject) -> None:
        chosen = self.choose(data)
        self.list[:0] = chosen
        self.queue.prepend_n([self.blocks[block_id] for block_id in chosen])

    def choose(self, data: st.DataObject) -> list[int]:
        chosen = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if self.taken else []
        self.taken = [block_id for block_id in self.taken if block_id not in chosen]
        return chosen

    @precondition(lambda self: self.order())
    @rule(data=st.data())
    def discard_to_front(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.order()))
        self.blocks[block_id].reset_hash()
        self.queue.discard_to_front(self.blocks[block_id])
        self.take_out(block_id)
        self.list.insert(0, block_id)

    @rule(lost=st.sets(st.integers(0, BLOCKS - 1)))
    def hashes_are_lost(self, lost: set[int]) -> None:
        """The pool was reset, or a connector found blocks invalid: the queue is not told."""
        for block_id in lost:
            self.blocks[block_id].reset_hash()

    @rule()
    def forget_all(self) -> None:
        bucketed = self.order()[len(self.list) :]
        unhashed = [block_id for block_id in bucketed if self.blocks[block_id].block_hash is None]
        self.list = [*unhashed, *self.list, *(block_id for block_id in bucketed if block_id not in unhashed)]
        self.buckets.clear()
        self.owners.clear()
        self.many.clear()
        self.queue.forget_all()

    # what holds at all times

    @invariant()
    def the_order_is_the_models(self) -> None:
        order = self.order()
        assert ids(self.queue.get_all_free_blocks()) == order
        assert ids(self.queue.iter_blocks_after(None)) == order
        assert self.queue.num_free_blocks == len(order) == len(set(order))
        assert sorted([*order, *self.taken]) == list(range(BLOCKS))
        assert [self.queue.left_reused, self.queue.left_evicted] == self.left
        left = {name: len(bucket) for (name, behind), bucket in self.buckets.items() if behind}
        self.used_s = {name: used_s for name, used_s in self.used_s.items() if name in left}
        assert {name: self.queue.left(name) for name in left} == {n: (self.used_s[n], left[n]) for n in left}

    @invariant()
    def owners_are_the_models(self) -> None:
        owned = {block_id: owners for block_id, owners in self.owners.items() if owners}
        assert self.queue.owned_blocks() == len(owned) + len(self.many)
        for block_id in range(BLOCKS):
            assert self.queue.owners(block_id) == owned.get(block_id, set())

    def teardown(self) -> None:
        expected = self.order()
        assert ids(self.queue.popleft_n(len(expected))) == expected


class ByProgramMachine(QueueMachine):
    by_program = True


@pytest.mark.parametrize(("machine", "examples"), [(QueueMachine, 60), (ByProgramMachine, 250)])
def test_the_queue_does_what_its_model_does(machine: type[QueueMachine], examples: int) -> None:
    """With an order by program, 10,000 operations."""
    from hypothesis.stateful import run_state_machine_as_test

    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
