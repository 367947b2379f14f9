"""Probes of engines: how many there are, and how many lost ones make an engine dead."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from gateway_harness import no_more_files
from sojourn_server.gateway.http.engine_client import open_session
from sojourn_server.gateway.http.engine_descriptions import EngineDescription
from sojourn_server.gateway.http.engine_monitor import MAX_LOST_PROBES, EngineMonitor, MonitoredEngine
from sojourn_server.gateway.http.engine_probe import PROBE_TIMEOUT_S, EngineProbe
from sojourn_server.gateway.http.replica_addresses import ReplicaAddresses, rank_addresses
from sojourn_server.routing.routing_events import ProbeReplica, ReplicaGone

URL = "http://engine:8000"


class Probed:
    """A monitor of one engine, whose health checks answer as the test says."""

    def __init__(self, ranks: int) -> None:
        self.now = 0.0
        self.told: list[Any] = []
        self.begun = 0
        """Number of health checks."""
        self.health: bool | None = None
        self.hold: asyncio.Event | None = None
        """Event for which health checks wait."""
        self.replicas = ReplicaAddresses()
        backend: Any = self
        session: Any = None
        self.monitor = EngineMonitor([URL], backend, self.replicas, session, clock=lambda: self.now)
        self.described = EngineDescription(ranks, "1", 1000, 0, 4, 0, False, True)
        self.engine.probe.check_health = self.check_health  # type: ignore[method-assign]
        self.engine.probe.describe = self.describe  # type: ignore[method-assign]
        addresses = rank_addresses(URL, ranks)
        self.names = [address.replica_id for address in addresses]
        self.engine.probe.described = self.described
        self.engine.places = addresses
        for address in addresses:
            self.replicas.add(address)

    def tell(self, event: Any) -> None:
        self.told.append(event)

    async def check_health(self, timeout_s: float = 0.0) -> bool | None:
        self.begun += 1
        if self.hold is not None:
            await self.hold.wait()
        return self.health

    async def describe(self) -> EngineDescription | None:
        return self.described

    @property
    def engine(self) -> MonitoredEngine:
        return self.monitor._watched[URL]

    @property
    def gone(self) -> list[str]:
        return [event.replica_id for event in self.told if isinstance(event, ReplicaGone)]

    def request_probes(self) -> None:
        """The core requests a probe of each rank, as in one tick."""
        for name in self.names:
            self.monitor.probe(ProbeReplica(name, "1"))

    async def probe_all(self) -> None:
        """Request probes, and wait for their results."""
        self.request_probes()
        await asyncio.gather(*self.monitor._tasks)


async def test_an_engine_has_one_probe_at_a_time_for_all_of_its_ranks() -> None:
    it = Probed(ranks=4)
    it.hold = asyncio.Event()
    it.request_probes()
    await asyncio.sleep(0)
    it.request_probes()
    it.hold.set()
    await asyncio.gather(*it.monitor._tasks)
    assert it.begun == 1
    assert it.engine.probes_lost == 1
    assert it.gone == []


async def test_probes_that_fail_in_a_moment_are_one_lost_probe() -> None:
    it = Probed(ranks=1)
    for _ in range(10 * MAX_LOST_PROBES):
        it.now += 0.001
        await it.probe_all()
    assert it.engine.probes_lost == 1
    assert it.gone == []


@pytest.mark.parametrize("ranks", [1, 4])
async def test_three_probes_lost_at_the_cores_interval_make_an_engine_dead(ranks: int) -> None:
    it = Probed(ranks)
    for number in range(MAX_LOST_PROBES):
        assert it.gone == []
        it.now = number * PROBE_TIMEOUT_S - 0.01 * number  # timers are not exact
        await it.probe_all()
    assert it.gone == it.names


async def request_at_interval_during_a_probe(it: Probed) -> None:
    """The core requests a probe, and another one before the first has its result."""
    it.hold = asyncio.Event()
    it.request_probes()
    while not it.begun:
        await asyncio.sleep(0)
    it.now += PROBE_TIMEOUT_S  # the probe had to wait for a poll before
    it.request_probes()
    it.hold.set()
    await asyncio.gather(*it.monitor._tasks)


async def test_a_probe_that_is_requested_during_one_follows_it() -> None:
    it = Probed(ranks=2)
    await request_at_interval_during_a_probe(it)
    assert (it.begun, it.engine.probes_lost, it.gone) == (2, 2, [])
    it.now += PROBE_TIMEOUT_S
    await it.probe_all()
    assert (it.begun, it.gone) == (3, it.names)


async def test_an_answered_probe_is_not_repeated() -> None:
    it = Probed(ranks=2)
    it.health = True
    await request_at_interval_during_a_probe(it)
    assert it.begun == 1
    it.health = None
    await it.probe_all()
    assert (it.begun, it.engine.probes_lost) == (2, 1)


async def test_a_refused_connection_needs_no_second_probe() -> None:
    it = Probed(ranks=2)
    it.health = False
    await it.probe_all()
    assert it.gone == it.names


async def test_a_probe_that_fails_in_the_gateway_itself_is_no_lost_probe() -> None:
    it = Probed(ranks=1)
    session = open_session()
    probe = EngineProbe("http://127.0.0.1:1", lambda: session)
    it.engine.probe, probe.described = probe, it.described
    for number in range(2 * MAX_LOST_PROBES):
        it.now = number * PROBE_TIMEOUT_S
        with no_more_files():
            await it.probe_all()
    assert (it.engine.probes_lost, it.gone) == (0, [])
    await it.probe_all()
    assert it.gone == it.names, "the connection was refused"
    await session.close()


@pytest.mark.parametrize(
    ("statuses", "last"),
    [((503, 503), False), ((503, 200, 503), None), ((503, 502, 503), None), ((500, 404, 500), None)],
)
async def test_only_errors_in_a_row_count_as_dead(statuses: tuple[int, ...], last: bool | None) -> None:
    answers = iter(statuses)

    async def health(_: web.Request) -> web.Response:
        return web.Response(status=next(answers))

    app = web.Application()
    app.router.add_get("/health", health)
    async with TestServer(app) as server, aiohttp.ClientSession() as session:
        probe = EngineProbe(str(server.make_url("")), lambda: session, max_error_polls=2)
        found = [await probe.check_health(5.0) for _ in statuses]
    assert found[-1] is last


async def test_an_answered_probe_sets_the_count_back() -> None:
    it = Probed(ranks=1)
    for health in (None, None, True, None, None):
        it.now += PROBE_TIMEOUT_S
        it.health = health
        await it.probe_all()
    assert it.engine.probes_lost == 2
    assert it.gone == []


async def test_engines_may_come_and_those_that_answer_stay_unlisted() -> None:
    it = Probed(ranks=1)
    it.monitor.watch({}, absent=["Engine"])
    assert it.monitor.missing() == ["Engine"]
    it.health = False
    await it.monitor.poll_all()
    assert it.gone == it.names
    it.monitor.watch({})
    assert it.monitor.missing() == []
