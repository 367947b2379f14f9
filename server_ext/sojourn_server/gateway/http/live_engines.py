"""Gets live frames (snapshots of memory and programs) from all engines behind a gateway. The engines' names
for programs become the clients' program ids."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from ...api.live_stream import SourceFrame
from ...metrics.live_frame import EngineRow, LiveFrame, ProgramRow, merge_rows
from .engine_monitor import EngineMonitor
from .multi_engine_queries import EngineQueries
from .program_id_mapper import FOREIGN_PROGRAM_ID, ProgramIdMapper
from .replica_addresses import ReplicaAddresses

PATH = "/sojourn/v1/stream?once=1"
STRAGGLER_WAIT_S = 2.0
"""Seconds to wait for the other engines after the first answer. An engine that has not answered by then
counts as silent in this frame."""


@dataclass(frozen=True, slots=True)
class GatewayLiveSource:
    """Live frames of a gateway's engines. Engines are named by their replica ids."""

    queries: EngineQueries
    replicas: ReplicaAddresses
    names: ProgramIdMapper
    monitor: EngineMonitor

    async def take(self, changed_within_s: float | None) -> SourceFrame:
        """Return the engines and the programs of all tenants. The gateway asks with its own key, so it may
        see them all.

        ``changed_within_s``: return only programs that changed within this many seconds, or that have a
        request or a lease; ``None``: return all programs.
        """
        path = PATH if changed_within_s is None else f"{PATH}&changed_within_s={changed_within_s:.3f}"
        replies = await self.queries.ask(path, None, others_s=STRAGGLER_WAIT_S)
        engines: list[EngineRow] = []
        rows: list[ProgramRow] = []
        total = 0
        silent: set[str] = set()
        for url in sorted({address.url for address in self.replicas.engines()}):
            ids = {(a.rank or 0): a.replica_id for a in self.replicas.values() if a.url == url}
            document = replies.documents.get(url)
            frame = _frame(document) if document is not None else None
            if frame is None:
                why = "runs without sojourn" if url in replies.stock else "does not answer"
                engines += [EngineRow(engine=name, now_s=0.0, error=why) for name in ids.values()]
                if url not in replies.stock:
                    silent.update(ids.values())
                continue
            ranked = {one.engine: _replica_name(one.engine, ids) for one in frame.engines}
            engines += [msgspec.structs.replace(one, engine=ranked[one.engine]) for one in frame.engines]
            rows += [self._row(row, ranked.get(row.engine, row.engine)) for row in frame.programs]
            total += frame.total
        engines += self._unused_engines()
        return SourceFrame(engines, merge_rows(rows), total, frozenset(silent))

    def _unused_engines(self) -> list[EngineRow]:
        """Return one row, with the reason, for each configured engine that gets no requests. On Ray, one row
        stands for all missing engines of a deployment. Such engines have no programs, so they do not count as
        silent."""
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


def _replica_name(engine: str, ids: dict[int, str]) -> str:
    rank = int(engine) if engine.isdecimal() else 0
    return ids.get(rank) or next(iter(ids.values()))


def _frame(document: object) -> LiveFrame | None:
    """Return the frame in an engine's answer; ``None``: the answer is not a frame."""
    try:
        return msgspec.convert(document, LiveFrame)
    except msgspec.ValidationError:
        return None
