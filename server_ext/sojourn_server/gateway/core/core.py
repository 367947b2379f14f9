"""What a gateway decides: facts and ``now`` in, actions out. No I/O, no clock.

The same object stands in the gateway on one machine, in the coordinator on Ray and in the lab. A request that
comes is either sent, or waits for a replica that was chosen for it, or waits for any. Everything else
moves requests between these three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from ...policy.fair_share import SharePolicy, TaskView, TenantView, TurnOf
from ...policy.replica_views import RouteView
from ...policy.routing import RoutingPolicy
from ...policy.stealing import StealingPolicy, StealView
from . import facts
from .facts import AnyAction, AnyFact, Cut, Left, Probe, Refuse, Send
from .fleet import Fleet, Health, Replica
from .line import Line, Waiting
from .prefixes import PrefixIndex
from .programs import Expectations, Program, Programs


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreLimits:
    """Bounds that no policy moves. Times in seconds."""

    send_below_load: float = math.inf
    """A request waits at the gateway while its replica's load is at least this; ``inf``: engines queue."""
    most_waiting: int = 20_000
    wait_s: float = 600.0
    """A request that found no place for so long is refused."""
    lease_s: float = 10.0
    """A replica that is silent for so long is probed; only who asked it may say that it is gone."""
    most_failures: int = 3
    """Replicas that one request may fail at."""
    silent_program_s: float = 1800.0
    """A program of which nothing is heard for so long is taken to be over."""
    slo_factor: float = 1.5
    """A program without a deadline is due when it has taken so many times what its kind takes."""
    usual_life_s: float = 300.0
    """What a kind is taken to take of which none has ended yet."""


@dataclass(slots=True)
class CoreCounts:
    """What happened so far."""

    routes: dict[str, int] = field(default_factory=dict)
    """Requests sent, by reason."""
    moves: int = 0
    steals: int = 0
    refused: int = 0
    replayed: int = 0
    cut: int = 0


class RoutingCore:
    """One gateway's, or one coordinator's. Single-threaded."""

    def __init__(
        self,
        routing: RoutingPolicy,
        stealing: StealingPolicy,
        sharing: SharePolicy,
        limits: CoreLimits | None = None,
    ) -> None:
        self.routing = routing
        self.stealing = stealing
        self.sharing = sharing
        self.limits = limits or CoreLimits()
        self.fleet = Fleet()
        self.programs = Programs()
        self.expected = Expectations()
        self.counts = CoreCounts()
        self._prefixes = PrefixIndex() if routing.reads_prefixes else None
        self._requests: dict[str, Waiting] = {}
        """All that are not over: waiting, or sent."""
        self._anywhere = Line()
        self._queues: dict[str, Line] = {}
        """By the replica that they wait for."""
        self._number = 0
        self._tenant_tokens: dict[str, int] = {}
        """Contexts in flight, by tenant."""
        self._shares: dict[str, float] = {}
        self._shares_due_s = -math.inf
        self._actions: list[AnyAction] = []
        self._room_changed = False
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            facts.Asked: self._asked,
            facts.Began: self._began,
            facts.Ended: self._ended,
            facts.Failed: self._failed,
            facts.ReplicaSeen: self._replica_seen,
            facts.ReplicaGone: self._replica_gone,
            facts.ReplicaDrains: self._replica_drains,
            facts.ProgramEnded: self._program_ended,
            facts.KvDropped: self._kv_dropped,
            facts.Tick: self._tick,
        }

    def take(self, fact: AnyFact, now: float) -> list[AnyAction]:
        """Take in what happened; returns what is to be done now, in this order."""
        self._handlers[type(fact)](fact, now)
        self._pump(now)
        actions, self._actions = self._actions, []
        return actions

    @property
    def waiting(self) -> int:
        """Requests that have not been sent."""
        return len(self._anywhere) + sum(map(len, self._queues.values()))

    # -- requests ---------------------------------------------------------------

    def _asked(self, fact: facts.Asked, now: float) -> None:
        if fact.request_id in self._requests:
            self._refuse(fact.request_id, 409, "duplicate_request", "a request of this id is being answered")
            return
        too_long = self._too_long(fact.context_tokens)
        if too_long:
            self._refuse(fact.request_id, 400, "context_too_long", too_long)
            return
        if self.waiting >= self.limits.most_waiting:
            message = f"{self.waiting} requests wait already; try again later"
            self._refuse(fact.request_id, 429, "too_many_waiting", message, retry_after_s=5.0)
            return
        program = None
        if fact.program_id is not None:
            key = (fact.tenant, fact.program_id)
            program, forgotten = self.programs.heard(key, fact.agent_type, fact.parent_id, now)
            if forgotten is not None:
                self._leave(forgotten)
            if fact.deadline_s is not None:
                program.deadline_s = fact.deadline_s
            program.waiting += 1
        waiting = Waiting(
            fact.request_id,
            self._number,
            fact.tenant,
            program,
            fact.context_tokens,
            self._size(program, fact.context_tokens + fact.output_tokens),
            now,
            output_tokens=fact.output_tokens,
            prefix=fact.prefix,
        )
        self._number += 1
        self._requests[fact.request_id] = waiting
        if not self._place(waiting, now):
            self._anywhere.add(waiting)

    def _began(self, fact: facts.Began, now: float) -> None:
        waiting = self._requests.get(fact.request_id)
        if waiting is not None and waiting.replica_id == fact.replica_id and waiting.sent_s is not None:
            waiting.began = True

    def _ended(self, fact: facts.Ended, now: float) -> None:
        waiting = self._requests.pop(fact.request_id, None)
        if waiting is None:
            return
        sent_s = waiting.sent_s
        if sent_s is None:
            self._unqueue(waiting)
        else:
            self._returned(waiting)
        program = waiting.program
        if program is None or not self._lives(program):
            return
        program.last_s = now
        if sent_s is None:
            return
        program.turns += 1
        self.expected.turn_took(program, now - sent_s)
        program.context_tokens = max(program.context_tokens, waiting.context_tokens + fact.output_tokens)
        if program.home == waiting.replica_id:
            program.cached = True
            self._resize(program, self._size(program, program.context_tokens))

    def _failed(self, fact: facts.Failed, now: float) -> None:
        waiting = self._requests.get(fact.request_id)
        if waiting is None or waiting.replica_id != fact.replica_id or waiting.sent_s is None:
            return  # it has been sent elsewhere since
        replica = self.fleet.get(fact.replica_id)
        if replica is not None and replica.health is not Health.SUSPECT:
            replica.health = Health.SUSPECT
            self.fleet.changed(replica)
            self._probe(replica, now)
        self._lost(waiting, fact.replica_id, now)

    def _lost(self, waiting: Waiting, replica_id: str, now: float) -> None:
        """The replica that a request was sent to does not answer it."""
        self._returned(waiting)
        if waiting.began:
            del self._requests[waiting.request_id]
            self._actions.append(Cut(waiting.request_id, replica_id))
            self.counts.cut += 1
            return
        waiting.failures += 1
        waiting.replica_id = waiting.sent_s = None
        if waiting.failures >= self.limits.most_failures:
            del self._requests[waiting.request_id]
            message = f"{waiting.failures} replicas in turn did not answer"
            self._refuse(waiting.request_id, 502, "replicas_failed", message, retry_after_s=1.0)
            return
        if waiting.program is not None:
            waiting.program.waiting += 1
        self.counts.replayed += 1
        self._anywhere.add_back(waiting)
        self._room_changed = True

    def _returned(self, waiting: Waiting) -> None:
        """A request is no longer where it was sent."""
        replica = self.fleet.get(waiting.replica_id)
        if replica is not None and waiting.request_id in replica.in_flight:
            self.fleet.over(replica, waiting.request_id)
        self._charge(waiting.tenant, -waiting.context_tokens)
        if waiting.program is not None:
            waiting.program.in_flight -= 1
        self._room_changed = True

    # -- replicas ---------------------------------------------------------------

    def _replica_seen(self, fact: facts.ReplicaSeen, now: float) -> None:
        known = self.fleet.get(fact.replica_id)
        if known is not None and known.instance != fact.instance:
            self._gone(known, now)
        self.fleet.seen(fact, now)
        self._room_changed = True

    def _replica_gone(self, fact: facts.ReplicaGone, now: float) -> None:
        replica = self.fleet.get(fact.replica_id)
        if replica is not None and replica.instance == fact.instance:
            self._gone(replica, now)

    def _gone(self, replica: Replica, now: float) -> None:
        sent = [self._requests[request_id] for request_id in replica.in_flight]
        queued = list(self._queues.pop(replica.replica_id, ()))
        for program in self.programs:
            if program.home == replica.replica_id:
                program.home, program.cached = None, False
        self.fleet.gone(replica)
        if self._prefixes is not None:
            self._prefixes.forget(replica.replica_id)
        for waiting in sent:
            self._lost(waiting, replica.replica_id, now)
        for waiting in queued:
            waiting.replica_id = None
            self._anywhere.add_back(waiting)
        self._room_changed = True

    def _replica_drains(self, fact: facts.ReplicaDrains, now: float) -> None:
        replica = self.fleet.get(fact.replica_id)
        if replica is None:
            return
        replica.health = Health.DRAINING
        self.fleet.changed(replica)
        for waiting in list(self._queues.pop(replica.replica_id, ())):
            waiting.replica_id = None
            self._anywhere.add_back(waiting)
        self._room_changed = True

    def _probe(self, replica: Replica, now: float) -> None:
        replica.probed_s = now
        self._actions.append(Probe(replica.replica_id, replica.instance))

    # -- programs ---------------------------------------------------------------

    def _program_ended(self, fact: facts.ProgramEnded, now: float) -> None:
        program = self.programs.ended((fact.tenant, fact.program_id))
        if program is not None:
            self.expected.ended(program, now)
            self._leave(program)

    def _kv_dropped(self, fact: facts.KvDropped, now: float) -> None:
        program = self.programs.get((fact.tenant, fact.program_id))
        if program is not None and program.home == fact.replica_id and not program.in_flight:
            self._leave(program)

    def _lives(self, program: Program) -> bool:
        """Its requests may outlive it: then they are anybody's."""
        return self.programs.get(program.key) is program

    def _leave(self, program: Program) -> None:
        """It is at home nowhere."""
        replica = self.fleet.get(program.home)
        if replica is not None:
            self.fleet.homed(replica, -program.size_tokens, -1)
            self._room_changed = True
        program.home, program.cached, program.size_tokens = None, False, 0

    def _settle(self, program: Program, replica: Replica, size_tokens: int) -> str | None:
        """It is at home here from now on; returns where it was."""
        before = program.home
        if before == replica.replica_id:
            self._resize(program, size_tokens)
            return None
        self._leave(program)
        program.home, program.size_tokens = replica.replica_id, size_tokens
        self.fleet.homed(replica, size_tokens, 1)
        if before is not None:
            program.moves += 1
            program.moved_at_turn = program.turns
            self.counts.moves += 1
            if not program.in_flight:
                self._actions.append(Left(program.key[1], before))
        return before

    def _resize(self, program: Program, size_tokens: int) -> None:
        replica = self.fleet.get(program.home)
        if replica is not None and size_tokens != program.size_tokens:
            self.fleet.homed(replica, size_tokens - program.size_tokens)
            self._room_changed = self._room_changed or size_tokens < program.size_tokens
        program.size_tokens = size_tokens

    def _size(self, program: Program | None, context_tokens: int) -> int:
        if program is None:
            return context_tokens
        context_tokens = max(context_tokens, program.context_tokens)
        most = max((r.max_context_tokens or r.capacity_tokens for r in self.fleet), default=context_tokens)
        return self.expected.size_tokens(program, context_tokens, most)

    # -- where to ---------------------------------------------------------------

    def _place(self, waiting: Waiting, now: float) -> bool:
        """Choose a replica for a request that waits for any, and send it or let it wait there."""
        route = self.routing.route(self._route_view(waiting), self.fleet.views, now)
        replica = self.fleet.get(route.replica_id)
        if replica is None:
            return False
        self._bring(waiting, replica, route.reason, now)
        return True

    def _bring(self, waiting: Waiting, replica: Replica, reason: str, now: float) -> None:
        waiting.replica_id, waiting.reason = replica.replica_id, reason
        if waiting.program is not None and self._lives(waiting.program):
            waiting.moved_from = self._settle(waiting.program, replica, waiting.size_tokens)
        if self._prefixes is not None:
            self._prefixes.computed(replica.replica_id, waiting.prefix)
        queue = self._queues.get(replica.replica_id)
        if queue or self._full(replica):
            self._queues.setdefault(replica.replica_id, Line()).add(waiting)
        else:
            self._send(waiting, replica, now)

    def _send(self, waiting: Waiting, replica: Replica, now: float) -> None:
        waiting.sent_s = now
        if waiting.program is not None:
            waiting.program.waiting -= 1
            waiting.program.in_flight += 1
        self._charge(waiting.tenant, waiting.context_tokens)
        self.fleet.sent(replica, waiting.request_id, waiting.context_tokens)
        self.counts.routes[waiting.reason] = self.counts.routes.get(waiting.reason, 0) + 1
        self._actions.append(Send(waiting.request_id, replica.replica_id, waiting.reason, waiting.moved_from))

    def _full(self, replica: Replica) -> bool:
        view = self.fleet.view(replica.replica_id)
        return view is not None and view.load >= self.limits.send_below_load

    def _route_view(self, waiting: Waiting) -> RouteView:
        program = waiting.program
        home = parent_home = None
        if program is not None:
            at = self.fleet.get(program.home)
            if at is not None and at.health is not Health.DRAINING:
                home = self.fleet.view(program.home)
            parent = self.programs.get(program.parent)
            if parent is not None and not program.turns:
                parent_home = self.fleet.view(parent.home)
        return RouteView(
            waiting.request_id,
            waiting.number,
            waiting.context_tokens,
            waiting.size_tokens,
            home,
            program is not None and program.cached,
            parent_home,
            self._prefixes.matches(waiting.prefix, waiting.context_tokens) if self._prefixes else {},
        )

    # -- as time goes by --------------------------------------------------------

    def _tick(self, fact: facts.Tick, now: float) -> None:
        limits = self.limits
        for replica in self.fleet:
            silent = now - replica.heard_s >= limits.lease_s
            if silent and (replica.probed_s is None or now - replica.probed_s >= limits.lease_s):
                replica.health = Health.SUSPECT if replica.health is Health.UP else replica.health
                self.fleet.changed(replica)
                self._probe(replica, now)
        for waiting in [w for w in self._everybody() if now - w.since_s >= limits.wait_s]:
            self._unqueue(waiting)
            del self._requests[waiting.request_id]
            message = f"no replica had room for it in {limits.wait_s:g} s"
            self._refuse(waiting.request_id, 503, "no_room", message, retry_after_s=10.0)
        for program in self.programs.silent_since(now - limits.silent_program_s):
            self.programs.ended(program.key)
            self._leave(program)
        self._share_out(now)

    def _pump(self, now: float) -> None:
        """Send whoever may go now."""
        if self._room_changed and len(self._anywhere):
            self._room_changed = False
            self._place_those_who_wait(now)
        for replica_id, queue in list(self._queues.items()):
            replica = self.fleet.get(replica_id)
            while replica is not None and len(queue) and not self._full(replica):
                waiting = queue.first(self._whose_turn(queue, now))
                queue.remove(waiting)
                self._send(waiting, replica, now)
            if not len(queue):
                del self._queues[replica_id]
        if self.stealing.steals:
            self._steal(now)

    def _place_those_who_wait(self, now: float) -> None:
        """In order, or tenant after tenant."""
        if self.sharing.shares_out:
            order = self._in_turn(now)
        else:
            order = sorted(self._anywhere, key=lambda waiting: waiting.number)
        for waiting in order:
            if self._place(waiting, now):
                self._anywhere.remove(waiting)

    def _in_turn(self, now: float) -> list[Waiting]:
        """Those who wait, tenants by what they use of their shares."""
        by_tenant: dict[str, list[Waiting]] = {}
        for waiting in self._anywhere:
            by_tenant.setdefault(waiting.tenant, []).append(waiting)
        tenants = sorted(by_tenant, key=lambda tenant: self._use(tenant))
        return [waiting for tenant in tenants for waiting in by_tenant[tenant]]

    def _use(self, tenant: str) -> float:
        share = self._shares.get(tenant, 0.0)
        return self._in_flight_share(tenant) / share if share else math.inf

    def _whose_turn(self, queue: Line, now: float) -> str:
        turns = [TurnOf(t, self._in_flight_share(t), queue.first(t).since_s) for t in queue.tenants]
        return self.sharing.next(turns, self._shares)

    def _in_flight_share(self, tenant: str) -> float:
        capacity = sum(replica.capacity_tokens for replica in self.fleet)
        return self._tenant_tokens.get(tenant, 0) / capacity if capacity else 0.0

    def _share_out(self, now: float) -> None:
        if not self.sharing.shares_out or now < self._shares_due_s:
            return
        self._shares_due_s = now + self.sharing.epoch_s
        tasks: dict[str, list[TaskView]] = {}
        for program in self.programs:
            if program.in_flight or program.waiting:
                tasks.setdefault(program.tenant, []).append(
                    TaskView(self.expected.work_s(program), self._deadline_s(program))
                )
        self._shares = dict(self.sharing.shares([TenantView(t, of) for t, of in tasks.items()], now))

    def _deadline_s(self, program: Program) -> float:
        if program.deadline_s is not None:
            return program.deadline_s
        life_s = self.expected.life_s(program)
        usual_s = self.limits.usual_life_s if life_s is None else life_s
        return program.began_s + self.limits.slo_factor * usual_s

    def _steal(self, now: float) -> None:
        views = []
        for replica in self.fleet:
            queue = self._queues.get(replica.replica_id)
            queued = len(queue) if queue is not None else 0
            idle = not queued and not self._full(replica)
            if not idle:
                replica.idle_since_s = None
            elif replica.idle_since_s is None:
                replica.idle_since_s = now
            view = self.fleet.view(replica.replica_id)
            assert view is not None
            idle_s = now - replica.idle_since_s if replica.idle_since_s is not None else 0.0
            movable = sum(1 for waiting in queue if _may_leave(waiting)) if queue is not None else 0
            views.append(StealView(replica.replica_id, view.load, queued, idle_s, view.takes_new, movable))
        steal = self.stealing.steal(views, now)
        if steal is None:
            return
        thief = self.fleet.get(steal.thief)
        queue = self._queues.get(steal.victim)
        movable_ones = [waiting for waiting in queue or () if _may_leave(waiting)]
        if thief is None or queue is None or not movable_ones:
            return  # it came too late
        waiting = min(movable_ones, key=lambda one: one.number)
        queue.remove(waiting)
        self.counts.steals += 1
        self._bring(waiting, thief, f"stolen_{steal.reason}", now)

    # -- inside -------------------------------------------------------------------

    def _everybody(self) -> Iterable[Waiting]:
        yield from self._anywhere
        for queue in self._queues.values():
            yield from queue

    def _unqueue(self, waiting: Waiting) -> None:
        queue = self._anywhere if waiting.replica_id is None else self._queues.get(waiting.replica_id)
        if queue is not None:
            queue.remove(waiting)
        if waiting.program is not None:
            waiting.program.waiting -= 1

    def _charge(self, tenant: str, tokens: int) -> None:
        left = self._tenant_tokens.get(tenant, 0) + tokens
        if left:
            self._tenant_tokens[tenant] = left
        else:
            self._tenant_tokens.pop(tenant, None)

    def _too_long(self, context_tokens: int) -> str | None:
        longest = max((r.max_context_tokens or r.capacity_tokens for r in self.fleet), default=0)
        if not longest or context_tokens <= longest:
            return None
        return f"the prompt has {context_tokens:,} tokens; the longest that a replica computes is {longest:,}"

    def _refuse(
        self, request_id: str, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        self.counts.refused += 1
        self._actions.append(Refuse(request_id, status, code, message, retry_after_s))


def _may_leave(waiting: Waiting) -> bool:
    """At a turn gap, and not a second time for the same turn."""
    program = waiting.program
    return program is None or (not program.in_flight and program.moved_at_turn != program.turns)
