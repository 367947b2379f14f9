"""Decides for all gateways of a cluster, with one routing core in one event loop. ``coordinator_actor`` runs
it on Ray."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Generator, Iterable, Sequence

import msgspec

from ...metrics.rate_limited_log import RateLimitedLog
from ...policies.cluster_preset import ClusterPreset
from ...routing import routing_events
from ...routing.pair_core import PairCore
from ...routing.routing_core import RoutingCore
from ...routing.routing_from_preset import RoutingRules, build_core
from ...routing.routing_limits import RoutingLimits
from ...routing.routing_status import PairEngineStatus, ProgramRouteStatus
from ..http.engine_descriptions import registration_event
from ..http.policy_failure_log import PolicyFailureLog
from ..http.routing_backend import TICK_S, take_event, with_links
from .coordinator_checkpoint import (
    CheckpointWriter,
    CoordinatorCheckpoint,
    CoordinatorOptions,
    read_checkpoint,
    read_checkpoint_epoch,
)
from .coordinator_messages import (
    IN_FLIGHT_UNKNOWN,
    CoordinatorResponse,
    CoordinatorState,
    DrainRequest,
    DrainResponse,
    EngineRegistration,
    EngineStopped,
    JoinRequest,
    PollRequest,
    RegistrationResponse,
    ReplicaInfo,
    ReplicaProbeResult,
    ReportRequest,
    ResponseStatus,
)
from .engine_autoscaler import Autoscaler
from .engine_registry import EngineRegistry, LivenessQuorum
from .message_router import HomeChangeTimer, MessageRouter, Outbox
from .pair_admission import PairAdmission

logger = logging.getLogger(__name__)

LONG_POLL_S = 5.0
"""Maximum seconds until a long poll is answered. A poll also shows that the gateway is alive."""


class Coordinator:
    """Makes the routing decisions for all gateways.

    A coordinator has an epoch, a number by which gateways and engines distinguish it from earlier and later
    coordinators. The epoch is the Unix time in milliseconds at the start, but at least the checkpoint's epoch
    plus one.

    A coordinator that learns of a higher epoch is ``deposed`` and makes no more decisions. There is one
    exception. Without a checkpoint and before its first request, a coordinator raises its own epoch instead.
    """

    def __init__(
        self,
        rules: RoutingRules,
        limits: RoutingLimits,
        options: CoordinatorOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Read the checkpoint, and write one with the new epoch. ``clock``: monotonic time in seconds.
        ``wall``: Unix time in seconds."""
        self._rules = rules
        self._limits = limits
        self.options = options
        self.deposed = False
        """Whether a later coordinator exists."""
        self.restored = 0
        """Number of programs with a home in the checkpoint."""
        self._had_requests = False
        """Whether a request has been reported."""
        self._clock = clock
        self._wall = wall
        self._rate_limited_log = RateLimitedLog(logger, clock)
        path = options.checkpoint
        kept = read_checkpoint(path) if path is not None else None
        last_epoch = read_checkpoint_epoch(path) if path is not None else 0
        self.epoch = max(int(wall() * 1000), last_epoch + 1)
        self.core = self._new_core()
        self.engines = EngineRegistry()
        self.post = MessageRouter()
        self._liveness_votes = LivenessQuorum()
        self._autoscaler = Autoscaler(options.autoscale, clock())
        if kept is not None and kept.core is not None:
            self._restore(kept)
        self._home_changes = HomeChangeTimer(self.core, self.post, clock)
        self._admission = PairAdmission(self.core, clock) if isinstance(self.core, PairCore) else None
        self._policy_log = PolicyFailureLog(self.core.counts)
        self._refresh_replicas()
        self.checkpoints: CheckpointWriter | None = None
        """Writes the checkpoints; ``None``: no checkpoint is written."""
        if path is not None:
            self.checkpoints = CheckpointWriter(
                path, options.checkpoint_s, self._checkpoint, self._is_superseded_by
            )
            unix_s, core = (kept.unix_s, kept.core) if kept is not None else (wall(), None)
            engines = self.engines.kept()
            self.checkpoints.write(
                CoordinatorCheckpoint(epoch=self.epoch, unix_s=unix_s, core=core, engines=engines)
            )
        logger.info("coordinator %d starts with %d programs that have a home", self.epoch, self.restored)

    def _new_core(self) -> RoutingCore:
        """Build an empty routing core whose id is the epoch."""
        return build_core(self._rules, self._limits, expects_engines=True, life=str(self.epoch))

    def _restore(self, kept: CoordinatorCheckpoint) -> None:
        """Restore core and engines from a checkpoint. An invalid checkpoint is logged and ignored."""
        assert kept.core is not None
        elapsed_s = max(0.0, self._wall() - kept.unix_s)
        try:
            self.restored = self.core.restore(kept.core, self._clock(), elapsed_s)
            # Replicas may have ended with the former coordinator.
            self.core.suspect_all(self._clock())
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("the checkpoint is ignored: %s", error)
            self.core = self._new_core()
            return
        self.engines = EngineRegistry(kept.engines)

    # -- gateways -----------------------------------------------------------------

    async def join(self, join: JoinRequest) -> CoordinatorResponse:
        """Process the join of a gateway that starts or reconnects. The gateway reports all its open requests.
        A request that it reported earlier but not now counts as ended."""
        if self._is_superseded_by(join.seen_epoch):
            return CoordinatorResponse(self.epoch, ResponseStatus.DEPOSED)
        before = self.post.box(join.gateway_id)
        if before is not None and join.join < before.join:
            # A later join of this gateway overtook this one.
            return CoordinatorResponse(self.epoch, ResponseStatus.JOIN)
        now = self._clock()
        request_ids = {one.request_id for one in join.requests}
        outbox, gone = self.post.join(join.gateway_id, request_ids, now, join.join)
        for request_id in gone:
            self._take(routing_events.RequestFinished(request_id, answered=None), join.gateway_id)
        for one in join.requests:
            sent = self.core.sent_request(one.request_id)
            if sent is not None:
                if isinstance(one, routing_events.RequestReceived):
                    outbox.post(sent)  # the decision was lost on its way
                    continue
                if sent.replica_id != one.replica_id:
                    self._take(routing_events.RequestFinished(one.request_id, answered=None), join.gateway_id)
            elif isinstance(one, routing_events.RequestReceived) and self.core.is_open(one.request_id):
                continue
            self._take(one, join.gateway_id)
            if isinstance(one, routing_events.RequestSent) and one.began:
                self._take(routing_events.FirstByteSent(one.request_id, one.replica_id), join.gateway_id)
        self._home_changes.schedule_flush()
        return self._answer(outbox, 0, -1)

    async def tell(self, tell: ReportRequest) -> CoordinatorResponse:
        """Process a batch of a gateway's events and probe results. Wait until all earlier batches of the
        gateway are processed."""
        outbox = self._outbox_of(tell)
        if isinstance(outbox, CoordinatorResponse):
            return outbox
        outbox.heard_s = self._clock()
        try:
            is_next = await outbox.wait_for_batch(tell.number)
        except asyncio.CancelledError:
            if self.post.box(tell.gateway_id) is outbox:
                raise
            return CoordinatorResponse(self.epoch, ResponseStatus.JOIN)
        if (left := self._response_if_left(tell, outbox)) is not None:
            return left
        if is_next:
            for event in tell.facts:
                self._take(event, tell.gateway_id)
            for probe in tell.probes:
                self._probed(probe, tell.gateway_id)
            outbox.finish_batch(tell.number)
        self._home_changes.schedule_flush()
        return self._answer(outbox, tell.acked, tell.places_version)

    async def listen(self, listen: PollRequest) -> CoordinatorResponse:
        """Answer a long poll of a gateway. Answer when there are new actions, homes or replicas for it, or
        after ``LONG_POLL_S``."""
        outbox = self._outbox_of(listen)
        if isinstance(outbox, CoordinatorResponse):
            return outbox
        outbox.heard_s = self._clock()
        outbox.wake.clear()
        journal = self.core.journal
        # Homes that have just changed wait for further changes, to go in one batch.
        homes_due = listen.version != journal.version and journal.due_s(self._clock()) in (None, 0.0)
        mail = outbox.since(listen.acked)[1]
        if not (mail or homes_due or listen.places_version != self.engines.version):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(outbox.wake.wait(), LONG_POLL_S)
        if (left := self._response_if_left(listen, outbox)) is not None:
            return left
        outbox.heard_s = self._clock()
        life = journal.life if listen.version >= 0 else ""
        homes = None
        if listen.version != journal.version:
            homes = self.core.changes_since(listen.version, life)
        answer = self._answer(outbox, listen.acked, listen.places_version)
        return msgspec.structs.replace(answer, homes=homes)

    def _outbox_of(self, message: ReportRequest | PollRequest) -> Outbox | CoordinatorResponse:
        """Return the outbox of the gateway that sent ``message``. If the gateway has to join, or this
        coordinator is deposed, return the response that says so."""
        if self._is_superseded_by(message.epoch):
            return CoordinatorResponse(self.epoch, ResponseStatus.DEPOSED)
        outbox = self.post.box(message.gateway_id)
        if message.epoch != self.epoch or outbox is None or outbox.join != message.join:
            return CoordinatorResponse(self.epoch, ResponseStatus.JOIN)
        return outbox

    def _response_if_left(
        self, message: ReportRequest | PollRequest, outbox: Outbox
    ) -> CoordinatorResponse | None:
        """Check after a wait whether the gateway that sent ``message`` still uses ``outbox``. Return ``None``
        if it does. If the gateway has joined again or is gone, return the response to send instead."""
        now = self._outbox_of(message)
        if now is outbox:
            return None
        if isinstance(now, CoordinatorResponse):
            return now
        return CoordinatorResponse(self.epoch, ResponseStatus.JOIN)

    def _answer(self, outbox: Outbox, acked: int, places_version: int) -> CoordinatorResponse:
        """Return the response with a gateway's actions after number ``acked``. Add the replicas if they have
        changed since ``places_version``."""
        first, mail = outbox.since(acked)
        shown = self.engines.shown if places_version != self.engines.version else None
        return CoordinatorResponse(
            self.epoch, mail_from=first, mail=mail, places=shown, places_version=self.engines.version
        )

    def _is_superseded_by(self, epoch: int) -> bool:
        """Process an epoch that a message reports. Return whether this coordinator is deposed.

        A higher epoch deposes this coordinator. In the exception that the class describes, this coordinator
        raises its own epoch instead.
        """
        if epoch > self.epoch and not self.deposed:
            if self.options.checkpoint is None and not self._had_requests:
                self._advance_epoch(epoch)
                return False
            self.deposed = True
            logger.warning("coordinator %d is superseded by %d", self.epoch, epoch)
        return self.deposed

    def _advance_epoch(self, epoch: int) -> None:
        """Set this coordinator's epoch to one more than the reported ``epoch``.

        Used only without a checkpoint, when epochs come from the clock alone. After the clock was set back,
        each new coordinator would otherwise be deposed.
        """
        logger.warning("coordinator %d got epoch %d: it continues as %d", self.epoch, epoch, epoch + 1)
        self.epoch = epoch + 1
        self.core.journal.life = str(self.epoch)
        self.post.wake_all()  # joined gateways join again

    # -- engines ------------------------------------------------------------------

    async def register(self, registration: EngineRegistration) -> RegistrationResponse:
        """Register an engine, or record that it is alive. Engines call this about twice a second. The answer
        has the number of engines that the cluster should have."""
        if self._is_superseded_by(registration.seen_epoch):
            return RegistrationResponse(self.epoch, ResponseStatus.DEPOSED)
        why = ""
        if self._admission is not None:
            why = self._admission.process_registration(registration)
            for event in self._admission.take_drain_events():
                self._take(event)
        if why:
            self._forget(registration.engine_id, "it gets no requests")
            self._refresh_replicas()
            return RegistrationResponse(self.epoch)
        first = not self.engines.has_registered(registration.engine_id)
        entry = self.engines.put(registration)
        for place in entry.left:
            self._take(routing_events.ReplicaGone(place.replica_id, place.instance, "registered_anew"))
        for engine_id in entry.replaced:
            # The former engine at this address is gone, or the address would not be free.
            self._forget(engine_id, "replaced")
        if self.engines.drains(registration.engine_id):
            self._drain(entry.places)
        self._register_replicas(entry.places, entry.changed)
        link_event = self._admission.record_links(registration) if self._admission is not None else None
        if link_event is not None:
            self._pass_on(self.core.take(link_event, self._clock()), None)
        if first:
            former = registration.wanted_engines if registration.seen_epoch != self.epoch else 0
            self._autoscaler.hold(former, self.engines.running(self.core, self._clock()))
        return RegistrationResponse(self.epoch, wanted_engines=self._autoscaler.engines)

    async def gone(self, gone: EngineStopped) -> RegistrationResponse:
        """Process a supervisor's report that an engine's process has ended."""
        places = self.engines.replicas_of(gone.engine_id)
        if not self.deposed and places and places[0].instance == gone.instance:
            self._forget(gone.engine_id, gone.reason)
            self._refresh_replicas()
        elif not places:
            self.engines.remove(gone.engine_id)  # forget its drain, if any
        return RegistrationResponse(self.epoch, ResponseStatus.DEPOSED if self.deposed else ResponseStatus.OK)

    async def drain(self, drain: DrainRequest) -> DrainResponse:
        """Drain an engine. Answer with the number of its requests in flight. The number is
        ``IN_FLIGHT_UNKNOWN`` for an engine that has not registered with this coordinator."""
        if self.deposed:
            return DrainResponse(self.epoch, IN_FLIGHT_UNKNOWN, ResponseStatus.DEPOSED)
        places = self.engines.replicas_of(drain.engine_id)
        if self.engines.drain(drain.engine_id):
            self._drain(places)
            self._refresh_replicas()
        if not self.engines.has_registered(drain.engine_id):
            return DrainResponse(self.epoch, IN_FLIGHT_UNKNOWN, ResponseStatus.JOIN)
        return DrainResponse(self.epoch, sum(self.core.in_flight(place.replica_id) for place in places))

    def _drain(self, places: Iterable[ReplicaInfo]) -> None:
        for place in places:
            event = self.core.drain_event(place.replica_id, place.instance)
            if event is not None:
                self._take(event)

    def _register_replicas(self, places: Iterable[ReplicaInfo], changed: bool = True) -> None:
        """Report to the core that replicas are alive. Announce them to the gateways before the core's
        actions, which may send requests there. ``changed``: whether the replicas differ from those that
        gateways know."""
        actions = []
        now = self._clock()
        for place in places:
            self._liveness_votes.cancel_vote(place.replica_id)
            paths = place.paths if self._admission is not None else None
            try:
                actions += self.core.take(registration_event(place.replica_id, place.description, paths), now)
            except ValueError as error:
                logger.warning("an engine is not registered: %s", error)
        if changed:
            self._refresh_replicas()
        self._pass_on(actions, None)
        self._home_changes.schedule_flush()

    def _forget(self, engine_id: str, reason: str) -> None:
        """Remove an engine, and report its replicas to the core as gone. ``reason``: text for the log and for
        ``ReplicaGone``."""
        for place in self.engines.remove(engine_id):
            logger.warning("replica %s is gone: %s", place.replica_id, reason)
            self._liveness_votes.cancel_vote(place.replica_id)
            self._take(routing_events.ReplicaGone(place.replica_id, place.instance, reason))

    def _probed(self, probe: ReplicaProbeResult, gateway_id: str) -> None:
        """Process the result of a gateway's probe of a replica. A failed probe is a vote that the replica is
        dead. A successful one proves that it is alive."""
        if not probe.alive:
            self._liveness_votes.record_failed_probe(probe.replica_id, probe.instance, gateway_id)
            return
        lease = self.core.lease(probe.replica_id)
        if lease is not None and lease[0] == probe.instance:
            places = self.engines.replicas_of(self.engines.engine_of(probe.replica_id) or "")
            self._register_replicas([place for place in places if place.replica_id == probe.replica_id])

    def _end_liveness_votes(self, now: float) -> None:
        """End the decided votes. If gateways cannot reach a replica, and it has been silent for
        ``RoutingLimits.lease_s``, remove its engine."""
        for replica_id, instance in self._liveness_votes.take_unreachable(self.post.gateways, now):
            lease = self.core.lease(replica_id)
            if lease is None or lease[0] != instance or now - lease[1] < self._limits.lease_s:
                continue  # its supervisor reports that it is alive, although gateways cannot reach it
            owner, reason = self.engines.engine_of(replica_id), "it is silent, and a probe did not reach it"
            if owner is not None:
                self._forget(owner, reason)
            else:
                self._take(routing_events.ReplicaGone(replica_id, instance, reason))

    # -- the core -----------------------------------------------------------------

    def _take(self, event: routing_events.AnyRoutingEvent, gateway_id: str | None = None) -> None:
        """Pass an event to the core, and send the core's actions to gateways. ``gateway_id``: the gateway
        that reported the event; ``None``: no gateway reported it."""
        now = self._clock()
        if self.checkpoints is not None and not isinstance(event, routing_events.Tick):
            self.checkpoints.mark_changed()
        if isinstance(event, (routing_events.RequestReceived, routing_events.RequestSent)):
            self._had_requests = True
            if event.deadline_s is not None:
                event = msgspec.structs.replace(event, deadline_s=now + event.deadline_s)
            if gateway_id is not None:
                self.post.add_request(gateway_id, event.request_id)
        actions = take_event(self.core, event, now, self._rate_limited_log)
        self._policy_log.log_new_failures(now)
        if isinstance(event, routing_events.RequestFinished):
            self.post.remove_request(event.request_id)
        self._pass_on(actions, gateway_id)

    def _pass_on(self, actions: Sequence[routing_events.AnyRoutingAction], gateway_id: str | None) -> None:
        """Send each action to the gateway that it concerns. A ``ProbeReplica`` starts a vote on its replica,
        and is not sent again while that vote runs. ``gateway_id``: the gateway that reported the event;
        ``None``: no gateway reported it."""
        for action in actions:
            if isinstance(action, routing_events.ProbeReplica) and not self._liveness_votes.begin(
                action.replica_id, action.instance, self.post.gateways, self._clock()
            ):
                continue
            self.post.send(action, actions, gateway_id)
            if isinstance(
                action, (routing_events.RejectRequest, routing_events.AbortStream)
            ) and not self.core.is_open(action.request_id):
                self.post.remove_request(action.request_id)

    def _refresh_replicas(self) -> None:
        """Update the list of replicas for gateways. If it has changed, answer all running polls."""
        routing = self._rules.routing if isinstance(self._rules, ClusterPreset) else None
        if self.engines.refresh_shown(self.core, routing, self._clock()):
            self.post.wake_all()

    # -- time ---------------------------------------------------------------------

    def begin(self) -> asyncio.Task[None]:
        """Start ``run`` as a task of the running event loop, and return the task. Its end is logged."""
        running = asyncio.get_running_loop().create_task(self.run())
        running.add_done_callback(self._ended)
        return running

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            logger.info("coordinator %d was stopped", self.epoch)
        elif (error := running.exception()) is not None:
            failed = "coordinator %d has failed: it makes no progress any more; please report this"
            logger.error(failed, self.epoch, exc_info=error)
        else:
            logger.info("coordinator %d has ended: it is superseded", self.epoch)

    async def run(self) -> None:
        """Send ticks to the core and write checkpoints, until cancelled or deposed. A failed tick is logged,
        and the loop goes on."""
        tasks = [asyncio.ensure_future(self.checkpoints.run())] if self.checkpoints is not None else []
        try:
            while not self.deposed:
                await asyncio.sleep(TICK_S)
                try:
                    self.tick()
                except Exception:
                    self._rate_limited_log.log(
                        logging.ERROR, "a tick failed; please report this", exc_info=True
                    )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.post.wake_all()

    def tick(self) -> None:
        """Do all that depends on time: send the core a ``Tick``, remove silent gateways, end liveness votes,
        and decide the number of engines. ``run`` calls this every ``TICK_S``."""
        now = self._clock()
        self._take(routing_events.Tick())
        for gateway_id, requests in self.post.remove_silent_gateways(now).items():
            logger.warning("gateway %s is gone; its requests have ended", gateway_id)
            for request_id in requests:
                self._take(routing_events.RequestFinished(request_id, answered=None))
        self._end_liveness_votes(now)
        self._autoscaler.update(self.core.demand_tokens, len(self.engines), now)
        self._refresh_replicas()
        self._home_changes.schedule_flush()

    def _checkpoint(self) -> Generator[None, None, CoordinatorCheckpoint]:
        """Copy the present state in steps. Return a checkpoint."""
        unix_s, engines = self._wall(), self.engines.kept()
        core = yield from self.core.snapshot_steps(self._clock())
        return CoordinatorCheckpoint(epoch=self.epoch, unix_s=unix_s, core=core, engines=engines)

    # -- questions ------------------------------------------------------------------

    async def state(self) -> CoordinatorState:
        """Return the coordinator's state, for operators, with the statuses of all replicas."""
        links_of = self._admission.links_of if self._admission is not None else lambda replica_id: {}
        found = with_links(self.core.replica_statuses(), links_of)
        pairs = [one for one in found if isinstance(one, PairEngineStatus)]
        replicas = [one for one in found if not isinstance(one, PairEngineStatus)]
        gateways, wanted = len(self.post), self._autoscaler.engines
        uses = self.core.shares_used()
        return CoordinatorState(self.epoch, self.restored, gateways, wanted, replicas, uses, pairs)

    async def programs(self) -> list[ProgramRouteStatus]:
        """Return the statuses of all programs. ``state`` does not include them, because they may take many
        megabytes."""
        return self.core.program_statuses()
