"""Routing backend of a gateway whose decisions come from a remote coordinator.

A turn goes directly to its program's known home if the coordinator permits that for the replica
(``ReplicaInfo.direct``). Otherwise the coordinator decides. While the coordinator does not answer, known
homes stay in use. New programs wait for ``LOCAL_DECISION_AFTER_S``. Then they go to the replica to which this
gateway has sent the fewest requests.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...routing import routing_events
from ...routing.routing_events import SendRequestToPair
from ...routing.routing_status import ProgramRouteStatus, ReplicaStatus
from ..http.replica_addresses import ReplicaAddresses
from ..http.routing_backend import ControlAction, RequestDecisionQueue
from .coordinator_cache import OnAffinityChange, ProgramAffinityCache, ReplicaCache
from .coordinator_messages import (
    CALL_TIMEOUT_S,
    URGENT_EVENTS,
    CoordinatorClient,
    CoordinatorResponse,
    CoordinatorUnavailable,
    JoinRequest,
    MessageEncodingError,
    PollRequest,
    ReplicaProbeResult,
    ReportRequest,
    ResponseStatus,
    call_with_timeout,
    encodable_events,
    encode_message,
)
from .open_requests import OpenRequest, OpenRequests, UnconfirmedEvents

logger = logging.getLogger(__name__)

MAX_CALLS_IN_FLIGHT = 2
"""Number of calls in flight to the coordinator at which a new request starts no further call. Requests are
then collected, and sent together when a call returns or after ``BATCH_S``. A call costs the coordinator a
millisecond, however many requests it carries."""
BATCH_S = 0.015
"""Maximum seconds for which events that are not urgent are collected before they are sent."""
LOCAL_DECISION_AFTER_S = 3.0
"""Seconds without an answer of the coordinator after which this gateway itself decides about waiting
requests."""
LONG_POLL_TIMEOUT_S = 20.0
"""Seconds without an answer to a long poll after which the coordinator counts as unavailable."""
RETRY_S = 0.2
"""Seconds between two attempts to join."""
SWEEP_INTERVAL_S = 0.25
"""Seconds between two checks for waiting requests and outdated replicas."""

UNEXPECTED_RESPONSE = "an answer of the coordinator was not understood; please report this"


class CoordinatedRoutingBackend:
    """Routing backend of one gateway, whose decisions come from a remote coordinator. Use it only in the
    event loop in which ``run`` runs."""

    def __init__(
        self,
        calls: CoordinatorClient,
        replicas: ReplicaAddresses,
        *,
        clock: Callable[[], float] = time.monotonic,
        fallback_s: float = LOCAL_DECISION_AFTER_S,
    ) -> None:
        """``replicas``: the gateway's table of addresses, which is kept equal to the coordinator's list.
        ``fallback_s``: seconds without the coordinator after which this gateway decides itself."""
        self.gateway_id = secrets.token_hex(8)
        self.on_control_action: Callable[[ControlAction], None] = lambda action: None
        self.on_action: Callable[[routing_events.AnyRoutingAction], None] = lambda action: None
        self.on_affinity_change: OnAffinityChange = lambda key, home: None
        """Function that is called with (program's key, home) when the coordinator reports a home that is new
        to this gateway."""
        self.epoch = 0
        """Epoch of the latest coordinator that has answered, a number that grows with each coordinator. 0:
        none has answered."""
        self.joined = False
        """Whether this gateway has joined the coordinator and has not lost it since then."""
        self.homes = ProgramAffinityCache()
        self.places = ReplicaCache(replicas, self.homes.forget_replica)
        self.requests = OpenRequests()
        self._calls = calls
        self._clock = clock
        self._rate_limited_log = RateLimitedLog(logger, clock)
        self._fallback_s = fallback_s
        self._events = UnconfirmedEvents()
        self._probes: list[ReplicaProbeResult] = []
        self._last_mail_number = 0
        """Number of the last action received from the coordinator."""
        self._number = 0
        """Number of the next batch of events. It starts at 0 with each join."""
        self._join_number = 0
        """Number of the present join, sent with every message. Answers to messages of earlier joins are
        ignored."""
        self._unavailable_since_s: float | None = clock()
        """Time at which the coordinator became unavailable; ``None``: it is available."""
        self._flush_later: asyncio.TimerHandle | None = None
        self._flush_next: asyncio.Handle | None = None
        self._is_urgent = False
        """Whether an event that has not been sent yet is urgent (``URGENT_EVENTS``)."""
        self._sends: set[asyncio.Task[None]] = set()
        """Calls in flight that send events."""
        self._lost: asyncio.Future[None] | None = None
        """Future that ends the running long poll when the coordinator is lost."""
        self._uses: dict[str, float] = {}

    # -- the backend's interface ---------------------------------------------------

    def open(self, asked: routing_events.RequestReceived) -> RequestDecisionQueue:
        """Submit a request. The returned queue receives decisions until ``close``. If the request may go
        directly to its program's home, the queue already has this decision."""
        one = self.requests.add(asked, self._clock())
        try:
            encode_message(asked)
        except MessageEncodingError as error:
            self._refuse_unencodable(one, error)
            return one.decisions
        home = self._direct_home(asked)
        if home is not None:
            one.sent_to = home
            one.decisions.add_decision(routing_events.SendRequest(asked.request_id, home, "home"))
        self._queue_event(one.as_event(self._clock()))
        return one.decisions

    def close(self, decisions: RequestDecisionQueue) -> None:
        """Stop adding decisions to a request's queue."""
        self.requests.remove(decisions.request_id)

    def tell(self, event: routing_events.AnyRoutingEvent) -> None:
        """Report an event to the coordinator, and update this gateway's own tables."""
        if isinstance(event, routing_events.FirstByteSent):
            if (one := self.requests.get(event.request_id)) is not None:
                one.began, one.sent_to, one.prefill_id = True, event.replica_id, None
        elif isinstance(event, routing_events.PrefillFinished):
            if (one := self.requests.get(event.request_id)) and one.prefill_id == event.replica_id:
                one.prefill_id = None
        elif isinstance(event, routing_events.RequestFailed):
            self._failed(event)
        elif isinstance(event, routing_events.ProgramEnded):
            self.homes.put((event.tenant, event.program_id), None)
        self._queue_event(event)

    def home(self, tenant: str, program_id: str) -> str | None:
        """Return the id of the replica that is a program's home; ``None``: unknown to this gateway."""
        home = self.homes.get(tenant, program_id)
        return home[0] if home is not None else None

    async def programs(self) -> Sequence[ProgramRouteStatus]:
        """Return the statuses of all programs that have not ended. Empty if the coordinator does not
        answer."""
        await self._flush_and_wait()
        try:
            return await call_with_timeout(self._calls.programs())
        except CoordinatorUnavailable:
            return ()

    async def replicas(self) -> Sequence[ReplicaStatus]:
        """Return the statuses of all known replicas. If the coordinator does not answer, the statuses count
        only this gateway's own requests."""
        await self._flush_and_wait()
        try:
            state = await call_with_timeout(self._calls.state())
        except CoordinatorUnavailable:
            return [self.requests.status_at(place) for place in self.places.values()]
        self._uses = state.uses
        return state.pairs or state.replicas

    def answered_by(self, tenant: str, program_id: str) -> str | None:
        """Return ``None``, because the coordinator does not report which engine answered."""
        return None

    def shares_used(self) -> dict[str, float]:
        """Return used capacity ÷ share by tenant, as of the last call of ``replicas``. Empty before the first
        call."""
        return self._uses

    def probed(self, replica_id: str, instance: str, alive: bool) -> None:
        """Report the result of this gateway's probe to the coordinator. ``alive``: whether this instance of
        the replica is alive."""
        self._probes.append(ReplicaProbeResult(replica_id, instance, alive))
        self._flush()

    def _direct_home(self, asked: routing_events.RequestReceived) -> str | None:
        """Return the id of the home to which a turn may go without asking the coordinator; ``None``: the
        coordinator decides."""
        home = self.homes.get(asked.tenant, asked.program_id) if asked.program_id is not None else None
        place = self.places.get(home[0]) if home is not None else None
        if home is None or place is None or place.instance != home[1]:
            return None
        return home[0] if place.direct or self._unavailable_since_s is not None else None

    # -- messages to the coordinator ----------------------------------------------

    def _queue_event(self, event: routing_events.AnyRoutingEvent) -> None:
        """Schedule an event to be sent to the coordinator. Before the join, events about requests are
        dropped, because the join reports all requests."""
        if not self.joined:
            self._events.keep(event)
            return
        self._events.waiting.append(event)
        loop = asyncio.get_running_loop()
        if isinstance(event, URGENT_EVENTS) and len(self._sends) < MAX_CALLS_IN_FLIGHT:
            # Send it together with all events of this iteration of the event loop.
            self._flush_next = self._flush_next or loop.call_soon(self._flush)
        elif self._flush_later is None:
            self._flush_later = loop.call_later(BATCH_S, self._flush)
        self._is_urgent = self._is_urgent or isinstance(event, URGENT_EVENTS)

    def _refuse_unencodable(self, one: OpenRequest, error: MessageEncodingError) -> None:
        """Reject a request with a value that cannot be encoded in a message to the coordinator."""
        one.refused = True
        message = f"this request has a value that cannot be sent to the coordinator: {error}"
        refused = routing_events.RejectRequest(one.asked.request_id, 400, "bad_request", message)
        one.decisions.add_decision(refused)
        self.on_action(refused)

    def _flush(self) -> None:
        """Start to send all collected events and probe results to the coordinator."""
        self._cancel_flushes()
        if not self.joined or not (self._events.waiting or self._probes):
            return
        events = self._events.take()
        probes, self._probes = self._probes, []
        report = ReportRequest(
            self.gateway_id,
            self.epoch,
            self._number,
            tuple(events),
            tuple(probes),
            acked=self._last_mail_number,
            places_version=self.places.version,
            join=self._join_number,
        )
        try:
            encode_message(report)
        except MessageEncodingError:
            report = msgspec.structs.replace(report, facts=encodable_events(events, self._rate_limited_log))
            if not (report.facts or probes):
                return
        self._events.sent(self._number, report.facts)
        self._number += 1
        task = asyncio.ensure_future(self._report(report))
        self._sends.add(task)
        task.add_done_callback(self._on_call_done)

    def _cancel_flushes(self) -> None:
        for handle in (self._flush_later, self._flush_next):
            if handle is not None:
                handle.cancel()
        self._flush_later = self._flush_next = None
        self._is_urgent = False

    def _on_call_done(self, task: asyncio.Task[None]) -> None:
        """Process the end of a call that sent events. If urgent events were collected meanwhile, send
        them."""
        self._sends.discard(task)
        if self._is_urgent and self.joined and not task.cancelled():
            self._flush()

    async def _report(self, report: ReportRequest) -> None:
        """Send a batch of events and process the answer. Without an answer, the coordinator counts as
        lost."""
        try:
            answer = await call_with_timeout(self._calls.report(report))
            if report.join == self._join_number:
                is_processed = answer.status is ResponseStatus.OK and answer.epoch == self.epoch
                if is_processed:
                    self._events.confirm(report.number)
                self._receive(answer)
                if is_processed:
                    self.requests.confirm(report.facts)
            return
        except CoordinatorUnavailable:
            pass
        except Exception:
            self._rate_limited_log.log(logging.ERROR, UNEXPECTED_RESPONSE, exc_info=True)
        if report.join == self._join_number:
            self._mark_disconnected()

    async def _flush_and_wait(self) -> None:
        """Send all collected events, and wait until the coordinator has them. Wait at most
        ``CALL_TIMEOUT_S``."""
        self._flush()
        if self._sends:
            await asyncio.wait(set(self._sends), timeout=CALL_TIMEOUT_S)

    # -- messages from the coordinator --------------------------------------------

    async def run(self) -> None:
        """Join the coordinator and poll it, until cancelled. Join again after each loss of the
        coordinator."""
        sweeps = asyncio.ensure_future(self._sweep())
        try:
            while True:
                try:
                    if not self.joined:
                        await self._join()
                    else:
                        await self._poll()
                except CoordinatorUnavailable:
                    self._mark_disconnected()
                except Exception:
                    self._rate_limited_log.log(logging.ERROR, UNEXPECTED_RESPONSE, exc_info=True)
                    self._mark_disconnected()
                if not self.joined:
                    await asyncio.sleep(RETRY_S)
        finally:
            # Nothing more is sent. Later events wait for another ``run``, which joins again.
            self.joined = False
            self._events.take_back()
            self._cancel_flushes()
            ending = {sweeps, *self._sends}
            for task in ending:
                task.cancel()
            await asyncio.gather(*ending, return_exceptions=True)

    async def _join(self) -> None:
        """Join the coordinator: report all open requests, and process the answer. Raises
        ``CoordinatorUnavailable``.

        No effect if the coordinator is deposed, or older than a coordinator that has answered before.
        """
        open_ = self.requests
        reported = {name: one.state for name, one in open_.items() if not one.refused}
        requests = tuple(open_[name].as_event(self._clock()) for name in reported)
        self._join_number += 1
        join = JoinRequest(self.gateway_id, self.epoch, requests, self._join_number)
        answer = await call_with_timeout(self._calls.join(join))
        if answer.status is not ResponseStatus.OK or answer.epoch < self.epoch:
            return
        another = self.homes.life != str(answer.epoch)
        if another:
            self.homes.version = -1
        self.places.joined(self._clock(), another=another)
        self.epoch, self.joined = answer.epoch, True
        self._last_mail_number = self._number = 0
        self._unavailable_since_s = None
        self._rate_limited_log.log(
            logging.INFO, "gateway %s has joined coordinator %d", self.gateway_id, self.epoch
        )
        # Report what has changed while the join was in flight.
        for name in reported.keys() - open_.keys():
            self._queue_event(routing_events.RequestFinished(name, answered=None))
        for name, one in open_.items():
            if name in reported and (one.refused or one.sent_to != reported[name][0]):
                self._queue_event(routing_events.RequestFinished(name, answered=None))
            if one.state == reported.get(name):
                one.placed_locally = False  # the coordinator knows where the request is
            elif not one.refused:
                self._queue_event(one.as_event(self._clock()))
                if one.began and one.sent_to is not None:
                    self._queue_event(routing_events.FirstByteSent(name, one.sent_to))
        self._receive(answer)
        self._flush()

    async def _poll(self) -> None:
        """Do one long poll and process the answer. Raises ``CoordinatorUnavailable``."""
        join = self._join_number
        poll = PollRequest(
            self.gateway_id, self.epoch, self._last_mail_number, self.homes.version, self.places.version, join
        )
        self._lost = asyncio.get_running_loop().create_future()
        polling = asyncio.ensure_future(self._calls.poll(poll))
        try:
            awaited: set[asyncio.Future[Any]] = {polling, self._lost}
            await asyncio.wait(awaited, timeout=LONG_POLL_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
            if not polling.done():
                raise CoordinatorUnavailable("it does not answer")
            answer = polling.result()
        finally:
            polling.cancel()
        if join == self._join_number:
            self._receive(answer)

    def _mark_disconnected(self) -> None:
        """Record that the coordinator is lost. This gateway then has to join again."""
        if self.joined:
            self._rate_limited_log.log(
                logging.WARNING, "the coordinator does not answer; programs with homes go on"
            )
        self.joined = False
        # The results of these calls are useless, and calls to the next coordinator would wait for them.
        for task in self._sends - {asyncio.current_task()}:
            task.cancel()
        if self._lost is not None and not self._lost.done():
            self._lost.set_result(None)
        self._events.take_back()
        if self._unavailable_since_s is None:
            self._unavailable_since_s = self._clock()

    def _receive(self, answer: CoordinatorResponse) -> None:
        """Process an answer of the coordinator: replicas, actions and homes. The coordinator is lost if the
        answer has another epoch, or another status than ``OK``."""
        if answer.status is not ResponseStatus.OK or answer.epoch != self.epoch:
            # Answers of a superseded coordinator are ignored.
            self.epoch = max(self.epoch, answer.epoch)
            self._mark_disconnected()
            return
        if answer.places is not None:
            self.places.update(answer.places, answer.places_version)
        for number, action in enumerate(answer.mail, answer.mail_from):
            if number > self._last_mail_number:
                self._last_mail_number = number
                self._dispatch_action(action)
        if answer.homes is not None:
            self.homes.apply(answer.homes, self.on_affinity_change)

    def _dispatch_action(self, action: routing_events.AnyRoutingAction) -> None:
        """Pass an action of the coordinator to its request or to the gateway. An action that no longer fits
        the state of its request is ignored."""
        if isinstance(action, ControlAction):
            self.on_control_action(action)
            return
        if (one := self.requests.get(action.request_id)) is None:
            return
        if isinstance(action, routing_events.AbortStream):
            if one.sent_to != action.replica_id:
                return
        elif one.began or one.refused:
            one.decisions.superseded |= isinstance(action, routing_events.SendRequest)
            return  # the request stays where it is, as reported
        elif isinstance(action, routing_events.RecallRequest):
            if one.sent_to != action.replica_id:
                return
            one.wait(self._clock())
        elif one.placed_locally:
            # The coordinator may have decided before it got this gateway's report, so report again.
            self._queue_event(routing_events.RequestFinished(action.request_id, answered=None))
            self._queue_event(one.as_event(self._clock()))
            return
        elif isinstance(action, routing_events.SendRequest):
            one.set_destination(action)
            self._record_affinity(one.asked, action)
        one.decisions.add_decision(action)  # before metrics, whose errors must not lose the decision
        self.on_action(action)

    def _record_affinity(
        self, asked: routing_events.RequestReceived, send: routing_events.SendRequest
    ) -> None:
        """Record the replica to which a request is sent as the home of its program."""
        place = self.places.get(send.replica_id)
        if asked.program_id is not None and place is not None and not isinstance(send, SendRequestToPair):
            self.homes.put((asked.tenant, asked.program_id), (send.replica_id, place.instance))

    # -- without the coordinator ---------------------------------------------------

    def _failed(self, event: routing_events.RequestFailed) -> None:
        """Record that a request failed at a replica. Without the coordinator, abort its stream if it has
        begun, or decide again."""
        one = self.requests.get(event.request_id)
        if one is None or not one.is_at(event.replica_id):
            return
        one.failed_at.append(event.replica_id)
        one.failures_computing += event.computing
        if not one.began:
            one.wait(self._clock())
        if not self.joined:
            if one.began:
                one.decisions.add_decision(routing_events.AbortStream(event.request_id, event.replica_id))
            else:
                self._decide_locally(one)

    async def _sweep(self) -> None:
        """Forget outdated replicas regularly, until cancelled. Also decide about waiting requests once the
        coordinator has been unavailable for ``fallback_s``."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            if self.joined:
                self.places.expire_inherited(self._clock())
            since_s = self._unavailable_since_s
            if since_s is None or self._clock() - since_s < self._fallback_s:
                continue
            for one in list(self.requests.values()):
                if one.sent_to is None and not one.refused:
                    self._decide_locally(one)

    def _decide_locally(self, one: OpenRequest) -> None:
        """Decide about a request without the coordinator. Without a replica, the request keeps waiting."""
        asked = one.asked
        home = self.home(asked.tenant, asked.program_id) if asked.program_id is not None else None
        decided = self.requests.decide(one, self.places, home, self._clock())
        if isinstance(decided, routing_events.RejectRequest):
            one.refused = True
            self.on_action(decided)
        elif decided is not None:
            one.set_destination(decided)
            one.placed_locally = True
            self._record_affinity(asked, decided)
        if decided is not None:
            one.decisions.add_decision(decided)
