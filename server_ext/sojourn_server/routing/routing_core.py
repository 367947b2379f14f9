"""State machine that routes the requests of one gateway. It takes an event and ``now``, and returns actions.
It has no I/O and no clock; the same code runs in a gateway and in the simulator.

A request is in one of two states: sent to a replica (or to a pair of engines), or waiting. The core moves
requests between these states, detects silent replicas, sends failed requests again, and knows programs. A
``RoutingStrategy`` chooses where a request goes and keeps the queues of waiting requests.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from itertools import islice, takewhile
from typing import Any

from msgspec.structs import replace

from ..policies.fairness_policies import RunningTaskView, SharePolicy, WaitingTenantView
from . import routing_events
from .program_estimates import ProgramEstimator
from .routing_events import (
    AbortStream,
    AnyRoutingAction,
    AnyRoutingEvent,
    KvReported,
    PairEngineRegistered,
    PairRole,
    ProbeReplica,
    RejectRequest,
    ReleaseProgramKv,
    ReplicaRegistered,
    ResidentKv,
    SendRequest,
)
from .routing_limits import (
    NO_ROOM_RETRY_S,
    QUEUE_FULL_RETRY_S,
    REPLICAS_FAILED_RETRY_S,
    PolicyCallError,
    RoutingCounters,
    RoutingLimits,
)
from .routing_records import (
    DEFAULT_MAX_RUNNING,
    Key,
    ProgramRouteStatus,
    Replica,
    ReplicaFleet,
    ReplicaHealth,
    ReplicaStatus,
    RoutedProgram,
    RoutedRequest,
)

MAX_PROGRAMS = 50_000
"""Maximum number of programs. Beyond it, the least recently active one without a request is forgotten."""
STORED_REASON = "stored_response"
"""Reason of a ``SendRequest`` to the only replica that stores the conversation."""


class RoutingStrategy:
    """Base class of strategies: what chooses replicas for the requests of one core, and keeps those that wait
    for any replica. The methods from ``changed`` on note what the core has done; by default they do
    nothing."""

    unit: str
    """What serves a request, in words."""
    sharing: SharePolicy | None
    """Divides the capacity among tenants; ``None``: tenants do not share capacity."""

    def attach(self, core: RoutingCore) -> None:
        """Use this core from now on."""
        raise NotImplementedError

    def longest_tokens(self) -> int:
        """Return the longest context, in tokens, that can be served; 0: unknown."""
        raise NotImplementedError

    def choose(self, request: RoutedRequest, now: float) -> SendRequest | None:
        """Choose where a new request goes (see ``RoutingCore.place``); ``None``: it has to wait. Raises
        ``PolicyCallError`` if a policy fails."""
        raise NotImplementedError

    def enqueue(self, request: RoutedRequest) -> None:
        """Add a request to the queue for any replica. ``dispatch`` places it later."""
        raise NotImplementedError

    def dequeue(self, request: RoutedRequest) -> None:
        """Remove a request from the queue for any replica. No effect if it is not there."""
        raise NotImplementedError

    def dispatch(self, now: float, *, epoch: bool) -> None:
        """Place the waiting requests that can be served now. ``epoch``: whether the event is a ``Tick``."""
        raise NotImplementedError

    def changed(self, request: RoutedRequest, now: float, *, frees: bool) -> None:
        """A request arrived or was sent. With ``frees``: it is no longer at its replica, or it has ended."""

    def prefilled(self, request: RoutedRequest, *, computed: bool) -> None:
        """A prefill engine has nothing left to do for a request. ``computed``: whether it computed the
        prompt. Only pairs have this event."""

    def answered_at_home(self, program: RoutedProgram) -> None:
        """A turn of a program was answered at its home, which has its KV now."""

    def homed(self, program: RoutedProgram, tokens: int) -> None:
        """A program got ``tokens`` more at its home; negative: fewer."""

    def registered(self, replica: Replica, now: float, *, was: ReplicaHealth | None) -> None:
        """A replica is new or has other sizes, or reports again. ``was``: its health before; ``None``:
        unknown."""

    def health_changed(self, replica: Replica, now: float) -> None:
        """A replica drains or is suspect, or no longer drains."""

    def lost(self, replica: Replica, now: float) -> None:
        """A replica was removed from the fleet."""

    def kv_lost(self, program: RoutedProgram, replica: Replica) -> None:
        """A program has lost its home, because the replica has lost its KV."""

    def kv_reported(self, event: KvReported, replica: Replica, now: float) -> None:
        """A replica has reported its programs with KV and those that wait, and homes are up to date."""

    def nic_queue_reported(self, event: routing_events.NicQueueReported, now: float) -> None:
        """A node reports the queue of its storage NIC."""


class RoutingCore:
    """Routes the requests of one gateway. Not thread-safe. ``limits``: ``None`` for the defaults.
    ``estimator`` estimates the sizes and turns of programs; ``None``: a new one."""

    def __init__(
        self,
        strategy: RoutingStrategy,
        limits: RoutingLimits | None = None,
        estimator: ProgramEstimator | None = None,
    ) -> None:
        self.limits = limits or RoutingLimits()
        self.estimator = estimator or ProgramEstimator()
        self.counts = RoutingCounters()
        self.fleet = ReplicaFleet(self.limits.send_below_load)
        self.programs: OrderedDict[Key, RoutedProgram] = OrderedDict()
        """Programs that have not ended, the least recently active first."""
        self.requests: dict[str, RoutedRequest] = {}
        """All requests in progress, by id."""
        self.waiting: dict[str, RoutedRequest] = {}
        """The requests that have not been sent, by id, the longest waiting first."""
        self.actions: list[AnyRoutingAction] = []
        """Actions of the present event."""
        self._number = 0
        """Number of requests so far."""
        self._left: list[RoutedProgram] = []
        """Programs whose last request has ended, and which have ended or were never answered."""
        self.strategy = strategy
        self.tenants = TenantShares(strategy.sharing, self) if strategy.sharing is not None else None
        strategy.attach(self)
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            routing_events.RequestReceived: self._received,
            routing_events.FirstByteSent: self._began,
            routing_events.PrefillFinished: self._prefilled,
            routing_events.RequestFinished: self._ended,
            routing_events.RequestFailed: self._failed,
            ReplicaRegistered: self._registered,
            PairEngineRegistered: self._registered,
            KvReported: self._kv_reported,
            routing_events.NicQueueReported: strategy.nic_queue_reported,
            routing_events.ReplicaGone: self._replica_gone,
            routing_events.ReplicaDrainStarted: self._drain_started,
            routing_events.ReplicaDrainCancelled: self._drain_cancelled,
            routing_events.ProgramEnded: self._program_ended,
            routing_events.Tick: self._tick,
        }

    def take(self, event: AnyRoutingEvent, now: float) -> list[AnyRoutingAction]:
        """Process an event; return the actions that it causes, in order."""
        self._handlers[type(event)](event, now)
        if self._left:
            for program in self._left:
                if program.is_idle and (program.is_over or not program.turns) and self.knows(program):
                    if not program.is_partial:
                        self.estimator.ended(program, program.last_s)
                    self._forget(program)
            self._left.clear()
        self.strategy.dispatch(now, epoch=isinstance(event, routing_events.Tick))
        actions, self.actions = self.actions, []
        return actions

    # -- queries ------------------------------------------------------------------

    def home(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the replica that is a program's home; ``None``: there is none."""
        program = self.programs.get((tenant, program_id))
        return program.home if program is not None and not program.is_over else None

    def last_engines(self, tenant: str, program_id: str) -> tuple[str | None, str | None]:
        """Return the ids of a program's home, or of its last home if it has none, and of the decode engine of
        its last answer. ``None``: there was none, or the program is unknown."""
        program = self.programs.get((tenant, program_id))
        if program is None or program.is_over:
            return None, None
        return program.home or program.former_home, program.decoded_by

    def program_statuses(self) -> list[ProgramRouteStatus]:
        """Return the statuses of all known programs, most recently active first."""
        return [program.status() for program in self.programs.values()][::-1]

    def shares_used(self) -> dict[str, float]:
        """Return used ÷ share of the capacity, by tenant. Empty if tenants do not share capacity."""
        shares = self.tenants
        if shares is None:
            return {}
        return {name: shares.used(name) / share for name, share in shares.shares.items() if share > 0}

    def replica_statuses(self) -> list[ReplicaStatus]:
        """Return the statuses of all known replicas, in the order of registration."""
        return [replica.status() for replica in self.fleet.values()]

    # -- requests: new --------------------------------------------------------------

    def _received(self, event: routing_events.RequestReceived, now: float) -> None:
        """Check a new request. Reject it, or place or queue it."""
        request_id, longest = event.request_id, self.strategy.longest_tokens() if event.exact else 0
        if request_id in self.requests:
            self.reject(request_id, 409, "duplicate_request", "a request with this id is in progress")
        elif longest and event.context_tokens > longest:
            message = f"the prompt has {event.context_tokens:,} tokens; the longest served has {longest:,}"
            self.reject(request_id, 400, "context_too_long", message)
        elif len(self.waiting) >= self.limits.most_waiting and (
            self.tenants is None or self.tenants.rejects_excess(event.tenant)
        ):
            message = f"{len(self.waiting)} requests are waiting already; try again later"
            self.reject(request_id, 429, "too_many_waiting", message, QUEUE_FULL_RETRY_S)
        else:
            request = self._add_request(event, now)
            try:
                only, choose = request.only_replica_id, self.strategy.choose
                send = SendRequest(request_id, only, STORED_REASON) if only else choose(request, now)
                if send is None:
                    self.strategy.enqueue(request)
                else:
                    self.place(request, send, now)
            except PolicyCallError as error:
                # No later event handles this request, so it has to be answered now.
                self.reject_unrouted(request, error, now)

    def _add_request(self, event: routing_events.RequestReceived, now: float) -> RoutedRequest:
        program = None
        if event.program_id is not None:
            key = (event.tenant, event.program_id)
            program = self.programs.get(key)
            parent = (event.tenant, event.parent_id) if event.parent_id else None
            if program is None:
                program = RoutedProgram(key, event.agent_type, parent, now, now)
                self.add_program(program)
            else:
                program.last_s = now
                self.programs.move_to_end(key)
            if program.is_reported:
                program.is_reported, program.agent_type, program.parent = False, event.agent_type, parent
            program.is_over, program.task = False, None  # the program goes on
            if event.deadline_s is not None:
                program.deadline_s = event.deadline_s
            program.waiting += 1
        context_tokens = self.fleet.fitting(event.context_tokens)
        request = RoutedRequest(
            event.request_id,
            self._number,
            event.tenant,
            program,
            context_tokens,
            self._size(program, context_tokens + event.output_tokens),
            now,
            now,
            output_tokens=event.output_tokens,
            prefix=event.prefix,
            only_replica_id=event.only_replica_id if event.only_replica_id in self.fleet else None,
            lane=event.tenant if self.tenants is not None else "",
        )
        self._number += 1
        self.requests[request.request_id] = self.waiting[request.request_id] = request
        self.strategy.changed(request, now, frees=False)
        return request

    def _size(self, program: RoutedProgram | None, context_tokens: int, *, anew: bool = False) -> int:
        """Return the longest context, in tokens, that a program is expected to reach. If ``program`` is
        ``None``, return ``context_tokens``. ``anew``: whether to compute a new estimate. If not, the last
        estimate is used until the program's context exceeds it. The result is at most the longest context
        that a replica can compute."""
        if program is None:
            return self.fleet.fitting(context_tokens)
        context_tokens = max(context_tokens, program.context_tokens)
        most = self.fleet.longest_tokens or context_tokens
        context_tokens = min(context_tokens, most)
        if context_tokens <= program.size_tokens and not anew:
            return self.fleet.fitting(program.size_tokens)
        return self.fleet.fitting(self.estimator.size_tokens(program, context_tokens, most))

    # -- requests: sent and not sent --------------------------------------------------

    def place(self, request: RoutedRequest, send: SendRequest, now: float) -> None:
        """Send a waiting request, which is in no queue, or let it wait for its replica if that is full. The
        replica, of a pair the prefill engine, becomes the home of the request's program. ``send``: the
        action, whose fields about the move and the peer are still empty."""
        replica, home = self.fleet[send.replica_id], self.fleet[send.home_id]
        moved_from, left_because = self._settle(request, home)
        peer = replica.seen.peer if isinstance(replica.seen, PairEngineRegistered) and send.prefill_id else ""
        request.placed = replace(send, moved_from=moved_from, left_because=left_because, peer=peer)
        if replica.is_full and not send.prefill_id:
            self.enqueue_at(request, replica)
        else:
            self.send(request, now)

    def enqueue_at(self, request: RoutedRequest, replica: Replica) -> None:
        """Add a request, which is in no queue, to the queue for one replica."""
        request.replica_id, request.queue_key = replica.replica_id, (request.number,)
        replica.queue.add(request)
        replica.known_view = None

    def dequeue(self, request: RoutedRequest) -> None:
        """Remove a waiting request from its queue. No effect if it is in no queue."""
        if request.replica_id is None:
            self.strategy.dequeue(request)
        elif (replica := self.fleet.get(request.replica_id)) is not None and replica.queue.remove(request):
            replica.known_view = None
        request.replica_id = None

    def _settle(self, request: RoutedRequest, replica: Replica) -> tuple[str | None, str]:
        """Make a replica the home of a request's program. Returns the former home and why the program had to
        leave it (``SendRequest``)."""
        program = request.program
        if program is None or not self.knows(program):
            return None, ""
        if program.home == replica.replica_id:  # the usual turn
            if request.size_tokens != program.size_tokens or program.waiting > 1:
                self.resize(program, request.size_tokens)
            return None, ""
        at, because = self.fleet.get(program.home), ""
        if at is not None and at.health is ReplicaHealth.DRAINING:
            because = "drain"
        elif at is not None and (at.replica_id, at.instance) in request.failed_at:
            because = "failed"
        moved_from = self.set_home(program, replica, request.size_tokens)
        return moved_from, because if moved_from is not None else ""

    def send(self, request: RoutedRequest, now: float, *, is_there: bool = False) -> None:
        """Send a waiting request, which is in no queue, as it was placed. Its program's home stays.
        ``is_there``: the replica has the request already, so no action is needed."""
        sent = request.sent = request.placed
        assert sent is not None
        del self.waiting[request.request_id]
        request.replica_id, request.sent_s = sent.replica_id, now
        if sent.prefill_id:
            request.prefill_id, request.prefilled = sent.prefill_id, False
        for one in (self.fleet.get(sent.replica_id), self.fleet.get(sent.prefill_id)):
            if one is not None:
                one.in_flight[request.request_id] = request
                self.fleet.changed(one, now)
        if request.program is not None:
            request.program.waiting -= 1
            request.program.in_flight += 1
        if self.tenants is not None:
            self.tenants.in_flight_tokens[request.tenant] += request.context_tokens
        self.strategy.changed(request, now, frees=False)
        if not is_there:
            self.counts.routes[sent.reason] += 1
            self.actions.append(sent)

    def unsend(self, request: RoutedRequest, now: float) -> None:
        """Record that a sent request is no longer at its replica. Afterwards it waits, and is in no queue."""
        self._take_from(request.replica_id, request, now)
        if request.prefill_id is not None:
            self._take_from(request.prefill_id, request, now)
        self.waiting[request.request_id] = request
        if request.program is not None:
            request.program.in_flight -= 1
            request.program.waiting += 1
        if self.tenants is not None:
            self.tenants.in_flight_tokens[request.tenant] -= request.context_tokens
        self.strategy.changed(request, now, frees=True)
        request.replica_id = request.prefill_id = request.sent = None
        request.began, request.prefilled, request.needs_tokens = False, True, 0
        request.waiting_since_s = now

    def _take_from(self, replica_id: str | None, request: RoutedRequest, now: float) -> None:
        """Stop counting a request as in flight at a replica. No effect if it is not."""
        replica = self.fleet.get(replica_id)
        if replica is not None and replica.in_flight.pop(request.request_id, None) is not None:
            self.fleet.changed(replica, now)

    def recall(self, request: RoutedRequest, now: float) -> None:
        """Take a sent request back from its replica. Afterwards it waits, and is in no queue."""
        assert request.replica_id is not None
        replica_id = request.replica_id
        self.actions.append(routing_events.RecallRequest(request.request_id, replica_id))
        self.unsend(request, now)
        request.recalled, request.recalled_from = True, replica_id

    def close(self, request: RoutedRequest, now: float) -> None:
        """Remove a request, wherever it is."""
        if request.sent is not None:
            self.unsend(request, now)
        else:
            self.dequeue(request)
        del self.requests[request.request_id], self.waiting[request.request_id]
        program = request.program
        if program is not None:
            program.waiting -= 1
            if program.is_idle and (program.is_over or not program.turns):
                self._left.append(program)
        self.strategy.changed(request, now, frees=True)

    def _began(self, event: routing_events.FirstByteSent, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and self._is_at(request, event.replica_id, now):
            request.began, request.recalled_from = True, None

    def _prefilled(self, event: routing_events.PrefillFinished, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None or request.prefilled or request.prefill_id != event.replica_id:
            return
        request.prefilled = True
        self._take_from(event.replica_id, request, now)
        program = request.program
        if program is not None and program.home == event.replica_id:
            program.cached |= event.computed
            if not program.cached and program.in_flight == 1:  # else another request's prompt may be computed
                self.leave_home(program)
        self.strategy.prefilled(request, computed=event.computed)

    def _is_at(self, request: RoutedRequest, replica_id: str, now: float) -> bool:
        """Whether a request is at the replica that has just reported an event about it.

        If the request was recalled from this replica, the event shows that the gateway ignored the recall,
        because the answer had begun. Then the request is recorded again as sent to this replica, and the
        result is True."""
        if request.sent is not None and request.replica_id == replica_id:
            return True
        replica = self.fleet.get(replica_id)
        if request.recalled_from != replica_id or replica is None:
            return False
        if request.sent is not None:
            self.unsend(request, now)
        else:
            self.dequeue(request)
        request.recalled_from = None
        if request.program is not None and self.knows(request.program):
            self.set_home(request.program, replica, request.size_tokens)
        assert request.placed is not None
        request.placed = replace(request.placed, replica_id=replica_id)
        self.send(request, now, is_there=True)
        return True

    # -- requests: over ---------------------------------------------------------------

    def _ended(self, event: routing_events.RequestFinished, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if event.replica_id is not None and not self._is_at(request, event.replica_id, now):
            return  # the end of an earlier attempt
        sent, sent_s, program = request.sent, request.sent_s, request.program
        self.close(request, now)
        if program is None or not self.knows(program):
            return
        program.last_s = now
        self.programs.move_to_end(program.key)
        if sent is None or not event.answered:
            return
        if sent.prefill_id:
            if event.replica_id is None:
                return  # an answer that its client gave up has stored nothing
            program.decoded_by = sent.replica_id
            # The context shrinks if the client truncated it.
            program.context_tokens = (event.prompt_tokens or request.context_tokens) + event.output_tokens
        else:
            prompt_tokens = max(event.prompt_tokens, request.context_tokens)
            program.context_tokens = max(program.context_tokens, prompt_tokens + event.output_tokens)
            program.cached |= program.home == sent.replica_id
        program.turns += 1
        at_home = program.home == sent.home_id
        if self.tenants is not None:
            self.estimator.observe_turn(program, now - sent_s)
        if at_home:
            self.strategy.answered_at_home(program)
            self.resize(program, self._size(program, program.context_tokens, anew=True))

    def _failed(self, event: routing_events.RequestFailed, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if not request.is_at(event.replica_id):
            # The request is waiting, or was sent elsewhere meanwhile. If the replica that the event names is
            # gone, the event says whether that replica had accepted the request.
            if event.computing and request.lost_with == event.replica_id:
                request.lost_with = None
                request.failures_computing += 1
            return
        request.failures_computing += event.computing
        replica = self.fleet.get(event.replica_id)
        if replica is not None:
            if not request.prefill_id:  # of a pair it is unknown which of both failed
                request.failed_at.add((replica.replica_id, replica.instance))
            if replica.health is ReplicaHealth.UP:
                self._suspect(replica, now)
        self._retry(request, now)

    def _retry(self, request: RoutedRequest, now: float) -> None:
        """Process a request that its replica did not answer, or answered only in part. If the answer has
        begun, abort its stream. If it failed too often or no other may serve it, reject it; else queue it."""
        request.failures += 1
        limits = self.limits
        if request.began:
            assert request.replica_id is not None
            self.actions.append(AbortStream(request.request_id, request.replica_id))
            self.close(request, now)
        elif (
            request.failures >= limits.most_failures
            or request.only_replica_id is not None
            or request.failures_computing >= limits.most_failures_computing
        ):
            self.give_up(request, now)
        else:
            self.unsend(request, now)
            self.strategy.enqueue(request)

    def give_up(self, request: RoutedRequest, now: float) -> None:
        """Reject a request that has failed too often, or has no replica left to try."""
        self.close(request, now)
        times, unit = request.failures, self.strategy.unit
        if request.only_replica_id is not None:
            why = f"the {unit} that stores its conversation did not answer"
        elif request.failures_computing >= self.limits.most_failures_computing:
            why = f"it was accepted by a {unit} {request.failures_computing} times and not answered"
        else:
            why = f"it was sent to a {unit} {times} time{'s' * (times > 1)} and not answered"
        self.reject(request.request_id, 502, "replicas_failed", why, REPLICAS_FAILED_RETRY_S)

    def reject(
        self, request_id: str, status: int, code: str, message: str, retry_after_s: float | None = None
    ) -> None:
        """Reject a request that is not, or no longer, in progress."""
        self.actions.append(RejectRequest(request_id, status, code, message, retry_after_s))

    def reject_unrouted(self, request: RoutedRequest, error: PolicyCallError, now: float) -> None:
        """Reject a request for which a policy failed. Another attempt would fail again, and block others."""
        self.counts.policy_failed(error)
        self.close(request, now)
        message = "the routing policy failed; see the gateway's log"
        self.reject(request.request_id, 500, "policy_failed", message)

    # -- programs and their homes -------------------------------------------------------

    def add_program(self, program: RoutedProgram) -> None:
        """Add a program. The program that was idle for longest makes room if there are too many."""
        self.programs[program.key] = program
        if len(self.programs) > MAX_PROGRAMS:
            idle = (one for one in self.programs.values() if one.is_idle and one is not program)
            if (oldest := next(idle, None)) is not None:
                self._forget(oldest)

    def knows(self, program: RoutedProgram) -> bool:
        """Whether a record is that of a known program. A forgotten program may still have open requests."""
        return self.programs.get(program.key) is program

    def set_home(self, program: RoutedProgram, replica: Replica, size_tokens: int) -> str | None:
        """Make a replica a program's home, and count ``size_tokens`` there for the program. Returns the id
        of the former home; ``None``: the program did not move. If it moves and has no request in flight,
        its former home may drop its KV (``ReleaseProgramKv``)."""
        before = program.home
        if before == replica.replica_id:
            self.resize(program, size_tokens)
            return None
        self.leave_home(program)
        program.home, program.size_tokens = replica.replica_id, size_tokens
        replica.add_homed(program, size_tokens)
        self._homed(program, size_tokens)
        if before is not None:
            program.moves += 1
            program.moved_at_turn = program.turns
            if not program.in_flight:
                self.actions.append(ReleaseProgramKv(program.key[1], before, program.tenant))
        return before

    def leave_home(self, program: RoutedProgram) -> None:
        """Remove a program's home. Its KV counts as lost. No effect without a home."""
        replica = self.fleet.get(program.home)
        size_tokens = program.size_tokens
        if replica is not None:
            replica.remove_homed(program)
        program.former_home = program.home or program.former_home
        program.home, program.cached, program.size_tokens = None, False, 0
        if replica is not None:
            self._homed(program, -size_tokens)

    def resize(self, program: RoutedProgram, size_tokens: int) -> None:
        """Change the number of tokens that are counted for a program at its home."""
        replica, more = self.fleet.get(program.home), size_tokens - program.size_tokens
        program.size_tokens = size_tokens
        if replica is not None and (more or program.waiting):  # ``homed`` looks at its waiting requests
            replica.add_homed(program, more)
            self._homed(program, more)

    def _homed(self, program: RoutedProgram, tokens: int) -> None:
        if self.tenants is not None:
            self.tenants.homed_tokens[program.tenant] += tokens
        self.strategy.homed(program, tokens)

    def _program_ended(self, event: routing_events.ProgramEnded, now: float) -> None:
        program = self.programs.get((event.tenant, event.program_id))
        if program is None:
            return
        program.is_over = True
        program.last_s = now
        if program.is_idle:
            self._left.append(program)

    def _forget(self, program: RoutedProgram) -> None:
        """Remove a program, which has no request."""
        del self.programs[program.key]
        self.leave_home(program)

    def _kv_reported(self, event: KvReported, now: float) -> None:
        """Process a replica's report of its load and of the programs whose KV it has."""
        replica = self.fleet.get(event.replica_id)
        if replica is None or replica.instance != event.instance:
            return
        # A request may end while the report is under way, so only what two reports show is from elsewhere.
        before = replica.reported_others
        requests, tokens = replica.reported_others = (
            max(0, event.requests - len(replica.in_flight)),
            max(0, event.request_tokens - sum(one.context_tokens for one in replica.in_flight.values())),
        )
        others = min(before[0], requests), min(before[1], tokens)
        if others != (replica.other_requests, replica.other_tokens):
            replica.other_requests, replica.other_tokens = others
            self.fleet.changed(replica, now)
        if replica.seen.role is not PairRole.DECODE:  # no program has its home there
            self._update_homes(event, replica, now)
        self.strategy.kv_reported(event, replica, now)

    def _update_homes(self, event: KvReported, replica: Replica, now: float) -> None:
        """Programs whose KV the replica has lost lose their home, and go to any replica. Programs that this
        gateway does not know, as after a restart, get their home here."""
        resident = {(one.tenant, one.program_id): one for one in event.programs}
        written_s = now - event.age_s
        for program in list(replica.programs.values()) if event.complete else ():
            one = resident.get(program.key)
            is_there = one is not None and 2 * one.tokens >= one.context_tokens
            if is_there or program.in_flight or program.last_s > written_s:
                continue
            self.leave_home(program)
            self.strategy.kv_lost(program, replica)
            if program.is_reported and program.is_idle:
                del self.programs[program.key]
        for one in event.programs:
            if 2 * one.tokens >= one.context_tokens:
                self._found(one, replica, now)

    def _found(self, one: ResidentKv, replica: Replica, now: float) -> None:
        """Process a report that a replica has the KV of a program. The program gets its home there if it has
        none. A program that is known only from reports is where it was last active."""
        key, last_s = (one.tenant, one.program_id), now - one.idle_s
        program = self.programs.get(key)
        if program is None:
            program = RoutedProgram(key, None, None, last_s, last_s, turns=1)
            program.is_reported = program.is_partial = True
            self.add_program(program)
        moves = program.is_reported and last_s > program.last_s and program.home != replica.replica_id
        if program.is_idle and not program.is_over and (program.home is None or moves):
            self.leave_home(program)
            program.context_tokens = max(program.context_tokens, one.context_tokens)
            program.last_s = max(program.last_s, last_s)
            self.set_home(program, replica, program.context_tokens)
            program.cached = True
        if one.steps_left is not None and program.home == replica.replica_id:
            program.pending_steps, program.pending_at_turn = one.steps_left, program.turns
            program.task = None

    # -- replicas -----------------------------------------------------------------------

    def _registered(self, event: ReplicaRegistered, now: float) -> None:
        known = self.fleet.get(event.replica_id)
        if known is not None and (known.instance, known.seen.role) != (event.instance, event.role):
            self._lose(known, now)
            known = None
        was = known.health if known is not None else None
        was_unlimited = not self.fleet.longest_tokens
        if not self.fleet.register(event, now):
            return
        if was_unlimited:
            for request in self.waiting.values():
                request.context_tokens = self.fleet.fitting(request.context_tokens)
                request.size_tokens = self.fleet.fitting(request.size_tokens)
        replica = self.fleet.get(event.replica_id)
        assert replica is not None
        self.strategy.registered(replica, now, was=was)

    def _replica_gone(self, event: routing_events.ReplicaGone, now: float) -> None:
        replica = self.fleet.get(event.replica_id)
        if replica is not None and replica.instance == event.instance:
            self._lose(replica, now)

    def _lose(self, replica: Replica, now: float) -> None:
        """Remove a replica. Its requests are routed again, or aborted if the client has the first byte."""
        self.fleet.remove(replica)
        for program in list(replica.programs.values()):
            replica.remove_homed(program)
            size_tokens, program.size_tokens = program.size_tokens, 0
            program.home, program.cached = None, False
            self._homed(program, -size_tokens)
        self.strategy.lost(replica, now)
        for request in [one for one in self.waiting.values() if one.only_replica_id == replica.replica_id]:
            self.give_up(request, now)
        for request in list(replica.in_flight.values()):
            request.lost_with = replica.replica_id
            self._retry(request, now)

    def _drain_started(self, event: routing_events.ReplicaDrainStarted, now: float) -> None:
        replica = self.fleet.get(event.replica_id)
        if replica is not None and replica.health is not ReplicaHealth.DRAINING:
            replica.health = ReplicaHealth.DRAINING
            self.fleet.changed(replica, now)
            self.strategy.health_changed(replica, now)

    def _drain_cancelled(self, event: routing_events.ReplicaDrainCancelled, now: float) -> None:
        self.fleet.drained.pop(event.replica_id, None)
        replica = self.fleet.get(event.replica_id)
        if replica is None or replica.health is not ReplicaHealth.DRAINING:
            return
        replica.health = ReplicaHealth.UP if replica.probed_s is None else ReplicaHealth.SUSPECT
        self.fleet.changed(replica, now)
        self.fleet.newly_idle = True
        self.strategy.health_changed(replica, now)

    def _suspect(self, replica: Replica, now: float) -> None:
        """Mark a silent or failed replica as suspect, and have it probed. A suspect replica gets no new
        programs."""
        if replica.health is ReplicaHealth.UP:
            replica.health = ReplicaHealth.SUSPECT
        self.fleet.changed(replica, now)
        replica.probed_s = now
        self.actions.append(ProbeReplica(replica.replica_id, replica.instance))
        self.strategy.health_changed(replica, now)

    # -- time -----------------------------------------------------------------------------

    def _tick(self, event: routing_events.Tick, now: float) -> None:
        """Suspect and probe each replica that has been silent for ``lease_s``. Reject requests that waited
        too long. Forget programs that were silent too long."""
        lease_s = self.limits.lease_s
        for replica in self.fleet.values():
            silent = now - replica.heard_s >= lease_s
            if silent and (replica.probed_s is None or now - replica.probed_s >= lease_s):
                self._suspect(replica, now)
        wait_s = self.limits.wait_s
        for request in list(
            takewhile(lambda one: now - one.waiting_since_s >= wait_s, self.waiting.values())
        ):
            self.close(request, now)
            message = f"the request waited {wait_s:g} s; no {self.strategy.unit} had free KV capacity"
            self.reject(request.request_id, 503, "no_room", message, NO_ROOM_RETRY_S)
        silent_s = now - self.limits.silent_program_s
        for program in list(takewhile(lambda one: one.last_s < silent_s, self.programs.values())):
            if program.is_idle:
                self._forget(program)
        if self.tenants is not None:
            self.tenants.update(now)


class TenantShares:
    """Used capacity and share of capacity of each tenant, and the order in which they are served (SAGA §6).

    A program without a stated deadline is due after ``RoutingLimits.slo_factor`` times the mean duration
    of its agent type. A stated deadline that is earlier than ``now`` plus the work left counts as ``now``
    plus the work left. Only the oldest of a tenant's programs count: as many as all replicas together run
    at once.
    """

    def __init__(self, policy: SharePolicy, core: RoutingCore) -> None:
        self._policy = policy
        self._core = core
        self._fleet = core.fleet
        self.in_flight_tokens: Counter[str] = Counter()
        """Total context length of requests in flight, by tenant."""
        self.homed_tokens: Counter[str] = Counter()
        """Total expected size of programs with a home, by tenant."""
        self.shares: Mapping[str, float] = {}
        """Fraction of all capacity that each tenant may use, as last computed; empty: not computed yet."""
        self._due_s = -math.inf
        """Time of the next computation of the shares."""

    def used(self, tenant: str, *, room: bool = False) -> float:
        """Return the fraction of all devices' KV capacity that a tenant's requests in flight use.

        With ``room``, return the larger of this and a second fraction: expected size of the tenant's programs
        with a home ÷ KV capacity of device and host memory."""
        fleet = self._fleet
        used = self.in_flight_tokens[tenant] / fleet.capacity_tokens if fleet.capacity_tokens else 0.0
        if room and fleet.memory_tokens:
            used = max(used, self.homed_tokens[tenant] / fleet.memory_tokens)
        return used

    def rejects_excess(self, tenant: str) -> bool:
        """Whether a new request is rejected while ``RoutingLimits.most_waiting`` requests wait: with as many
        as its share of them, or if twice as many wait."""
        waiting, most = self._core.waiting, self._core.limits.most_waiting
        tenants = [one.tenant for one in waiting.values()]
        return len(waiting) >= 2 * most or tenants.count(tenant) >= most / len({*tenants, tenant})

    # -- shares -----------------------------------------------------------------

    def update(self, now: float) -> None:
        """Compute the tenants' shares from the work left in their programs, once per ``SharePolicy.epoch_s``
        seconds. If the policy fails, the error is counted and the shares stay unchanged."""
        epoch_s = self._policy.epoch_s
        if 0 < self._due_s - now <= epoch_s:
            return  # not due yet; a due time beyond one epoch means that the clock stepped back
        self._due_s = now + epoch_s
        # A tenant whose requests have no program has unknown work, so it gets the least share.
        working: dict[str, dict[Key, RoutedProgram]] = {}
        for request in self._core.requests.values():
            programs = working.setdefault(request.tenant, {})
            if request.program is not None:
                programs[request.program.key] = request.program
        views = {tenant: self._tasks(programs, now) for tenant, programs in working.items()}
        try:
            self.shares = dict(self._policy.shares(views, now))
        except Exception as error:
            self._core.counts.policy_failed(error)

    def _tasks(self, programs: Mapping[Key, RoutedProgram], now: float) -> list[RunningTaskView]:
        """Return the tenant's programs that count for its share, each with its work and deadline."""
        tasks = []
        for program in islice(programs.values(), self._fleet.max_running or DEFAULT_MAX_RUNNING):
            task = program.task
            if task is None:
                work_s = self._core.estimator.work_s(program)
                life_s = self._core.estimator.life_s(program)
                usual_s = self._core.limits.usual_life_s if life_s is None else life_s
                due_s = program.began_s + self._core.limits.slo_factor * usual_s
                deadline_s = due_s if program.deadline_s is None else program.deadline_s
                task = program.task = RunningTaskView(work_s, deadline_s)
            if program.deadline_s is not None and task.deadline_s < now + task.work_s:
                task = RunningTaskView(task.work_s, now + task.work_s)
            tasks.append(task)
        return tasks

    def order(self, firsts: Iterable[RoutedRequest], *, room: bool) -> list[str]:
        """Return the tenants of waiting requests, the oldest of each tenant, in the order in which tenants
        are served. If the policy fails, this is the order of arrival. ``room``: True if the requests wait
        for KV capacity, False if they wait for a full replica."""
        waiting = [
            WaitingTenantView(one.tenant, self.used(one.tenant, room=room), one.since_s) for one in firsts
        ]
        if len(waiting) == 1:
            return [waiting[0].tenant]
        try:
            return self._policy.order(waiting, self.shares)
        except Exception as error:
            self._core.counts.policy_failed(error)
            return [one.tenant for one in sorted(waiting, key=lambda one: (one.since_s, one.tenant))]
