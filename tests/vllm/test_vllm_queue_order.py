"""Who goes next and who is preempted, in vLLM's own scheduler (C6, C8)."""

from __future__ import annotations

import gc
import random
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from sojourn_server.core.request_table import QueuePlace, QueueState
from sojourn_server.vllm.waiting_queue import PolicyRequestQueue
from turns import prompt, waiting


def test_user_priority_comes_before_ours(make_engine):
    engine = make_engine("continuum", blocks=129, max_num_seqs=1, scheduling_policy="priority")
    engine.add("first", prompt(1, 32), program_id="A", priority=5)
    engine.add("second", prompt(2, 32), program_id="B", priority=1)
    engine.add("third", prompt(3, 32), program_id="C", priority=1)
    assert waiting(engine) == ["second", "third", "first"]


def test_a_returning_program_is_not_preempted_for_having_come_back_late(make_engine):
    """The engine's own rule preempts the last admitted: here the earliest program's second turn."""
    victims = {}
    for policy in ("observe", "continuum"):
        engine = make_engine(policy, blocks=33, max_model_len=512)
        engine.add("a1", prompt(1, 40), program_id="A")
        engine.run()
        engine.add("b1", prompt(2, 200), program_id="B", max_tokens=120)
        engine.step()
        engine.add("a2", prompt(3, 200), program_id="A", max_tokens=120)
        engine.run()
        victims[policy] = [
            d["program_id"] for d in engine.ask("decisions")["decisions"] if d["kind"] == "preempt"
        ]
    assert victims["observe"][0] == "A"
    assert set(victims["continuum"]) == {"B"}


@pytest.mark.parametrize("policy", [None, "observe", "continuum"])
def test_of_equal_user_priorities_the_latest_request_is_preempted_even_if_it_needs_the_block(
    make_engine, policy
):
    """As in stock vLLM, which goes by arrival times. The running requests need not be in that order."""
    engine = make_engine(policy, blocks=9, max_model_len=256, scheduling_policy="priority")
    late = engine.add("late", range(48), max_tokens=100, arrival_s=5.0)
    early = engine.add("early", range(1000, 1048), max_tokens=100, arrival_s=3.0)
    while not late.num_preemptions + early.num_preemptions:
        engine.step()
    assert (early.num_preemptions, late.num_preemptions) == (0, 1)


@pytest.mark.parametrize("broken", [None, ("late",), (float("nan"),)])
@pytest.mark.parametrize("policy", ["continuum", "autellix", "sojourn"])
def test_a_request_whose_key_fails_waits_behind_the_others(make_engine, policy, broken):
    """Keys of all policies compare with the key of a request that the policy cannot place."""
    engine = make_engine(policy, blocks=129, max_num_seqs=1, settings={"strict": False})
    scheduler = engine.scheduler.sojourn.program_scheduler
    place_of = scheduler.queue_place

    def queue_place(request_id, preempted=None):
        place = place_of(request_id, preempted)
        if not request_id.startswith("bad"):
            return place
        if broken is None:
            raise ZeroDivisionError
        return place._replace(key=broken)

    scheduler.queue_place = queue_place
    engine.add("busy", prompt(1, 32), max_tokens=30)
    engine.step()
    for number, name in enumerate(["bad1", "good1", "bad2", "good2"]):
        engine.add(name, prompt(number + 2, 64), arrival_s=float(number))
    assert waiting(engine) == ["good1", "good2", "bad1", "bad2"]
    engine.run()


def test_victims_priority_is_put_back(make_engine):
    engine = make_engine("continuum-paper", blocks=33, max_model_len=512)
    requests = [engine.add(f"r{n}", prompt(n, 100), max_tokens=150, program_id=f"P{n}") for n in range(4)]
    while engine.scheduler.has_unfinished_requests():
        engine.step()
        assert {request.priority for request in requests} == {0}
    assert any(request.num_preemptions for request in requests)
    assert [request.num_output_tokens for request in requests] == [150] * 4


@dataclass(eq=False)
class Waiting:
    """A waiting request, by itself."""

    key: int
    status: str = "waiting"


STATES = (QueueState.GATED, QueueState.PARKED, QueueState.OPEN, QueueState.OPEN)


def state(request: Waiting) -> QueueState:
    return STATES[request.key % len(STATES)]


def make_queue() -> Any:
    """Return a queue of ``Waiting``. It admits no gated request."""
    no = {"may_be_admitted": lambda request: False, "blocks_queue": lambda request: False}
    owner = SimpleNamespace(place=lambda request: QueuePlace((request.key,), state(request)), **no)
    return PolicyRequestQueue(owner)


@pytest.mark.parametrize("seed", range(20))
def test_the_open_request_with_the_lowest_key_is_next(seed):
    """Requests come, are moved, and leave, in any order. One that was peeked is popped, whatever moves."""
    rng = random.Random(seed)
    queue, waiting, keys = make_queue(), [], iter(rng.sample(range(10_000), 4_000))
    alive = weakref.WeakSet()

    def move():
        moved = rng.choice(waiting)
        moved.key = next(keys)
        queue.rekey(moved)

    for _ in range(400):
        waiting.append(Waiting(next(keys)))
        alive.add(waiting[-1])
        queue.add_request(waiting[-1])
        if rng.random() < 0.2:
            move()
        if rng.random() < 0.2:
            left = waiting.pop(rng.randrange(len(waiting)))
            queue.remove_request(left)
            queue.rekey(left)
        queue.admission_closed, queue.peeked = False, None
        while queue and rng.random() < 0.4:
            is_open = [each for each in waiting if state(each) is QueueState.OPEN]
            first = min(is_open, key=lambda each: each.key)
            assert queue.peek_request() is first
            move()
            assert queue.pop_request() is first
            waiting.remove(first)
        parked = {each for each in waiting if state(each) is QueueState.PARKED}
        ordered = sorted({*waiting} - parked, key=lambda each: each.key)
        assert len(queue) == len(waiting)
        assert list(queue)[: len(ordered)] == ordered
        assert {*queue} - {*ordered} == parked
        assert bool(queue) == any(state(each) is QueueState.OPEN for each in waiting)
        if not queue:
            with pytest.raises(IndexError):
                queue.peek_request()
    gc.collect()
    assert {*alive} == {*waiting, left, *is_open}, "one that has left is freed: its prompt may be long"
