"""Queries several engines and merges their answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from ...api import response_merging
from ...api.api_errors import ApiError
from .engine_client import EngineReply, ask_engine, bearer
from .replica_addresses import ReplicaAddress, ReplicaAddresses

QUERY_TIMEOUT_S = 15.0
"""Maximum seconds that a query waits for an engine's answer."""
STRAGGLER_WAIT_S = 0.5
"""Seconds to wait for the other engines after the first success. For routes where one answer is enough.
The clients of these routes give up after one or two seconds."""


@dataclass(slots=True)
class EngineReplies:
    """Answers of several engines to one query."""

    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    """JSON objects of successful answers, by the engine's URL."""
    stock: list[str] = field(default_factory=list)
    """URLs of engines that lack the route (404), because they run without sojourn."""
    silent: list[str] = field(default_factory=list)
    """URLs of engines that gave no usable answer."""
    refuses_key: bool = False
    """Whether an engine refused the key. Such engines are ``silent`` too."""


@dataclass(frozen=True, slots=True)
class EngineQueries:
    """Queries engines on behalf of clients. Merged results name the engines that did not answer.

    ``authorization`` is the client's ``Authorization`` header. ``engine_key`` is the gateway's own key for
    engines. If it is set, engines receive it in place of the client's header.
    """

    replicas: ReplicaAddresses
    session: Callable[[], aiohttp.ClientSession]
    engine_key: str | None

    async def every(
        self, path: str, authorization: str | None, *, others_s: float | None = None
    ) -> dict[str, EngineReply | None]:
        """Send a GET to all engines, and return their answers by URL; ``None``: no answer.

        ``others_s``: seconds to wait for the other engines after the first success; ``None``: wait until all
        have answered or timed out.
        """
        asked = {
            engine.url: asyncio.ensure_future(self._get(engine, path, authorization))
            for engine in self.replicas.engines()
        }
        await _gather_replies(set(asked.values()), others_s)
        return {url: None if task.cancelled() else task.result() for url, task in asked.items()}

    async def ask(
        self, path: str, authorization: str | None, *, others_s: float | None = None
    ) -> EngineReplies:
        """Send a GET to all engines as ``every`` does, and sort their answers."""
        replies = EngineReplies()
        for url, answer in (await self.every(path, authorization, others_s=others_s)).items():
            if answer is not None and (document := answer.document) is not None:
                replies.documents[url] = document
            elif answer is not None and answer.status == 404:
                replies.stock.append(url)
            else:
                replies.silent.append(url)
                replies.refuses_key |= _refuses_key(answer)
        return replies

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """Return the capabilities of all engines, merged into one document. It has the format of a single
        engine's answer, so that clients see a single server.

        The document is empty if no engine with sojourn answers. Raises ``ApiError`` 401 instead if an engine
        refused the key.
        """
        found = await self.ask("/sojourn/v1/capabilities", authorization, others_s=STRAGGLER_WAIT_S)
        # A proxy in front of an engine may answer 200 to anything.
        ours = {url: one for url, one in found.documents.items() if one.get("name") == "sojourn"}
        if not ours:
            if found.refuses_key:
                raise _key_refused()
            return {}
        merged = response_merging.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # ``paths`` describes one engine; for a fleet, ``pairs`` counts the engines of each role.
            reports = [report for one in ours.values() if isinstance(report := one.get("paths"), dict)]
            roles = Counter(str(report.get("role")) for report in reports if report)
            merged["pairs"] = dict(sorted(roles.items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent = [*found.silent, *(url for url in found.documents if url not in ours)]
        return {**merged, "engines": engines, "gateway": True, "stock": found.stock, "silent": silent}

    async def graphs(self, authorization: str | None) -> dict[str, Any]:
        """Return all workflow graphs that the engines know. Add the URLs of engines that run without sojourn
        (``stock``) or did not answer (``silent``)."""
        found = await self.ask("/sojourn/v1/graphs", authorization)
        graphs = (
            response_merging.merge_graphs(list(found.documents.values()))
            if found.documents
            else {"graphs": [], "total": 0, "bytes": 0, "forgotten": 0}
        )
        return {**graphs, "stock": found.stock, "silent": found.silent}

    async def first(self, path: str, authorization: str | None) -> EngineReply | None:
        """Query all engines. Return the first answer with status 200; ``None``: there is none. Raises
        ``ApiError`` 401 if there is none and an engine refuses the key."""
        asked = [asyncio.ensure_future(self._get(e, path, authorization)) for e in self.replicas.engines()]
        refuses_key = False
        try:
            for answering in asyncio.as_completed(asked):
                found = await answering
                if found is not None and found.status == 200:
                    return found
                refuses_key |= _refuses_key(found)
        finally:
            for task in asked:
                task.cancel()
        if refuses_key:
            raise _key_refused()
        return None

    async def one(
        self,
        replica_id: str | None,
        path: str,
        authorization: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> EngineReply | None:
        """Query one replica's engine. Return its answer unchanged; ``None``: the replica is unknown or does
        not answer. ``headers``: further headers of the query. ``body``: it is sent with POST; ``None``: the
        query is a GET."""
        address = self.replicas.get(replica_id)
        return await self._get(address, path, authorization, headers, body) if address is not None else None

    async def _get(
        self,
        engine: ReplicaAddress,
        path: str,
        authorization: str | None,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> EngineReply | None:
        return await ask_engine(
            self.session(),
            engine.url + path,
            method="GET" if body is None else "POST",
            body=body,
            authorization=bearer(self.engine_key, authorization),
            headers=headers,
            timeout_s=QUERY_TIMEOUT_S,
        )


def _refuses_key(answer: EngineReply | None) -> bool:
    return answer is not None and answer.status in (401, 403)


def _key_refused() -> ApiError:
    """Return the error 401 for a client whose key an engine refuses."""
    challenge = {"WWW-Authenticate": "Bearer"}
    return ApiError(401, "the engines refuse this key", "send a key that they accept", challenge)


async def _gather_replies(asked: set[asyncio.Future[EngineReply | None]], others_s: float | None) -> None:
    """Wait until all futures in ``asked`` are done. With ``others_s``, wait at most that many seconds after
    the first success, and cancel the rest."""
    left = asked
    try:
        while left:
            done, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            answers = [task.result() for task in done]
            if others_s is not None and any(one is not None and one.document is not None for one in answers):
                await asyncio.wait(asked, timeout=others_s)
                return
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
