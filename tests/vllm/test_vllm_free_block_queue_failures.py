"""The engine calls the queue where nothing catches an error of ours: then it must become vLLM's own."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.vllm.free_block_queue import Bucket, EvictionOrder

BLOCKS = 60
SIX = [f"P{number}" for number in range(6)]


def lose_a_block(queue: Any) -> None:
    """The books say that a block is in a bucket, and it is in none."""
    next(iter(queue._bucket_of.values())).blocks.popitem()


def forget_all_buckets(queue: Any) -> None:
    queue._order.first = lambda: None


def miscount(queue: Any) -> None:
    """More free blocks than there are: the next large request takes the list's fake end for one."""
    queue._bucket_of.popitem()


def scores_do_not_compare(queue: Any) -> None:
    mixed = iter([(1.0,), None, ("a",), (2.0,), ({},)] * 1000)
    order = {"standing": lambda *_: (0.0,), "score": lambda *_: next(mixed)}
    queue._order.scorer = type("Order", (), {name: staticmethod(call) for name, call in order.items()})()


def score_fails(queue: Any) -> None:
    queue._order.scorer.score = None


def fails_in(name: str, late: bool) -> Callable[[Any], None]:
    """``late``: the work is done, and then it fails: nothing may be done twice."""

    def sabotage(queue: Any) -> None:
        original = getattr(queue, name)

        def call(*args: Any) -> Any:
            if late:
                original(*args)
            raise RuntimeError(f"{name} is broken")

        setattr(queue, name, call)

    sabotage.__name__ = f"{'late' if late else ''}{name}"
    return sabotage


INSIDE = ["_bucket_for", "_take_out", "_forget_if_empty", "_pop_from_bucket", "_report"]
SABOTAGES = [
    lose_a_block,
    forget_all_buckets,
    miscount,
    scores_do_not_compare,
    score_fails,
    *(fails_in(name, late) for name in INSIDE for late in (False, True)),
]


@pytest.mark.parametrize("is_rescored", [False, True])
def test_a_score_that_does_not_compare_is_named(is_rescored: bool) -> None:
    score = 1.0 if is_rescored else math.nan
    order = EvictionOrder(SimpleNamespace(standing=lambda *_: (2.5,), score=lambda _: (score,)))

    def add_and_rescore() -> None:
        nonlocal score
        order.push(Bucket("P"))
        score = math.nan
        order.rescale()

    with pytest.raises(ValueError, match=r"scores \(2\.5,\) with \(nan,\)"):
        add_and_rescore()


class Life:
    """Six programs on a pool that holds two of them, step by step, against what the pool itself counts."""

    def __init__(self, engine: Any, clock: Any) -> None:
        self.engine, self.clock = engine, clock
        self.random = random.Random(7)
        self.contexts: dict[str, list[int]] = {}
        self.turns = 0

    def go_on(self, turns: int) -> None:
        for _ in range(turns):
            self.turns += 1
            program = self.random.choice(SIX)
            context = self.contexts.get(program, list(range(64)))
            if len(context) > 500 or self.random.random() < 0.2:
                context = list(range(64))
            context = [*context, *(self.turns * 1000 + n for n in range(self.random.randint(20, 120)))]
            self.contexts[program] = context
            self.engine.add(f"r{self.turns}", context, max_tokens=4, program_id=program)
            if self.random.random() < 0.3:
                self.engine.tell({"seq": self.turns, "type": "program_end", "program_id": program})
                del self.contexts[program]
            for _ in range(self.random.randint(0, 6)):
                self.step()
        while self.engine.scheduler.has_unfinished_requests():
            self.step()

    def step(self) -> None:
        self.clock.now += 0.05
        self.engine.step()
        pool = self.engine.pool
        free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        assert sorted(free) == [block.block_id for block in pool.blocks[1:] if block.ref_cnt == 0]
        assert len(free) == pool.get_num_free_blocks()


@pytest.mark.parametrize("sabotage", SABOTAGES, ids=lambda sabotage: sabotage.__name__)
def test_whatever_goes_wrong_within_it_the_engine_goes_on(
    make_engine: Any, clock: Any, caplog: pytest.LogCaptureFixture, sabotage: Callable[[Any], None]
) -> None:
    engine = make_engine("saga", blocks=BLOCKS, settings={"strict": False})
    adapter = engine.scheduler.sojourn
    life = Life(engine, clock)
    life.go_on(25)
    queue = adapter._queue
    assert not queue.broken
    assert queue._bucket_of, "the test needs something in buckets"
    sabotage(queue)
    break_it(life, queue)
    assert queue.broken
    life.go_on(25)
    assert adapter.failures == 1, "it fails once, and says so once"
    assert "the eviction order failed" in caplog.text


def break_it(life: Life, queue: Any) -> None:
    """Until it is noticed; the pool need not add up in the step in which it is."""
    step, life.step = life.step, life.engine.step  # type: ignore[method-assign]
    for _ in range(20):
        if queue.broken:
            break
        life.go_on(1)
    life.engine.add("all", range(10**6, 10**6 + (BLOCKS - 2) * 16), max_tokens=4)
    life.engine.run()
    life.step = step  # type: ignore[method-assign]
