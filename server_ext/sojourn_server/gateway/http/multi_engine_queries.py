"""Queries several engines and merges their answers, into live frames (snapshots of programs) too."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec

from ...api import response_merging
from ...api.api_errors import ApiError
from ...api.live_stream import SourceFrame
from ...metrics.live_frame import EngineRow, LiveFrame, ProgramRow, merge_rows
from .engine_client import EngineReply, ask_engine, bearer
from .engine_monitor import EngineMonitor
from .program_id_mapper import FOREIGN_PROGRAM_ID, ProgramIdMapper
from .replica_addresses import ReplicaAddresses

QUERY_TIMEOUT_S = 15.0
"""Maximum seconds that a query waits for an engine's answer."""
STRAGGLER_WAIT_S = 0.5
"""Seconds to wait for other engines after the first success, for clients that give up after a second."""
LIVE_STRAGGLER_WAIT_S = 2.0
"""The same for live frames. An engine that has not answered by then counts as silent in this frame."""


class EngineReplies(dict[str, EngineReply | None]):
    """The answers of several engines to one query, by the engine's URL; ``None``: no answer."""

    @property
    def documents(self) -> dict[str, dict[str, Any]]:
        """JSON objects of successful answers."""
        return {
            url: found for url, one in self.items() if one is not None and (found := one.document) is not None
        }

    @property
    def stock(self) -> list[str]:
        """URLs of engines that lack the route (404), because they run without sojourn."""
        return [url for url, one in self.items() if one is not None and one.status == 404]

    @property
    def silent(self) -> list[str]:
        """URLs of engines that gave no usable answer."""
        return sorted(self.keys() - self.documents.keys() - set(self.stock))

    def check_key(self) -> None:
        """Raise ``ApiError`` 401 if an engine refuses the client's key."""
        if any(one is not None and one.status in (401, 403) for one in self.values()):
            challenge = {"WWW-Authenticate": "Bearer"}
            raise ApiError(401, "the engines refuse this key", "send a key that they accept", challenge)


@dataclass(frozen=True, slots=True)
class EngineQueries:
    """Queries engines for clients. ``authorization``: the client's header; ``engine_key`` replaces it."""

    replicas: ReplicaAddresses
    session: Callable[[], aiohttp.ClientSession]
    engine_key: str | None
    names: ProgramIdMapper
    monitor: EngineMonitor

    async def one(
        self,
        replica_id: str | None,
        path: str,
        authorization: str | None,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
    ) -> EngineReply | None:
        """Return one engine's answer, unchanged; ``None``: there is none. ``body``: that of a POST."""
        address = self.replicas.get(replica_id)
        if address is None:
            return None
        return await ask_engine(
            self.session(),
            address.url + path,
            method="GET" if body is None else "POST",
            body=body,
            authorization=bearer(self.engine_key, authorization),
            headers=headers,
            timeout_s=QUERY_TIMEOUT_S,
        )

    async def every(
        self, path: str, authorization: str | None, others_s: float | None = None, body: bytes | None = None
    ) -> EngineReplies:
        """Query all engines. ``others_s``: seconds to wait for the others after the first success; ``None``:
        for all. ``body``: that of a POST."""
        asked = {
            engine.url: asyncio.ensure_future(self.one(engine.replica_id, path, authorization, body=body))
            for engine in self.replicas.engines()
        }
        try:
            for answer in asyncio.as_completed(asked.values()):
                reply = await answer
                if others_s is not None and reply is not None and reply.document is not None:
                    await asyncio.wait(asked.values(), timeout=others_s)
                    break
        finally:
            for task in asked.values():
                task.cancel()
            await asyncio.gather(*asked.values(), return_exceptions=True)
        return EngineReplies(
            (url, None if task.cancelled() else task.result()) for url, task in asked.items()
        )

    async def first(self, path: str, authorization: str | None) -> EngineReply | None:
        """Return the first answer with status 200, if any. Raises ``ApiError`` 401 for a refused key."""
        replies = await self.every(path, authorization, others_s=0.0)
        found = next((one for one in replies.values() if one is not None and one.status == 200), None)
        if found is None:
            replies.check_key()
        return found

    async def capabilities(self, authorization: str | None) -> dict[str, Any]:
        """Return the engines' capabilities, merged as if they were those of one server; empty if no engine
        with sojourn answers. Raises ``ApiError`` 401 for a refused key."""
        found = await self.every("/sojourn/v1/capabilities", authorization, STRAGGLER_WAIT_S)
        # A proxy in front of an engine may answer 200 to anything.
        ours = {url: one for url, one in found.documents.items() if one.get("name") == "sojourn"}
        if not ours:
            found.check_key()
            return {}
        merged = response_merging.merge_capabilities(list(ours.values()))
        if merged.pop("paths", None) is not None:
            # ``paths`` describes one engine. Of several, ``pairs`` counts those of each role.
            reports = [report for one in ours.values() if isinstance(report := one.get("paths"), dict)]
            merged["pairs"] = dict(sorted(Counter(str(one.get("role")) for one in reports if one).items()))
        engines = sum(count if isinstance(count := one.get("engines"), int) else 1 for one in ours.values())
        silent = [*found.silent, *(url for url in found.documents if url not in ours)]
        return {**merged, "engines": engines, "gateway": True, "stock": found.stock, "silent": silent}

    # -- live frames, as a ``LiveSource`` ----------------------------------------------

    async def take(self, changed_within_s: float | None) -> SourceFrame:
        """Return the engines, and the programs that changed within this many seconds; ``None``: all."""
        delta = "" if changed_within_s is None else f"&changed_within_s={changed_within_s:.3f}"
        replies = await self.every("/sojourn/v1/stream?once=1" + delta, None, LIVE_STRAGGLER_WAIT_S)
        documents, stock, total = replies.documents, replies.stock, 0
        engines: list[EngineRow] = []
        rows: list[ProgramRow] = []
        silent: set[str] = set()
        for url in sorted({address.url for address in self.replicas.engines()}):
            ids = {str(a.rank or 0): a.replica_id for a in self.replicas.values() if a.url == url}
            try:
                frame = msgspec.convert(documents.get(url), LiveFrame)
            except msgspec.ValidationError:  # also if there is none
                why = "runs another release of sojourn" if url in documents else "does not answer"
                why = "runs without sojourn" if url in stock else why
                engines += [EngineRow(engine=name, now_s=0.0, error=why) for name in ids.values()]
                if url not in stock:
                    silent.update(ids.values())
                continue
            first = next(iter(ids.values()))
            ranked = {one.engine: ids.get(one.engine, first) for one in frame.engines}
            engines += [msgspec.structs.replace(one, engine=ranked[one.engine]) for one in frame.engines]
            rows += [self._row(row, ranked.get(row.engine, row.engine)) for row in frame.programs]
            total += frame.total
        return SourceFrame(engines + self._unused_engines(), merge_rows(rows), total, frozenset(silent))

    def _unused_engines(self) -> list[EngineRow]:
        """Return a row for each engine that gets no requests, on Ray for each deployment."""
        reasons = {
            one: "does not answer" if number == 1 else f"{number} do not answer"
            for one, number in Counter(self.monitor.missing()).items()
        }
        reasons |= {url: f"gets no requests: {why}" for url, why in self.monitor.refused().items()}
        used = {address.url for address in self.replicas.values()}
        return [
            EngineRow(engine=urlsplit(one).netloc or one, now_s=0.0, error=why)
            for one, why in sorted(reasons.items())
            if one not in used
        ]

    def _row(self, row: ProgramRow, engine: str) -> ProgramRow:
        """Return a row with the client's program ids in place of the engines' names."""
        key = self.names.key(row.program_id)
        if key is None:  # the program has no tenant of this gateway; only the admin key sees it
            return msgspec.structs.replace(row, engine=engine, tenant=None)
        parent = row.parent_program_id
        if parent is not None:
            its = self.names.key(parent)
            parent = its[1] if its is not None and its[0] == key[0] else FOREIGN_PROGRAM_ID
        return msgspec.structs.replace(
            row, engine=engine, tenant=key[0], program_id=key[1], parent_program_id=parent
        )
