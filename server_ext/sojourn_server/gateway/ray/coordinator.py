"""Decides for all gateways of a cluster: one routing core, one event loop. Without Ray: an actor wraps it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ...policy.cluster_preset import ClusterPreset
from ..core import facts
from ..core.limits import CoreLimits
from ..http.decider import TICK_S
from ..http.policy_log import PolicyLog
from .autoscale import AutoscaleLimits, Wanted, wanted_engines
from .checkpoint import Checkpoint, Checkpoints, read_checkpoint, read_epoch
from .deciding import Deciding
from .deciding_homes import DecidingHomes
from .deciding_pairs import DecidingPairs, PairRules
from .mailbox import Mailbox
from .messages import (
    NOT_KNOWN,
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
from .post import Post
from .register import Register
from .seldom import Seldom
from .trials import Trials

logger = logging.getLogger(__name__)

LISTEN_S = 5.0
"""A gateway that listens hears something at least so often, and is heard of."""
CHECKPOINT_S = 1.0
AUTOSCALE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorOptions:
    """What an operator chooses."""

    checkpoint: Path | None = None
    """``None``: a new coordinator begins with what gateways and engines tell it."""
    checkpoint_s: float = CHECKPOINT_S
    autoscale: AutoscaleLimits = field(default_factory=AutoscaleLimits)


class Coordinator:
    """One of possibly several lives. Its epoch is later than that of all that wrote the checkpoint before.

    Without a shared file it still is, by the clock, or as soon as it is told of a later one before any
    request. Whoever finds that there is a later one
    (``deposed``) decides nothing any more.
    """

    def __init__(
        self,
        rules: ClusterPreset | PairRules,
        limits: CoreLimits,
        options: CoordinatorOptions,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Reads the checkpoint, and writes that it has begun."""
        self._rules = rules
        self._limits = limits
        self.options = options
        self.deposed = False
        self.restored = 0
        self._had_requests = False
        self._clock = clock
        self._wall = wall
        self._seldom = Seldom(logger, clock)
        path = options.checkpoint
        kept = read_checkpoint(path) if path is not None else None
        last_epoch = read_epoch(path) if path is not None else 0
        self.epoch = max(int(wall() * 1000), last_epoch + 1)
        self._deciding = self._new_deciding()
        self.engines = Register()
        self.post = Post()
        self._trials = Trials()
        self._wake_later: asyncio.TimerHandle | None = None
        self._wanted = Wanted(options.autoscale.min_engines)
        self._autoscaled_s = clock()
        if kept is not None and kept.core is not None:
            self._restore(kept)
        self._policy_log = PolicyLog(self.core.counts)
        self._look_at_places()
        self.checkpoints: Checkpoints | None = None
        """``None``: nothing is kept."""
        if path is not None:
            self.checkpoints = Checkpoints(path, options.checkpoint_s, self._checkpoint, self._is_later)
            first = Checkpoint(
                epoch=self.epoch,
                unix_s=kept.unix_s if kept is not None else wall(),
                core=kept.core if kept is not None else None,
                engines=self.engines.kept(),
            )
            self.checkpoints.write(first)
        logger.info("coordinator %d begins with %d programs at home somewhere", self.epoch, self.restored)

    @property
    def core(self) -> Any:
        """What decides."""
        return self._deciding.core

    def _new_deciding(self) -> Deciding:
        life = str(self.epoch)
        if isinstance(self._rules, PairRules):
            return DecidingPairs(self._rules, self._limits, life, self._clock)
        return DecidingHomes(self._rules, self._limits, life, self._clock)

    def _restore(self, kept: Checkpoint) -> None:
        assert kept.core is not None
        elapsed_s = max(0.0, self._wall() - kept.unix_s)
        try:
            self.restored = self._deciding.restore(kept.core, self._clock(), elapsed_s)
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("the checkpoint is left aside: %s", error)
            self._deciding = self._new_deciding()
            return
        self.engines = Register(kept.engines)

    # -- gateways -----------------------------------------------------------------

    async def join(self, join: Join) -> Answer:
        """A gateway begins, or begins anew; all it has is in ``join``, and what is not is over."""
        if self._is_later(join.seen_epoch):
            return Answer(self.epoch, Status.DEPOSED)
        before = self.post.box(join.gateway_id)
        if before is not None and join.join < before.join:
            return Answer(self.epoch, Status.JOIN)  # a later one of this gateway's has overtaken it
        now = self._clock()
        said = {one.request_id for one in join.requests}
        mailbox, gone = self.post.join(join.gateway_id, said, now, join.join)
        for request_id in gone:
            self._take(facts.Ended(request_id, answered=None), join.gateway_id)
        for one in join.requests:
            sent = self._deciding.sent(one.request_id)
            if sent is not None:
                if isinstance(one, facts.Asked):
                    mailbox.post(sent)  # the word of it was lost on its way
                    continue
                if sent.replica_id != one.replica_id:
                    self._take(facts.Ended(one.request_id, answered=None), join.gateway_id)
            elif isinstance(one, facts.Asked) and self._deciding.knows(one.request_id):
                continue
            self._take(one, join.gateway_id)
            if isinstance(one, facts.Sent) and one.began:
                self._take(facts.Began(one.request_id, one.replica_id), join.gateway_id)
        self._soon()
        return self._answer(mailbox, 0, -1)

    async def tell(self, tell: Tell) -> Answer:
        """What happened at a gateway."""
        mailbox = self._mailbox(tell)
        if isinstance(mailbox, Answer):
            return mailbox
        mailbox.heard_s = self._clock()
        try:
            is_next = await mailbox.turn(tell.number)
        except asyncio.CancelledError:
            if self.post.box(tell.gateway_id) is mailbox:
                raise
            return Answer(self.epoch, Status.JOIN)
        still = self._mailbox(tell)
        if still is not mailbox:
            return still if isinstance(still, Answer) else Answer(self.epoch, Status.JOIN)
        if is_next:
            for fact in tell.facts:
                self._take(fact, tell.gateway_id)
            for probe in tell.probes:
                self._probed(probe, tell.gateway_id)
            mailbox.taken(tell.number)
        self._soon()
        return self._answer(mailbox, tell.acked, tell.places_version)

    async def listen(self, listen: Listen) -> Answer:
        """Answers when there is something new for this gateway, or after a while."""
        mailbox = self._mailbox(listen)
        if isinstance(mailbox, Answer):
            return mailbox
        mailbox.heard_s = self._clock()
        mailbox.wake.clear()
        journal = self._deciding.journal
        # Homes that have only just changed are told with those that change next, in one batch.
        homes_due = listen.version != journal.version and journal.due_s(self._clock()) in (None, 0.0)
        mail = mailbox.since(listen.acked)[1]
        if not (mail or homes_due or listen.places_version != self.engines.version):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(mailbox.wake.wait(), LISTEN_S)
        still = self._mailbox(listen)
        if still is not mailbox:
            return still if isinstance(still, Answer) else Answer(self.epoch, Status.JOIN)
        mailbox.heard_s = self._clock()
        life = journal.life if listen.version >= 0 else ""
        homes = None
        if listen.version != journal.version:
            homes = self._deciding.changes_since(listen.version, life)
        answer = self._answer(mailbox, listen.acked, listen.places_version)
        return msgspec.structs.replace(answer, homes=homes)

    def _mailbox(self, said: Tell | Listen) -> Mailbox | Answer:
        """Of a gateway that says something, or why it is not listened to."""
        if self._is_later(said.epoch):
            return Answer(self.epoch, Status.DEPOSED)
        mailbox = self.post.box(said.gateway_id)
        if said.epoch != self.epoch or mailbox is None or mailbox.join != said.join:
            return Answer(self.epoch, Status.JOIN)
        return mailbox

    def _answer(self, mailbox: Mailbox, acked: int, places_version: int) -> Answer:
        first, mail = mailbox.since(acked)
        shown = self.engines.shown if places_version != self.engines.version else None
        return Answer(
            self.epoch, mail_from=first, mail=mail, places=shown, places_version=self.engines.version
        )

    def _is_later(self, epoch: int) -> bool:
        if epoch > self.epoch and not self.deposed:
            if self.options.checkpoint is None and not self._had_requests:
                self._overtake(epoch)
                return False
            self.deposed = True
            logger.warning("coordinator %d gives way to %d", self.epoch, epoch)
        return self.deposed

    def _overtake(self, epoch: int) -> None:
        """Be later than that. Where nothing is kept, only the clock said that this life is; it may have been
        set back, and then each next one would give way too."""
        logger.warning("coordinator %d is later than %d: it goes on as %d", self.epoch, epoch, epoch + 1)
        self.epoch = epoch + 1
        self._deciding.journal.life = str(self.epoch)
        self.post.wake_all()  # those who have joined do so again

    # -- engines ------------------------------------------------------------------

    async def register(self, told: Registration) -> Registered:
        """An engine is there; to be said once a second or so."""
        if self._is_later(told.seen_epoch):
            return Registered(self.epoch, Status.DEPOSED)
        why = self._deciding.why_not(told)
        for fact in self._deciding.turned():
            self._take(fact)
        if why:
            self._forget(told.engine_id, "it is sent nothing")
            self._look_at_places()
            return Registered(self.epoch)
        entry = self.engines.put(told)
        for place in entry.left:
            self._take(facts.ReplicaGone(place.replica_id, place.instance, "registered_anew"))
        for engine_id in entry.replaced:
            # Another engine had this address before: it is gone, or the address would not be free.
            self._forget(engine_id, "replaced")
        if self.engines.drains(told.engine_id):
            self._drain(entry.places)
        self._seen(entry.places, entry.changed)
        self._pass_on(self._deciding.told(told, self._clock()), None)
        return Registered(self.epoch, wanted_engines=self._wanted.engines)

    async def gone(self, gone: EngineGone) -> Registered:
        """An engine's own deployment says that its process has ended."""
        places = self.engines.of(gone.engine_id)
        if not self.deposed and places and places[0].instance == gone.instance:
            self._forget(gone.engine_id, gone.reason)
            self._look_at_places()
        elif not places:
            self.engines.remove(gone.engine_id)  # of which at most is known that it was to be left
        return Registered(self.epoch, Status.DEPOSED if self.deposed else Status.OK)

    async def drain(self, drain: Drain) -> Drained:
        """Nobody is sent to an engine any more, but for turns that are on their way.

        Of one that has not registered here it is not known how many these are.
        """
        if self.deposed:
            return Drained(self.epoch, NOT_KNOWN, Status.DEPOSED)
        places = self.engines.of(drain.engine_id)
        if self.engines.drain(drain.engine_id):
            self._drain(places)
            self._look_at_places()
        if not self.engines.has_heard(drain.engine_id):
            return Drained(self.epoch, NOT_KNOWN, Status.JOIN)
        found = (self._deciding.replica(place.replica_id) for place in places)
        return Drained(self.epoch, sum(replica.in_flight for replica in found if replica is not None))

    def _drain(self, places: Iterable[Place]) -> None:
        for place in places:
            fact = self._deciding.drains(place)
            if fact is not None:
                self._take(fact)

    def _seen(self, places: Iterable[Place], changed: bool = True) -> None:
        """Places that are new are looked at before anybody hears that a request is to go there."""
        actions = []
        now = self._clock()
        for place in places:
            self._trials.over(place.replica_id)
            try:
                actions += self.core.take(self._deciding.seen_as(place), now)
            except ValueError as error:
                logger.warning("an engine is left aside: %s", error)
        if changed:
            self._look_at_places()
        self._pass_on(actions, None)
        self._soon()

    def _forget(self, engine_id: str, reason: str) -> None:
        for place in self.engines.remove(engine_id):
            logger.warning("replica %s is gone: %s", place.replica_id, reason)
            self._trials.over(place.replica_id)
            self._take(facts.ReplicaGone(place.replica_id, place.instance, reason))

    def _probed(self, probe: ProbeAnswer, gateway_id: str) -> None:
        if not probe.alive:
            self._trials.heard(probe.replica_id, probe.instance, gateway_id, False)
            return
        replica = self._deciding.replica(probe.replica_id)
        if replica is not None and replica.instance == probe.instance:
            places = self.engines.of(self.engines.engine_of(probe.replica_id) or "")
            self._seen([place for place in places if place.replica_id == probe.replica_id])

    def _end_trials(self, now: float) -> None:
        for replica_id, instance in self._trials.lost(self.post.gateways, now):
            replica = self._deciding.replica(replica_id)
            silent = replica is not None and now - replica.heard_s >= self._limits.lease_s
            if replica is None or replica.instance != instance or not silent:
                continue  # its own deployment says that it lives: some gateway cannot reach it
            owner = self.engines.engine_of(replica_id)
            if owner is not None:
                self._forget(owner, "silent, and not reached")
            else:
                self._take(facts.ReplicaGone(replica_id, instance, "silent, and not reached"))

    # -- the core -----------------------------------------------------------------

    def _take(self, fact: facts.AnyFact, gateway_id: str | None = None) -> None:
        now = self._clock()
        if self.checkpoints is not None and not isinstance(fact, facts.Tick):
            self.checkpoints.changed()
        if isinstance(fact, (facts.Asked, facts.Sent)):
            self._had_requests = True
            if fact.deadline_s is not None:
                fact = msgspec.structs.replace(fact, deadline_s=now + fact.deadline_s)
            if gateway_id is not None:
                self.post.has(gateway_id, fact.request_id)
        actions: Sequence[facts.AnyAction]
        try:
            actions = self.core.take(fact, now)
        except Exception:
            what = type(fact).__name__
            self._seldom.say(
                logging.ERROR, f"the routing core failed at {what}; please report this", exc_info=True
            )
            actions = _instead(fact)
        self._policy_log.look(now)
        if isinstance(fact, facts.Ended):
            self.post.over(fact.request_id)
        self._pass_on(actions, gateway_id)

    def _pass_on(self, actions: Sequence[facts.AnyAction], gateway_id: str | None) -> None:
        """Each action to the gateway that has its request."""
        for action in actions:
            if isinstance(action, facts.Probe) and not self._trials.begin(
                action.replica_id, action.instance, self.post.gateways, self._clock()
            ):
                continue
            self.post.send(action, actions, gateway_id)

    def _soon(self) -> None:
        """Wake those who listen when a batch of changed homes is due."""
        now = self._clock()
        due_s = self._deciding.journal.due_s(now)
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
        if self._deciding.flush(self._clock()) is not None:
            self.post.wake_all()
        self._soon()

    def _look_at_places(self) -> None:
        if self._deciding.look(self.engines, self._clock()):
            self.post.wake_all()

    # -- as time goes by ----------------------------------------------------------

    def begin(self) -> asyncio.Task[None]:
        """``run`` as a task of this loop; that it has ended is logged, whatever it ended with."""
        running = asyncio.get_running_loop().create_task(self.run())
        running.add_done_callback(self._ended)
        return running

    def _ended(self, running: asyncio.Task[None]) -> None:
        if running.cancelled():
            logger.info("coordinator %d was ended", self.epoch)
        elif (error := running.exception()) is not None:
            logger.error(
                "coordinator %d has failed: no time goes by for it; please report this",
                self.epoch,
                exc_info=error,
            )
        else:
            logger.info("coordinator %d has ended: there is a later one", self.epoch)

    async def run(self) -> None:
        """Ticks and checkpoints, until cancelled or deposed. After a tick that fails, which is logged, others
        follow."""
        tasks = [asyncio.ensure_future(self.checkpoints.run())] if self.checkpoints is not None else []
        try:
            while not self.deposed:
                await asyncio.sleep(TICK_S)
                try:
                    self.tick()
                except Exception:
                    self._seldom.say(logging.ERROR, "a tick failed; please report this", exc_info=True)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.post.wake_all()

    def tick(self) -> None:
        """A tenth of a second has gone by."""
        now = self._clock()
        self._take(facts.Tick())
        for gateway_id, requests in self.post.silent(now).items():
            logger.warning("gateway %s is gone; its requests are over", gateway_id)
            for request_id in requests:
                self._take(facts.Ended(request_id, answered=None))
        self._end_trials(now)
        if now - self._autoscaled_s >= AUTOSCALE_S:
            self._autoscaled_s = now
            need = self._deciding.need(len(self.engines))
            self._wanted = wanted_engines(need, self._wanted, self.options.autoscale, now)
        self._look_at_places()
        self._soon()

    def _checkpoint(self) -> Checkpoint:
        return Checkpoint(
            epoch=self.epoch,
            unix_s=self._wall(),
            core=self._deciding.snapshot(self._clock()),
            engines=self.engines.kept(),
        )

    # -- who asks -----------------------------------------------------------------

    async def state(self) -> State:
        """All that is known."""
        state = State(self.epoch, self.restored, len(self.post), self._wanted.engines, [], [], {})
        return await self._deciding.onto(state)


def _instead(fact: facts.AnyFact) -> Sequence[facts.AnyAction]:
    """What a gateway hears that waits for the answer to a fact which the core failed at.

    After ``Failed`` it hears both: it leaves aside that a request is refused whose answer has begun, and that
    one is cut whose answer has not.
    """
    failed = "gateway_failed", "the gateway failed; see its log"
    if isinstance(fact, facts.Asked):
        return [facts.Refuse(fact.request_id, 500, *failed)]
    if isinstance(fact, facts.Failed):
        return [facts.Refuse(fact.request_id, 500, *failed), facts.Cut(fact.request_id, fact.replica_id)]
    return []
