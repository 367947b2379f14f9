"""On a real Ray cluster: what reaches engines, and what happens when parts are killed.

The last test adds an application of prefill and decode engines to the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from gateway_harness import until
from ray_cluster import Client, Cluster, client
from ray_gateway import DEADLINE_S, free_port, psutil, started

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.xdist_group("ray")]

HERE = Path(__file__).parent
GATEWAYS = "ServeReplica:sojourn:Gateway"
COORDINATOR = "ray::CoordinatorActor"
ENGINES = "fake_engine_process.py"
PAIR_ENGINES = "fake_pair_engine_process.py"
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


async def test_turns_come_to_one_replica_by_whichever_gateway(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "affine")
        for _ in range(3):
            again = await asyncio.gather(*(it.turn(name) for name in homes))
            assert dict(zip(homes, again, strict=True)) == homes
        shown = (await it.get("/sojourn/v1/programs?limit=1000"))["programs"]
        known = {one["program_id"]: one for one in shown}
        assert {name: known[name]["replica"] for name in homes} == homes
        assert await it.replicas() == await it.replicas()


async def test_serves_own_address_answers_too(cluster: Cluster) -> None:
    async with client(cluster) as it:
        home = await it.turn("both-ways")
        url = f"http://127.0.0.1:{cluster.served}"
        body = {"model": "tiny", "messages": [], "stream": True}
        headers = {"X-Session-ID": "both-ways"}
        async with it.http.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            assert answer.headers["X-Sojourn-Replica"] == home
            assert (await answer.read()).endswith(b"data: [DONE]\n\n")
        async with it.http.get(f"{url}/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "tiny"


async def test_requests_of_the_same_id_are_all_answered(cluster: Cluster) -> None:
    async with client(cluster) as it:
        body = {"model": "tiny", "messages": []}
        headers = {"X-Session-ID": "double", "X-Request-Id": "the-same"}
        url = f"{cluster.url}/v1/chat/completions"

        async def ask() -> int:
            async with it.http.post(url, json=body, headers=headers) as answer:
                return answer.status

        assert set(await asyncio.gather(*(ask() for _ in range(16)))) == {200}


async def test_nothing_listens_where_others_reach_it(cluster: Cluster) -> None:
    async with client(cluster):
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


async def test_each_gateway_counts_at_its_own_port_and_none_at_the_shared_one(cluster: Cluster) -> None:
    first = cluster.config["metrics_port"]

    async def pages(ports: Iterable[int]) -> list[str]:
        found = []
        for port in ports:
            with contextlib.suppress(aiohttp.ClientError):
                # A connection of its own, so that the kernel may choose another gateway.
                async with (
                    aiohttp.ClientSession() as http,
                    http.get(f"http://127.0.0.1:{port}/metrics") as answer,
                ):
                    found.append(await answer.text())
        return [page for page in found if "sojourn_gateway_" in page]

    async with client(cluster) as it:
        await asyncio.gather(*(it.turn(f"counted-{number}") for number in range(10)))
        own = await pages(range(first, first + 20))
        assert len(own) == 2
        counted = [re.findall(r"^sojourn_gateway_requests_total\{.*\} (\S+)$", page, re.M) for page in own]
        assert sum(float(value) for values in counted for value in values) >= 10
        shared = await pages([cluster.direct] * 10 + [cluster.served] * 2)
        assert len(shared) == 12
        for page in shared:
            assert "sojourn_gateway_requests_total" not in page
            assert 'sojourn_gateway_replicas{health="up"}' in page


async def test_a_killed_engine_costs_no_request_and_streams_end_with_an_error(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "engine")
        before = await it.replicas()
        streaming: dict[str, str] = {}
        streams = {
            name: asyncio.ensure_future(
                it.stream(name, lambda at, name=name: streaming.update({name: at}))  # type: ignore[misc]
            )
            for name in list(homes)[:8]
        }
        await until(lambda: len(streaming) == 8)
        victim = homes["engine-0"]
        port = victim.rpartition(":")[2]
        (pid,) = cluster.pids(f"{ENGINES} 127.0.0.1 {port}")
        turns = [asyncio.ensure_future(it.turn(name, delay_s=1.5)) for name in list(homes)[8:] * 3]
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        turns += [asyncio.ensure_future(it.turn(name)) for name in list(homes)[8:]]
        await asyncio.gather(*turns)
        for name, stream in streams.items():
            told = await stream
            lost = b'"type":"replica_lost"' in told
            assert lost is (streaming[name] == victim), (name, told[-200:])
            assert told.endswith(b"data: [DONE]\n\n")
        after = {name: await it.turn(name) for name in homes}
        assert all(after[name] == home for name, home in homes.items() if home != victim)
        await it.settled()
        assert (await it.replicas()).items() != before.items()
        assert it.repeated == 0


async def test_a_killed_coordinator_costs_nothing_and_homes_are_kept(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "coordinator")
        before = cluster.on_cluster("state")
        streams = [asyncio.ensure_future(it.stream(name)) for name in list(homes)[:6]]
        (pid,) = cluster.pids(COORDINATOR)
        turns = [asyncio.ensure_future(it.turn(name, delay_s=1.5)) for name in list(homes)[6:]]
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        for _ in range(3):
            again = await asyncio.gather(*(it.turn(name) for name in list(homes)[6:]))
            assert again == list(homes.values())[6:]
        new = await asyncio.gather(*(it.turn(f"coordinator-new-{number}") for number in range(6)))
        assert len(new) == 6
        await asyncio.gather(*turns)
        for stream in streams:
            assert b"replica_lost" not in await stream

        async def back() -> bool:
            return cluster.pids(COORDINATOR) not in ([], [pid]) and len(await it.replicas()) == 2

        await until(back)
        after = cluster.on_cluster("state")
        assert after["epoch"] > before["epoch"]
        kept = sum(after["homes"].get(name) == home for name, home in homes.items())
        assert kept >= 0.95 * len(homes)
        assert after["restored"] >= 0.95 * len(homes)
        assert {name: await it.turn(name) for name in homes} == homes
        assert it.repeated == 0


async def test_a_killed_gateway_is_replaced_and_programs_stay(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "gateway")
        before = cluster.pids(GATEWAYS)
        os.kill(before[0], signal.SIGKILL)
        for _ in range(5):
            again = await asyncio.gather(*(it.turn(name) for name in homes))
            assert dict(zip(homes, again, strict=True)) == homes
        await until(lambda: len(set(cluster.pids(GATEWAYS)) - {before[0]}) == 2)
        await it.settled()


async def test_a_killed_engine_replica_takes_its_engine_along(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "replica")
        (pid, *_) = cluster.pids("ServeReplica:sojourn:Engine")
        (engine,) = [child.pid for child in psutil.Process(pid).children()]
        turns = [asyncio.ensure_future(it.turn(name, delay_s=1.5)) for name in homes for _ in range(2)]
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*turns)
        await until(lambda: not psutil.pid_exists(engine))

        async def anew() -> bool:
            return len(await it.replicas()) == 2 and len(cluster.pids(ENGINES)) == 2

        await until(anew)
        assert it.repeated == 0


async def test_of_two_coordinators_one_gives_way(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "two")
        before = cluster.on_cluster("state")
        second = cluster.on_cluster("second")
        assert second["epoch"] > before["epoch"]
        for _ in range(3):
            again = await asyncio.gather(*(it.turn(name) for name in homes))
            assert dict(zip(homes, again, strict=True)) == homes

        async def later() -> bool:
            now = await asyncio.to_thread(cluster.on_cluster, "state")
            return bool(now["epoch"] > second["epoch"] and now["gateways"] == 2)

        await until(later)
        assert {name: await it.turn(name) for name in homes} == homes
        assert it.repeated == 0


async def test_programs_of_a_drained_replica_move(cluster: Cluster) -> None:
    async with client(cluster) as it:
        homes = await homes_of(it, "drain")
        victim = homes["drain-0"]
        url = f"{cluster.url}/sojourn/v1/replicas/{victim}/drain"
        async with it.http.post(url, headers={"Authorization": "Bearer root"}) as answer:
            assert answer.status == 200
            assert (await answer.json())["health"] == "draining"

        async def left() -> bool:
            return victim not in await asyncio.gather(*(it.turn(name) for name in homes))

        await until(left)
        (pid,) = cluster.pids(f"{ENGINES} 127.0.0.1 {victim.rpartition(':')[2]}")
        os.kill(pid, signal.SIGKILL)
        await it.settled()
        assert it.repeated == 0


async def test_there_are_as_many_engines_as_programs_need(cluster: Cluster) -> None:
    async with client(cluster) as it:
        names = [f"large-{number}" for number in range(10)]
        large = {"path": "/v1/completions", "prompt": [1] * 3_900}
        await asyncio.gather(*(it.turn(name, **large) for name in names))
        await it.settled(engines=3)
        homes = {name: await it.turn(name) for name in names}
        over = [{"type": "program_end", "program_id": name, "seq": 1} for name in names]
        async with it.http.post(
            f"{cluster.url}/sojourn/v1/events", json={"v": 1, "emitter": "e", "events": over}
        ) as answer:
            assert {one["outcome"] for one in (await answer.json())["outcomes"]} == {"applied"}
        await it.settled(engines=2)
        assert len(homes) == 10
        assert it.repeated == 0


class Pairs:
    """Their application on a cluster that runs."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.others = set(cluster.pids(COORDINATOR))
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._path = cluster.home / "pairs.yaml"

        def engines(role: str, number: int) -> dict[str, Any]:
            command = [sys.executable, str(HERE.parent / PAIR_ENGINES), "{host}", "{port}", role]
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


async def settled_pairs(it: Client) -> dict[str, dict[str, Any]]:
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
        known = await settled_pairs(it)
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
        assert (await settled_pairs(it)).keys() == known.keys()
        assert set(await asyncio.gather(*turns("after", delay_s=0.2))) == decode

        # A decode engine, with answers that have begun and others that have not.
        on_their_way, slow = await streams(), turns("slow", delay_s=1.0)
        victim = next(iter(on_their_way)).partition(" ")[0]
        assert victim in decode
        [pid] = pairs.cluster.pids(f"{PAIR_ENGINES} 127.0.0.1 {victim.rpartition(':')[2]}")
        await asyncio.sleep(0.5)
        os.kill(pid, signal.SIGKILL)
        assert set(await asyncio.gather(*slow, *turns("meanwhile"))) <= {*decode}
        for where, stream in on_their_way.items():
            told = await stream
            assert (b'"type":"replica_lost"' in told) is where.startswith(f"{victim} "), (where, told[-200:])
        again = await settled_pairs(it)
        assert {one["instance"] for one in again.values()} != {one["instance"] for one in known.values()}
        assert sum(one["role"] == "decode" for one in again.values()) == DECODE
        assert it.repeated == 0
