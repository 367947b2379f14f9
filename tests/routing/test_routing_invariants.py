"""Any life of a routing core: whatever happens in whatever order, nothing is lost and all sums are right."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from routing_builders import expectations, kv_lost
from sojourn_server.policies.fairness_policies import (
    AgentFairShare,
    SharePolicy,
    TenantPreemptionPolicy,
    UrgencyPreemption,
)
from sojourn_server.policies.routing_policies import (
    CapacityRouting,
    LeastDelayRouting,
    PrefixAffinityRouting,
    RandomRouting,
    RoundRobinRouting,
    SessionAffinityRouting,
    StealingPolicy,
    WorkStealing,
)
from sojourn_server.routing import routing_events
from sojourn_server.routing.affinity_strategy import AffinityStrategy
from sojourn_server.routing.routing_core import RoutingCore
from sojourn_server.routing.routing_events import (
    AbortStream,
    RecallRequest,
    RejectRequest,
    ReleaseProgramKv,
    SendRequest,
)
from sojourn_server.routing.routing_limits import RoutingLimits
from sojourn_server.routing.routing_records import ReplicaHealth, RoutedProgram

ROUTINGS = (
    RandomRouting(),
    RoundRobinRouting(),
    SessionAffinityRouting(),
    PrefixAffinityRouting(),
    CapacityRouting(),
    CapacityRouting(size_by="context"),
    *[LeastDelayRouting(resident_for_s=20.0)] * 3,
)


class AnyLife(RuleBasedStateMachine):
    """One place for each request. ``at`` is where gateways have sent requests, as the core told them to."""

    @initialize(
        routing=st.sampled_from(ROUTINGS),
        stealing=st.sampled_from((StealingPolicy(), WorkStealing(), WorkStealing(idle_s=0.0))),
        sharing=st.sampled_from((AgentFairShare(), SharePolicy(), AgentFairShare())),
        preemption=st.sampled_from(
            (
                UrgencyPreemption(blocked_s=0.0),
                TenantPreemptionPolicy(),
            )
        ),
        send_below=st.sampled_from((0.5, 1.0, math.inf)),
    )
    def begin(self, routing: Any, stealing: Any, sharing: Any, preemption: Any, send_below: float) -> None:
        limits = RoutingLimits(
            send_below_load=send_below,
            wait_s=50.0,
            most_waiting=30,
            queue_patience_s=15.0,
            queue_patience_requests=3,
        )
        strategy = AffinityStrategy(routing, stealing, sharing, preemption=preemption)
        self.strategy = strategy
        self.core = RoutingCore(strategy, limits, expectations())
        self.now = self.latest = 0.0
        self.number = 0
        self.instances = 0
        self.open: dict[str, routing_events.RequestReceived] = {}
        self.at: dict[str, str] = {}
        self.began: set[str] = set()
        self.failed: dict[str, set[tuple[str, str]]] = {}
        self.recalled: dict[str, str] = {}
        self.failures: Counter[str] = Counter()
        for name in "ab":
            self.a_replica(name, True, 1000)
        for tenant in "tu":  # so that there is work to share out
            self.asks("warm", 100, tenant, None, None)
            self.now += 1.0
            self.open.clear()
            self.at.clear()
            self.take(routing_events.RequestFinished(f"r{self.number}", 10))

    def take(self, fact: Any) -> None:
        for action in self.core.take(fact, self.now):
            match action:
                case SendRequest():
                    assert action.request_id in self.open
                    assert action.request_id not in self.at
                    replica = self.core.fleet.get(action.replica_id)
                    assert replica is not None
                    failed = self.failed.get(action.request_id, set())
                    assert (replica.replica_id, replica.instance) not in failed, "it has failed there"
                    self.at[action.request_id] = action.replica_id
                case RecallRequest():
                    assert self.at.pop(action.request_id) == action.replica_id
                    assert action.request_id not in self.began, "its answer had begun"
                    assert action.request_id not in self.recalled, "a second time"
                    self.recalled[action.request_id] = action.replica_id
                case RejectRequest():
                    del self.open[action.request_id]
                    self.at.pop(action.request_id, None)
                case AbortStream():
                    del self.open[action.request_id]
                    assert self.at.pop(action.request_id) == action.replica_id
                case ReleaseProgramKv():
                    assert self.core.fleet.get(action.replica_id) is not None

    def lose(self, names: list[str]) -> None:
        """Their replica does not answer: who has not begun waits again."""
        for name in names:
            if name not in self.began:
                self.at.pop(name, None)
                self.failures[name] += 1

    @rule(name=st.sampled_from("abc"), again=st.booleans(), capacity=st.integers(500, 2000))
    def a_replica(self, name: str, again: bool, capacity: int) -> None:
        known = self.core.fleet.get(name)
        if known is None or not again:
            self.instances += 1
        instance = known.instance if known is not None and again else str(self.instances)
        if known is not None and not again:
            self.lose([one for one, at in self.at.items() if at == name])
        self.take(routing_events.ReplicaRegistered(name, instance, capacity, max_running=4))

    @rule(name=st.sampled_from("abc"), drains=st.booleans())
    def leaves(self, name: str, drains: bool) -> None:
        replica = self.core.fleet.get(name)
        if replica is None:
            return
        if not drains:
            self.lose([one for one, at in self.at.items() if at == name])
        self.take(
            routing_events.ReplicaDrainStarted(name)
            if drains
            else routing_events.ReplicaGone(name, replica.instance)
        )
        if not drains:
            assert name not in self.at.values()

    @rule(name=st.sampled_from("abc"))
    def stays(self, name: str) -> None:
        self.take(routing_events.ReplicaDrainCancelled(name))
        replica = self.core.fleet.get(name)
        assert replica is None or replica.health is not ReplicaHealth.DRAINING

    @rule(name=st.sampled_from("abc"))
    def is_gone_for_a_moment(self, name: str) -> None:
        replica = self.core.fleet.get(name)
        if replica is not None:
            drained = replica.health is ReplicaHealth.DRAINING
            self.leaves(name, False)
            self.take(routing_events.ReplicaRegistered(name, replica.instance, 1000, max_running=4))
            assert (self.core.fleet.get(name).health is ReplicaHealth.DRAINING) == drained

    @rule(
        program=st.sampled_from(("p", "q", "r", None)),
        tokens=st.integers(1, 3000),
        tenant=st.sampled_from("tu"),
        parent=st.sampled_from(("p", "q", None)),
        due_s=st.sampled_from((None, 2.0, 500.0)),
        output=st.sampled_from((0, 10**12)),
        exact=st.booleans(),
    )
    def asks(
        self,
        program: str | None,
        tokens: int,
        tenant: str,
        parent: str | None,
        due_s: float | None,
        output: int = 0,
        exact: bool = False,
    ) -> None:
        self.number += 1
        name = f"r{self.number}"
        deadline_s = None if due_s is None else self.now + due_s
        self.open[name] = routing_events.RequestReceived(
            name,
            tenant,
            tokens,
            program,
            parent,
            output_tokens=output,
            deadline_s=deadline_s,
            agent_type="coder" if tokens % 2 else None,
            prefix=(tokens % 3, tokens % 7),
            exact=exact,
        )
        self.take(self.open[name])

    @rule(
        tenant=st.sampled_from("tu"),
        tokens=st.integers(50, 400),
        due_s=st.sampled_from((2.0, 500.0)),
        many=st.integers(2, 6),
        seconds=st.sampled_from((0.0, 0.2)),
    )
    def a_crowd_asks(self, tenant: str, tokens: int, due_s: float, many: int, seconds: float) -> None:
        for _ in range(many):
            self.asks(f"new {self.number}", tokens, tenant, None, due_s)
        self.time(seconds)

    @rule(
        data=st.data(),
        tokens=st.integers(0, 500),
        counted=st.sampled_from((0, 700)),
        says_where=st.booleans(),
        answered=st.booleans(),
    )
    def ends(self, data: Any, tokens: int, counted: int, says_where: bool, answered: bool) -> None:
        if self.open:
            name = data.draw(st.sampled_from(sorted(self.open)))
            at = self.at.get(name)
            if says_where and at is None:
                return
            request = self.core.requests[name]
            program = request.program or RoutedProgram(("", ""), None, None, 0.0, 0.0)
            turns, context_tokens = program.turns, program.context_tokens
            if at is not None and answered and request.program is not None:
                turns += 1
                context_tokens = max(context_tokens, max(counted, request.context_tokens) + tokens)
            del self.open[name]
            self.at.pop(name, None)
            where = at if says_where else None
            self.take(routing_events.RequestFinished(name, tokens, where, answered, counted))
            assert (program.turns, program.context_tokens) == (turns, context_tokens)

    @rule(data=st.data(), began=st.booleans(), stale=st.booleans(), computing=st.booleans())
    def fails(self, data: Any, began: bool, stale: bool, computing: bool) -> None:
        if self.at:
            name = data.draw(st.sampled_from(sorted(self.at)))
            at = "nowhere" if stale else self.at[name]
            if stale:
                self.take(routing_events.RequestFinished(name, 7, at))
                assert name in self.core.requests, "an earlier try's end ends nothing"
            if began:
                self.take(routing_events.FirstByteSent(name, at))
                if not stale:
                    self.began.add(name)
            if not stale:
                self.lose([name])
                replica = self.core.fleet.get(at)
                if replica is not None:
                    self.failed.setdefault(name, set()).add((at, replica.instance))
            self.take(routing_events.RequestFailed(name, at, computing))

    @rule(data=st.data())
    def begins(self, data: Any) -> None:
        if self.at:
            name = data.draw(st.sampled_from(sorted(self.at)))
            self.began.add(name)
            self.take(routing_events.FirstByteSent(name, self.at[name]))

    @rule(data=st.data(), ends=st.booleans())
    def a_recall_comes_too_late(self, data: Any, ends: bool) -> None:
        late = sorted(
            name
            for name, at in self.recalled.items()
            if name in self.open and self.core.requests[name].recalled_from == at and self.core.fleet.get(at)
        )
        if not late:
            return
        name = data.draw(st.sampled_from(late))
        at = self.recalled[name]
        self.began.add(name)
        if ends:
            del self.open[name]
            self.at.pop(name, None)
            self.take(routing_events.RequestFinished(name, 3, at))
        else:
            self.at[name] = at
            self.take(routing_events.FirstByteSent(name, at))
            assert self.core.requests[name].replica_id == at

    @rule(
        program=st.sampled_from("pqr"),
        tenant=st.sampled_from("tu"),
        drop=st.booleans(),
        at=st.sampled_from("abc"),
    )
    def a_program(self, program: str, tenant: str, drop: bool, at: str) -> None:
        self.take(
            kv_lost(self.core, program, tenant, at) if drop else routing_events.ProgramEnded(program, tenant)
        )

    @rule(seconds=st.floats(-5, 40))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.take(routing_events.Tick())

    @invariant()
    def nothing_is_lost_and_nothing_is_twice(self) -> None:
        if not hasattr(self, "core"):
            return
        it, strategy = self.core, self.strategy
        self.latest = max(self.latest, self.now)  # the cache does not hold if the clock steps back
        assert set(it.requests) == set(self.open)
        assert all(self.failures[name] < it.limits.most_failures for name in self.open)
        queues = [
            *strategy.anywhere,
            *strategy.failed.values(),
            *(one for replica in it.fleet.values() for one in replica.queue),
        ]
        waits = [one.request_id for one in queues]
        assert len(waits) == len(set(waits)) == len(it.waiting)
        assert set(waits) == set(it.waiting) == self.open.keys() - self.at.keys()
        assert it.counts.policy_failures == 0
        sent = {name: one.replica_id for name, one in it.requests.items() if one.sent is not None}
        assert sent == self.at
        for replica in it.fleet.values():
            assert set(replica.in_flight) == {
                name for name, at in self.at.items() if at == replica.replica_id
            }
            homes = {
                program.key: program for program in it.programs.values() if program.home == replica.replica_id
            }
            assert replica.programs == homes
            assert replica.homed_tokens == sum(program.size_tokens for program in homes.values())
            view = replica.view()
            replica.known_view = None
            assert replica.view() == view
            if isinstance(strategy._routing, LeastDelayRouting):
                groups = strategy._groups(view, None, self.latest)
                replica.groups = None
                assert strategy._groups(view, None, self.latest) == groups
            is_full = replica.load() >= it.limits.send_below_load
            assert (replica.idle_since_s is None) == is_full
            assert not replica.queue.lanes or is_full
        for program in it.programs.values():
            is_over = not program.turns or program.is_over
            assert not (program.is_idle and is_over) or program in it._left, "it is kept for nothing"
            assert program.home is None or it.fleet.get(program.home) is not None
            assert program.in_flight == sum(1 for n in self.at if it.requests[n].program is program)
            assert program.waiting == sum(1 for n in waits if it.requests[n].program is program)
        for tenant in "tu" if strategy.tenants is not None else "":
            flying = sum(it.requests[n].context_tokens for n in self.at if it.requests[n].tenant == tenant)
            assert strategy.tenants.in_flight_tokens.get(tenant, 0) == flying
            homed = sum(program.size_tokens for program in it.programs.values() if program.tenant == tenant)
            assert strategy.tenants.homed_tokens.get(tenant, 0) == homed
        assert it.fleet.capacity_tokens == sum(replica.seen.capacity_tokens for replica in it.fleet.values())


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
