"""Polls prefill and decode engines: their roles, whether they can form pairs, and the queues of their links
to storage and to other engines."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

import aiohttp
from sojourn.wire_codec import CAPABILITIES_PATH

from ...routing import routing_events
from ...routing.routing_events import PairRole
from ...routing.routing_status import LinkStats
from .engine_client import parse_json_object
from .engine_descriptions import (
    EngineCompatibility,
    EngineDescription,
    InvalidPairEngine,
    PairCapabilities,
    PairEngineDescription,
    describe_pair,
    dominant_compatibility,
    engine_compatibility,
    incompatibility,
    nic_queue_event,
    parse_pair_capabilities,
    registration_event,
)
from .engine_monitor import POLL_S, EngineMonitor, MonitoredEngine
from .replica_addresses import ReplicaAddresses, rank_addresses
from .routing_backend import RoutingBackend

logger = logging.getLogger(__name__)


class PairMonitor(EngineMonitor):
    """Registers the prefill and decode engines at given addresses.

    All accepted engines are of one kind: they have the same model and KV format (``EngineCompatibility``). At
    each poll, ``dominant_compatibility`` chooses this served kind, until the kind has had engines of both
    roles. From then on, the served kind changes only when all its engines are gone.

    An engine that is not accepted gets no requests, and the log says so once.
    """

    def __init__(
        self,
        roles: Mapping[str, PairRole],
        routing_backend: RoutingBackend,
        replicas: ReplicaAddresses,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """``roles``: the configured role of the engine at each URL. ``engine_key``: key sent to engines;
        ``None``: no key. ``poll_s``: seconds between two polls."""
        super().__init__(
            roles,
            routing_backend,
            replicas,
            session,
            engine_key=engine_key,
            poll_s=poll_s,
            read=describe_pair,
        )
        self._tell = routing_backend.tell
        self._roles = dict(roles)
        self._kind: EngineCompatibility | None = None
        """The served kind; ``None``: not chosen yet."""
        self._had_pair = False
        """Whether the served kind has had engines of both roles at the same time."""
        self._refused: dict[str, str] = {}
        """Why an engine is not accepted, by URL."""
        self._instances: dict[str, str] = {}
        """Last registered instance of each replica."""
        self._links: dict[str, dict[str, LinkStats]] = {}
        """Last report of each engine's links, by the engine's URL and the link's name."""
        self._logged_counts: tuple[int, int] | None = None
        """Numbers of accepted engines in the last log line: (prefill, decode). ``None``: nothing was logged
        yet."""
        self._running_polls = 0
        """Number of ``poll_all`` calls in progress. The call that ends last registers the engines."""

    async def poll_all(self) -> None:
        """Poll all engines once. Then choose the served kind, and register the engines of this kind."""
        self._running_polls += 1
        try:
            await super().poll_all()
        finally:
            self._running_polls -= 1
        if self._running_polls:
            return
        for watched in self._watched.values():
            self._register_or_refuse(watched)
        self._log_pairs()

    def _log_pairs(self) -> None:
        """Log the number of accepted engines if it has changed."""
        found = Counter(self._roles[url] for url in self._accepted_urls())
        named = Counter(self._roles.values())
        counts = found[PairRole.PREFILL], found[PairRole.DECODE]
        if counts == self._logged_counts:
            return
        self._logged_counts = counts
        logger.info(
            "pairs: %d of %d prefill and %d of %d decode engines are accepted",
            found[PairRole.PREFILL],
            named[PairRole.PREFILL],
            found[PairRole.DECODE],
            named[PairRole.DECODE],
        )

    def watch(self, engines: Mapping[str, PairRole | None], absent: Iterable[str] = ()) -> None:
        self._roles |= {url: role for url, role in engines.items() if role is not None}
        super().watch(engines, absent)
        self._roles = {url: role for url, role in self._roles.items() if url in self._watched}

    def refused(self) -> Mapping[str, str]:
        """Return the URLs of engines that answer but get no requests, with the reasons."""
        return dict(self._refused)

    def links_of(self, replica_id: str) -> Mapping[str, LinkStats]:
        """Return an engine's last report of its links, by the link's name. Empty if there is no report."""
        address = self._replicas.get(replica_id)
        return self._links.get(address.url, {}) if address is not None else {}

    # -- polling ------------------------------------------------------------------

    async def _ask_more(self, watched: MonitoredEngine) -> None:
        """Query an engine's links and capabilities. If the capabilities changed, describe the engine
        again."""
        known = watched.description
        if not isinstance(known, PairEngineDescription):
            return
        probe = watched.probe
        (status, capabilities), links = await asyncio.gather(probe.get(CAPABILITIES_PATH), probe.links())
        if status == 200:
            try:
                paths = parse_pair_capabilities(parse_json_object(capabilities) or {})
            except InvalidPairEngine:
                paths = None
            if _same_engine(known.paths, paths):
                probe.described = dataclasses.replace(known, paths=paths)  # ``block_s`` may be new
            else:
                await self._describe(watched)
        if links is not None:
            self._links[watched.url] = links

    # -- results ------------------------------------------------------------------

    def _log_engine_up(self, url: str, described: EngineDescription) -> None:
        """Do nothing. ``_register_or_refuse`` logs a new engine once it is accepted."""

    def _register_replicas(self, watched: MonitoredEngine) -> None:
        """Register a living engine if it is accepted. No effect during ``poll_all``, which does this
        for all engines at its end."""
        if not self._running_polls:
            self._register_or_refuse(watched)
            self._log_pairs()

    def _register_or_refuse(self, watched: MonitoredEngine) -> None:
        """Register an engine with the core if it is accepted. Otherwise refuse it."""
        described = watched.description
        if not isinstance(described, PairEngineDescription):
            return
        url, paths = watched.url, described.paths
        why = self._check_kind(url, described)
        if why or paths is None:
            self._refuse(watched, why)
            return
        self._refused.pop(url, None)
        [address] = watched.places or rank_addresses(url, 1)
        if self._replicas.get(address.replica_id) is None:
            logger.info(
                "%s is up: a %s engine at node %s, KV for %d tokens",
                url, paths.role.value, paths.node, described.capacity_tokens,
            )  # fmt: skip
        watched.places = [address]
        self._replicas.add(address)
        self._instances[address.replica_id] = described.instance
        if len(self._served_roles()) == len(PairRole):
            self._had_pair = True
        self._tell(registration_event(address.replica_id, described, paths))
        self._report_nic_queue(paths.node)

    def _report_nic_queue(self, node: str) -> None:
        """Report the queue of a node's storage NIC: the sum of the queues of the node's accepted engines."""
        at_node = [
            url for url in self._accepted_urls() if (fit := self._fit_engine(url)) and fit[1].node == node
        ]
        event = nic_queue_event(node, [self._links.get(url, {}) for url in at_node])
        if event is not None:
            self._tell(event)

    def _check_kind(self, url: str, described: PairEngineDescription) -> str:
        """Return why an engine is not accepted; empty if it is accepted. May change the served kind."""
        paths, role = described.paths, self._roles[url]
        if described.unfit or paths is None:
            return described.unfit
        if paths.role is not role:
            return f"it is a {paths.role.value} engine; expected a {role.value} engine, as listed"
        if not (self._had_pair and self._served_roles()):
            self._kind, self._had_pair = self._most_common(), False
        if self._kind is None:
            return ""
        return incompatibility(engine_compatibility(described, paths), self._kind)

    def _most_common(self) -> EngineCompatibility | None:
        """Return the kind to serve; ``None``: no engine has its configured role. ``dominant_compatibility``
        chooses it among the engines that have their configured role. In a tie, the served kind wins, or else
        the kind of the engine that is configured first."""
        engines = [
            (fit[0], role) for url, role in self._roles.items() if (fit := self._fit_engine(url)) is not None
        ]
        return dominant_compatibility(engines, self._kind)

    def _refuse(self, watched: MonitoredEngine, why: str) -> None:
        """Remove an engine that is not accepted, and report it to the core as gone. Each new reason is logged
        once."""
        for address in watched.places:
            self._replicas.remove(address.replica_id)
            instance = self._instances.pop(address.replica_id, None)
            if instance is not None:  # the engine may have been restarted since
                self._tell(routing_events.ReplicaGone(address.replica_id, instance, "refused"))
        watched.places = []
        if self._refused.get(watched.url) != why:
            logger.warning("%s gets no requests: %s", watched.url, why)
            self._refused[watched.url] = why

    def _gone(self, watched: MonitoredEngine, reason: str) -> None:
        was_there = watched.description is not None
        super()._gone(watched, reason)
        self._refused.pop(watched.url, None)
        self._links.pop(watched.url, None)
        if was_there and not self._running_polls:
            self._log_pairs()

    def _describe_loss(self, watched: MonitoredEngine) -> str:
        role = self._roles[watched.url]
        if any(self._roles[url] is role for url in self._accepted_urls() if url != watched.url):
            return f"other {role.value} engines go on"
        return f"no {role.value} engine is left, requests are refused until one comes"

    # -- other engines ------------------------------------------------------------

    def _accepted_urls(self) -> Iterable[str]:
        """Return the URLs of the engines that have a registered replica."""
        return [
            url
            for url, watched in self._watched.items()
            if any(self._replicas.get(address.replica_id) is not None for address in watched.places)
        ]

    def _served_roles(self) -> set[PairRole]:
        """Return the roles of the accepted engines of the served kind."""
        if self._kind is None:
            return set()
        return {
            self._roles[url]
            for url in self._accepted_urls()
            if (fit := self._fit_engine(url)) and not incompatibility(fit[0], self._kind)
        }

    def _fit_engine(self, url: str) -> tuple[EngineCompatibility, PairCapabilities] | None:
        """Return (kind, capabilities) of the engine at a URL. ``None``: there is no engine, it cannot be part
        of any pair, or it has another role than configured."""
        described = self._watched[url].description
        if not isinstance(described, PairEngineDescription) or described.unfit or described.paths is None:
            return None
        if described.paths.role is not self._roles[url]:
            return None
        return engine_compatibility(described, described.paths), described.paths


def _same_engine(known: PairCapabilities | None, described: PairCapabilities | None) -> bool:
    """Whether two reports are equal, apart from the measured ``block_s``. Two ``None`` are equal."""
    if known is None or described is None:
        return known is described
    return dataclasses.replace(described, block_s=known.block_s) == known
