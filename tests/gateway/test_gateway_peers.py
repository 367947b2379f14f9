"""Gateways that share engines and nothing else: who owns a program, and what happens when an owner goes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import DEADLINE_S, KEYS, World, hint, until, world
from hypothesis import given, settings
from hypothesis import strategies as st
from sojourn_server.gateway.http import peers as peers_module
from sojourn_server.gateway.http.gateway_app import GatewayApplication
from sojourn_server.gateway.http.peers import Peers, owner_of
from sojourn_server.routing.routing_records import ReplicaHealth


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in found]


@settings(max_examples=30)
@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=3)), max_size=20), st.integers(2, 6))
def test_all_gateways_name_one_owner_and_a_lost_one_moves_its_programs_alone(
    programs: list[tuple[str, str]], count: int
) -> None:
    urls = [f"http://g:{number}" for number in range(count)]
    before = {key: owner_of(urls, *key) for key in programs}
    assert before == {key: owner_of(reversed(urls), *key) for key in programs}
    after = {key: owner_of(urls[1:], *key) for key in programs}
    moved = {key for key in programs if before[key] != after[key]}
    assert moved == {key for key in programs if before[key] == urls[0]}


@asynccontextmanager
async def gateways(fakes: list[FakeEngine], **options: Any) -> AsyncIterator[list[World]]:
    """Two gateways in front of the same engines."""
    ports = free_ports(2)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    async with AsyncExitStack() as stack:
        worlds = []
        for url, port in zip(urls, ports, strict=True):
            it = world(fakes, tenants=KEYS, port=port, peers=Peers(url, urls), **options)
            worlds.append(await stack.enter_async_context(it))
        for it in worlds:
            await until(lambda it=it: it.gateway.peers.alive)
        yield worlds


def _owned(it: World, here: bool) -> str:
    """A program of tenant a that is this gateway's own, or another's."""
    names = (f"p{number}" for number in range(50))
    return next(one for one in names if (it.gateway.peers.owner("a", one) is None) is here)


def known(it: World) -> set[str]:
    return {program_id for _, program_id in it.core.programs}


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "CHECK_S", 0.05)


async def test_requests_and_events_reach_the_programs_gateway_from_any_other() -> None:
    async with engines(2) as fakes, gateways(fakes) as (one, other):
        mine = _owned(one, True)
        for it in (one, other):
            codex = {"thread-id": mine}
            assert (await it.send("/v1/responses", "key-a", json={"input": "x"}, headers=codex)).status == 200
            for stream in (False, True):
                answer = await it.chat(mine, "key-a", stream=stream)
                assert answer.status == 200
                assert "X-Sojourn-Replica" in answer.headers
                if stream:
                    assert (await answer.read()).endswith(b"data: [DONE]\n\n")
            [outcome] = await it.events(
                {"type": "tool_start", "program_id": mine, "call_id": it.url, "tool": "t", "seq": 1},
                key="key-a",
                emitter=it.url,
            )
            assert outcome["outcome"] == "applied"
        assert mine in known(one)
        assert sorted(len(fake.requests) for fake in fakes) == [0, 6], "all at one engine"
        assert all(fake.headers[-1].get("x-sojourn-passed") is None for fake in fakes if fake.headers)
        assert (await other.chat(mine, "wrong")).status == 401
        assert (await other.chat(None, "key-a")).status == 200, "without a program it stays where it is"


async def test_events_of_another_gateways_program_that_ride_in_a_request_reach_that_gateway() -> None:
    async with engines(1) as fakes, gateways(fakes) as (one, other):
        rides_in, starts = _owned(one, True), _owned(one, False)
        event = {"type": "tool_start", "program_id": starts, "call_id": "c", "tool": "t", "seq": 1}
        assert (await other.chat(key="key-a", **hint(rides_in, event))).status == 200
        assert (await one.chat(starts, "key-a")).status == 200
        assert fakes[0].of(f"a/{starts}") == ["tool_start"], "sent before the program's first turn"
        assert starts in known(other)


async def test_a_request_that_was_passed_on_is_decided_where_it_arrives() -> None:
    async with engines(1) as fakes, gateways(fakes) as (one, _):
        others = _owned(one, False)
        headers = {"X-Session-ID": others, "X-Sojourn-Passed": "1"}
        answer = await one.send("/v1/chat/completions", "key-a", json={"messages": []}, headers=headers)
        assert answer.status == 200
        assert others in known(one)


async def test_a_client_that_leaves_ends_its_request_at_the_owner_and_its_engine() -> None:
    async with engines(1) as fakes, gateways(fakes) as (one, other):
        fakes[0].hold = asyncio.Event()
        asked = asyncio.ensure_future(other.chat(_owned(one, True), "key-a"))
        await until(lambda: fakes[0].requests)
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        await until(lambda: fakes[0].gave_up == 1)


async def test_a_gateway_that_hangs_holds_up_no_request_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers_module, "CHECK_TIMEOUT_S", 0.2)
    async with engines(1) as fakes, gateways(fakes) as (one, other):
        owned = _owned(one, True)
        hangs = asyncio.Event()

        serve = GatewayApplication.__call__

        async def hang(app: Any, *request: Any) -> None:
            if app._generation is one.gateway.generation:
                hangs.set()
                await asyncio.sleep(3600)
            await serve(app, *request)

        monkeypatch.setattr(GatewayApplication, "__call__", hang)
        asked = asyncio.ensure_future(other.chat(owned, "key-a"))
        await hangs.wait()
        assert (await asked).status == 200
        assert owned in known(other)


async def test_a_drain_that_another_gateway_did_not_take_says_so() -> None:
    async with engines(2) as fakes, gateways(fakes, admin_key="root") as (one, other):
        gone = f"http://127.0.0.1:{free_ports(1)[0]}"
        await one.gateway.peers.set_urls([one.url, other.url, gone])
        answer = await one.send(f"/sojourn/v1/replicas/{fakes[0].name}/drain", "root")
        assert answer.status == 502
        told = (await answer.json())["error"]
        assert gone in told["message"]
        assert other.url not in told["message"]
        for it in (one, other):
            assert it.core.fleet[fakes[0].name].health is ReplicaHealth.DRAINING


async def start(engine_urls: list[str], urls: list[str], own: str) -> asyncio.subprocess.Process:
    command = [sys.executable, "-m", "sojourn_server.cli", "gateway", "--engines", ",".join(engine_urls)]
    command += ["--port", own.rpartition(":")[2], "--peers", ",".join(urls), "--log-level", "error"]
    return await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)


@pytest.mark.slow
async def test_of_three_engines_and_two_gateways_one_each_is_killed_and_no_later_request_fails() -> None:
    """They are processes, killed under load. Each stream that breaks gets an error event."""
    async with AsyncExitStack() as stack:
        command = [sys.executable, str(Path(__file__).with_name("fake_engine_process.py")), "127.0.0.1"]
        ports = free_ports(5)
        running: list[asyncio.subprocess.Process] = []

        async def end() -> None:
            for process in running:
                if process.returncode is None:
                    process.kill()
                await process.wait()

        stack.push_async_callback(end)
        for port in ports[:3]:
            running.append(await asyncio.create_subprocess_exec(*command, str(port)))
        engine_urls = [f"http://127.0.0.1:{port}" for port in ports[:3]]
        urls = [f"http://127.0.0.1:{port}" for port in ports[3:]]
        for url in urls:
            running.append(await start(engine_urls, urls, url))
        timeout = aiohttp.ClientTimeout(total=DEADLINE_S)
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=timeout))

        async def ready(url: str, up: int) -> bool:
            try:
                async with http.get(f"{url}/health") as answer:
                    return bool((await answer.json())["up"] == up)
            except aiohttp.ClientError:
                return False

        for url in urls:
            await until(lambda url=url: ready(url, 3))
        dead, alive = urls
        streaming: set[str] = set()

        async def turn(program: str, **more: Any) -> tuple[int, str, str | None]:
            body = {"model": "tiny", "messages": [], **more}
            async with http.post(
                f"{alive}/v1/chat/completions", json=body, headers={"X-Session-ID": program}
            ) as answer:
                if "stream" in more:
                    streaming.add(program)
                return answer.status, await answer.text(), answer.headers.get("X-Sojourn-Replica")

        owners = {f"p{number}": owner_of(urls, "default", f"p{number}") for number in range(200)}
        of_each = ([name for name, owner in owners.items() if owner == url][:10] for url in urls)
        names = [name for pair in zip(*of_each, strict=True) for name in pair]
        began = dict(
            zip(names, await asyncio.gather(*(turn(name, delay_s=0.3) for name in names)), strict=True)
        )
        homes = {name: home for name, (_, _, home) in began.items()}
        assert {status for status, _, _ in began.values()} == {200}
        assert set(homes.values()) == {url.removeprefix("http://") for url in engine_urls}
        lost_home = f"127.0.0.1:{ports[0]}"

        async def known_homes() -> bool:
            """Each gateway knows its own programs' homes, and from the engines the others'."""
            for url in urls:
                async with http.get(f"{url}/sojourn/v1/programs") as answer:
                    listed = (await answer.json())["programs"]
                if {one["program_id"]: one["replica"] for one in listed} != homes:
                    return False
            return True

        await until(known_homes)
        slow = [asyncio.ensure_future(turn(name, delay_s=1.0)) for name in names]
        streams = {
            name: asyncio.ensure_future(turn(name, stream=True, events=40, gap_s=0.1)) for name in names[:10]
        }
        passed = {name for name in names if owners[name] == dead}
        await until(lambda: streaming == streams.keys())
        for killed in (running[0], running[3]):
            os.kill(killed.pid, signal.SIGKILL)
        later = [asyncio.ensure_future(turn(name)) for _ in range(5) for name in names]
        answers = await asyncio.gather(*slow, *later)
        assert {status for status, _, _ in answers} == {200}
        for (_, _, home), before in zip(answers, list(homes.values()) * 6, strict=True):
            assert before in (home, lost_home), "all others stay where their KV is"
        for name, stream in streams.items():
            status, text, _ = await stream
            assert status == 200
            assert ('"type":"replica_lost"' in text) is (name in passed or homes[name] == lost_home), text[
                -200:
            ]
            assert text.endswith("data: [DONE]\n\n")
        homes = {name: home for name, (_, _, home) in zip(names, answers[-len(names) :], strict=True)}
        assert lost_home not in homes.values()
        running[3] = await start(engine_urls, urls, dead)
        await until(lambda: ready(dead, 2))
        again = await asyncio.gather(*map(turn, names))
        assert [(status, home) for status, _, home in again] == [(200, home) for home in homes.values()]


async def test_a_conversation_that_meets_several_gateways_is_no_program() -> None:
    async with engines(2) as fakes, gateways(fakes) as worlds:
        previous, homes = {}, set()
        for number in (0, 1, 1, 0, 0):
            answer = await worlds[number].send("/v1/responses", "key-a", json={"input": "x", **previous})
            homes.add(answer.headers["X-Sojourn-Replica"])
            previous = {"previous_response_id": (await answer.json())["id"]}
        assert len(homes) == 1
        assert [known(it) for it in worlds] == [set(), set()]
