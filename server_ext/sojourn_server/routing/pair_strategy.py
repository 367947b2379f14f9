"""Strategy that sends each request to a prefill and a decode engine (DualPath §6.1).

``policies.prefill_decode`` chooses engines by their load. Any engine can read a turn's KV from storage, up to
``RoutedProgram.context_tokens``. The prefill engine that computed a program's last prompt is the program's
home: it has that KV already, knows the program and gets its events. If several tenants wait, their requests
line up by the tenants' shares of capacity (SAGA §6), else by arrival.
"""

from __future__ import annotations

import math
from itertools import chain, count, zip_longest

from ..policies.fairness_policies import AgentFairShare
from ..policies.prefill_decode.engine_pair_scheduler import FULL_BLOCK_TOKENS, PairScheduler, PdRequest
from . import routing_events
from .routing_core import Placement, RoutingCore, RoutingStrategy
from .routing_events import PairEngineRegistered, PairRole
from .routing_limits import QUEUE_FULL_RETRY_S
from .routing_records import Replica, ReplicaHealth, RoutedProgram, RoutedRequest
from .tenant_shares import TenantShares
from .waiting_queues import WaitingQueue

ROLE_MISSING_TIMEOUT_S = 5.0
"""Seconds that requests wait while a role (prefill or decode) has no engine, if no supervisor starts
engines. An engine that misses one or two polls returns within this time. An engine that has to load its
model does not."""
MAX_NODES = 4096
"""If this many nodes are known, a new node displaces all nodes without engines."""


class PairStrategy(RoutingStrategy):
    """Lets the pair scheduler ``pairs`` choose the engines.

    ``expects_engines``: whether a supervisor starts missing engines. If True, requests wait for a missing
    engine. If False and a role (prefill or decode) has no engines, new requests are rejected at once, and
    waiting requests after ``ROLE_MISSING_TIMEOUT_S``."""

    unit = "pair of engines"

    def __init__(self, pairs: PairScheduler, *, expects_engines: bool = False) -> None:
        self.pairs = pairs
        self._expects_engines = expects_engines
        self._missing_since_s: float | None = None
        """Time of the first tick that found a role without engines."""
        self._numbers: dict[str, int] = {}
        """Number of each engine that the pair scheduler knows, by replica id. An engine that is registered
        anew gets a new number."""
        self._names: dict[int, str] = {}
        """The same engines by number."""
        self._places: dict[int, tuple[str, int]] = {}
        """(node, KV tokens) of these engines, as the pair scheduler knows them."""
        self._open: set[int] = set()
        """Engines that accept new requests."""
        self._nodes: dict[str, int] = {}
        """Number of each node in the pair scheduler, by the node's name. A node without engines is kept,
        since an engine may return while reads are still queued at the node's NIC."""
        self._new_number, self._new_node = count(), count()
        self._engines_changed = False
        """True if an engine started or stopped accepting requests since the last ``dispatch``."""

    def attach(self, core: RoutingCore) -> None:
        self._core = core
        self.tenants = TenantShares(AgentFairShare(), core)
        self._queue = WaitingQueue(by_tenant=True)

    # -- queries --------------------------------------------------------------------

    def missing_role(self) -> str:
        if self._expects_engines:
            return ""
        present = {
            one.seen.role
            for one in self._core.fleet.values()
            if isinstance(one.seen, PairEngineRegistered) and one.health is not ReplicaHealth.DRAINING
        }
        return next((role.value for role in PairRole if role not in present), "")

    def longest_tokens(self) -> int:
        """Return the longest context that both roles can hold."""
        return min((tokens for role in PairRole if (tokens := self._longest(role))), default=0)

    def _longest(self, role: PairRole) -> int:
        """Return the longest context that an engine of a role can hold; 0: there is none."""
        seen = (one.seen for one in self._core.fleet.values())
        return max(
            (
                one.max_context_tokens or one.capacity_tokens
                for one in seen
                if isinstance(one, PairEngineRegistered) and one.role is role
            ),
            default=0,
        )

    def rejects_excess(self, tenant: str) -> bool:
        return self.tenants.rejects_excess(tenant)

    def shares_used(self) -> dict[str, float]:
        return self.tenants.used_fractions()

    # -- requests -------------------------------------------------------------------

    def choose(self, request: RoutedRequest, now: float) -> Placement | None:
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
        home = self._numbers.get(program.home or "") if program is not None and program.cached else None
        hit_blocks = stored // FULL_BLOCK_TOKENS
        self.pairs.submit(PdRequest(request.request_id, tokens, hit_blocks, kv_tokens, home, stored))
        request.queue_key = (request.number,)
        self._queue.add(request)

    def dequeue(self, request: RoutedRequest) -> None:
        if self._queue.remove(request):
            self.pairs.end(request.request_id)

    def sent(self, request: RoutedRequest, now: float) -> None:
        self.tenants.count(request)

    def unsent(self, request: RoutedRequest, now: float) -> None:
        self.tenants.count(request, -1)
        self.pairs.end(request.request_id)

    def answered(self, program: RoutedProgram, turn_s: float, *, at_home: bool) -> None:
        self._core.estimator.observe_turn(program, turn_s)

    def prefilled(self, request: RoutedRequest) -> None:
        self.pairs.prefilled(request.request_id)

    def dispatch(self, now: float, *, epoch: bool) -> None:
        if self._engines_changed:
            self._engines_changed = False
            # All waiting requests line up again, with sizes that the present engines can hold.
            waiting = sorted(self._core.waiting.values(), key=lambda request: request.number)
            for request in waiting:
                self.dequeue(request)
            for request in waiting:
                self.enqueue(request)
        queues = self._queue.tenants
        if len(queues) > 1:
            tenants = self.tenants.order(queues.items(), room=False)
            turns = zip_longest(*(queues[tenant].requests for tenant in tenants))
            self.pairs.line_up([one.request_id for one in chain(*turns) if one is not None])
        for pair in self.pairs.dispatch(now):
            decode, prefill = self._names[pair.decode], self._names[pair.prefill]
            request = self._core.requests[str(pair.request.request_id)]
            self._queue.remove(request)
            self._core.place(request, Placement(decode, "pair", prefill, pair.decode_reads), now)

    def expire(self, now: float) -> None:
        self.tenants.update(now)
        missing = self.missing_role()
        if not missing:
            self._missing_since_s = None
            return
        if self._missing_since_s is None:
            self._missing_since_s = now
        if now - self._missing_since_s < ROLE_MISSING_TIMEOUT_S:
            return
        message = f"no {missing} engine for {ROLE_MISSING_TIMEOUT_S:g} s; try again soon"
        for request in list(self._core.waiting.values()):
            self._core.close(request, now)
            self._core.reject(request.request_id, 503, "no_room", message, QUEUE_FULL_RETRY_S)

    # -- engines --------------------------------------------------------------------

    def registered(self, replica: Replica, now: float, *, was: ReplicaHealth | None) -> None:
        seen = replica.seen
        assert isinstance(seen, PairEngineRegistered)
        self._add_node(seen.node, seen.block_s)
        number = self._numbers.get(replica.replica_id)
        if number is not None and self._places.get(number) != (seen.node, seen.capacity_tokens):
            self._remove(replica)  # the pair scheduler gets a new engine; requests stay at this engine
        self.health_changed(replica, now)
        if seen.role is PairRole.DECODE and (number := self._numbers.get(replica.replica_id)) is not None:
            self.pairs.decode[number].most_requests = seen.max_running or math.inf

    def _add_node(self, name: str, block_s: float) -> None:
        """Add a node to the pair scheduler, or update the speed of its storage NIC."""
        if name not in self._nodes:
            if len(self._nodes) >= MAX_NODES:
                used = {getattr(one.seen, "node", "") for one in self._core.fleet.values()}
                for unused in self._nodes.keys() - used:
                    del self.pairs.nics[self._nodes.pop(unused)]
            self._nodes[name] = next(self._new_node)
        self.pairs.add_node(self._nodes[name], block_s)

    def health_changed(self, replica: Replica, now: float) -> None:
        """Make an engine available to the pair scheduler, or stop sending new requests to it. The pair
        scheduler still counts the requests of an unavailable engine, since they use memory."""
        seen, number = replica.seen, self._numbers.get(replica.replica_id)
        assert isinstance(seen, PairEngineRegistered)
        is_prefill, is_up = seen.role is PairRole.PREFILL, replica.health is ReplicaHealth.UP
        if is_up == (number in self._open):
            return
        self._engines_changed = True
        if number is None:
            number = self._numbers[replica.replica_id] = next(self._new_number)
            self._names[number] = replica.replica_id
            self._places[number] = (seen.node, seen.capacity_tokens)
            node = self._nodes[seen.node]
            if is_prefill:
                self.pairs.add_prefill(number, node)
            else:
                # A node's engines are a group (§6.1).
                self.pairs.add_decode(number, node, node, seen.capacity_tokens)
                self.pairs.decode[number].most_requests = seen.max_running or math.inf
        elif is_up:
            (self.pairs.prefill.get(number) or self.pairs.decode[number]).is_suspended = False
        else:
            self.pairs.suspend(self.pairs.prefill.get(number) or self.pairs.decode[number])
        (self._open.add if is_up else self._open.discard)(number)

    def lost(self, replica: Replica, now: float) -> None:
        self._remove(replica)

    def _remove(self, replica: Replica) -> None:
        """Remove an engine from the pair scheduler. Requests that have both engines stay there; all others
        are queued again."""
        number = self._numbers.pop(replica.replica_id, None)
        if number is None:
            return
        del self._names[number], self._places[number]
        self._open.discard(number)
        is_prefill = number in self.pairs.prefill
        self.pairs.suspend(self.pairs.prefill.pop(number) if is_prefill else self.pairs.decode.pop(number))
        self._engines_changed = True

    def nic_queue_reported(self, event: routing_events.NicQueueReported, now: float) -> None:
        node = self._nodes.get(event.node)
        if node is not None:
            self.pairs.report(node, event.queue_s, now)
