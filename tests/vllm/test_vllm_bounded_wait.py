"""A request of no program waits at most ``queue_patience_s`` longer than in stock vLLM, however many hinted
leases other clients take."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sojourn_server.core.event_limits import EVENT_BURST_S, EVENT_SHARE
from sojourn_server.vllm import scheduler_adapter
from turns import tool

PATIENCE_S = 5.0
STEP_S = 0.05
LONGEST_TURN_S = 3.0
"""Bound of the time that a request of the load runs: nothing is preempted for the stranger."""
GIVE_UP_S = 120.0
BLOCKS = 201
BLOCK_SIZE = 16


GREEDY_HINTS: dict[str, dict[str, Any]] = {
    "lease": {},
    "urgent": {"priority": 2**31, "deadline_seconds": 1e-9, "expected_resume": True},
    "short": {"expected_output_length": 1, "blocks_parent": True, "parent_program_id": "P0"},
    "long": {"expected_output_length": 10**9, "root_program_id": "P0"},
}
"""What greedy clients add to the hint of a lease."""


class GreedyClients:
    """Programs that hold hinted leases, some of them in a loop, and requests that always run.

    ``hints``: one of ``GREEDY_HINTS``. ``tools``: after each turn a program reports a tool that never ends,
    and all send heartbeats. ``running``: the number of requests of no program that always run.
    """

    def __init__(
        self,
        engine: Any,
        seed: int,
        programs: int,
        looping: int,
        ttl_s: float,
        tenants: int,
        hints: str = "lease",
        tools: bool = False,
        running: int = 1,
    ) -> None:
        self.engine = engine
        self.random = random.Random(seed)
        self.looping = looping
        self.ttl_s = ttl_s
        self.tenants = tenants
        self.hints = GREEDY_HINTS[hints]
        self.running = running
        self.tools = tools and hasattr(engine.scheduler, "sojourn")
        self.contexts = {
            n: [n * 10_000 + i for i in range(self.random.randrange(200, 400))] for n in range(programs)
        }
        self.busy: dict[str, int | None] = {}
        self.numbers = itertools.count()

    def step(self, now: float) -> None:
        always = list(self.busy.values()).count(None)
        for _ in range(always, self.running):
            self.start(None, [-1 - i for i in range(32)], int(LONGEST_TURN_S / STEP_S) - 10)
        idle = [n for n in self.contexts if n not in self.busy.values()]
        for n in self.random.sample(
            idle, min(len(idle), max(0, self.looping + self.running - len(self.busy)))
        ):
            self.start(n, self.contexts[n], 4)
        for request_id in self.engine.step().finished:
            n = self.busy.pop(request_id, None)
            if n is not None and self.tools:
                self.report(n)
            if n is not None and len(self.contexts[n]) < 1000:
                self.contexts[n] += [n * 10_000 + 5_000 + len(self.contexts[n]) + i for i in range(20)]

    def report(self, n: int) -> None:
        """A tool that goes on for ever, and a sign of life of every program."""
        seq = next(self.numbers)
        beats = [
            {"type": "heartbeat", "program_id": f"P{other}", "seq": next(self.numbers)}
            for other in self.contexts
        ]
        self.engine.tell(tool(f"P{n}", seq, f"c{seq}", expected_s=1e9), *beats)

    def start(self, n: int | None, prompt: list[int], max_tokens: int) -> None:
        request_id = f"r{next(self.numbers)}"
        self.busy[request_id] = n
        program = {
            "program_id": f"P{n}",
            "context": {
                "kv_retention_ttl_seconds": self.ttl_s,
                "sojourn": {"v": 1, "tenant": f"t{(n or 0) % self.tenants}"},
                **self.hints,
            },
        }
        self.engine.add(request_id, prompt, max_tokens=max_tokens, **(program if n is not None else {}))


def wait_of_a_stranger(
    make_engine: Callable[..., Any], clock: Any, policy: str | None, pool_share: float = 0.5, **load: Any
) -> float:
    """Virtual seconds from the arrival of a request for a share of the pool to its admission."""
    options = {"settings": {"queue_patience_s": PATIENCE_S}} if policy is not None else {}
    engine = make_engine(policy, blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=4096, **options)
    clients = GreedyClients(engine, **load)

    def step() -> None:
        clients.step(clock.now)
        clock.now += STEP_S

    for _ in range(600):
        step()
    arrived_s = clock.now
    engine.add("stranger", [500_000 + i for i in range(int(BLOCKS * pool_share) * BLOCK_SIZE)])
    while clock.now - arrived_s < GIVE_UP_S:
        step()
        stranger = engine.scheduler.requests.get("stranger")
        if stranger is None or stranger.num_computed_tokens:
            break
    return clock.now - arrived_s


@pytest.mark.parametrize("policy", ["static-ttl", "continuum", "fixed-ttl", "saga", "tetris", "autellix"])
@given(
    load=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 1000),
            "programs": st.integers(1, 60),
            "looping": st.integers(0, 16),
            "ttl_s": st.sampled_from([1.0, 30.0, 300.0]),
            "tenants": st.integers(1, 4),
            "hints": st.sampled_from(sorted(GREEDY_HINTS)),
            "tools": st.booleans(),
            "running": st.integers(1, 3),
            "pool_share": st.sampled_from([0.05, 0.25, 0.5, 0.75]),
        }
    ),
)
@settings(max_examples=2, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_mix_of_greedy_clients_delays_a_stranger_for_longer(make_engine, clock, policy, load) -> None:
    stock_s = wait_of_a_stranger(make_engine, clock, None, **load)
    ours_s = wait_of_a_stranger(make_engine, clock, policy, **load)
    assert ours_s <= stock_s + PATIENCE_S + LONGEST_TURN_S


def test_a_tenant_cannot_take_the_lease_budget_of_another_with_hints(make_engine) -> None:
    engine = make_engine("static-ttl", blocks=BLOCKS, max_model_len=4096)
    for tenant, programs in (("a", 10), ("b", 5), ("a", 1)):
        for number in range(programs):
            hint = {"kv_retention_ttl_seconds": 300.0, "sojourn": {"v": 1, "tenant": tenant}}
            name = f"{tenant}{programs}{number}"
            prompt = [hash((name, i)) % 100_000 for i in range(20 * BLOCK_SIZE)]
            engine.add(name, prompt, program_id=name, context=hint)
            engine.run()
    leased = engine.scheduler.sojourn.program_scheduler.leases
    assert sum(name.startswith("b") for name in leased) >= 2  # each ended lease of a makes room for the next
    assert sum(name.startswith("a") for name in leased) <= 8


@pytest.mark.parametrize("policy", ["continuum", "program-fcfs", "saga", "autellix", "tetris", "observe"])
def test_overdue_strangers_do_not_starve_a_program(make_engine, clock, policy) -> None:
    """More requests without a program than the engine serves: a program's request is served in its turn."""
    engine = make_engine(policy, blocks=BLOCKS, max_model_len=4096, max_num_seqs=1)
    backlog = 40
    for number in range(backlog):
        engine.add(f"s{number}", range(number * 100, number * 100 + 16), max_tokens=20)
    engine.add("ours", range(900_000, 900_016), max_tokens=20, program_id="P")
    waited_s = 0.0
    while "ours" in engine.scheduler.requests and waited_s < 300:
        for _ in range(20):
            engine.step()
            clock.now += STEP_S
        waited_s += 1.0
        number += 1
        engine.add(f"s{number}", range(number * 100, number * 100 + 16), max_tokens=20)
    assert waited_s <= backlog + 3


class LongAnswerEngine:
    """An engine in which a program writes an answer that takes longer than any test waits."""

    def __init__(self, make_engine: Callable[..., Any], clock: Any, policy: str | None) -> None:
        options = {"settings": {"queue_patience_s": PATIENCE_S}} if policy is not None else {}
        self.engine = make_engine(policy, blocks=BLOCKS, block_size=BLOCK_SIZE, max_model_len=3200, **options)
        self.clock = clock
        if policy is not None:  # programs lose KV all the time: admission reserves nothing before that
            self.engine.scheduler.sojourn.program_scheduler.state.last_shortage_s = math.inf

    def add(self, name: str, blocks: int, *, tokens: int = 4, ttl_s: float | None = None) -> None:
        """Add a request. Its program is the part of ``name`` before "/"; without "/" it has no program. The
        requests of one program have the same prompt."""
        program, is_tracked, _ = name.partition("/")
        start = 10_000 * ord(program[0])
        hint = {"context": {"kv_retention_ttl_seconds": ttl_s}} if ttl_s is not None else {}
        given = {"program_id": program, **hint} if is_tracked else {}
        self.engine.add(name, range(start, start + blocks * BLOCK_SIZE), max_tokens=tokens, **given)

    def step_for(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.engine.step()
            self.clock.now += STEP_S

    def waits(self, name: str) -> bool:
        request = self.engine.scheduler.requests.get(name)
        return request is not None and not request.num_computed_tokens

    def wait_s(self, name: str) -> float:
        """Virtual seconds until the request is admitted, at most ``GIVE_UP_S``."""
        since_s = self.clock.now
        while self.waits(name) and self.clock.now - since_s < GIVE_UP_S:
            self.step_for(STEP_S)
        return self.clock.now - since_s

    def leases(self) -> set[str]:
        """Programs that hold a lease; empty on stock."""
        sojourn = getattr(self.engine.scheduler, "sojourn", None)
        return set(sojourn.program_scheduler.leases) if sojourn is not None else set()


def wait_behind_a_rejected_program_s(
    make_engine: Callable[..., Any], clock: Any, policy: str | None
) -> float:
    """Virtual seconds until a stranger is admitted. It comes after program G, which would fit, but not beside
    the expected growth of program A."""
    its = LongAnswerEngine(make_engine, clock, policy)
    its.add("A/1", 40, tokens=2400)
    its.step_for(STEP_S)
    its.add("G/1", 110)
    its.step_for(STEP_S)
    assert its.waits("G/1") == (policy is not None)
    its.step_for(PATIENCE_S)
    its.add("S", 2)
    return its.wait_s("S")


def wait_behind_a_leased_program_s(
    make_engine: Callable[..., Any], clock: Any, policy: str | None, returns: bool
) -> float:
    """Virtual seconds until a stranger is admitted. It comes after program G, which lacks the blocks that
    program A leases. If A ``returns``, it waits behind the stranger, so its lease does not expire."""
    its = LongAnswerEngine(make_engine, clock, policy)
    its.add("B/1", 2, tokens=2400)
    its.step_for(STEP_S)
    its.add("A/1", 120, ttl_s=300.0)
    its.step_for(20 * STEP_S)
    assert its.leases() == ({"A"} if policy is not None else set())
    its.add("G/1", 100)
    its.step_for(PATIENCE_S + 2 * STEP_S)
    its.add("S", 2)
    if not returns:
        return its.wait_s("S")
    begin_s = clock.now
    while its.waits("S") and clock.now - begin_s < PATIENCE_S:
        its.step_for(STEP_S)
    its.add("A/2", 121, ttl_s=300.0)
    return clock.now - begin_s + its.wait_s("S")


@pytest.mark.parametrize(
    ("wait_s", "policies"),
    [
        (wait_behind_a_rejected_program_s, ["continuum", "saga"]),
        *(
            (
                partial(wait_behind_a_leased_program_s, returns=returns),
                ["continuum", "saga", "continuum-paper", "static-ttl"],
            )
            for returns in (True, False)
        ),
    ],
    ids=["that admission rejects", "that waits for a lease", "that waits for a lease whose program returns"],
)
def test_a_program_delays_a_stranger_by_no_more_than_the_patience(
    make_engine, clock, wait_s, policies
) -> None:
    """Else G waits for A's lease, the stranger for G, and A, which has the lease, for the stranger."""
    stock_s = wait_s(make_engine, clock, None)
    for policy in policies:
        assert wait_s(make_engine, clock, policy) <= stock_s + PATIENCE_S + STEP_S, policy


def test_a_program_that_waits_for_a_lease_leaves_it_while_it_holds_up_no_request(make_engine, clock) -> None:
    its = LongAnswerEngine(make_engine, clock, "continuum")
    its.add("B/1", 2, tokens=2400)
    its.step_for(STEP_S)
    its.add("A/1", 120, ttl_s=300.0)
    its.step_for(20 * STEP_S)
    its.add("G/1", 100)
    its.step_for(3 * PATIENCE_S)
    assert its.waits("G/1")
    assert its.leases() == {"A"}
    its.add("S", 2)
    its.step_for(2 * STEP_S)
    assert not its.waits("S")
    assert not its.waits("G/1")
    assert "A" not in its.leases()


@pytest.mark.parametrize("program", ["B", None])
@pytest.mark.parametrize("returned", [False, True])
def test_with_user_priorities_a_request_does_not_wait_for_the_lease_of_a_less_important_program(
    make_engine, clock, program, returned
) -> None:
    """If the leased program has returned, it waits behind the request, and its lease does not expire while
    it waits. So without this, both would wait until nothing runs any more."""
    engine = make_engine("continuum", blocks=65, max_model_len=8192, scheduling_policy="priority")
    for name, priority in (("A", 10), ("C", 0)):
        prompt, hint = range(priority * 1000, priority * 1000 + 320), {"kv_retention_ttl_seconds": 10}
        engine.add(f"{name}1", prompt, priority=priority, program_id=name, context=hint)
        engine.run()
        engine.tell(tool(name))
    running = engine.add("r1", range(40_000, 40_016), max_tokens=4000)
    engine.step()
    if returned:
        engine.add("A2", [*range(10_000, 10_320), *range(50_000, 50_400)], priority=10, program_id="A")
    request = engine.add("b1", range(20_000, 20_400), max_tokens=2, program_id=program)
    engine.step()
    assert running.num_output_tokens == 2, "there is no lack of blocks for what runs"
    assert request.num_output_tokens == 1
    leases = set(engine.scheduler.sojourn.program_scheduler.state.leases)
    assert leases == {"C"}, "a lease of an equally important program stays"


@pytest.fixture
def busy(make_engine):
    """An engine that runs a request, and no other beside it."""
    engine = make_engine("continuum", blocks=BLOCKS, max_num_seqs=1, settings={"strict": False})
    engine.add("running", range(16), max_tokens=20)
    engine.step()
    return engine


def test_a_request_that_the_scheduler_does_not_know_breaks_no_step(busy, clock) -> None:
    """Its events failed. It is served all the same, and an overdue request beside it too."""
    busy.add("unknown", range(100, 116), max_tokens=5, program_id="P")
    busy.add("overdue", range(200, 216), max_tokens=5)
    del busy.scheduler.sojourn.program_scheduler.state.requests.states["unknown"]
    clock.now += 31.0
    for _ in range(60):
        busy.step()
    assert not busy.scheduler.requests


def test_a_request_whose_arrival_fails_waits_behind_no_later_one(busy, monkeypatch) -> None:
    with monkeypatch.context() as broken:
        broken.setattr(scheduler_adapter, "read_identity", None)
        busy.add("failed", range(100, 116), program_id="P")
    for number in range(3):
        busy.add(f"later{number}", range(200, 216))
    assert next(iter(busy.scheduler.waiting)).request_id == "failed"


def test_the_time_of_events_on_requests_counts_towards_that_of_all_events(make_engine, clock, monkeypatch):
    """They are handled before their request and cannot wait. So those that clients post wait longer."""
    engine = make_engine(blocks=65)
    service = engine.scheduler.sojourn.service
    apply = service.apply_attached_events

    def slow(*arguments: Any) -> Any:
        clock.now += EVENT_BURST_S + 0.01
        return apply(*arguments)

    monkeypatch.setattr(service, "apply_attached_events", slow)
    event = {"type": "heartbeat", "program_id": "A", "seq": 1}
    context = {"sojourn": {"v": 1, "emitter": "e", "events": [event]}}
    engine.add("a1", range(32), program_id="A", context=context)
    answer = json.loads(engine.scheduler.sojourn_call("event_batches", "[]"))
    assert answer["wait_s"] == pytest.approx(0.01 / EVENT_SHARE, rel=0.1)
