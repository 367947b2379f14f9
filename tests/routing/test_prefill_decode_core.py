"""Prefill and decode on separate engines: what becomes of requests and engines."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from routing_builders import asked, only, sends
from sojourn_server.policies.prefill_decode.engine_pair_scheduler import (
    PairScheduler,
    PrefillDecodeRules,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.pair_strategy import PairStrategy
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    AbortStream,
    KvReported,
    NicQueueReported,
    PairEngineRegistered,
    PairRole,
    RejectRequest,
    RequestFinished,
    SendRequest,
)
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.routing.routing_records import ReplicaHealth

KV_TOKENS = 10_000


def seen(name: str, instance: str = "1", kv_tokens: int = KV_TOKENS, **more: Any) -> PairEngineRegistered:
    role = PairRole.PREFILL if name.startswith("p") else PairRole.DECODE
    given = {"role": role, "node": f"node-{name}", "block_s": 0.01, "peer": f"tcp:{name}:1", **more}
    return PairEngineRegistered(name, instance, kv_tokens, **given)


def core(*names: str, pairs: PairScheduler | None = None, **limits: Any) -> RoutingCore:
    pairs = pairs or PairScheduler(PrefillDecodeRules(most_tokens_s=math.inf))
    made = RoutingCore(PairStrategy(pairs), RoutingLimits(**limits))
    for name in names:
        made.take(seen(name), 0.0)
    return made


def test_what_a_program_has_stored_is_read_by_the_side_with_less_to_read() -> None:
    it = core("p1", "d1")
    it.take(asked("a", 6400, program_id="p"), 1.0)
    it.take(routing_events.RequestFinished("a", 64, "d1"), 2.0)
    it.take(NicQueueReported("node-p1", 50.0), 100.0)
    reported(it, "p1", now=100.0)  # it has evicted what it computed
    assert only(it.take(asked("b", 6464 + 40, program_id="p"), 100.0)).decode_reads
    it.take(routing_events.RequestFinished("b", 10, "d1"), 200.0)
    it.take(NicQueueReported("node-d1", 50.0), 200.0)
    reported(it, "p1", now=201.0)
    assert not only(it.take(asked("c", 6600, program_id="p"), 200.0)).decode_reads
    it.take(routing_events.RequestFinished("c", 10, "d1"), 200.0)
    it.take(routing_events.ProgramEnded("p", "t"), 300.0)
    assert not only(it.take(asked("d", 6600, program_id="p"), 300.0)).decode_reads
    assert (
        it.strategy.pairs.nics["node-d1"].busy_until_s <= 300.0
    )  # nothing of an ended program is looked for


def turn(it: RoutingCore, name: str, tokens: int, now: float, *, computed: bool = True) -> SendRequest:
    """A whole turn of a program, whose answer has 10 tokens. ``computed``: its prompt, by the prefill engine;
    else by the decode engine."""
    sent: SendRequest = only(it.take(asked(name, tokens, program_id="p"), now))
    it.take(routing_events.PrefillFinished(name, sent.prefill_id, computed=computed), now)
    it.take(routing_events.RequestFinished(name, 10, sent.replica_id), now)
    return sent


def test_a_programs_turns_are_prefilled_where_its_context_is_unless_another_is_sooner_done() -> None:
    it = core("p1", "p2", "d1")
    first = turn(it, "a", 1000, 1.0)
    assert it.home("t", "p") == first.prefill_id == "p1"
    busy = only(it.take(asked("b", 900), 2.0))
    assert busy.prefill_id == "p1"  # another's prompt, as long as the context
    second = turn(it, "c", 1200, 3.0)
    assert (second.prefill_id, second.moved_from) == ("p1", None)
    it.take(routing_events.PrefillFinished("b", "p1"), 3.0)
    only(it.take(asked("d", 3000), 4.0))
    released, sent = it.take(asked("e", 1400, program_id="p"), 5.0)
    assert (sent.prefill_id, sent.moved_from) == ("p2", "p1")
    assert released == routing_events.ReleaseProgramKv("p", "p1", "t")
    assert it.home("t", "p") == "p2"


def reported(it: RoutingCore, name: str, *tokens: int, now: float) -> None:
    programs = tuple(routing_events.ResidentKv("t", "p", one, 1000, 0.0) for one in tokens)
    it.take(KvReported(replica_id=name, instance="1", programs=programs, complete=True), now)


def test_a_home_that_lost_the_context_or_is_gone_is_a_home_no_more() -> None:
    it = core("p1", "p2", "d1")
    assert it.last_engines("t", "p") == (None, None)
    turn(it, "a", 1000, 1.0)
    reported(it, "p1", 900, now=2.0)
    assert it.home("t", "p") == "p1"
    assert next((one.replica, one.programs) for one in it.replica_statuses()) == ("p1", 1)
    reported(it, "p1", 100, now=3.0)
    assert it.home("t", "p") is None
    assert it.last_engines("t", "p") == ("p1", "d1"), "both know it"
    reported(it, "d1", 900, now=4.0)  # a decode engine computes no prompts
    assert it.home("t", "p") is None
    reported(it, "p2", 900, now=5.0)
    assert it.home("t", "p") == "p2"
    it.take(routing_events.ReplicaGone("p2", "1"), 6.0)
    assert it.home("t", "p") is None
    assert turn(it, "b", 1200, 7.0).prefill_id == "p1"


def test_a_prompt_that_the_decode_engine_computes_is_not_at_the_prefill_engine() -> None:
    it = core("p1", "p2", "d1", pairs=PairScheduler(PrefillDecodeRules()))
    turn(it, "a", 5000, 1.0, computed=False)
    assert it.home("t", "p") is None
    turn(it, "b", 1000, 10.0)
    turn(it, "c", 1100, 12.0, computed=False)
    assert it.home("t", "p") == "p1", "it still has what it computed before"
    for number in range(20):
        turn(it, f"e{number}", 5000, 20.0 + number, computed=False)
    assert it.strategy.pairs.most_prefill_tokens == math.inf, "no speed was seen"


@pytest.mark.parametrize("second_ends_first", [False, True])
def test_a_prompt_at_the_decode_engine_beside_one_that_is_computed_leaves_the_home(
    second_ends_first: bool,
) -> None:
    it = core("p1", "d1")
    only(it.take(asked("a", 1000, program_id="p"), 1.0))
    only(it.take(asked("b", 1000, program_id="p"), 1.0))
    it.take(routing_events.PrefillFinished("b", "p1", computed=False), 2.0)
    if second_ends_first:
        it.take(routing_events.RequestFinished("b", 10, "d1"), 3.0)
        assert not it.programs["t", "p"].cached
    it.take(routing_events.PrefillFinished("a", "p1"), 4.0)
    assert it.programs["t", "p"].cached
    assert it.home("t", "p") == "p1"


def test_a_waiting_request_does_not_go_to_a_home_that_lost_the_context_meanwhile() -> None:
    it = core("p1", "p2")
    it.take(seen("d1", max_running=2), 0.0)
    turn(it, "a", 5000, 1.0)
    assert [only(it.take(asked(name, 2000), 2.0)).prefill_id for name in "bc"] == ["p1", "p2"]
    it.take(routing_events.PrefillFinished("c", "p2"), 2.0)
    assert it.take(asked("d", 6000, program_id="p"), 3.0) == []
    reported(it, "p1", 100, now=10.0)
    sent = only(it.take(routing_events.RequestFinished("c", 10, "d1"), 11.0))
    assert (sent.request_id, sent.prefill_id) == ("d", "p2"), "p1 has 2,000 tokens more to compute"


def test_a_stored_conversation_goes_on_at_its_decode_engine_alone() -> None:
    it = core("p1", "d1", "d2")
    sent = only(it.take(asked("a", program_id="p", only_replica_id="d2"), 1.0))
    assert (sent.replica_id, sent.prefill_id) == ("d2", "")
    assert it.take(RequestFinished("a", 10, "d2"), 2.0) == []
    assert not it.requests
    assert it.take(asked("b", 1100, program_id="p"), 3.0)[-1].prefill_id == "p1"


def test_a_flood_of_one_tenant_leaves_others_their_share() -> None:
    it = core("p1", most_waiting=40)
    it.take(seen("d1", max_running=2), 0.0)
    for number in range(60):
        it.take(asked(f"flood {number}", tenant="flood"), 1.0)
    assert len(it.waiting) == 40, "the rest was rejected"
    for name in ("light 0", "light 1"):
        assert it.take(asked(name, tenant="light"), 2.0) == []
    it.take(routing_events.Tick(), 3.0)
    ended, order = ["flood 0", "flood 1"], []
    for name in ended:
        sent = sends(it.take(RequestFinished(name, 1, "d1"), 4.0))
        order += sent
        ended += sent
        if len(order) == 6:
            break
    assert order.index("light 0") <= 1
    assert order.index("light 1") <= 4
    assert it.shares_used().keys() == {"flood", "light"}


NAMES = ("p1", "p2", "d1", "d2", "d3")


class Life(RuleBasedStateMachine):
    """Whatever happens, in any order: each request is somewhere, once, and the books agree."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.number = 0
        pairs = PairScheduler(PrefillDecodeRules(most_tokens_s=math.inf))
        pairs.most_prefill_tokens = 5000
        self.core = core(pairs=pairs, wait_s=500.0, most_waiting=30)
        self.lives = dict.fromkeys(NAMES, 1)
        self.sent: dict[str, SendRequest] = {}
        self.open: set[str] = set()
        for name in ("p1", "d1"):  # without both nobody is taken in
            self.core.take(seen(name), self.now)

    def tell(self, fact: Any) -> None:
        self.now += 0.1
        for action in self.core.take(fact, self.now):
            if isinstance(action, SendRequest):
                assert action.request_id in self.open
                for name in (action.prefill_id, action.replica_id):
                    engine = self.core.fleet.get(name)
                    assert engine is not None
                    assert engine.health is ReplicaHealth.UP
                self.sent[action.request_id] = action
            elif isinstance(action, (RejectRequest, AbortStream)):
                self.over(action.request_id)

    def over(self, name: str) -> None:
        self.open.discard(name)
        self.sent.pop(name, None)

    def some(self, data: st.DataObject, of: Any) -> str:
        return str(data.draw(st.sampled_from(sorted(of))))

    @rule(
        tokens=st.integers(1, 40_000),
        program=st.sampled_from([None, "x", "y"]),
        tenant=st.sampled_from("tu"),
    )
    def ask(self, tokens: int, program: str | None, tenant: str) -> None:
        self.number += 1
        self.open.add(f"r{self.number}")
        self.tell(routing_events.RequestReceived(f"r{self.number}", tenant, tokens, program_id=program))

    @rule(name=st.sampled_from(NAMES), tokens=st.integers(0, 1000))
    def report(self, name: str, tokens: int) -> None:
        found = routing_events.ResidentKv("t", "x", tokens, 1000, 0.0)
        life = str(self.lives[name])
        self.tell(KvReported(replica_id=name, instance=life, programs=(found,), complete=True))

    @rule(
        name=st.sampled_from(NAMES),
        kv=st.sampled_from([1_000, KV_TOKENS, 30_000]),
        most=st.sampled_from([0, 1, 3]),
    )
    def hear(self, name: str, kv: int, most: int) -> None:
        self.tell(seen(name, str(self.lives[name]), kv_tokens=kv, max_running=most))

    @rule(name=st.sampled_from(NAMES), known=st.booleans())
    def die(self, name: str, known: bool) -> None:
        life = str(self.lives[name])
        self.lives[name] += 1
        if known:
            self.tell(routing_events.ReplicaGone(name, life))

    @rule(name=st.sampled_from(NAMES), drains=st.booleans())
    def drain(self, name: str, drains: bool) -> None:
        self.tell(
            routing_events.ReplicaDrainStarted(name) if drains else routing_events.ReplicaDrainCancelled(name)
        )

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), what=st.sampled_from(["prefilled", "began", "failed", "late"]))
    def go_on(self, data: st.DataObject, what: str) -> None:
        name = self.some(data, self.sent)
        pair = self.sent[name]
        if what == "prefilled":
            self.tell(routing_events.PrefillFinished(name, pair.prefill_id))
        elif what == "began":
            self.tell(routing_events.FirstByteSent(name, pair.replica_id))
        else:
            at = NAMES if what == "late" else [pair.prefill_id, pair.replica_id]
            failed = routing_events.RequestFailed(name, data.draw(st.sampled_from(at)), what == "late")
            self.tell(failed)

    @precondition(lambda self: self.sent)
    @rule(
        data=st.data(),
        how=st.sampled_from(["answered", "answered", "answered", "refused", "given up"]),
        counted=st.sampled_from([0, 300]),
    )
    def end(self, data: st.DataObject, how: str, counted: int) -> None:
        """Only an answer is a turn, and only its context is stored: as long as an engine has counted, also if
        that is less than before, or else as the request said."""
        name = self.some(data, self.sent)
        request, at = self.core.requests[name], self.sent[name].replica_id
        program, is_there = request.program, request.sent is not None and request.replica_id == at
        before = program and (program.turns, program.context_tokens)
        if before and how == "answered" and is_there:
            before = before[0] + 1, (counted or request.context_tokens) + 5
        if is_there or how == "given up":
            self.over(name)
        where = None if how == "given up" else at
        self.tell(RequestFinished(name, 5, where, how != "refused", counted))
        assert (program and (program.turns, program.context_tokens)) == before

    @rule(seconds=st.sampled_from([0.1, 12.0, 600.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.tell(routing_events.Tick())

    @invariant()
    def nobody_is_lost_and_the_books_agree(self) -> None:
        assert set(self.core.requests) == self.open
        assert set(self.core.strategy.pairs.in_flight) == self.open
        nodes = {one.seen.node for one in self.core.fleet.values()}
        assert self.core.strategy.pairs.nics.keys() == nodes, "a node without engines is forgotten"
        for program in self.core.programs.values():
            is_over = not program.turns or program.is_over
            assert not (program.is_idle and is_over) or program in self.core._left, "it is kept for nothing"
        assert self.core.strategy.pairs.dispatch(self.now) == [], "nothing waits that could be sent"
        assert len(self.core.waiting) == sum(f.sent is None for f in self.core.requests.values())
        for name, flight in self.core.requests.items():
            assert self.core.programs or flight.program is None
            if flight.sent is not None:
                assert self.sent[name].replica_id == flight.replica_id
                assert flight.replica_id in {one.replica_id for one in self.core.fleet.values()}

    def teardown(self) -> None:
        """With engines there, everybody who waits goes."""
        for name in NAMES:
            self.tell(routing_events.ReplicaDrainCancelled(name))
        for _ in range(3 * len(self.open) + 1):
            self.now += 2.0
            for name in NAMES:
                self.tell(seen(name, str(self.lives[name]), kv_tokens=KV_TOKENS))
            self.tell(routing_events.Tick())
            for name in list(self.sent):
                if name in self.sent and self.core.requests[name].sent is not None:
                    at = self.sent[name].replica_id
                    self.over(name)
                    self.tell(RequestFinished(name, 1, at))
        assert not self.open
        assert all(view.tokens == 0 for view in self.core.strategy.pairs.prefill.values())
        assert not any(self.core.tenants.in_flight_tokens.values())


TestLife = Life.TestCase
TestLife.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
