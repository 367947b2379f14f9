"""Strategy that sends each request to a prefill and a decode engine (DualPath §6.1).

``policies.prefill_decode`` chooses engines by their load. Any engine can read a turn's KV from storage, up to
``RoutedProgram.context_tokens``. The prefill engine that computed a program's last prompt is the program's
home: it has that KV already, knows the program and gets its events. If several tenants wait, their requests
line up by the tenants' shares of capacity (SAGA §6), else by arrival.
"""

from __future__ import annotations

import math
from itertools import chain, zip_longest

from ..policies.fairness_policies import AgentFairShare
from ..policies.prefill_decode.engine_pair_scheduler import (
    FULL_BLOCK_TOKENS,
    DecodeEngine,
    PairScheduler,
    PdRequest,
    PrefillEngine,
)
from . import routing_events
from .routing_core import RoutingCore, RoutingStrategy
from .routing_events import PairEngineRegistered, PairRole, SendRequest
from .routing_records import Replica, ReplicaHealth, RoutedProgram, RoutedRequest, WaitingQueue


class PairStrategy(RoutingStrategy):
    """Lets the pair scheduler ``pairs`` choose the engines. While there are none of a role, requests wait."""

    unit = "pair of engines"
    sharing = AgentFairShare()

    def __init__(self, pairs: PairScheduler) -> None:
        self.pairs = pairs
        self._sizes_changed = False
        """True if, since the last ``dispatch``, an engine started or stopped accepting requests, or a waiting
        request's program lost its home."""
        self._may_send = False
        """True if a request arrived or capacity was freed since the last ``dispatch``."""
        self._order_changed = False
        """True if tenants may take turns in another order than at the last ``dispatch``."""

    def attach(self, core: RoutingCore) -> None:
        self._core = core
        self._queue = WaitingQueue()

    # -- queries --------------------------------------------------------------------

    def longest_tokens(self) -> int:
        """Return the longest context that both roles can hold."""
        return min((tokens for role in PairRole if (tokens := self._longest(role))), default=0)

    def _longest(self, role: PairRole) -> int:
        """Return the longest context that an engine of a role can hold; 0: there is none."""
        seen = [one.seen for one in self._core.fleet.values() if one.seen.role is role]
        return max((one.max_context_tokens or one.capacity_tokens for one in seen), default=0)

    # -- requests -------------------------------------------------------------------

    def choose(self, request: RoutedRequest, now: float) -> SendRequest | None:
        return None

    def enqueue(self, request: RoutedRequest) -> None:
        """Queue a request at the pair scheduler. Its sizes are cut to the largest context that a decode
        engine can hold, since they are estimates and the client may state any output length. A request
        that really is too long is rejected by its engine."""
        tokens = max(1, request.context_tokens)
        kv_tokens = tokens + request.output_tokens
        limits = self.pairs.largest_kv_tokens(), self._longest(PairRole.DECODE)
        if decode_tokens := min((limit for limit in limits if limit), default=0):
            tokens, kv_tokens = min(tokens, decode_tokens), min(kv_tokens, decode_tokens)
        program = request.program
        # The last token of a prompt is always computed.
        stored = min(program.context_tokens if program is not None else 0, tokens - 1)
        home = program.home if program is not None and program.cached else None
        hit_blocks = stored // FULL_BLOCK_TOKENS
        self.pairs.submit(PdRequest(request.request_id, tokens, hit_blocks, kv_tokens, home, stored))
        request.queue_key = (request.number,)
        self._may_send = True
        self._order_changed |= request.lane not in self._queue.lanes
        self._queue.add(request)

    def dequeue(self, request: RoutedRequest) -> None:
        if self._queue.remove(request):
            self._end(request)

    def _end(self, request: RoutedRequest) -> None:
        if request.request_id in self.pairs.in_flight:  # else a decode engine alone serves it
            self._may_send = self._order_changed = True
            self.pairs.end(request.request_id)

    def changed(self, request: RoutedRequest, now: float, *, frees: bool) -> None:
        if frees:
            self._end(request)

    def prefilled(self, request: RoutedRequest, *, computed: bool) -> None:
        self._may_send = self._order_changed = True
        self.pairs.prefilled(request.request_id, computed=computed)

    def kv_lost(self, program: RoutedProgram, replica: Replica) -> None:
        self._sizes_changed |= program.waiting > 0

    def dispatch(self, now: float, *, epoch: bool) -> None:
        if self._sizes_changed:
            self._sizes_changed, self._may_send = False, True
            # All waiting requests line up again, with sizes that the present engines can hold.
            waiting = sorted(self._core.waiting.values(), key=lambda request: request.number)
            for request in waiting:
                self.dequeue(request)
            for request in waiting:
                self.enqueue(request)
        if not self._may_send and not epoch:
            return
        lanes = self._queue.lanes
        if (self._order_changed or epoch) and len(lanes) > 1:  # an epoch may change the tenants' shares
            assert self._core.tenants is not None
            tenants = self._core.tenants.order(map(self._queue.first, lanes), room=False)
            turns = zip_longest(*(lanes[tenant] for tenant in tenants))
            self.pairs.line_up([one.request_id for one in chain(*turns) if one is not None])
        self._may_send = self._order_changed = False
        for pair in self.pairs.dispatch(now):
            request = self._core.requests[str(pair.request.request_id)]
            self._queue.remove(request)
            reads, prefill_id = pair.decode_reads, pair.prefill
            send = SendRequest(
                request.request_id, pair.decode, "pair", prefill_id=prefill_id, decode_reads=reads
            )
            self._core.place(request, send, now)

    # -- engines --------------------------------------------------------------------

    def registered(self, replica: Replica, now: float, *, was: ReplicaHealth | None) -> None:
        seen, name = replica.seen, replica.replica_id
        assert isinstance(seen, PairEngineRegistered)
        self.pairs.add_node(seen.node, seen.block_s)
        if self._engine(replica) is None:
            self._sizes_changed = True
            if seen.role is PairRole.PREFILL:
                self.pairs.add_prefill(name, seen.node)
            else:
                # A node's engines are a group (§6.1).
                self.pairs.add_decode(name, seen.node, seen.node, seen.capacity_tokens)
        decode = self.pairs.decode.get(name)
        if decode is not None:
            sizes = (seen.capacity_tokens, seen.max_running or math.inf)
            self._sizes_changed |= sizes != (decode.kv_tokens, decode.most_requests)
            decode.free_kv_tokens += seen.capacity_tokens - decode.kv_tokens
            decode.kv_tokens, decode.most_requests = sizes
        self.health_changed(replica, now)

    def _engine(self, replica: Replica) -> PrefillEngine | DecodeEngine | None:
        return self.pairs.prefill.get(replica.replica_id) or self.pairs.decode.get(replica.replica_id)

    def health_changed(self, replica: Replica, now: float) -> None:
        """Make an engine available to the pair scheduler, or stop sending new requests to it. The pair
        scheduler still counts the requests of an unavailable engine, since they use memory."""
        engine, is_up = self._engine(replica), replica.health is ReplicaHealth.UP
        if engine is None or engine.is_suspended is not is_up:
            return
        self._sizes_changed, engine.is_suspended = True, not is_up

    def lost(self, replica: Replica, now: float) -> None:
        """Requests that have both engines stay there; all others are queued again."""
        engine = self._engine(replica)
        if engine is not None:
            self.pairs.remove(engine)
            self._sizes_changed = True

    def nic_queue_reported(self, event: routing_events.NicQueueReported, now: float) -> None:
        if event.node in self.pairs.nics:
            self.pairs.report(event.node, event.queue_s, now)
