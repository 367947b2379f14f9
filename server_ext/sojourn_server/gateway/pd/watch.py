"""Looking after prefill and decode engines: what each is, whether it fits the others, how its links do."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import aiohttp
from sojourn.wire import CAPABILITIES_PATH

from ..core import facts
from ..http.replicas import Replicas, addresses
from ..http.watch import POLL_S, Description, Watch, Watched, table
from .decider import PdDecider
from .description import Kind, PairDescription, describe_pair, leading, nic_told, seen_as, unlike
from .facts import Role
from .told import STATS_PATH, LinkTold, NotOfAPair, PathsTold, read_links, read_paths

logger = logging.getLogger(__name__)


class PairWatch(Watch):
    """Tells a decider of pairs of the engines at some addresses.

    Those that cannot be in a pair are sent nothing, and the log says once why. Which model and which size of
    a Full Block are served is what most of them have when the gateway starts. It may be another until pairs
    can be made, and then only after all of that kind have gone.
    """

    def __init__(
        self,
        roles: Mapping[str, Role],
        decider: PdDecider,
        replicas: Replicas,
        session: Callable[[], aiohttp.ClientSession],
        *,
        engine_key: str | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        """``roles``: what the engine at each address was named as."""
        super().__init__(roles, decider, replicas, session, engine_key=engine_key, poll_s=poll_s)
        self._tell = decider.tell
        self._roles = dict(roles)
        self._kind: Kind | None = None
        self._had_pair = False
        """Of that kind, both roles were there at once."""
        self._refused: dict[str, str] = {}
        self._instances: dict[str, str] = {}
        """By replica, the life that was told last."""
        self._links: dict[str, dict[str, LinkTold]] = {}
        """By address, what was told last."""
        self._said: tuple[int, int] | None = None
        """Engines of each role that were taken, when the log said so last."""
        self._looks = 0
        """Looks at all of them that have not ended: until then none is sent anything."""

    async def look(self) -> None:
        """Once at each, and then at what they have in common."""
        self._looks += 1
        try:
            await super().look()
        finally:
            self._looks -= 1
        if self._looks:
            return
        for watched in self._watched.values():
            self._take(watched)
        self._say_pairs()

    def _say_pairs(self) -> None:
        """In the log, where it is not what it said last."""
        found = Counter(self._roles[url] for url in self._taken())
        named = Counter(self._roles.values())
        counts = found[Role.PREFILL], found[Role.DECODE]
        if counts == self._said:
            return
        self._said = counts
        logger.info(
            "pairs: %d of %d prefill and %d of %d decode engines are here",
            found[Role.PREFILL],
            named[Role.PREFILL],
            found[Role.DECODE],
            named[Role.DECODE],
        )

    def refused(self) -> Mapping[str, str]:
        """Addresses of engines that answer and are sent nothing, with what is wrong with them."""
        return dict(self._refused)

    def links_of(self, replica_id: str) -> Mapping[str, LinkTold]:
        """What an engine told last of its links, by name; empty: nothing."""
        address = self._replicas.get(replica_id)
        return self._links.get(address.url, {}) if address is not None else {}

    # -- what is asked ------------------------------------------------------------

    def _read(
        self, capabilities: Mapping[str, Any], metrics: str, models: Mapping[str, Any], life: int
    ) -> Description:
        return describe_pair(capabilities, metrics, models, life)

    async def _ask_more(self, watched: Watched) -> None:
        known = watched.description
        if not isinstance(known, PairDescription):
            return
        url = watched.url
        answers = await asyncio.gather(self._text(url + CAPABILITIES_PATH), self._text(url + STATS_PATH))
        (status, capabilities), (_, stats) = answers
        if status == 200:
            try:
                paths = read_paths(table(capabilities))
            except NotOfAPair:
                paths = None
            if _same(known.paths, paths):
                watched.description = dataclasses.replace(known, paths=paths)  # its speed may be another
            else:
                described = await self._describe(watched)
                if described is not None:
                    self._described(watched, described)
        links = read_links(table(stats))
        if links is not None:
            self._links[url] = links

    # -- what comes of it ---------------------------------------------------------

    def _say_up(self, url: str, described: Description) -> None:
        """Said when it is known whether it is taken."""

    def _seen(self, watched: Watched) -> None:
        if not self._looks:
            self._take(watched)
            self._say_pairs()

    def _take(self, watched: Watched) -> None:
        told = watched.description
        if not isinstance(told, PairDescription):
            return
        url, paths = watched.url, told.paths
        why = self._why_not(url, told)
        if why or paths is None:
            self._refuse(watched, why)
            return
        self._refused.pop(url, None)
        [address] = watched.places or addresses(url, 1)
        if self._replicas.get(address.replica_id) is None:
            logger.info(
                "%s is up: a %s engine at node %s, KV for %d tokens",
                url, paths.role.value, paths.node, told.capacity_tokens,
            )  # fmt: skip
        watched.places = [address]
        self._replicas.add(address)
        self._instances[address.replica_id] = told.instance
        self._tell(seen_as(address.replica_id, told, paths))
        self._tell_queue(paths.node)

    def _tell_queue(self, node: str) -> None:
        """Its engines read through one NIC: what waits for it is what waits at all of them."""
        fact = nic_told(node, [self._links.get(url, {}) for url in self._taken() if self._node(url) == node])
        if fact is not None:
            self._tell(fact)

    def _why_not(self, url: str, told: PairDescription) -> str:
        """Empty: it may be in a pair."""
        paths, role = told.paths, self._roles[url]
        if told.unfit or paths is None:
            return told.unfit
        if paths.role is not role:
            return f"it is a {paths.role.value} engine; expected a {role.value} engine, as which it is named"
        ours = self._kind
        alike = [
            other
            for other in self._taken()
            if (kind := self._kind_of(other)) is not None and ours is not None and not unlike(kind, ours)
        ]
        if len({self._roles[other] for other in alike}) == len(Role):
            self._had_pair = True
        elif not alike or not self._had_pair:
            self._kind, self._had_pair = self._most_common(), False
        if told.kind is None or self._kind is None:
            return ""
        return unlike(told.kind, self._kind)

    def _most_common(self) -> Kind | None:
        """Of those that fit otherwise, in the order in which they were named; ``None``: there is none."""
        fit = [
            (kind, role)
            for url, role in self._roles.items()
            if (kind := self._kind_of(url)) is not None and self._has_role(url, role)
        ]
        return leading(fit, self._kind)

    def _refuse(self, watched: Watched, why: str) -> None:
        for address in watched.places:
            self._replicas.remove(address.replica_id)
            instance = self._instances.pop(address.replica_id, None)
            if instance is not None:  # what it tells by now may be another one
                self._tell(facts.ReplicaGone(address.replica_id, instance, "refused"))
        watched.places = []
        if self._refused.get(watched.url) != why:
            logger.warning("%s is sent nothing: %s", watched.url, why)
            self._refused[watched.url] = why

    def _gone(self, watched: Watched, reason: str) -> None:
        was_there = watched.description is not None
        super()._gone(watched, reason)
        self._refused.pop(watched.url, None)
        self._links.pop(watched.url, None)
        if was_there and not self._looks:
            self._say_pairs()

    def _without(self, watched: Watched) -> str:
        role = self._roles[watched.url]
        if any(self._roles[url] is role for url in self._taken() if url != watched.url):
            return f"other {role.value} engines go on"
        return f"no {role.value} engine is left, requests are refused until one comes"

    # -- of the others ------------------------------------------------------------

    def _taken(self) -> Iterable[str]:
        """Addresses of engines that are sent requests."""
        return [
            url
            for url, watched in self._watched.items()
            if any(self._replicas.get(address.replica_id) is not None for address in watched.places)
        ]

    def _description(self, url: str) -> PairDescription | None:
        told = self._watched[url].description
        return told if isinstance(told, PairDescription) and not told.unfit else None

    def _kind_of(self, url: str) -> Kind | None:
        told = self._description(url)
        return told.kind if told is not None else None

    def _has_role(self, url: str, role: Role) -> bool:
        told = self._description(url)
        return told is not None and told.paths is not None and told.paths.role is role

    def _node(self, url: str) -> str | None:
        told = self._description(url)
        return told.paths.node if told is not None and told.paths is not None else None


def _same(known: PathsTold | None, told: PathsTold | None) -> bool:
    """Whether an engine is what it was, however fast."""
    if known is None or told is None:
        return known is told
    return dataclasses.replace(told, block_s=known.block_s) == known
