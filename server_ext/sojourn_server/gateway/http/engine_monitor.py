"""Polls engines, registers living ones with the routing core, and reports dead or restarted ones as gone."""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import aiohttp

from ...routing import routing_events
from ...routing.routing_events import PairRole
from .engine_descriptions import EngineDescription, describe_engine, registration_event
from .engine_probe import PROBE_TIMEOUT_S, EngineProbe
from .replica_addresses import ReplicaAddress, ReplicaAddresses, rank_addresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)

POLL_S = 2.0
"""Default seconds between two polls of an engine."""
MAX_LOST_PROBES = 3
"""Number of consecutive lost probes after which an engine counts as dead. A lost probe is one without an
answer. Two kinds do not count: probes that failed in the gateway itself, and probes that the core requested
less than ``LOST_PROBE_INTERVAL_S`` after the previous lost probe."""
LOST_PROBE_INTERVAL_S = 0.9 * PROBE_TIMEOUT_S
"""Minimum seconds between two lost probes. The core requests a probe every 10 s, so the limit is a little
shorter. Without the limit, connections that are reset at once could make an engine count as dead within a
moment."""
DESCRIBE_EVERY_POLLS = 15
"""Number of polls between two requests for an engine's description."""
_LOSS_TEXTS = {
    "refused": "it refuses connections or reports that it is unhealthy",
    "silent": "it does not answer",
}
"""Log texts for the loss of an engine, by reason."""


@dataclass(slots=True)
class MonitoredEngine:
    """A configured address, and the engine there, if any."""

    probe: EngineProbe
    polls: int = 0
    """Number of successful polls since the engine was last lost."""
    is_warned: bool = False
    """Whether the log already warns that no engine answers at the address, or that the engine asks for a
    key."""
    probes_lost: int = 0
    """Number of consecutive lost probes."""
    probe_lost_s: float = -math.inf
    """Time, on the monitor's clock, at which the core requested the last probe that was lost."""
    probe_asked_s: float = -math.inf
    """Time, on the monitor's clock, at which the core requested the last probe that was begun."""
    next_asked_s: float | None = None
    """Time, on the monitor's clock, of the core's last request for a further probe while one is in progress.
    Requests within ``LOST_PROBE_INTERVAL_S`` of the running probe's request are ignored. ``None``: no further
    probe is due."""
    probing: asyncio.Task[None] | None = None
    """The last probe; ``None``: there was none."""
    places: list[ReplicaAddress] = field(default_factory=list)
    """Addresses of the engine's replicas, one per data-parallel rank. Empty if the engine is not
    registered."""
    checking: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a poll or probe of the engine."""

    @property
    def url(self) -> str:
        """URL of the engine."""
        return self.probe.url

    @property
    def description(self) -> EngineDescription | None:
        """The last accepted description of the engine; ``None``: no engine answers at the address."""
        return self.probe.described

    def count_unanswered_probe(self) -> None:
        """Count the last probe as lost, because it got no answer. No effect within ``LOST_PROBE_INTERVAL_S``
        of the previous lost probe."""
        if self.probe_asked_s - self.probe_lost_s >= LOST_PROBE_INTERVAL_S:
            self.probes_lost += 1
            self.probe_lost_s = self.probe_asked_s


class EngineMonitorProtocol(Protocol):
    """Interface between an engine monitor and its gateway. By default, the results of ``missing`` and
    ``refused`` are empty."""

    def probe(self, action: routing_events.ProbeReplica) -> None:
        """Start to check whether a replica is alive, and report the result to the routing core."""
        ...

    def watch(self, engines: Mapping[str, PairRole | None], absent: Iterable[str] = ()) -> None:
        """Monitor these engines from now on, by URL, and those that still answer. ``absent``: names of
        engines that should run and do not, for ``missing``. A role is given for prefill and decode
        engines."""
        ...

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """Return the last description of a replica's engine; ``None``: unknown."""
        ...

    def missing(self) -> list[str]:
        """Return the addresses at which no engine answers. On Ray, return names of deployments, each once per
        missing engine."""
        return []

    def refused(self) -> Mapping[str, str]:
        """Return the addresses of engines that answer but get no requests, with the reasons."""
        return {}


class EngineMonitor(EngineMonitorProtocol):
    """Registers the engines at given addresses with a routing backend."""

    def __init__(
        self,
        urls: Iterable[str],
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
        read: Callable[..., EngineDescription] = describe_engine,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``engine_key``: key sent to engines; ``None``: no key. ``poll_s``: seconds between two polls.
        ``read``: function that builds an engine's description from its answers. ``clock``: time in
        seconds."""
        self._open_probe = functools.partial(EngineProbe, session=session, key=engine_key, read=read)
        self._watched = {url: MonitoredEngine(self._open_probe(url)) for url in urls}
        self._absent: tuple[str, ...] = ()
        self._is_running = False
        self._pollers: dict[str, asyncio.Task[None]] = {}
        self._routing_backend = routing_backend
        self._replicas = replicas
        self._poll_s = poll_s
        self._clock = clock
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Poll all engines regularly, until cancelled."""
        self._is_running = True
        self._start_pollers()
        try:
            await asyncio.Event().wait()
        finally:
            self._is_running = False
            for task in self._pollers.values():
                task.cancel()
            await asyncio.gather(*self._pollers.values(), return_exceptions=True)

    def watch(self, engines: Mapping[str, PairRole | None], absent: Iterable[str] = ()) -> None:
        """Monitor these engines from now on, by URL, and those that still answer. ``absent``: names of
        engines that should run and do not, for ``missing``. A role is given for prefill and decode
        engines."""
        for url in [url for url, one in self._watched.items() if url not in engines and not one.description]:
            del self._watched[url]
            if url in self._pollers:
                self._pollers.pop(url).cancel()
        for url in engines:
            if url not in self._watched:
                self._watched[url] = MonitoredEngine(self._open_probe(url))
        self._absent = tuple(absent)
        if self._is_running:
            self._start_pollers()

    def _start_pollers(self) -> None:
        for url, watched in self._watched.items():
            if url not in self._pollers:
                self._pollers[url] = asyncio.ensure_future(self._poll_regularly(watched))

    async def poll_all(self) -> None:
        """Poll all engines once."""
        await asyncio.gather(*(self._check(watched) for watched in self._watched.values()))

    def probe(self, action: routing_events.ProbeReplica) -> None:
        """Start a task that checks whether a replica's engine is alive. If the engine is dead, all its
        replicas are reported to the core as gone. A replica whose engine is not monitored is reported at
        once.

        If a probe of the engine is already in progress, no second one starts. A further probe may follow if
        that one gets no answer.
        """
        address = self._replicas.get(action.replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        if watched is None:
            self._routing_backend.tell(
                routing_events.ReplicaGone(action.replica_id, action.instance, "not seen")
            )
        elif watched.probing is None or watched.probing.done():
            watched.probe_asked_s, watched.next_asked_s = self._clock(), None
            watched.probing = asyncio.ensure_future(self._probe(watched))
            self._tasks.add(watched.probing)
            watched.probing.add_done_callback(self._tasks.discard)
        elif self._clock() - watched.probe_asked_s >= LOST_PROBE_INTERVAL_S:
            # A probe first waits for a running poll, so it may last longer than the core's interval. Requests
            # that come sooner are for other ranks of the engine, and the running probe covers all ranks.
            watched.next_asked_s = self._clock()

    def description_of(self, replica_id: str) -> EngineDescription | None:
        """Return the last description of a replica's engine; ``None``: unknown."""
        address = self._replicas.get(replica_id)
        watched = self._watched.get(address.url) if address is not None else None
        return watched.description if watched is not None else None

    def missing(self) -> list[str]:
        """Return the addresses at which no engine answers."""
        unknown = [watched.url for watched in self._watched.values() if watched.description is None]
        return [*unknown, *self._absent]

    async def _poll_regularly(self, watched: MonitoredEngine) -> None:
        """Poll one engine every ``poll_s`` seconds, until cancelled. Errors of a poll are logged."""
        if watched.polls:  # ``poll_all`` has polled it already
            await asyncio.sleep(self._poll_s)
        while True:
            try:
                await self._check(watched)
            except Exception:
                logger.exception("polling %s failed; please report this", watched.url)
            await asyncio.sleep(self._poll_s)

    async def _check(self, watched: MonitoredEngine) -> None:
        """Poll an engine. Register it if it is alive, report it as gone if it is dead. Without an answer its
        state stays."""
        async with watched.checking:
            alive = await watched.probe.check_health()
            if alive is None:
                return  # no answer yet; the core notices the silence and has the replica probed
            if not alive:
                self._gone(watched, "refused")
                if not watched.is_warned:
                    logger.warning("no engine answers at %s yet", watched.url)
                    watched.is_warned = True
                return
            watched.probes_lost = 0
            if watched.description is None or watched.polls % DESCRIBE_EVERY_POLLS == 0:
                await self._describe(watched)
            watched.polls += 1
            await self._ask_more(watched)
            self._register_replicas(watched)

    async def _probe(self, watched: MonitoredEngine) -> None:
        """Probe an engine. Register it if it is alive, report it as gone if it is dead or ``MAX_LOST_PROBES``
        probes were lost. Without an answer, the probe is repeated if the core has requested another one
        meanwhile."""
        async with watched.checking:
            while True:
                alive = await watched.probe.check_health(PROBE_TIMEOUT_S)
                if alive:
                    watched.probes_lost = 0
                    # Another engine may have been started at the same address.
                    await self._describe(watched)
                    self._register_replicas(watched)
                    return
                if not watched.probe.failed_here:
                    watched.count_unanswered_probe()
                if alive is False or watched.probes_lost >= MAX_LOST_PROBES:
                    self._gone(watched, "refused" if alive is False else "silent")
                    return
                if watched.next_asked_s is None:
                    return
                watched.probe_asked_s, watched.next_asked_s = watched.next_asked_s, None

    async def _ask_more(self, watched: MonitoredEngine) -> None:
        """Hook for subclasses: send further queries to a living engine, at each poll."""

    async def _describe(self, watched: MonitoredEngine) -> None:
        """Update an engine's description. If the number of ranks has changed, the engine's former replicas
        are reported as gone."""
        probe, known = watched.probe, watched.description
        described = await probe.describe()
        if probe.asks_for_key and not watched.is_warned:
            logger.warning("%s asks for a key: without --engine-key its sizes are unknown", watched.url)
            watched.is_warned = True
        if described is None:
            return
        if known is not None and known.instance != described.instance:
            logger.warning("%s was restarted: its KV is lost", watched.url)
        if known is None:
            self._log_engine_up(watched.url, described)
        if known is None or known.ranks != described.ranks:
            self._forget(watched, "described_anew")
            watched.places = rank_addresses(watched.url, described.ranks)
        probe.described = described
        watched.is_warned = False

    def _log_engine_up(self, url: str, described: EngineDescription) -> None:
        logger.info(
            "%s is up: KV for %d tokens on the device, %d in host memory",
            url,
            described.capacity_tokens,
            described.host_tokens,
        )
        if described.pair_role:
            logger.warning(
                "%s was started with --role %s, but this gateway sends it all requests; clients could then "
                "read other clients' KV. Start the gateway with --prefill and --decode, or the engine "
                "without --role",
                url,
                described.pair_role,
            )

    def _register_replicas(self, watched: MonitoredEngine) -> None:
        """Register a living engine's replicas with the core, or report that they are alive."""
        described = watched.description
        if described is None:
            return
        for address in watched.places:
            self._replicas.add(address)
            self._routing_backend.tell(registration_event(address.replica_id, described))

    def _gone(self, watched: MonitoredEngine, reason: str) -> None:
        """Report an engine as gone and log the loss. ``reason``: a key of ``_LOSS_TEXTS``. No effect if no
        engine was there."""
        if watched.description is None:
            return
        lost = self._describe_loss(watched)
        logger.warning("%s is gone (%s); %s", watched.url, _LOSS_TEXTS[reason], lost)
        self._forget(watched, reason)
        watched.probe.mark_lost()
        watched.polls = watched.probes_lost = 0

    def _describe_loss(self, watched: MonitoredEngine) -> str:
        """Return a log text that says what the loss of this engine means for requests and programs."""
        unused = all(other is watched or other.description is None for other in self._watched.values())
        return "no engine is left, requests wait for one" if unused else "its programs go on elsewhere"

    def _forget(self, watched: MonitoredEngine, reason: str) -> None:
        """Report an engine's replicas to the core as gone, and remove their addresses."""
        described = watched.description
        for address in watched.places:
            self._replicas.remove(address.replica_id)
            if described is not None:
                self._routing_backend.tell(
                    routing_events.ReplicaGone(address.replica_id, described.instance, reason)
                )
        watched.places = []
