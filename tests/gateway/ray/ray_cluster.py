"""``sojourn gateway --ray`` with fake engines, and a client for it."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from gateway_harness import until
from ray_gateway import DEADLINE_S, RayGateway
from sojourn_server.launch.engine_server import free_port

HERE = Path(__file__).parent
GATEWAYS = "ServeReplica:sojourn:Gateway"
MOST_PORTS = 20
PROBE_S = 3.0
"""Ports that are tried for the gateways' own addresses."""


class Cluster(RayGateway):
    """A gateway on Ray with fake engines."""

    def __init__(self, home: Path) -> None:
        fake = [sys.executable, str(HERE.parent / "fake_engine_process.py"), "{host}", "{port}"]
        engines = {"min": 2, "max": 3, "shrink_after_s": 3, "num_cpus": 0.1, "drain_s": 5, "command": fake}
        super().__init__(home, engines)
        self.config["metrics_port"] = free_port("127.0.0.1")


class Client:
    """Client that repeats requests after connection errors, as an SDK does."""

    def __init__(self, cluster: Any, http: aiohttp.ClientSession) -> None:
        """``cluster``: has the attribute ``url``."""
        self.cluster, self.http = cluster, http
        self.repeated = 0

    async def turn(self, program: str, **more: Any) -> str:
        """Send one turn, not streamed, and return the replica that answered. Fails for a status other than
        200."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                async with self.http.post(
                    f"{self.cluster.url}/v1/chat/completions",
                    json={"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **more},
                    headers={"X-Session-ID": program},
                ) as answer:
                    text = await answer.text()
                    assert answer.status == 200, text
                    return answer.headers["X-Sojourn-Replica"]
            except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError):
                assert time.monotonic() < end
                self.repeated += 1
                await asyncio.sleep(0.05)

    async def _stream(self, program: str, at: dict[str, str]) -> bytes:
        body = {"model": "tiny", "messages": [], "stream": True, "events": 40, "gap_s": 0.1}
        async with self.http.post(
            f"{self.cluster.url}/v1/chat/completions", json=body, headers={"X-Session-ID": program}
        ) as answer:
            assert answer.status == 200
            at[program] = answer.headers["X-Sojourn-Replica"]
            return await answer.read()

    async def streams(self, *programs: str) -> tuple[dict[str, str], dict[str, asyncio.Future[bytes]]]:
        """Begin a streamed turn of about 4 s of each program. Return the replicas that answer, and all that
        is received."""
        at: dict[str, str] = {}
        streams = {name: asyncio.ensure_future(self._stream(name, at)) for name in programs}
        await until(lambda: len(at) == len(streams))
        return at, streams

    async def get(self, path: str, url: str | None = None) -> Any:
        """Return the JSON of a GET, with the operator's key. ``url``: of a gateway; ``None``: of any."""
        headers = {"Authorization": "Bearer root"}
        async with self.http.get((url or self.cluster.url) + path, headers=headers) as answer:
            return await answer.json()

    async def gateways(self) -> list[str]:
        """Own addresses of the gateways that answer. Other processes may listen and never answer, or be
        gateways of other tests."""
        first, found = self.cluster.config["metrics_port"], []
        for port in range(first, first + MOST_PORTS):
            url = f"http://127.0.0.1:{port}"
            with suppress(aiohttp.ClientError, TimeoutError, AssertionError):
                async with asyncio.timeout(PROBE_S):
                    await self.get("/health", url)
                self.cluster.listens_at(port)
                found.append(url)
        return found

    async def replicas(self, url: str | None = None) -> dict[str, str]:
        """Instances of the replicas that are up, by replica."""
        states = (await self.get("/sojourn/v1/replicas", url))["replicas"]
        return {state["replica"]: state["instance"] for state in states if state["health"] == "up"}

    async def settled(self, engines: int = 2, gateways: int = 2) -> None:
        """Wait until exactly this many engines and gateways are up, and each gateway knows all of them."""

        async def there() -> bool:
            try:
                urls = await self.gateways()
                known = [await self.replicas(url) for url in urls]
                peers = [(await self.get("/health", url)).get("peers", 0) for url in urls]
            except aiohttp.ClientError:
                return False
            if len(urls) != gateways or len(self.cluster.pids(GATEWAYS)) != gateways:
                return False
            return (
                all(one == known[0] and len(one) == engines for one in known)
                and peers == [gateways - 1] * gateways
            )

        await until(there)


@asynccontextmanager
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    """Yield a client that keeps no connections, so that both gateways get requests."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        made = Client(cluster, http)
        await made.settled()
        yield made
