"""``sojourn gateway --ray`` as a process, with fake engines, and a client that asks it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_world import until

psutil = pytest.importorskip("psutil")

DEADLINE_S = 60.0
START_S = 180.0
HERE = Path(__file__).parent


class Cluster:
    """The command, and how to look at what it started."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.log = home / "log"
        self.checkpoint = home / "checkpoint"
        self.direct, self.served = _free_port(), _free_port()
        self.url = f"http://127.0.0.1:{self.direct}"
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
            # A token is written into the home; the path of Ray's sockets has to be short.
            "HOME": str(home),
            "RAY_TMPDIR": str(home),
            "ADMIN": "root",
            "COLUMNS": "200",
        }
        self.process: subprocess.Popen[bytes] | None = None
        self.seen: dict[int, Any] = {}

    def config(self) -> dict[str, Any]:
        fake = [sys.executable, str(HERE.parent / "fake_engine_process.py"), "{host}", "{port}"]
        return {
            "model": "tiny",
            "port": self.served,
            "direct_port": self.direct,
            "checkpoint": str(self.checkpoint),
            "keys": {"admin": "ADMIN"},
            "engines": {
                "min": 2, "max": 3, "shrink_after_s": 5, "num_cpus": 0.1, "drain_s": 5,
                "log_dir": str(self.home / "e"), "command": fake,
            },
        }  # fmt: skip

    def start(self) -> None:
        path = self.home / "config.yaml"
        path.write_text(json.dumps(self.config()))  # JSON is YAML
        command = [sys.executable, "-m", "sojourn_server.cli", "gateway", "--ray", str(path)]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        end = time.monotonic() + START_S
        while f"http://127.0.0.1:{self.served} answers" not in self.log.read_text():
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.2)

    def stop(self) -> None:
        """As a service manager does it; fails if anything is left."""
        assert self.process is not None
        self.tree()
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(DEADLINE_S)
            _, left = psutil.wait_procs(list(self.seen.values()), timeout=DEADLINE_S)
            assert not left, left
            assert code == 0, self.log.read_text()
        finally:
            for one in [*self.seen.values(), psutil.Process()]:
                if one.pid != os.getpid() and one.is_running():
                    one.kill()
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def tree(self) -> list[Any]:
        """All processes that were started, and their children."""
        assert self.process is not None
        found = psutil.Process(self.process.pid).children(recursive=True)
        self.seen |= {one.pid: one for one in found}
        return list(found)

    def pids(self, title: str) -> list[int]:
        """Processes whose command line has these words."""
        found = []
        for one in self.tree():
            try:
                if title in " ".join(one.cmdline()):
                    found.append(one.pid)
            except psutil.Error:
                continue
        return found

    def run(self, script: str, *arguments: str) -> str:
        """A script beside this file as a driver on the cluster; what it prints last."""
        done = subprocess.run(
            [sys.executable, str(HERE / script), str(self.home / "config.yaml"), *arguments],
            env=self.environment, capture_output=True, text=True, timeout=DEADLINE_S * 2,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip().splitlines()[-1]


class Client:
    """Asks like an SDK does: what does not reach a gateway is asked again."""

    def __init__(self, cluster: Cluster, http: aiohttp.ClientSession) -> None:
        self.cluster, self.http = cluster, http
        self.repeated = 0

    async def turn(self, program: str, path: str = "/v1/chat/completions", **more: Any) -> str:
        """One turn, not streamed; the replica that answered. Fails unless it is answered with 200."""
        end = time.monotonic() + DEADLINE_S
        while True:
            try:
                async with self.http.post(
                    self.cluster.url + path,
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

    async def stream(self, program: str, began: Callable[[str], None] = lambda replica: None) -> bytes:
        """A turn of about 4 s, streamed; all that came."""
        body = {"model": "tiny", "messages": [], "stream": True, "events": 40, "gap_s": 0.1}
        async with self.http.post(
            f"{self.cluster.url}/v1/chat/completions", json=body, headers={"X-Session-ID": program}
        ) as answer:
            assert answer.status == 200
            began(answer.headers["X-Sojourn-Replica"])
            return await answer.read()

    async def get(self, path: str) -> Any:
        """The JSON of a GET, as an operator."""
        headers = {"Authorization": "Bearer root"}
        async with self.http.get(self.cluster.url + path, headers=headers) as answer:
            return await answer.json()

    async def replicas(self) -> dict[str, str]:
        """Instances by replica, of those that are up."""
        states = (await self.get("/sojourn/v1/replicas"))["replicas"]
        return {state["replica"]: state["instance"] for state in states if state["health"] == "up"}

    async def settled(self, engines: int = 2, gateways: int = 2) -> None:
        """Until so many are up."""

        async def there() -> bool:
            try:
                up = len(await self.replicas()) == engines
            except aiohttp.ClientError:
                return False
            return up and len(self.cluster.pids("ServeReplica:sojourn:Gateway")) == gateways

        await until(there)


@asynccontextmanager
async def client(cluster: Cluster) -> AsyncIterator[Client]:
    """Connections are not kept, so that both gateways get their share."""
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        made = Client(cluster, http)
        await made.settled()
        yield made


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
