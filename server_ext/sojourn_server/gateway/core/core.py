"""What a gateway decides: facts and ``now`` in, actions out. No I/O, no clock.

The same object stands in the gateway on one machine, in the coordinator on Ray and in the lab. A request that
comes is either sent, or waits for a replica that was chosen for it, or waits for any. Everything else
moves requests between these three.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ...policy.fair_share import SharePolicy
from ...policy.routing import RoutingPolicy
from ...policy.stealing import StealingPolicy
from ...policy.yielding import NoYielding, YieldPolicy
from . import facts
from .departures import Departures
from .facts import AnyAction, AnyFact, Cut, Probe
from .failures import Failures
from .fleet import Fleet, Health, Replica
from .homes import Homes
from .journal import Changes, Home, StateJournal
from .limits import CoreCounts, CoreLimits
from .line import Waiting
from .placing import Placing
from .policy_failed import PolicyFailed
from .programs import Expectations, Key, Program, Programs
from .refusals import Refusals
from .requests import Requests
from .residents import residents_for
from .room import RoomLine
from .state import CoreState, read_state, written_state
from .steals import Steals
from .tenants import Tenants
from .yields import Yields

__all__ = ["CoreCounts", "CoreLimits", "RoutingCore"]

MOST_ENDED = 500
"""Requests refused in one tick because they waited too long; the others in the next."""


class RoutingCore:
    """One gateway's, or one coordinator's. Single-threaded.

    ``life`` names this core among those before and after it, in ``changes_since``.
    """

    def __init__(
        self,
        routing: RoutingPolicy,
        stealing: StealingPolicy,
        sharing: SharePolicy,
        limits: CoreLimits | None = None,
        *,
        yielding: YieldPolicy | None = None,
        expected: Expectations | None = None,
        life: str = "",
    ) -> None:
        self.limits = limits or CoreLimits()
        self.fleet = Fleet(self.limits.send_below_load)
        self.programs = Programs()
        self.expected = expected or Expectations()
        self.counts = CoreCounts()
        self.tenants = Tenants(
            sharing, self.fleet, self.expected, self.limits.slo_factor, self.limits.usual_life_s, self.counts
        )
        self.journal = StateJournal(life)
        residents = residents_for(routing)
        self.homes = Homes(self.fleet, self.tenants, self.journal, residents)
        self.requests = Requests(self.fleet, self.tenants, residents)
        self._placing = Placing(
            routing,
            self.fleet,
            self.programs,
            self.homes,
            self.requests,
            self.counts,
            self.expected,
            residents,
        )
        self._failures = Failures(self.fleet, self.limits)
        self._room = RoomLine(
            self.requests.anywhere,
            self.fleet,
            self.tenants,
            self.limits.line_patience_s,
            self.limits.line_patience_requests,
        )
        self._actions = self._placing.actions
        self._refusals = Refusals(self.requests, self._failures, self.counts, self._actions)
        self._departures = Departures(
            self.fleet,
            self.requests,
            self.tenants,
            self.homes,
            self._placing,
            self._room,
            Steals(stealing, self.fleet, self.requests),
            Yields(
                yielding or NoYielding(), self.fleet, self.requests, self.tenants, self.homes, self._placing
            ),
            self._failures,
            self._refusals,
            self.counts,
        )
        self.changes = 0
        """Goes up with what another core would have to know to go on from here."""
        self._number = 0
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            facts.Asked: self._asked,
            facts.Sent: self._sent,
            facts.Began: self._began,
            facts.Prefilled: lambda fact, now: None,
            facts.Ended: self._ended,
            facts.Failed: self._failed,
            facts.ReplicaSeen: self._replica_seen,
            facts.ReplicaGone: self._replica_gone,
            facts.ReplicaDrains: self._replica_drains,
            facts.ReplicaStays: self._replica_stays,
            facts.ProgramEnded: self._program_ended,
            facts.KvDropped: self._kv_dropped,
            facts.Tick: self._tick,
        }

    def take(self, fact: AnyFact, now: float) -> list[AnyAction]:
        """Take in what happened; returns what is to be done now, in this order."""
        self._handlers[type(fact)](fact, now)
        self._leave_unanswered(now)
        self._departures.send_off(now, epoch=isinstance(fact, facts.Tick))
        actions = list(self._actions)
        self.changes += bool(actions) or not isinstance(fact, (facts.Tick, facts.ReplicaSeen))
        self._actions.clear()
        return actions

    @property
    def waiting(self) -> int:
        """Requests that have not been sent."""
        return self.requests.waiting

    # -- copies -----------------------------------------------------------------

    def flush(self, now: float) -> Changes | None:
        """The batch of changed homes that is due; ``None``: none is, ``journal.due_s`` says when."""
        return self.journal.flush(now, self._all_homes)

    def changes_since(self, version: int, life: str) -> Changes:
        """What a copy of the homes lacks that is as of ``version`` of the core of this ``life``."""
        return self.journal.since(version, life, self._all_homes)

    def snapshot(self, now: float) -> CoreState:
        """What another core needs to go on from here. Requests are not in it: who has them tells of them."""
        return written_state(self.fleet, self.programs, self.expected, self._number, now)

    def restore(self, state: CoreState, now: float, elapsed_s: float | None = None) -> None:
        """Go on from there. Its replicas have a lease from ``now`` to be heard of; homes stand meanwhile.

        ``elapsed_s``: how long ago it was written, where ``now`` is another clock; ``None``: it is the same
        one. Raises ``ValueError`` for a core that has begun already, or a state that makes no sense.
        """
        if self._number or len(self.fleet) or len(self.programs):
            raise ValueError("this core has replicas or programs already; expected a new one")
        shift_s = 0.0 if elapsed_s is None else now - state.taken_s - elapsed_s
        read_state(state, self.fleet, self.programs, self.homes, self.expected, now, shift_s)
        for program in self.programs:
            self._placing.expect_turns(program)
        self._number = state.number

    def _all_homes(self) -> Iterator[tuple[Key, Home]]:
        for program in self.programs:
            replica = self.fleet.get(program.home)
            if replica is not None:
                yield program.key, (replica.replica_id, replica.instance)

    # -- requests ---------------------------------------------------------------

    def _asked(self, fact: facts.Asked, now: float) -> None:
        if fact.request_id in self.requests.by_id:
            self._refusals.refuse(
                fact.request_id, 409, "duplicate_request", "a request of this id is being answered"
            )
            return
        longest = self.fleet.longest_tokens
        if fact.exact and longest and fact.context_tokens > longest:
            message = (
                f"the prompt has {fact.context_tokens:,} tokens; the longest that a replica computes is "
                f"{longest:,}"
            )
            self._refusals.refuse(fact.request_id, 400, "context_too_long", message)
            return
        if self._too_many_wait(fact.tenant):
            message = f"{self.waiting} requests wait already; try again later"
            self._refusals.refuse(fact.request_id, 429, "too_many_waiting", message, retry_after_s=5.0)
            return
        try:
            self._taken_in(fact, now)
        except Exception as error:
            # Whoever waits for an answer to it gets one: nothing would look at it again.
            waiting = self.requests.by_id.get(fact.request_id)
            if waiting is not None:
                self.requests.close(waiting, now)
            if not isinstance(error, PolicyFailed):
                raise  # an error of ours: who has asked refuses it, and says where it was
            self._refusals.unrouted(fact.request_id, error)

    def _too_many_wait(self, tenant: str) -> bool:
        """Where tenants take turns, a flood of one shuts out none that has less than its share waiting."""
        most = self.limits.most_waiting
        if self.waiting < most or not self.tenants.take_turns or self.waiting >= 2 * most:
            return self.waiting >= most
        waiting_of = self.requests.waiting_of
        return waiting_of.get(tenant, 0) >= most / (len(waiting_of) + (tenant not in waiting_of))

    def _taken_in(self, fact: facts.Asked, now: float) -> None:
        waiting = self._opened(fact, now)
        kept = self._room.kept_free
        route = self._placing.route(waiting, now, kept)
        home = waiting.program.home if waiting.program is not None else None
        comes_new = route.replica_id not in (None, home) and not route.passes
        if comes_new and self._room.is_shut and self.requests.anywhere:
            self._departures.wait_anywhere(waiting)
        elif self._placing.bring(waiting, route, now):
            self._room.got_room += route.replica_id != home
        else:
            waiting.needs_tokens = route.needs_tokens
            self._room.is_shut = self._room.is_shut or not route.needs_tokens
            self.requests.wait_anywhere(waiting)
            # Whether a replica is kept free of this one too is a question of whose turn it is.
            self._departures.room_changed |= kept is not None

    def _opened(self, fact: facts.Asked | facts.Sent, now: float) -> Waiting:
        program = None
        if fact.program_id is not None:
            key = (fact.tenant, fact.program_id)
            program, forgotten = self.programs.heard(key, fact.agent_type, fact.parent_id, now)
            if forgotten is not None:
                self.homes.leave(forgotten, now)
            if fact.deadline_s is not None:
                program.deadline_s = fact.deadline_s
        context_tokens = self.fleet.fitting(fact.context_tokens)
        waiting = Waiting(
            fact.request_id,
            self._number,
            fact.tenant,
            program,
            context_tokens,
            self._size(program, context_tokens + fact.output_tokens),
            now,
            output_tokens=fact.output_tokens,
            prefix=fact.prefix if isinstance(fact, facts.Asked) else (),
        )
        self._number += 1
        self.requests.open(waiting)
        return waiting

    def _sent(self, fact: facts.Sent, now: float) -> None:
        waiting = self.requests.by_id.get(fact.request_id)
        if waiting is None:
            waiting = self._opened(fact, now)
        elif waiting.sent_s is not None:
            return
        else:
            self.requests.take_out(waiting)
        waiting.reason = "sent_by_gateway"
        replica = self.fleet.get(fact.replica_id)
        program = waiting.program
        if program is not None and replica is not None and self._placing.lives(program):
            # A gateway whose copy of the homes is old does not change them.
            size_tokens = max(waiting.size_tokens, program.size_tokens)
            if program.home in (None, replica.replica_id):
                self.homes.settle(program, replica, size_tokens, now)
        self.requests.send(waiting, fact.replica_id, now)
        waiting.began = fact.began
        self.counts.sent(waiting.reason)

    def _began(self, fact: facts.Began, now: float) -> None:
        waiting = self.requests.by_id.get(fact.request_id)
        if waiting is not None and self._is_at(waiting, fact.replica_id, now):
            waiting.began, waiting.recalled_from = True, None

    def _ended(self, fact: facts.Ended, now: float) -> None:
        waiting = self.requests.by_id.get(fact.request_id)
        if waiting is None:
            return
        if fact.replica_id is not None and not self._is_at(waiting, fact.replica_id, now):
            return  # an earlier try's
        sent_s, replica_id, program = waiting.sent_s, waiting.replica_id, waiting.program
        answered = waiting.began if fact.answered is None else fact.answered
        self.requests.close(waiting, now)
        self._departures.room_changed = True
        if program is None or not self._placing.lives(program):
            return
        self.programs.touched(program, now)
        if sent_s is None or not answered:
            return
        program.turns += 1
        self.expected.turn_took(program, now - sent_s)
        program.context_tokens = max(program.context_tokens, waiting.context_tokens + fact.output_tokens)
        if program.home == replica_id:
            program.cached = True
            self._placing.expect_turns(program)
            self.homes.resize(program, self._size(program, program.context_tokens, anew=True))
            self._ask_again(program, now)

    def _leave_unanswered(self, now: float) -> None:
        """Whoever was promised room for turns, and had none."""
        unanswered = self.requests.unanswered
        while unanswered:
            program = unanswered.pop()
            is_open = program.in_flight or program.waiting
            if not program.turns and not is_open and self._placing.lives(program):
                self.homes.leave(program, now)

    def _is_at(self, waiting: Waiting, replica_id: str, now: float) -> bool:
        """A request was sent there. Where it had been recalled from there, the recall came too late."""
        if waiting.sent_s is not None and waiting.replica_id == replica_id:
            return True
        if waiting.recalled_from != replica_id:
            return False
        if waiting.sent_s is not None:
            self.requests.take_back(waiting, now)
        else:
            self.requests.take_out(waiting)
        waiting.recalled_from = None
        self.requests.send(waiting, replica_id, now)
        replica, program = self.fleet.get(replica_id), waiting.program
        if replica is not None and program is not None and self._placing.lives(program):
            self._placing.settle(program, replica, waiting.size_tokens, now)
        return True

    def _failed(self, fact: facts.Failed, now: float) -> None:
        waiting = self.requests.by_id.get(fact.request_id)
        if waiting is None or not self._failures.count(waiting, fact):
            return
        replica = self.fleet.get(fact.replica_id)
        if replica is not None and replica.health is Health.UP:
            replica.health = Health.SUSPECT
            self.fleet.changed(replica, now)
            self._probe(replica, now)
        self._lost(waiting, now)

    def _lost(self, waiting: Waiting, now: float) -> None:
        """The replica that a request was sent to does not answer it."""
        self._departures.room_changed = True
        waiting.failures += 1
        if waiting.began:
            assert waiting.replica_id is not None
            self._actions.append(Cut(waiting.request_id, waiting.replica_id))
            self.counts.cut += 1
            self.requests.close(waiting, now)
        elif self._failures.are_enough(waiting):
            self._refusals.failed(waiting, now)
        else:
            self.requests.take_back(waiting, now)
            self.counts.replayed += 1
            self._departures.wait_anywhere(waiting)

    # -- replicas ---------------------------------------------------------------

    def _replica_seen(self, fact: facts.ReplicaSeen, now: float) -> None:
        known = self.fleet.get(fact.replica_id)
        if known is not None and known.instance != fact.instance:
            self._gone(known, now)
            known = None
            self.changes += 1
        was_well = known is not None and known.health is Health.UP
        unfitted = not self.fleet.longest_tokens
        if not self.fleet.seen(fact, now):
            return
        self.changes += 1
        if unfitted:
            for waiting in self.requests.everybody_who_waits():
                waiting.context_tokens = self.fleet.fitting(waiting.context_tokens)
                waiting.size_tokens = self.fleet.fitting(waiting.size_tokens)
        self._departures.room_changed = True
        self.requests.freed.add(fact.replica_id)
        replica = self.fleet.get(fact.replica_id)
        assert replica is not None
        if known is None:
            self.requests.adopt(replica, now)
            self.requests.replica_came(replica)
        elif not was_well:
            for waiting in list(self.requests.anywhere):
                if waiting.program is not None and waiting.program.home == fact.replica_id:
                    self.requests.anywhere.waits_for(waiting, 0)

    def _replica_gone(self, fact: facts.ReplicaGone, now: float) -> None:
        replica = self.fleet.get(fact.replica_id)
        if replica is not None and replica.instance == fact.instance:
            self._gone(replica, now)

    def _gone(self, replica: Replica, now: float) -> None:
        for program in self.programs:
            if program.home == replica.replica_id:
                self.homes.leave(program, now)
        for request_id in list(replica.in_flight):
            waiting = self.requests.by_id[request_id]
            waiting.lost_with = replica.replica_id
            self._lost(waiting, now)
        self._scatter(replica)
        self.fleet.gone(replica)
        self.requests.replica_gone(replica)
        self._placing.forget(replica.replica_id)

    def _replica_drains(self, fact: facts.ReplicaDrains, now: float) -> None:
        replica = self.fleet.get(fact.replica_id)
        if replica is not None:
            replica.health = Health.DRAINING
            self.fleet.changed(replica, now)
            self._scatter(replica)

    def _replica_stays(self, fact: facts.ReplicaStays, now: float) -> None:
        self.fleet.drained.pop(fact.replica_id, None)
        replica = self.fleet.get(fact.replica_id)
        if replica is None or replica.health is not Health.DRAINING:
            return
        replica.health = Health.UP if replica.probed_s is None else Health.SUSPECT
        self.fleet.changed(replica, now)
        self.fleet.newly_idle = True
        self.requests.freed.add(replica.replica_id)
        self._departures.room_changed = True

    def _scatter(self, replica: Replica) -> None:
        """Whoever waits for it waits for any."""
        for waiting in list(self.requests.queues.get(replica.replica_id, ())):
            self.requests.take_out(waiting)
            self._departures.wait_anywhere(waiting)
        self._departures.room_changed = True

    def _probe(self, replica: Replica, now: float) -> None:
        replica.probed_s = now
        self._actions.append(Probe(replica.replica_id, replica.instance))

    # -- programs ---------------------------------------------------------------

    def _program_ended(self, fact: facts.ProgramEnded, now: float) -> None:
        program = self.programs.ended((fact.tenant, fact.program_id))
        if program is not None:
            self.expected.ended(program, now)
            self.homes.leave(program, now)

    def _kv_dropped(self, fact: facts.KvDropped, now: float) -> None:
        program = self.programs.get((fact.tenant, fact.program_id))
        if program is not None and program.home == fact.replica_id and not program.in_flight:
            self.homes.leave(program, now)

    def _size(self, program: Program | None, context_tokens: int, *, anew: bool = False) -> int:
        """What a program is expected to need; judged ``anew`` after each turn, else only if outgrown."""
        fitting = self.fleet.fitting
        if program is None:
            return fitting(context_tokens)
        context_tokens = fitting(max(context_tokens, program.context_tokens))
        if context_tokens <= program.size_tokens and not anew:
            return fitting(program.size_tokens)
        most = self.fleet.longest_tokens or context_tokens
        return fitting(self.expected.size_tokens(program, context_tokens, most))

    def _ask_again(self, program: Program, now: float) -> None:
        """It has its KV somewhere since its other requests were asked about: they need no room."""
        if not program.waiting:
            return
        for waiting in self.requests.anywhere.of(program):
            self.requests.anywhere.waits_for(waiting, 0)
            self._departures.room_changed = True

    # -- as time goes by --------------------------------------------------------

    def _tick(self, fact: facts.Tick, now: float) -> None:
        limits = self.limits
        for replica in self.fleet:
            silent = now - replica.heard_s >= limits.lease_s
            if silent and (replica.probed_s is None or now - replica.probed_s >= limits.lease_s):
                replica.health = Health.SUSPECT if replica.health is Health.UP else replica.health
                self.fleet.changed(replica, now)
                self._probe(replica, now)
        for waiting in self.requests.astray_since(now - limits.lease_s):
            waiting.lost_with = waiting.replica_id
            self._lost(waiting, now)
        for waiting in self._waited_too_long(now):
            self._refusals.waited_too_long(waiting, limits.wait_s, now)
        for program in self.programs.silent_since(now - limits.silent_program_s):
            self.programs.ended(program.key)
            self.homes.leave(program, now)
            self.changes += 1
        self.tenants.share_out(now)
        # Who is late by now is seen only when the line is gone through.
        self._departures.room_changed = True

    def _waited_too_long(self, now: float) -> list[Waiting]:
        """The oldest of each row are enough: the others came later."""
        found: list[Waiting] = []
        for line in self.requests.lines():
            for row in line.rows.values():
                for waiting in row:
                    if now - waiting.since_s < self.limits.wait_s or len(found) >= MOST_ENDED:
                        break
                    found.append(waiting)
        return found
