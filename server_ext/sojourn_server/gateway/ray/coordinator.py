"""Decides for all gateways of a cluster: one routing core, one event loop. Without Ray: an actor wraps it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ...policy.cluster_preset import ClusterPreset
from ...policy.replica_views import RouteView
from ..core import facts
from ..core.core import RoutingCore
from ..core.fleet import Health, Replica
from ..core.from_preset import core_of
from ..core.limits import CoreLimits
from ..http.decider import TICK_S, LocalDecider
from ..http.replicas import addresses
from .autoscale import AutoscaleLimits, Need, Wanted, wanted_engines
from .checkpoint import Checkpoint, read_checkpoint, read_epoch, write_checkpoint
from .mailbox import Mailbox
from .messages import (
    Answer,
    Drain,
    Drained,
    EngineGone,
    Join,
    Listen,
    Place,
    ProbeAnswer,
    Registered,
    Registration,
    State,
    Status,
    Tell,
)
from .trials import Trials

logger = logging.getLogger(__name__)

LISTEN_S = 5.0
"""A gateway that listens hears something at least so often, and is heard of."""
GATEWAY_LEASE_S = 20.0
"""Requests of a gateway that has said nothing for so long are over."""
CHECKPOINT_S = 1.0
CHECKPOINT_SHARE = 0.02
"""Of the event loop's time that copies for checkpoints may take."""
AUTOSCALE_S = 1.0
ASKED_ABOUT = 8
"""Made-up turns that a policy is asked about to see whether it sends all of them home."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What an operator chooses."""

    checkpoint: Path | None = None
    """``None``: a new coordinator begins with what gateways and engines tell it."""
    checkpoint_s: float = CHECKPOINT_S
    autoscale: AutoscaleLimits = field(default_factory=AutoscaleLimits)


class Coordinator:
    """One of possibly several lives. Its epoch is later than that of all that wrote the checkpoint before.

    Without a shared file it still is, by the clock. Whoever finds that there is a later one
    (``deposed``) decides nothing any more.
    """

    def __init__(
        self,
        preset: ClusterPreset,
        limits: CoreLimits,
        options: CoordinatorOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Reads the checkpoint, and writes that it has begun."""
        self._preset = preset
        self._limits = limits
        self.options = options
        self.deposed = False
        self.restored = 0
        self._clock = clock
        self._wall = wall
        path = options.checkpoint
        kept = read_checkpoint(path) if path is not None else None
        last_epoch = read_epoch(path) if path is not None else 0
        self.epoch = max(int(wall() * 1000), last_epoch + 1)
        self.core = self._new_core()
        self._engines: dict[str, list[Place]] = {}
        self._drains: set[str] = set()
        self._mailboxes: dict[str, Mailbox] = {}
        self._owner: dict[str, str] = {}
        """Gateway that has a request."""
        self._trials = Trials()
        self._places: tuple[Place, ...] = ()
        self._places_version = 0
        self._wake_later: asyncio.TimerHandle | None = None
        self._facts = 0
        self._checkpointed = -1
        """Facts that the newest checkpoint is of."""
        self._wanted = Wanted(options.autoscale.min_engines)
        self._autoscaled_s = clock()
        if kept is not None and kept.core is not None:
            self._restore(kept)
        self._reads = LocalDecider(self.core, (), clock)
        """Only to read from."""
        self._look_at_places()
        if path is not None:
            first = kept.core if kept is not None else None
            written = Checkpoint(
                epoch=self.epoch,
                unix_s=kept.unix_s if kept is not None else wall(),
                core=first,
                engines=dict(self._engines),
            )
            self._write(path, written)
        logger.info("coordinator %d begins with %d programs at home somewhere", self.epoch, self.restored)

    def _new_core(self) -> RoutingCore:
        return core_of(self._preset, self._limits, life=str(self.epoch))

    def _restore(self, kept: Checkpoint) -> None:
        assert kept.core is not None
        try:
            self.core.restore(kept.core, self._clock(), max(0.0, self._wall() - kept.unix_s))
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("the checkpoint is left aside: %s", error)
            self.core = self._new_core()
            return
        for replica in self.core.fleet:
            if replica.health is Health.UP:
                # It may have ended with the coordinator before: nobody new goes there until it registers.
                replica.health = Health.SUSPECT
                self.core.fleet.changed(replica, self._clock())
        self._engines = {engine: list(places) for engine, places in kept.engines.items()}
        self.restored = sum(program.home is not None for program in self.core.programs)

    # -- gateways -----------------------------------------------------------------

    async def join(self, join: Join) -> Answer:
        """A gateway begins, or begins anew; all it has is in ``join``, and what is not is over."""
        if self._is_later(join.seen_epoch):
            return Answer(self.epoch, Status.DEPOSED)
        now = self._clock()
        old = self._mailboxes.get(join.gateway_id)
        mailbox = self._mailboxes[join.gateway_id] = Mailbox(now)
        said = {one.request_id for one in join.requests}
        if old is not None:
            old.close()
            mailbox.requests = old.requests & said
            for request_id in old.requests - said:
                self._take(facts.Ended(request_id), join.gateway_id)
        for one in join.requests:
            known = self.core.requests.by_id.get(one.request_id)
            if known is not None and known.sent_s is not None:
                if isinstance(one, facts.Asked):
                    # The word of it was lost on its way.
                    assert known.replica_id is not None
                    mailbox.post(facts.Send(one.request_id, known.replica_id, known.reason, known.moved_from))
                    continue
                if known.replica_id != one.replica_id:
                    self._take(facts.Ended(one.request_id), join.gateway_id)
            elif known is not None and isinstance(one, facts.Asked):
                continue
            self._take(one, join.gateway_id)
            if isinstance(one, facts.Sent) and one.began:
                self._take(facts.Began(one.request_id, one.replica_id), join.gateway_id)
        self._soon()
        return self._answer(mailbox, 0, -1)

    async def tell(self, tell: Tell) -> Answer:
        """What happened at a gateway."""
        refused = self._refused(tell.gateway_id, tell.epoch)
        if refused is not None:
            return refused
        mailbox = self._mailboxes[tell.gateway_id]
        mailbox.heard_s = self._clock()
        try:
            if await mailbox.turn(tell.number):
                for fact in tell.facts:
                    self._take(fact, tell.gateway_id)
                for probe in tell.probes:
                    self._probed(probe, tell.gateway_id)
                mailbox.taken(tell.number)
        except asyncio.CancelledError:
            if self._mailboxes.get(tell.gateway_id) is mailbox:
                raise
            return Answer(self.epoch, Status.JOIN)
        self._soon()
        return self._answer(mailbox, tell.acked, tell.places_version)

    async def listen(self, listen: Listen) -> Answer:
        """Answers when there is something new for this gateway, or after a while."""
        refused = self._refused(listen.gateway_id, listen.epoch)
        if refused is not None:
            return refused
        mailbox = self._mailboxes[listen.gateway_id]
        mailbox.heard_s = self._clock()
        mailbox.wake.clear()
        journal = self.core.journal
        # Homes that have only just changed are told with those that change next, in one batch.
        homes_due = listen.version != journal.version and journal.due_s(self._clock()) in (None, 0.0)
        mail = mailbox.since(listen.acked)[1]
        if not (mail or homes_due or listen.places_version != self._places_version):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(mailbox.wake.wait(), LISTEN_S)
        refused = self._refused(listen.gateway_id, listen.epoch)
        if refused is not None:
            return refused
        if self._mailboxes[listen.gateway_id] is not mailbox:
            return Answer(self.epoch, Status.JOIN)
        mailbox.heard_s = self._clock()
        life = journal.life if listen.version >= 0 else ""
        homes = None
        if listen.version != journal.version:
            homes = self.core.changes_since(listen.version, life)
        answer = self._answer(mailbox, listen.acked, listen.places_version)
        return msgspec.structs.replace(answer, homes=homes)

    def _refused(self, gateway_id: str, epoch: int) -> Answer | None:
        if self._is_later(epoch):
            return Answer(self.epoch, Status.DEPOSED)
        if epoch != self.epoch or gateway_id not in self._mailboxes:
            return Answer(self.epoch, Status.JOIN)
        return None

    def _answer(self, mailbox: Mailbox, acked: int, places_version: int) -> Answer:
        first, mail = mailbox.since(acked)
        shown = self._places if places_version != self._places_version else None
        return Answer(
            self.epoch, mail_from=first, mail=mail, places=shown, places_version=self._places_version
        )

    def _is_later(self, epoch: int) -> bool:
        if epoch > self.epoch and not self.deposed:
            self.deposed = True
            logger.warning("coordinator %d gives way to %d", self.epoch, epoch)
        return self.deposed

    # -- engines ------------------------------------------------------------------

    async def register(self, told: Registration) -> Registered:
        """An engine is there; to be said once a second or so."""
        if self._is_later(told.seen_epoch):
            return Registered(self.epoch, Status.DEPOSED)
        before = self._engines.get(told.engine_id, [])
        of = told.description
        health = {place.replica_id: place for place in before}
        places = [
            Place(a.replica_id, a.url, a.rank, of, Health.UP.value, False, True)
            if a.replica_id not in health
            else msgspec.structs.replace(health[a.replica_id], url=a.url, rank=a.rank, description=of)
            for a in addresses(told.url, of.ranks)
        ]
        known = {place.replica_id for place in places}
        for place in before:
            if place.replica_id not in known or place.instance != of.instance:
                self._take(facts.ReplicaGone(place.replica_id, place.instance, "registered_anew"))
        for engine_id, others in list(self._engines.items()):
            # Another engine had this address before: it is gone, or the address would not be free.
            if engine_id != told.engine_id and any(place.replica_id in known for place in others):
                self._forget(engine_id, "replaced")
        changed = places != before
        self._engines[told.engine_id] = places
        self._seen(places, changed)
        return Registered(self.epoch, wanted_engines=self._wanted.engines)

    async def gone(self, gone: EngineGone) -> Registered:
        """An engine's own deployment says that its process has ended."""
        places = self._engines.get(gone.engine_id, [])
        if not self.deposed and places and places[0].instance == gone.instance:
            self._forget(gone.engine_id, gone.reason)
            self._look_at_places()
        return Registered(self.epoch, Status.DEPOSED if self.deposed else Status.OK)

    async def drain(self, drain: Drain) -> Drained:
        """Nobody is sent to an engine any more, but for turns that are on their way."""
        if self.deposed:
            return Drained(self.epoch, 0, Status.DEPOSED)
        places = self._engines.get(drain.engine_id, [])
        if drain.engine_id not in self._drains:
            self._drains.add(drain.engine_id)
            for place in places:
                self._take(facts.ReplicaDrains(place.replica_id))
            self._look_at_places()
        found = (self.core.fleet.get(place.replica_id) for place in places)
        return Drained(self.epoch, sum(len(replica.in_flight) for replica in found if replica is not None))

    def _seen(self, places: Iterable[Place], changed: bool = True) -> None:
        """Places that are new are looked at before anybody hears that a request is to go there."""
        actions = []
        now = self._clock()
        for place in places:
            self._trials.over(place.replica_id)
            of = place.description
            seen = facts.ReplicaSeen(
                place.replica_id,
                of.instance,
                of.capacity_tokens,
                host_tokens=of.host_tokens,
                max_running=of.max_running,
                max_context_tokens=of.max_context_tokens,
            )
            try:
                actions += self.core.take(seen, now)
            except ValueError as error:
                logger.warning("an engine is left aside: %s", error)
        if changed:
            self._look_at_places()
        self._pass_on(actions, None)
        self._soon()

    def _forget(self, engine_id: str, reason: str) -> None:
        self._drains.discard(engine_id)
        for place in self._engines.pop(engine_id, []):
            logger.warning("replica %s is gone: %s", place.replica_id, reason)
            self._trials.over(place.replica_id)
            self._take(facts.ReplicaGone(place.replica_id, place.instance, reason))

    def _probed(self, probe: ProbeAnswer, gateway_id: str) -> None:
        if not probe.alive:
            self._trials.heard(probe.replica_id, probe.instance, gateway_id, False)
            return
        replica = self.core.fleet.get(probe.replica_id)
        if replica is not None and replica.instance == probe.instance:
            self._seen(place for place in self._places if place.replica_id == probe.replica_id)

    def _end_trials(self, now: float) -> None:
        for replica_id, instance in self._trials.lost(self._mailboxes, now):
            replica = self.core.fleet.get(replica_id)
            silent = replica is not None and now - replica.heard_s >= self.core.limits.lease_s
            if replica is None or replica.instance != instance or not silent:
                continue  # its own deployment says that it lives: some gateway cannot reach it
            owner = self._engine_of(replica_id)
            if owner is not None:
                self._forget(owner, "silent, and not reached")
            else:
                self._take(facts.ReplicaGone(replica_id, instance, "silent, and not reached"))

    def _engine_of(self, replica_id: str) -> str | None:
        for engine_id, places in self._engines.items():
            if any(place.replica_id == replica_id for place in places):
                return engine_id
        return None

    # -- the core -----------------------------------------------------------------

    def _take(self, fact: facts.AnyFact, gateway_id: str | None = None) -> None:
        now = self._clock()
        self._facts += not isinstance(fact, facts.Tick)
        if isinstance(fact, (facts.Asked, facts.Sent)):
            if fact.deadline_s is not None:
                fact = msgspec.structs.replace(fact, deadline_s=now + fact.deadline_s)
            if gateway_id is not None:
                self._owner[fact.request_id] = gateway_id
                self._mailboxes[gateway_id].requests.add(fact.request_id)
        try:
            actions = self.core.take(fact, now)
        except Exception:
            logger.exception("the routing core failed at %s; please report this", type(fact).__name__)
            return
        if isinstance(fact, facts.Ended):
            mailbox = self._mailboxes.get(self._owner.pop(fact.request_id, ""))
            if mailbox is not None:
                mailbox.requests.discard(fact.request_id)
        self._pass_on(actions, gateway_id)

    def _pass_on(self, actions: Sequence[facts.AnyAction], gateway_id: str | None) -> None:
        """Each action to the gateway that has its request."""
        for action in actions:
            if isinstance(action, facts.Probe):
                now = self._clock()
                if self._trials.begin(action.replica_id, action.instance, self._mailboxes, now):
                    for mailbox in self._mailboxes.values():
                        mailbox.post(action)
                continue
            if isinstance(action, facts.Left):
                # Whoever moves the program also tells its old replica, in that order.
                owner = next(
                    (
                        self._owner.get(one.request_id)
                        for one in actions
                        if isinstance(one, facts.Send) and one.moved_from == action.replica_id
                    ),
                    gateway_id,
                )
                mailbox_ = self._mailboxes.get(owner or "") or next(iter(self._mailboxes.values()), None)
            else:
                mailbox_ = self._mailboxes.get(self._owner.get(action.request_id, ""))
            if mailbox_ is not None:
                mailbox_.post(action)

    def _soon(self) -> None:
        """Wake those who listen when a batch of changed homes is due."""
        now = self._clock()
        due_s = self.core.journal.due_s(now)
        if due_s is None or (due_s > 0 and self._wake_later is not None):
            return
        if due_s > 0:
            self._wake_later = asyncio.get_running_loop().call_later(due_s, self._flush)
        else:
            self._flush()

    def _flush(self) -> None:
        if self._wake_later is not None:
            self._wake_later.cancel()
            self._wake_later = None
        if self.core.flush(self._clock()) is not None:
            self._wake_all()
        self._soon()

    def _wake_all(self) -> None:
        for mailbox in self._mailboxes.values():
            mailbox.wake.set()

    def _look_at_places(self) -> None:
        places = []
        for of in self._engines.values():
            for place in of:
                replica = self.core.fleet.get(place.replica_id)
                if replica is not None:
                    places.append(
                        msgspec.structs.replace(
                            place,
                            health=replica.health.value,
                            direct=self._is_direct(replica),
                            takes_new=replica.health is Health.UP,
                        )
                    )
        found = tuple(places)
        if found != self._places:
            self._places = found
            self._places_version += 1
            self._wake_all()

    def _is_direct(self, replica: Replica) -> bool:
        """Turns of programs at home there go there now, whatever they are: then gateways need not ask."""
        core, routing = self.core, self._preset.routing
        if (
            replica.health is not Health.UP
            or routing.reads_prefixes
            or core.fleet.full(replica)
            or replica.replica_id in core.requests.queues
        ):
            return False
        home = core.fleet.view(replica.replica_id)
        for number in range(ASKED_ABOUT):
            turn = RouteView(f"made-up-{number}", number, 1, 1, home, True, None, {})
            if routing.route(turn, core.fleet.views, self._clock()).replica_id != replica.replica_id:
                return False
        return True

    # -- as time goes by ----------------------------------------------------------

    async def run(self) -> None:
        """Ticks and checkpoints, until cancelled or deposed."""
        checkpoints = asyncio.ensure_future(self._keep_checkpoints())
        try:
            while not self.deposed:
                await asyncio.sleep(TICK_S)
                self.tick()
        finally:
            checkpoints.cancel()
            await asyncio.gather(checkpoints, return_exceptions=True)
            self._wake_all()

    def tick(self) -> None:
        """A tenth of a second has gone by."""
        now = self._clock()
        self._take(facts.Tick())
        for gateway_id, mailbox in list(self._mailboxes.items()):
            if now - mailbox.heard_s >= GATEWAY_LEASE_S:
                logger.warning("gateway %s is gone; its requests are over", gateway_id)
                del self._mailboxes[gateway_id]
                mailbox.close()
                for request_id in list(mailbox.requests):
                    self._take(facts.Ended(request_id))
        self._end_trials(now)
        if now - self._autoscaled_s >= AUTOSCALE_S:
            self._autoscaled_s = now
            self._wanted = wanted_engines(self._need(), self._wanted, self.options.autoscale, now)
        self._look_at_places()
        self._soon()

    def _need(self) -> Need:
        fleet = self.core.fleet
        engines = sum(1 for places in self._engines.values() if places)
        homed = sum(replica.homed_tokens for replica in fleet)
        lines = (self.core.requests.anywhere, self.core.requests.failed)
        waiting = sum(max(one.needs_tokens, one.size_tokens) for line in lines for one in line)
        return Need(homed + waiting, fleet.room_tokens // engines if engines else 0)

    async def _keep_checkpoints(self) -> None:
        path = self.options.checkpoint
        if path is None:
            return
        pause_s = self.options.checkpoint_s
        while True:
            await asyncio.sleep(pause_s)
            began_s = time.perf_counter()
            changed = self._facts
            if changed == self._checkpointed:
                # Nothing to write, but somebody else may have.
                self._is_later(await asyncio.to_thread(read_epoch, path))
                continue
            checkpoint = Checkpoint(
                epoch=self.epoch,
                unix_s=self._wall(),
                core=self.core.snapshot(self._clock()),
                engines={engine: list(places) for engine, places in self._engines.items()},
            )
            took_s = time.perf_counter() - began_s
            pause_s = max(self.options.checkpoint_s, took_s / CHECKPOINT_SHARE)
            if await asyncio.to_thread(self._write, path, checkpoint):
                self._checkpointed = changed

    def _write(self, path: Path, checkpoint: Checkpoint) -> bool:
        try:
            self._is_later(write_checkpoint(path, checkpoint))
        except OSError as error:
            logger.error("checkpoint %s cannot be written: %s", path, error)
            return False
        return True

    # -- who asks -----------------------------------------------------------------

    async def state(self) -> State:
        """All that is known."""
        return State(
            self.epoch,
            self.restored,
            len(self._mailboxes),
            self._wanted.engines,
            list(await self._reads.programs()),
            list(await self._reads.replicas()),
            self._reads.uses(),
        )
