"""Polls of engines: what is registered, what is reported of their load, and when an engine is dead."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fake_engine import engines
from sojourn_server.gateway.http import engine_monitor
from sojourn_server.gateway.http.engine_client import EngineClient
from sojourn_server.gateway.http.engine_monitor import SILENT_DEAD_S, EngineMonitor
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses
from sojourn_server.routing.routing_events import (
    KvReported,
    ProbeReplica,
    ReplicaGone,
    ReplicaRegistered,
    ResidentKv,
)


class Monitored:
    """A monitor of one engine, on a clock of its own, and what it has told the core."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self.now = 0.0
        self.told: list[Any] = []
        self.monitor = EngineMonitor(
            {url: None},
            self,  # type: ignore[arg-type]
            ReplicaAddresses(),
            ProgramIdMapper([""]),
            lambda: session,
            clock=lambda: self.now,
        )

    def tell(self, event: Any) -> None:
        self.told.append(event)

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.told if isinstance(event, kind)]


@asynccontextmanager
async def monitored(url: str) -> AsyncIterator[Monitored]:
    session = EngineClient().session()
    it = Monitored(url, session)
    await it.monitor.poll_all()
    try:
        yield it
    finally:
        await session.close()


@pytest.fixture(autouse=True)
def short_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_monitor, "HEALTH_TIMEOUT_S", 0.2)


async def test_an_engine_is_registered_with_its_load_and_its_programs() -> None:
    async with engines(1) as [fake]:
        fake.served.add("p")
        async with monitored(fake.url) as it:
            [seen], [load] = it.of(ReplicaRegistered), it.of(KvReported)
            assert (seen.replica_id, load.replica_id, load.instance) == (fake.name, fake.name, seen.instance)
            assert load.programs == (ResidentKv("", "p", 100, 105),)
            assert load.age_s >= 0.0


async def test_a_silent_engine_is_dead_only_after_some_time() -> None:
    async with engines(1) as [fake], monitored(fake.url) as it:
        fake.silent = True
        it.now = SILENT_DEAD_S - 1
        await it.monitor.poll_all()
        assert it.of(ReplicaGone) == []
        it.now = SILENT_DEAD_S
        await it.monitor.poll_all()
        assert [gone.replica_id for gone in it.of(ReplicaGone)] == [fake.name]
        assert it.monitor.missing() == [fake.url]
        fake.silent = False
        await it.monitor.poll_all()
        assert it.monitor.missing() == []


@pytest.mark.parametrize(
    ("statuses", "dead"),
    [((503, 503), True), ((503, 200, 503), False), ((503, 502, 503), False), ((500, 404, 500), False)],
)
async def test_only_errors_in_a_row_make_an_engine_dead(statuses: tuple[int, ...], dead: bool) -> None:
    answers = iter((200, *statuses))

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server, monitored(str(server.make_url("")).rstrip("/")) as it:
        assert len(it.of(ReplicaRegistered)) == 1
        for _ in statuses:
            await it.monitor.poll_all()
        assert bool(it.of(ReplicaGone)) is dead


async def test_an_engine_that_was_waited_for_and_asks_for_a_key_is_named_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with engines(1, key="k") as [fake]:
        await fake.kill()
        async with monitored(fake.url) as it:
            assert "no engine answers" in caplog.text
            await fake.restart()
            for _ in range(2):
                await it.monitor.poll_all()
            assert caplog.text.count("asks for a key") == 1


async def test_an_unknown_replica_or_one_that_refuses_connections_is_gone_at_once() -> None:
    async with engines(1) as [fake], monitored(fake.url) as it:
        it.monitor.probe(ProbeReplica("nowhere", "1"))
        assert it.of(ReplicaGone) == [ReplicaGone("nowhere", "1")]
        it.monitor.watch({}, absent=["Engine"])
        assert it.monitor.missing() == ["Engine"], "one that answers stays"
        await fake.kill()
        await it.monitor.poll_all()
        assert [gone.replica_id for gone in it.of(ReplicaGone)] == ["nowhere", fake.name]
        it.monitor.watch({})
        assert it.monitor.missing() == []
