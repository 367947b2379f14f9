"""A routing core that chooses a prefill and a decode engine for each request (DualPath §6.1).

``policies.prefill_decode`` chooses engines by their load. Programs have no home, because any engine can read
a turn's KV from storage. This module adds and removes engines, sends failed requests again, tracks how much
KV of each program is stored, and limits the size of all tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from itertools import count

from ..policies.prefill_decode.engine_pair_scheduler import PairScheduler
from ..policies.prefill_decode.prefill_decode_views import FULL_BLOCK_TOKENS, PdRequest
from . import routing_events
from .bounded_program_table import BoundedProgramTable
from .pair_tables import PairEngine, PairProgram, PairRequest, RoleSummary, summarize_roles
from .replica_fleet import remember_drain
from .routing_core import RoutingCore
from .routing_events import PairEngineRegistered, PairRole, SendRequestToPair
from .routing_limits import ROLE_MISSING_RETRY_S, RoutingLimits
from .routing_status import PairEngineStatus, ProgramRouteStatus

ROLE_MISSING_TIMEOUT_S = 5.0
"""Seconds that requests wait while a role (prefill or decode) has no engine, if no supervisor starts engines.
An engine that misses one or two polls returns within this time. An engine that has to load its model does
not."""
MAX_NODES = 4096
"""If this many nodes are known, a new node displaces all nodes without engines."""


class PairCore(RoutingCore):
    """Routing core in which a pair scheduler (``pairs``; ``None``: the default one) chooses the engines.

    ``expects_engines``: whether a supervisor starts missing engines. If True, requests wait for a missing
    engine. If False, a role (prefill or decode) without engines has two effects. New requests are rejected at
    once. Waiting requests are rejected after ``ROLE_MISSING_TIMEOUT_S``.
    """

    def __init__(
        self,
        pairs: PairScheduler | None = None,
        limits: RoutingLimits | None = None,
        *,
        expects_engines: bool = False,
        life: str = "",
    ) -> None:
        super().__init__(limits, life)
        self._expects_engines = expects_engines
        self._missing_since_s: float | None = None
        """Time of the first tick that found a role without engines."""
        self.pairs = pairs or PairScheduler()
        self.engines: dict[str, PairEngine] = {}
        self.requests: dict[str, PairRequest] = {}
        """Requests in progress, waiting ones included, by id."""
        self._names: dict[tuple[PairRole, int], str] = {}
        """Replica ids of the engines that the pair scheduler knows, by role and number."""
        self._nodes: dict[str, int] = {}
        """Number of each node in the pair scheduler, by the node's name. A node without engines is kept until
        there are ``MAX_NODES`` nodes. An engine may return while reads are still queued at the node's NIC."""
        self._node_numbers = count()
        """Numbers for new nodes."""
        self._numbers = count()
        """Numbers for new engines."""
        self.programs: BoundedProgramTable[PairProgram] = BoundedProgramTable()
        self._paired = 0
        """Number of requests in progress that have a decode engine, including adopted requests (see
        ``PairRequest.adopted``)."""
        self._roles: RoleSummary | None = None
        """Cached result of ``_role_summary``; ``None``: to be computed again."""
        self._engines_changed = False
        """True if an engine started or stopped accepting requests since the last ``_requeue``."""
        self._handlers[PairEngineRegistered] = self._registered
        self._handlers[routing_events.NicQueueReported] = self._nic_queue_reported
        self._handlers[routing_events.PrefillFinished] = self._prefilled

    # -- questions ------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        return len(self.requests) - self._paired

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        program = self.programs.get((tenant, program_id))
        return program.answered_by if program is not None else None

    def is_open(self, request_id: str) -> bool:
        """Whether a request is in progress. False for an adopted request (see ``PairRequest.adopted``),
        because its gateway may take the request back and submit it again."""
        request = self.requests.get(request_id)
        return request is not None and not request.adopted

    def sent_request(self, request_id: str) -> routing_events.SendRequest | None:
        request = self.requests.get(request_id)
        return request.sent if request is not None and request.decode_id is not None else None

    def replica(self, replica_id: str) -> PairEngine | None:
        return self.engines.get(replica_id)

    def replicas(self) -> Iterable[PairEngine]:
        return self.engines.values()

    def in_flight(self, replica_id: str) -> int:
        return sum(request.is_at(replica_id) for request in self.requests.values())

    def suspect_all(self, now: float) -> None:
        """Do nothing, because this core has no snapshots and so no restored engines."""

    def stored_tokens(self, tenant: str, program_id: str) -> int:
        """Return the number of tokens of a program's context whose KV is in storage, as far as known; 0:
        unknown."""
        program = self.programs.get((tenant, program_id))
        return program.stored_tokens if program is not None else 0

    def program_statuses(self) -> list[ProgramRouteStatus]:
        """Statuses of all programs, most recently active first. Their token counts are ``stored_tokens``."""
        waiting = Counter(
            id(request.program) for request in self.requests.values() if request.decode_id is None
        )
        return [program.status(waiting[id(program)]) for program in self.programs][::-1]

    def replica_statuses(self) -> list[PairEngineStatus]:
        """Statuses of all engines. ``links`` is empty, since the core does not know the engines' links."""
        counts: Counter[str] = Counter()
        tokens: Counter[str] = Counter()
        for request in self.requests.values():
            for replica_id in (request.prefill_id, request.decode_id):
                if replica_id is not None and request.is_at(replica_id):
                    counts[replica_id] += 1
                    tokens[replica_id] += request.asked.context_tokens
        return [engine.status(counts[name], tokens[name]) for name, engine in self.engines.items()]

    # -- engines --------------------------------------------------------------------

    def _registered(self, event: PairEngineRegistered, now: float) -> None:
        if event.kv_tokens < 1 or not event.node or event.max_running < 0:
            raise ValueError(
                f"engine {event.replica_id!r}: kv_tokens {event.kv_tokens}, node {event.node!r}, max_running "
                f"{event.max_running}; expected at least 1, a name, at least 0"
            )
        self._add_node(event.node, event.block_s)
        known = self.engines.get(event.replica_id)
        if known is not None and (known.seen.instance, known.seen.role) != (event.instance, event.role):
            self._lose(event.replica_id, now)
            known = None
        if known is None:
            drained = self.drained.pop(event.replica_id, None) == event.instance
            known = self.engines[event.replica_id] = PairEngine(event, now, is_draining=drained)
            self._roles = None
        elif (known.seen.node, known.seen.kv_tokens) != (event.node, event.kv_tokens):
            self._unschedule(known)  # the pair scheduler gets a new engine; requests stay at this engine
        if known.seen != event:
            self._roles = None
        known.seen, known.heard_s, known.probed_s, known.suspect = event, now, None, False
        self._admit(known)
        self._limit(known)

    def _add_node(self, name: str, block_s: float) -> None:
        """Add a node to the pair scheduler, or update the speed of its storage NIC. Raises ``ValueError`` for
        an invalid ``block_s``."""
        number = self._nodes.get(name)
        if number is not None:
            self.pairs.add_node(number, block_s)
            return
        if len(self._nodes) >= MAX_NODES:
            used = {engine.seen.node for engine in self.engines.values()}
            for unused in self._nodes.keys() - used:
                self.pairs.remove_node(self._nodes.pop(unused))
        number = next(self._node_numbers)
        self.pairs.add_node(number, block_s)
        self._nodes[name] = number

    def _admit(self, engine: PairEngine) -> None:
        """Make an engine available to the pair scheduler. No effect on a draining or suspect engine."""
        if engine.is_open or engine.is_draining or engine.suspect:
            return
        engine.is_open = self._engines_changed = True
        seen = engine.seen
        if engine.number is not None:
            if seen.role is PairRole.PREFILL:
                self.pairs.resume_prefill(engine.number)
            else:
                self.pairs.resume_decode(engine.number)
            return
        node = self._nodes[seen.node]
        engine.number = next(self._numbers)
        self._names[seen.role, engine.number] = seen.replica_id
        if seen.role is PairRole.PREFILL:
            self.pairs.add_prefill(engine.number, node)
        else:
            # Engines of one node form a group (§6.1).
            self.pairs.add_decode(engine.number, node, node, seen.kv_tokens)
            self._limit(engine)

    def _limit(self, engine: PairEngine) -> None:
        """Limit a decode engine's requests in the pair scheduler to the number that the engine runs at once.
        No effect on a prefill engine."""
        seen = engine.seen
        if seen.role is PairRole.DECODE and engine.number is not None:
            self.pairs.set_decode_request_limit(engine.number, seen.max_running or math.inf)

    def _withdraw(self, engine: PairEngine) -> None:
        """Stop sending new requests to an engine for now. The pair scheduler still counts the engine's
        current requests, since they use memory."""
        if engine.number is None or not engine.is_open:
            return
        engine.is_open = False
        if engine.seen.role is PairRole.PREFILL:
            self.pairs.suspend_prefill(engine.number)
        else:
            self.pairs.suspend_decode(engine.number)
        self._engines_changed = True

    def _unschedule(self, engine: PairEngine) -> None:
        """Remove an engine from the pair scheduler. Requests that already have both engines stay at these
        engines. All other requests are queued again."""
        role, number = engine.seen.role, engine.number
        if number is None:
            return
        engine.number, engine.is_open = None, False
        del self._names[role, number]
        if role is PairRole.PREFILL:
            self.pairs.remove_prefill(number)
        else:
            self.pairs.remove_decode(number)
        self._engines_changed = True

    def _lose(self, replica_id: str, now: float) -> None:
        engine = self.engines.pop(replica_id)
        if engine.is_draining:
            remember_drain(self.drained, replica_id, engine.seen.instance)
        self._unschedule(engine)
        self._roles = None
        for request in [one for one in self.requests.values() if one.is_at(replica_id)]:
            if request.began:
                self._abort(request.asked.request_id, replica_id)
                self._close(request)
            else:
                request.lost_with = replica_id
                self._retry_or_reject(request, now)

    def _drain_started(self, event: routing_events.ReplicaDrainStarted, now: float) -> None:
        engine = self.engines.get(event.replica_id)
        if engine is not None and not engine.is_draining:
            engine.is_draining, self._roles = True, None
            self._withdraw(engine)

    def _drain_cancelled(self, event: routing_events.ReplicaDrainCancelled, now: float) -> None:
        self.drained.pop(event.replica_id, None)
        engine = self.engines.get(event.replica_id)
        if engine is not None and engine.is_draining:
            engine.is_draining, self._roles = False, None
            self._admit(engine)

    def _suspect(self, replica_id: str, now: float) -> None:
        engine = self.engines[replica_id]
        engine.suspect, engine.probed_s = True, now
        self._withdraw(engine)
        self._probe(replica_id, engine.seen.instance)

    def _nic_queue_reported(self, event: routing_events.NicQueueReported, now: float) -> None:
        node = self._nodes.get(event.node)
        if node is not None:
            self.pairs.report(node, event.queue_s, now)

    def _role_summary(self) -> RoleSummary:
        """Return a summary of the registered engines. The summary is cached, because each request reads it
        and there may be a thousand engines."""
        if self._roles is None:
            self._roles = summarize_roles(self.engines.values())
        return self._roles

    def _longest_tokens(self) -> int:
        return self._role_summary().max_context_tokens

    # -- requests -------------------------------------------------------------------

    def _received(self, event: routing_events.RequestReceived, now: float) -> None:
        known = self.requests.get(event.request_id)
        if known is not None and known.adopted:
            self._close(known)  # the gateway took the request back and submits it again
        super()._received(event, now)

    def _reject_early(self, event: routing_events.RequestReceived) -> bool:
        missing = None if self._expects_engines else self._role_summary().missing
        if missing is None:
            return False
        message = f"no {missing.value} engine is registered; try again soon"
        self._reject(event.request_id, 503, "no_room", message, retry_after_s=ROLE_MISSING_RETRY_S)
        return True

    def _open(self, event: routing_events.RequestReceived, now: float) -> None:
        self._submit(self._add_request(event, now))

    def _add_request(self, event: routing_events.RequestReceived, now: float) -> PairRequest:
        request = self.requests[event.request_id] = PairRequest(event, now, now)
        if event.program_id is not None:
            key = (event.tenant, event.program_id)
            request.program, _ = self.programs.find_or_add(key, lambda: PairProgram(key, now), now)
            request.program.requests += 1
        return request

    def _close_if_open(self, request_id: str, now: float) -> None:
        request = self.requests.get(request_id)
        if request is not None:
            self._close(request)

    def _sent(self, event: routing_events.RequestSent, now: float) -> None:
        """Record a request that a gateway has sent. If another core or the gateway itself chose the engines,
        adopt the request. The pair scheduler does not count the load of an adopted request until the request
        is routed again."""
        request = self.requests.get(event.request_id)
        where = (event.prefill_id, event.replica_id)
        if request is not None and where in (
            (None, request.decode_id),
            (request.prefill_id, request.decode_id),
        ):
            request.began = request.began or event.began
            if event.prefill_id is None:
                self._mark_prefilled(request)
            return
        if request is None:
            asked = routing_events.RequestReceived(
                event.request_id,
                event.tenant,
                event.context_tokens,
                program_id=event.program_id,
                output_tokens=event.output_tokens,
            )
            request = self._add_request(asked, now)
        else:
            self._remove_from_pairs(request)
        self._paired += 1
        request.prefill_id, request.decode_id = event.prefill_id, event.replica_id
        request.prefilled, request.began = event.prefill_id is None, event.began
        request.adopted, request.sent = True, None

    def _submit(self, request: PairRequest) -> None:
        """Queue a request at the pair scheduler.

        The request's sizes are cut to the largest context that a decode engine can hold, since they are
        estimates and the client may state any output length. A request that really is too long is rejected by
        its engine.
        """
        asked = request.asked
        tokens = max(1, asked.context_tokens)
        kv_tokens = tokens + asked.output_tokens
        limits = self.pairs.decode.largest_kv_tokens(), self._role_summary().decode_context_tokens
        if decode_tokens := min((limit for limit in limits if limit), default=0):
            tokens, kv_tokens = min(tokens, decode_tokens), min(kv_tokens, decode_tokens)
        stored = self.stored_tokens(asked.tenant, asked.program_id) if asked.program_id is not None else 0
        hit_blocks = min(stored, tokens - 1) // FULL_BLOCK_TOKENS
        self.pairs.submit(PdRequest(asked.request_id, tokens, hit_blocks, kv_tokens))

    def _dispatch(self, now: float, *, epoch: bool) -> None:
        if self._engines_changed:
            self._engines_changed = False
            self._requeue()
        for pair in self.pairs.dispatch(now):
            request_id = str(pair.request.request_id)
            request = self.requests[request_id]
            request.prefill_id = self._names[PairRole.PREFILL, pair.prefill]
            request.decode_id = self._names[PairRole.DECODE, pair.decode]
            decode = self.engines[request.decode_id].seen
            self._paired += 1
            blocks = sum(pair.split)
            request.sent = SendRequestToPair(
                request_id,
                request.decode_id,
                "pair",
                prefill_id=request.prefill_id,
                peer=decode.peer,
                epoch=decode.epoch,
                decode_share=pair.split.decode_blocks / blocks if blocks else 0.0,
            )
            self._actions.append(request.sent)
            self.counts.sent("pair")

    def _requeue(self) -> None:
        """Submit all waiting requests to the pair scheduler again, in order of arrival, with sizes that the
        present engines can hold."""
        waiting = sorted(
            (request for request in self.requests.values() if request.decode_id is None),
            key=lambda request: request.since_s,
        )
        for request in waiting:
            self.pairs.end(request.asked.request_id)
        for request in waiting:
            self._submit(request)

    def _prefilled(self, event: routing_events.PrefillFinished, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and request.prefill_id == event.replica_id:
            self._mark_prefilled(request)

    def _mark_prefilled(self, request: PairRequest) -> None:
        """Record that a request's prompt is computed. No effect if that is recorded already."""
        if not request.prefilled:
            request.prefilled = True
            if not request.adopted:
                self.pairs.prefilled(request.asked.request_id)

    def _began(self, event: routing_events.FirstByteSent, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is not None and request.decode_id == event.replica_id:
            request.began = True

    def _ended(self, event: routing_events.RequestFinished, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None or event.replica_id not in (None, request.decode_id):
            return
        asked, program = request.asked, self._live_program(request)
        if program is not None:
            self.programs.touched(program, now)
            # A request that an engine refused stored nothing.
            if event.answered and event.replica_id is not None:
                program.turns += 1
                program.answered_by = event.replica_id
                # The prompt length on arrival was an estimate. ``stored_tokens`` falls if the client has
                # truncated the context.
                program.stored_tokens = (event.prompt_tokens or asked.context_tokens) + event.output_tokens
        self._close(request)

    def _live_program(self, request: PairRequest) -> PairProgram | None:
        """Return the record of a request's program; ``None``: the request has no program, or the program has
        left the table since the request arrived."""
        program = request.program
        return program if program is not None and self.programs.get(program.key) is program else None

    def _failed(self, event: routing_events.RequestFailed, now: float) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            return
        if not request.is_at(event.replica_id):
            # If the engine is gone, this event says whether that engine had accepted the request.
            if event.computing and request.lost_with == event.replica_id:
                request.lost_with = None
                request.failures_computing += 1
            return
        request.failures_computing += event.computing
        engine = self.engines.get(event.replica_id)
        if engine is not None and not engine.suspect:
            self._suspect(event.replica_id, now)
        if request.began:
            self.counts.cut += 1  # the gateway has ended the stream, so no action is needed
            self._close(request)
        else:
            self._retry_or_reject(request, now)

    def _retry_or_reject(self, request: PairRequest, now: float) -> None:
        """Process a request that its pair of engines lost before the first byte of the answer. If the request
        failed too often, reject it, because it may be the cause. Otherwise submit it again."""
        request.failures += 1
        if not self._failed_too_often(request):
            self._replay(request, now)
            return
        self._close(request)
        if request.failures_computing >= self.limits.most_failures_computing:
            why = f"{request.failures_computing} pairs of engines accepted it and did not answer"
        else:
            why = f"{request.failures} pairs of engines in turn did not answer"
        self._reject_failed(request.asked.request_id, why)

    def _replay(self, request: PairRequest, now: float) -> None:
        """Submit again a request that an engine did not answer. The request gets a new pair of engines."""
        self._remove_from_pairs(request)
        request.prefill_id = request.decode_id = request.sent = None
        request.prefilled = False
        request.waiting_since_s = now
        self.counts.replayed += 1
        self._submit(request)

    def _remove_from_pairs(self, request: PairRequest) -> None:
        """Remove a request from the pair scheduler, and stop counting it as paired. It remains in
        ``requests``."""
        self._paired -= request.decode_id is not None
        if not request.adopted:
            self.pairs.end(request.asked.request_id)
        request.adopted = False

    def _close(self, request: PairRequest) -> None:
        """Remove a request. Also remove its program if the program has no answered request so far, and no
        other request in progress."""
        del self.requests[request.asked.request_id]
        program = self._live_program(request)
        if program is not None:
            program.requests -= 1
            if not program.requests and not program.turns:
                self.programs.remove(program.key)
        self._remove_from_pairs(request)

    def _program_ended(self, event: routing_events.ProgramEnded, now: float) -> None:
        self.programs.remove((event.tenant, event.program_id))

    # -- time -----------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for request in [one for one in self.requests.values() if one.decode_id is None]:
            if now - request.waiting_since_s >= self.limits.wait_s:
                self._close(request)
                self._reject_timed_out(request.asked.request_id, "pair of engines")
        for program in self.programs.silent_since(now - self.limits.silent_program_s):
            self.programs.remove(program.key)
        missing = None if self._expects_engines else self._role_summary().missing
        if missing is None:
            self._missing_since_s = None
            return
        if self._missing_since_s is None:
            self._missing_since_s = now
        if now - self._missing_since_s < ROLE_MISSING_TIMEOUT_S:
            return
        message = f"no {missing.value} engine for {ROLE_MISSING_TIMEOUT_S:g} s; try again soon"
        for request in [one for one in self.requests.values() if one.decode_id is None]:
            self._close(request)
            self._reject(
                request.asked.request_id, 503, "no_room", message, retry_after_s=ROLE_MISSING_RETRY_S
            )
