"""The queue of free blocks alone, against a naive model of it."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from sojourn_server.core.block_owners import BlockOwners
from sojourn_server.vllm.free_block_queue import ProgramFreeBlockQueue
from turns import abandoned_branches
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

Left = tuple[float, int] | None
ScoreOf = Callable[[str, Left], Any]
BLOCKS = 14
NEWEST = math.inf
LIST, ENDED = "vLLM's list", "ended"
PROGRAMS = [f"P{number}" for number in range(16)]


def make_blocks(count: int) -> list[Any]:
    return [KVCacheBlock(number) for number in range(count)]


def make_queue(blocks: Sequence[Any], score: ScoreOf | None = None, evicted: Any = None) -> Any:
    owners = BlockOwners()

    def remove(gone: list[Any], score: Any) -> None:
        owned = list(zip(gone, owners.remove_evicted(ids(gone)), strict=True))
        if evicted is not None:
            evicted([(block, owner) for block, owner in owned if block.block_hash is not None], score)

    return ProgramFreeBlockQueue(
        FreeKVCacheBlockQueue(list(blocks)),
        owners=owners,
        evicted=remove,
        scorer=ByScore(score) if score is not None else None,
        failed=reraise,
    )


def reraise(error: Exception) -> None:
    raise error


class ByScore:
    """An order without a scale of its own: a bucket's standing is its score at that time."""

    def __init__(self, score: ScoreOf) -> None:
        self.standing = score
        self.shift = 0.0

    def score(self, standing: Any) -> Any:
        """The shift is one that changes the order."""
        return (standing[0] * (-1.0 if self.shift else 1.0), *standing[1:])


def give_hash(block: Any) -> None:
    block.set_block_hash(make_block_hash_with_group_id(BlockHash(b"%032d" % block.block_id), 0))


def own(queue: Any, blocks: Iterable[Any], program_id: str) -> None:
    queue.owners.own(ids(blocks), program_id)
    queue.place(ids(blocks))


def end(queue: Any, program_id: str) -> list[int]:
    """End a program. Return its blocks that have no owner now."""
    changed = queue.owners.end(program_id)
    queue.place(changed)
    return [block_id for block_id in changed if block_id not in queue.owners.of]


def ids(blocks: Iterable[Any]) -> list[int]:
    return [block.block_id for block in blocks]


def test_blocks_of_very_many_programs_are_no_longer_counted_per_program() -> None:
    """Otherwise 2,000 programs with one system prompt are listed 2,000 times for each of its blocks."""
    queue = make_queue(
        make_blocks(4), score=lambda program_id, left: (0.0,), evicted=lambda gone, score: None
    )
    prefix, alone = queue.popleft_n(2), queue.popleft_n(1)
    for block in (*prefix, *alone):
        give_hash(block)
    own(queue, alone, "P0")
    for number in range(1000):
        own(queue, prefix, f"P{number}")
        assert len(queue.owners.owners_of(0)) == (number + 1 if number < 16 else 0)
    assert queue.owners.blocks == {"P0": {alone[0].block_id: None}}
    queue.append_n([*prefix, *alone])
    for number in range(1000):
        assert end(queue, f"P{number}") == (ids(alone) if number == 0 else [])
    assert ids(queue.popleft_n(4)) == [3, 2, 0, 1]  # still shared, so still last
    assert not queue.owners.of


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
            score=self.standing if self.by_program else None,
            evicted=lambda gone, score: self.evictions.extend(block.block_id for block, _ in gone),
        )
        self.count = 0
        self.place: dict[int, tuple[Any, int]] = {}
        """Free block → (``LIST``, ``ENDED`` or its bucket's program and time of use, place within)."""
        self.left = [0, 0]
        self.owners: dict[int, set[str]] = {}
        self.used_by: dict[int, set[str]] = {}
        """Cached block → programs that used it, and "somebody" for a reuse without an owner."""
        self.upside_down = False
        self.taken: list[int] = []
        for block_id in range(BLOCKS):
            self.file(block_id)

    # what the model knows

    def standing(self, program_id: str, left: Left) -> tuple[float, ...]:
        score, rank = self.scores[program_id]
        return (score, rank) if left is None else (score - 1.5 - left[0] % 3, rank, left[0])

    def score(self, name: tuple[str, float]) -> tuple[float, ...]:
        program_id, used_s = name
        if not program_id:
            return (NEWEST,)
        score, *rest = self.standing(program_id, None if used_s == NEWEST else (used_s, 0))
        return (-score if self.upside_down else score, *rest)

    def of(self, name: Any) -> list[int]:
        """Blocks of a bucket, of ``LIST`` or of ``ENDED``, in order."""
        return sorted((b for b in self.place if self.place[b][0] == name), key=lambda b: self.place[b][1])

    def order(self) -> list[int]:
        listed = self.of(LIST)
        first = list(itertools.takewhile(lambda b: self.blocks[b].block_hash is None, listed))
        in_buckets = [b for name in sorted({*self.bucket_names()}, key=self.score) for b in self.of(name)]
        return [*first, *self.of(ENDED), *listed[len(first) :], *in_buckets]

    def belongs(self, block_id: int) -> Any:
        if self.is_of_ended(block_id):
            return ENDED
        owners = self.owners.get(block_id, set())
        if not owners or not self.by_program or self.blocks[block_id].block_hash is None:
            return LIST
        return ("" if len(owners) > 1 else next(iter(owners)), NEWEST)

    def is_of_ended(self, block_id: int) -> bool:
        """Whether one program alone has ever used it, and that has ended."""
        users = self.used_by.get(block_id, set())
        is_one = len(users) == 1 and users <= set(PROGRAMS) and not self.owners.get(block_id)
        return is_one and self.blocks[block_id].block_hash is not None

    def is_left(self, block_id: int) -> bool:
        name = self.place[block_id][0]
        return name not in (LIST, ENDED) and name[1] != NEWEST

    def file(self, block_id: int) -> None:
        self.count += 1
        self.place[block_id] = (self.belongs(block_id), self.count)

    def file_first(self, block_ids: Sequence[int]) -> None:
        for block_id in reversed(block_ids):
            self.count += 1
            self.place[block_id] = (LIST, -self.count)

    def refile(self, block_ids: Iterable[int]) -> None:
        """Free blocks that are not where they belong go there."""
        for block_id in block_ids:
            if block_id in self.place and self.place[block_id][0] != self.belongs(block_id):
                if self.blocks[block_id].block_hash is None:
                    self.file_first([block_id])
                else:
                    self.file(block_id)

    def popped(self, expected: list[int], got: list[Any]) -> None:
        assert ids(got) == expected
        cached = [block_id for block_id in expected if self.blocks[block_id].block_hash is not None]
        heard = [each for each in cached if self.owners.get(each) or self.is_of_ended(each)]
        assert self.evictions == heard
        self.evictions.clear()
        for block_id in expected:
            self.left[1] += self.is_left(block_id)
            del self.place[block_id]
            self.owners.pop(block_id, None)
            self.used_by.pop(block_id, None)
            self.blocks[block_id].reset_hash()
        self.taken += expected

    # what can happen

    @initialize()
    def some_are_in_use(self) -> None:
        self.popleft_n_of(BLOCKS // 2)

    def popleft_n_of(self, count: int) -> None:
        expected = self.order()[:count]
        one = count == 1
        self.popped(expected, [self.queue.popleft()] if one else self.queue.popleft_n(count))

    @rule(data=st.data())
    def popleft_n(self, data: st.DataObject) -> None:
        self.popleft_n_of(data.draw(st.integers(0, len(self.order()))))

    @precondition(lambda self: not self.order())
    @rule()
    def popleft_of_nothing(self) -> None:
        with pytest.raises(ValueError, match="No free blocks"):
            self.queue.popleft()

    @precondition(lambda self: self.order())
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        block_id = data.draw(st.sampled_from(self.order()))
        self.left[0] += self.is_left(block_id)
        is_any_used = any(self.owners.values()) or any(
            len(users) == 1 and users <= set(PROGRAMS) and not self.owners.get(b)
            for b, users in self.used_by.items()
        )
        if is_any_used and not self.owners.get(block_id):
            self.used_by.setdefault(block_id, set()).add("somebody")
        self.queue.remove(self.blocks[block_id])
        del self.place[block_id]
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
        """Blocks in use and free ones."""
        chosen = data.draw(st.lists(st.integers(0, BLOCKS - 1), unique=True))
        self.own_by(chosen, data.draw(st.lists(st.sampled_from(PROGRAMS), max_size=20, unique=True)))

    def own_by(self, block_ids: list[int], program_ids: list[str]) -> None:
        for program_id in program_ids:
            own(self.queue, [self.blocks[block_id] for block_id in block_ids], program_id)
            for block_id in block_ids:
                self.owners.setdefault(block_id, set()).add(program_id)
                self.used_by.setdefault(block_id, set()).add(program_id)
            self.refile(block_ids)

    @rule(program_id=st.sampled_from(PROGRAMS))
    def remove_owner(self, program_id: str) -> None:
        mine = [block_id for block_id, owners in self.owners.items() if program_id in owners]
        orphans = end(self.queue, program_id)
        assert sorted(orphans) == sorted(b for b in mine if self.owners[b] == {program_id})
        for block_id in mine:
            self.owners[block_id].discard(program_id)
        # Which of them comes first is the queue's affair; where they are filed is not.
        after = ids(self.queue.get_all_free_blocks())
        moved = sorted((b for b in mine if b in after), key=after.index)
        hashed = [b for b in moved if self.blocks[b].block_hash is not None]
        unhashed = [b for b in reversed(moved) if self.blocks[b].block_hash is None]
        changed = [block_id for block_id in [*hashed, *unhashed] if len(self.owners[block_id]) <= 1]
        for block_id in orphans:
            del self.owners[block_id]
            if self.blocks[block_id].block_hash is None and len(self.used_by[block_id]) == 1:
                del self.used_by[block_id]  # it cannot be found again
        self.refile(changed)

    @rule(program_id=st.sampled_from(PROGRAMS), used_s=st.integers(0, 9))
    def mark_abandoned(self, program_id: str, used_s: float) -> None:
        for block_id in self.of((program_id, NEWEST)):
            self.place[block_id] = ((program_id, used_s), self.place[block_id][1])
        self.queue.mark_abandoned(program_id, used_s)

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
        for name in PROGRAMS:
            self.queue.rescore(name)

    @rule()
    def the_scale_moves(self) -> None:
        """Change all scores and no standing."""
        self.upside_down = not self.upside_down
        if self.by_program:
            self.queue._order.scorer.shift = float(self.upside_down)
        self.queue.rescale()

    @rule(data=st.data())
    def append_n(self, data: st.DataObject) -> None:
        for block_id in (chosen := self.choose(data)):
            self.file(block_id)
        if len(chosen) == 1:
            self.queue.append(self.blocks[chosen[0]])
        else:
            self.queue.append_n([self.blocks[block_id] for block_id in chosen])

    @rule(data=st.data())
    def prepend_n(self, data: st.DataObject) -> None:
        chosen = self.choose(data)
        self.file_first(chosen)
        self.queue.prepend_n([self.blocks[block_id] for block_id in chosen])

    def choose(self, data: st.DataObject) -> list[int]:
        chosen = data.draw(st.lists(st.sampled_from(self.taken), unique=True)) if self.taken else []
        self.taken = [block_id for block_id in self.taken if block_id not in chosen]
        return chosen

    @rule(lost=st.sets(st.integers(0, BLOCKS - 1)))
    def hashes_are_lost(self, lost: set[int]) -> None:
        """The pool was reset, or a connector found blocks invalid: the queue is not told."""
        for block_id in lost:
            self.blocks[block_id].reset_hash()

    @rule()
    def clear_owners(self) -> None:
        bucketed = [*self.of(ENDED), *(b for b in self.order() if self.place[b][0] not in (LIST, ENDED))]
        self.owners.clear()
        self.used_by.clear()
        self.file_first([b for b in bucketed if self.blocks[b].block_hash is None])
        for block_id in bucketed:
            if self.blocks[block_id].block_hash is not None:
                self.file(block_id)
        self.queue.clear_owners()
        self.queue.owners.clear()

    # what holds at all times

    @invariant()
    def the_order_is_the_models(self) -> None:
        order = self.order()
        assert ids(self.queue.get_all_free_blocks()) == order
        assert ids(self.queue.iter_blocks_after(None)) == order
        for place, block_id in enumerate(order):
            assert ids(self.queue.iter_blocks_after(self.blocks[block_id])) == order[place + 1 :]
        assert self.queue.num_free_blocks == len(order) == len(set(order))
        assert sorted([*order, *self.taken]) == list(range(BLOCKS))
        assert [self.queue.abandoned_reused, self.queue.abandoned_evicted] == self.left
        for program_id in PROGRAMS:
            left = Counter(used_s for (p, used_s) in self.bucket_names() if p == program_id)
            left.pop(NEWEST, None)
            assert abandoned_branches(self.queue, program_id) == left

    def bucket_names(self) -> list[tuple[str, float]]:
        return [name for name, _ in self.place.values() if name not in (LIST, ENDED)]

    @invariant()
    def owners_are_the_models(self) -> None:
        owned = {block_id: owners for block_id, owners in self.owners.items() if owners}
        assert len(self.queue.owners.of) == len(owned)
        for block_id in range(BLOCKS):
            assert self.queue.owners.owners_of(block_id) == owned.get(block_id, set())

    def teardown(self) -> None:
        expected = self.order()
        assert ids(self.queue.popleft_n(len(expected))) == expected


class ByProgramMachine(QueueMachine):
    by_program = True


@pytest.mark.parametrize(("machine", "examples"), [(QueueMachine, 60), (ByProgramMachine, 250)])
def test_the_queue_does_what_its_model_does(machine: type[QueueMachine], examples: int) -> None:
    """With an order by program, 10,000 operations."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
