"""On a real Ray cluster: what reaches engines, and what happens when parts are killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from ray_cluster import GATEWAYS, Client, Cluster, client
from ray_gateway import DEADLINE_S, psutil, started
from sojourn_server.launch.engine_server import free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]

HERE = Path(__file__).parent
ENGINES = "fake_engine_process.py"
PREFILL, DECODE = 1, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A cluster for all tests of this file. An idle one takes a third of a core, so it ends with the file."""
    pytest.importorskip("ray.serve")
    with started(Cluster) as made:
        yield made


async def homes_of(it: Client, prefix: str, count: int = 20) -> dict[str, str]:
    """Programs that have had a turn, spread over the engines."""
    names = [f"{prefix}-{number}" for number in range(count)]
    # All run at once, so that the load of each decides about the next.
    there = await asyncio.gather(*(it.turn(name, delay_s=0.5) for name in names))
    homes = dict(zip(names, there, strict=True))
    assert len(set(homes.values())) == 2
    return homes


async def test_turns_come_to_one_engine_by_any_gateway_and_nothing_listens_elsewhere(
    cluster: Cluster,
) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "affine")
        for _ in range(3):
            again = await asyncio.gather(*(it.turn(name) for name in homes))
            assert dict(zip(homes, again, strict=True)) == homes
        # Serve's proxy leads to any gateway, too.
        url = f"http://127.0.0.1:{cluster.served}/v1/chat/completions"
        body = {"model": "tiny", "messages": [], "stream": True}
        for name, home in list(homes.items())[:4]:
            async with it.http.post(url, json=body, headers={"X-Session-ID": name}) as answer:
                assert answer.headers["X-Sojourn-Replica"] == home
                assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        counted = []
        for gateway in await it.gateways():
            async with it.http.get(f"{gateway}/metrics") as answer:
                page = await answer.text()
            values = re.findall(r"^sojourn_gateway_requests_total\{.*\} (\S+)$", page, re.M)
            counted.append(sum(map(float, values)))
        assert sum(counted) == 4 * len(homes) + 4
        assert all(counted), "each has programs of its own"

        listening = []
        for one in cluster.tree():
            try:
                connections = one.net_connections(kind="inet")
            except psutil.Error:
                continue
            listening += [(one.name(), c.laddr.ip) for c in connections if c.status == psutil.CONN_LISTEN]
        assert listening
        loopback = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
        assert [(name, ip) for name, ip in listening if ip not in loopback] == []


@pytest.mark.parametrize("killed", ["engine", "replica"])
async def test_a_killed_engine_costs_no_request_and_streams_end_with_an_error(
    cluster: Cluster, killed: str
) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, killed)
        before = await it.replicas()
        streaming, streams = await it.streams(*list(homes)[:8])
        victim = homes[f"{killed}-0"]
        (engine,) = cluster.pids(f"{ENGINES} 127.0.0.1 {victim.rpartition(':')[2]}")
        turns = [asyncio.ensure_future(it.turn(name, delay_s=1.5)) for name in list(homes)[8:] * 3]
        await asyncio.sleep(0.5)
        os.kill(engine if killed == "engine" else psutil.Process(engine).ppid(), signal.SIGKILL)
        turns += [asyncio.ensure_future(it.turn(name)) for name in list(homes)[8:]]
        await asyncio.gather(*turns)
        for name, stream in streams.items():
            told = await stream
            lost = b'"type":"replica_lost"' in told
            assert lost is (streaming[name] == victim), (name, told[-200:])
            assert told.endswith(b"data: [DONE]\n\n")
        await until(lambda: not psutil.pid_exists(engine))
        after = {name: await it.turn(name) for name in homes}
        assert all(after[name] == home for name, home in homes.items() if home != victim)
        await it.settled()
        assert (await it.replicas()).items() != before.items()
        assert it.repeated == 0


async def knows(it: Client, homes: dict[str, str]) -> bool:
    """Whether all gateways know these homes, their own programs' and, from the engines, the others'."""
    found = []
    for url in await it.gateways():
        listed = (await it.get("/sojourn/v1/programs?limit=1000", url))["programs"]
        found.append({one["program_id"]: one["replica"] for one in listed})
    return all(homes.items() <= one.items() for one in found)


async def test_a_killed_gateway_is_replaced_and_programs_stay(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "gateway")
        await until(lambda: knows(it, homes))
        before = cluster.pids(GATEWAYS)
        os.kill(before[0], signal.SIGKILL)
        for _ in range(5):
            again = await asyncio.gather(*(it.turn(name) for name in homes))
            assert dict(zip(homes, again, strict=True)) == homes
        await until(lambda: len(set(cluster.pids(GATEWAYS)) - {before[0]}) == 2)
        await it.settled()
        again = await asyncio.gather(*(it.turn(name) for name in homes))
        assert dict(zip(homes, again, strict=True)) == homes


class Pairs:
    """An application of pairs on a cluster that runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        port = free_port("127.0.0.1")
        self.url = f"http://127.0.0.1:{port}"
        self._path = cluster.home / "pairs.yaml"

        def engines(role: str, number: int) -> dict[str, Any]:
            command = [sys.executable, str(HERE.parent / ENGINES), "{host}", "{port}", role]
            log_dir = str(cluster.home / "e")
            return {"min": number, "num_cpus": 0.1, "drain_s": 5, "log_dir": log_dir, "command": command}

        document = {
            "model": "tiny",
            "name": "pairs",
            "direct_port": port,
            "keys": {"admin": "ADMIN"},
            "prefill": engines("prefill", PREFILL),
            "decode": engines("decode", DECODE),
        }
        self._path.write_text(json.dumps(document))

    def does(self, what: str) -> None:
        """``up`` or ``down``."""
        self.cluster.run(HERE / "pairs_on_cluster.py", str(self._path), what)


@pytest.fixture
def pairs(cluster: Cluster) -> Iterator[Pairs]:
    made = Pairs(cluster)
    made.does("up")
    try:
        yield made
    finally:
        made.does("down")


async def test_pairs_serve_while_a_decode_engine_is_killed(pairs: Pairs) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        it = Client(pairs, http)
        known: dict[str, str] = {}

        async def there() -> bool:
            try:
                states = [one for _ in range(4) for one in (await it.get("/sojourn/v1/replicas"))["replicas"]]
            except aiohttp.ClientError:
                return False
            known.clear()
            known.update({one["replica"]: one["role"] for one in states if one["health"] == "up"})
            return len(known) == PREFILL + DECODE and len(states) == 4 * len(known)

        await until(there)
        decode = {name for name, role in known.items() if role == "decode"}
        assert len(decode) == DECODE
        at, streams = await it.streams(*(f"pair-{number}" for number in range(8)))
        turns = [asyncio.ensure_future(it.turn(f"slow-{number}", delay_s=1.0)) for number in range(12)]
        victim = at["pair-0"]
        assert victim in decode
        [pid] = pairs.cluster.pids(f"{ENGINES} 127.0.0.1 {victim.rpartition(':')[2]}")
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        turns += [asyncio.ensure_future(it.turn(f"meanwhile-{number}")) for number in range(12)]
        assert set(await asyncio.gather(*turns)) <= decode
        for name, stream in streams.items():
            told = await stream
            assert (b'"type":"replica_lost"' in told) is (at[name] == victim), (name, told[-200:])

        async def replaced() -> bool:
            return await there() and victim not in known

        await until(replaced)
        assert it.repeated == 0
