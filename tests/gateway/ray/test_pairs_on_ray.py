"""Prefill and decode engines on a real Ray cluster, beside the engines of the other tests."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from ray_cluster import Client, Cluster
from ray_gateway import DEADLINE_S, free_port

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]

HERE = Path(__file__).parent
COORDINATOR = "ray::CoordinatorActor"
ENGINES = "fake_pair_engine_process.py"
PREFILL, DECODE = 1, 2


class Pairs:
    """Their application on a cluster that runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.others = set(cluster.pids(COORDINATOR))
        port = free_port()
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
            "checkpoint": str(cluster.home / "pairs-checkpoint"),
            "keys": {"admin": "ADMIN"},
            "prefill": engines("prefill", PREFILL),
            "decode": engines("decode", DECODE),
        }
        self._path.write_text(json.dumps(document))

    def does(self, what: str) -> None:
        """``up`` or ``down``."""
        self.cluster.run(HERE / "pairs_on_cluster.py", str(self._path), what)

    def coordinators(self) -> list[int]:
        """Processes; none while it is being started anew."""
        return [pid for pid in self.cluster.pids(COORDINATOR) if pid not in self.others]


@pytest.fixture
def pairs(cluster: Cluster) -> Iterator[Pairs]:
    made = Pairs(cluster)
    made.does("up")
    try:
        yield made
    finally:
        made.does("down")


async def settled(it: Client) -> dict[str, dict[str, Any]]:
    """Until all engines are up; what is known of each, by replica."""
    found: dict[str, dict[str, Any]] = {}

    async def there() -> bool:
        try:
            states = (await it.get("/sojourn/v1/replicas"))["replicas"]
        except aiohttp.ClientError:
            return False
        found.clear()
        found.update({state["replica"]: state for state in states if state["health"] == "up"})
        return len(found) == PREFILL + DECODE

    await until(there)
    return found


async def test_pairs_serve_while_the_coordinator_and_a_decode_engine_are_killed(pairs: Pairs) -> None:
    connector = aiohttp.TCPConnector(force_close=True, limit=0)
    timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
        it = Client(pairs, http)  # type: ignore[arg-type]
        known = await settled(it)
        decode = {name for name, one in known.items() if one["role"] == "decode"}
        assert len(decode) == DECODE
        programs = [f"pair-{number}" for number in range(8)]

        async def streams() -> dict[str, asyncio.Task[bytes]]:
            """Of all programs; all have begun. By replica and program."""
            at: dict[str, str] = {}
            made = {
                name: asyncio.ensure_future(
                    it.stream(name, lambda there, name=name: at.update({name: there}))  # type: ignore[misc]
                )
                for name in programs
            }
            await until(lambda: len(at) == len(programs))
            return {f"{at[name]} {name}": task for name, task in made.items()}

        def turns(prefix: str, **more: Any) -> list[asyncio.Task[str]]:
            return [asyncio.ensure_future(it.turn(f"{prefix}-{number}", **more)) for number in range(12)]

        assert set(await asyncio.gather(*turns("first", delay_s=0.2))) == decode

        # The coordinator, with requests on both legs.
        on_their_way, slow = await streams(), turns("slow", delay_s=1.0)
        [before] = pairs.coordinators()
        await asyncio.sleep(0.5)
        os.kill(before, signal.SIGKILL)
        answered = await asyncio.gather(*slow, *turns("meanwhile"))
        assert set(answered) <= decode
        for stream in on_their_way.values():
            told = await stream
            assert b"replica_lost" not in told
            assert told.endswith(b"data: [DONE]\n\n")
        await until(lambda: pairs.coordinators() not in ([], [before]))
        assert (await settled(it)).keys() == known.keys()
        assert set(await asyncio.gather(*turns("after", delay_s=0.2))) == decode

        # A decode engine, with answers that have begun and others that have not.
        on_their_way, slow = await streams(), turns("slow", delay_s=1.0)
        victim = next(iter(on_their_way)).partition(" ")[0]
        assert victim in decode
        [pid] = pairs.cluster.pids(f"{ENGINES} 127.0.0.1 {victim.rpartition(':')[2]}")
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert set(await asyncio.gather(*slow, *turns("meanwhile"))) <= {*decode}
        for where, stream in on_their_way.items():
            told = await stream
            assert (b'"type":"replica_lost"' in told) is where.startswith(f"{victim} "), (where, told[-200:])
        again = await settled(it)
        assert {one["instance"] for one in again.values()} != {one["instance"] for one in known.values()}
        assert sum(one["role"] == "decode" for one in again.values()) == DECODE
        assert it.repeated == 0
