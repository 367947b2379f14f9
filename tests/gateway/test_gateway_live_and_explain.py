"""Live frames and explanations of several engines behind a gateway: whose they are, and what is missing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, running
from gateway_harness import World, until, world
from sojourn.wire_events import ProgramEnd, ProgramStart
from sojourn_server.gateway.http.program_id_mapper import FOREIGN_PROGRAM_ID
from sojourn_server.metrics.live_frame import LiveFrame
from virtual_engine import prompt
from virtual_fake_engine import VirtualFakeEngine

DISCONNECTS = "sojourn_gateway_client_disconnects_total"
KEYS = {"key-a": "a", "key-b": "b"}


@asynccontextmanager
async def gateway(*fakes: FakeEngine) -> AsyncIterator[World]:
    """A gateway of two tenants and an operator before these engines."""
    async with running(*fakes), world(list(fakes), tenants=KEYS, admin_key="root") as it:
        yield it


async def frame(it: World, key: str, more: str = "") -> LiveFrame:
    return msgspec.convert(await it.get(f"/sojourn/v1/stream?once=1{more}", key), LiveFrame)


async def explained(it: World, key: str, status: int = 200, program: str = "p", more: str = "") -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    url = f"{it.url}/sojourn/v1/programs/{program}/explain{more}"
    async with it.http.get(url, headers=headers) as answer:
        assert answer.status == status, await answer.text()
        return await answer.json()


async def test_an_explanation_has_the_tenants_ids_also_in_its_text() -> None:
    fake = VirtualFakeEngine()
    lease = fake.virtual.turn("a/p", prompt(40))
    assert lease is not None
    fake.virtual.wait(lease.ttl_s + 5.0)
    fake.virtual.evict(prompt(40), by="b/rival")
    fake.virtual.turn("a/p", prompt(60))
    async with gateway(fake) as it:
        assert (await it.chat("p", "key-a")).status == 200
        found = await explained(it, "key-a")
        assert (found["program_id"], found["turn"], found["replica"]) == ("p", 2, fake.name)
        assert found["lost_to"] == FOREIGN_PROGRAM_ID
        assert "by another program" in found["text"]
        assert {one["program_id"] for one in found["decisions"]} == {"p"}
        assert any("ttl_s" in one for one in found["decisions"]), "with their terms"
        assert "b/" not in str(found)
        shown = await explained(it, "root")
        assert shown["lost_to"] == "b/rival"
        assert "by program b/rival" in shown["text"]
        assert (await explained(it, "key-a", more="?turn=1"))["turn"] == 1
        assert "1, 2" in (await explained(it, "key-a", 404, more="?turn=7"))["error"]["next"]
        await explained(it, "key-a", 400, more="?turn=0")
        await explained(it, "key-b", 404)
        await fake.kill()
        assert "does not answer" in (await explained(it, "key-a", 503))["error"]["message"]


async def test_an_ended_program_is_explained_by_the_engine_that_remembers_most_of_it() -> None:
    """The gateway forgets a program when it ends; the engines remember it."""
    first, second = VirtualFakeEngine(), VirtualFakeEngine()
    async with gateway(first, second) as it:
        for fake, turns in ((first, 1), (second, 3)):
            for _ in range(turns):
                fake.virtual.turn("a/p", prompt(40))
            fake.virtual.send(ProgramEnd(program_id="a/p", seq=-1, status="ok"))
        found = await explained(it, "key-a")
        assert (found["program_id"], found["turn"], found["replica"]) == ("p", 3, second.name)
        assert "a/" not in str(found["decisions"])
        assert (await explained(it, "key-a", more="?turn=2"))["turn"] == 2
        await explained(it, "key-a", 404, more="?turn=7")
        await explained(it, "key-a", 400, more="?turn=0")
        await explained(it, "key-b", 404)
        await explained(it, "key-a", 404, program="unknown")


async def test_an_answer_that_is_no_explanation_is_the_engines_fault() -> None:
    knows, fake = VirtualFakeEngine(), FakeEngine()
    async with gateway(knows, fake) as it:
        knows.virtual.turn("a/p", prompt(40))
        knows.virtual.send(ProgramEnd(program_id="a/p", seq=-1, status="ok"))
        assert (await explained(it, "key-a"))["replica"] == knows.name, "the other's answer does not count"
    fake = FakeEngine()
    async with gateway(fake) as it:
        assert (await it.chat("p", "key-a")).status == 200
        error = (await explained(it, "key-a", 502))["error"]
        assert "sent no explanation" in error["message"]


async def test_a_live_frame_has_every_engine_and_each_tenant_sees_its_programs() -> None:
    fake, stock, odd = VirtualFakeEngine(ranks=2), FakeEngine(), VirtualFakeEngine()
    odd.rpc.instead["snapshot"] = {}
    first, second = fake.ranks
    first.send(ProgramStart(program_id="a/p", seq=-1, parent_program_id="b/q"))
    first.send(ProgramStart(program_id="a/child", seq=-1, parent_program_id="a/p"))
    first.turn("a/p", prompt(40))
    for _ in range(2):
        second.turn("b/q", prompt(8, seed=1))
    first.turn("b/q", prompt(8, seed=1))
    second.turn("stranger", prompt(8, seed=2))
    async with gateway(fake, stock, odd) as it:
        await until(lambda: len(list(it.gateway.replicas)) == 4)
        found = await frame(it, "root")
        assert {row.engine: row.error for row in found.engines} == {
            f"{fake.name}/0": None,
            f"{fake.name}/1": None,
            stock.name: "runs without sojourn",
            odd.name: "does not answer",
        }
        assert found.full, "it is no delta; the row of an engine says that its programs are missing"
        rows = {(row.tenant, row.program_id): row for row in found.programs}
        assert rows.keys() == {("a", "p"), ("a", "child"), ("b", "q"), (None, "stranger")}
        assert rows["a", "p"].engine == f"{fake.name}/0"
        assert (rows["b", "q"].engine, rows["b", "q"].turns) == (f"{fake.name}/1", 2)
        assert rows["a", "p"].parent_program_id == FOREIGN_PROGRAM_ID
        assert rows["a", "child"].parent_program_id == "p"
        assert sum(row.turns for row in found.engines) == 5

        own = await frame(it, "key-a")
        assert {row.program_id for row in own.programs} == {"p", "child"}
        assert {row.turns for row in own.engines} == {0}, "no totals of all tenants"
        second.wait(100.0)
        first.wait(100.0)
        first.turn("a/new", prompt(8, seed=3), "done")
        delta = await frame(it, "key-a", "&changed_within_s=5")
        assert await frame(it, "key-a", "&changed_within_s=5.5"), "as an engine's route, any number"
        assert not delta.full
        assert {row.program_id for row in delta.programs} == {"new"}


async def test_a_live_frame_says_why_an_engine_gets_no_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, odd = VirtualFakeEngine(), VirtualFakeEngine()
    async with gateway(fake, odd) as it:
        await until(lambda: len(it.gateway.replicas) == 2)
        refused = {"http://10.0.0.9:8000": "no role", odd.url: "too late"}
        monkeypatch.setattr(it.gateway.monitor, "refused", lambda: refused)
        rows = {row.engine: row.error for row in (await frame(it, "root")).engines}
        assert rows == {fake.name: None, odd.name: None, "10.0.0.9:8000": "gets no requests: no role"}


async def test_a_live_frame_counts_the_engines_that_ray_has_not_started() -> None:
    fake = VirtualFakeEngine()
    async with gateway(fake) as it:
        await until(lambda: len(it.gateway.replicas) == 1)
        it.gateway.monitor.watch({fake.url: None}, ["Prefill", "Decode", "Decode"])
        rows = {row.engine: row.error for row in (await frame(it, "root")).engines}
        assert rows == {fake.name: None, "Prefill": "does not answer", "Decode": "2 do not answer"}


async def test_how_a_program_ended_is_asked_of_the_engines_and_counted() -> None:
    fake = VirtualFakeEngine()
    promise = {"v": 1, "heartbeat": True}
    for name in ("a/ended", "a/crashed", "a/killed"):
        fake.virtual.turn(name, prompt(8), sojourn=promise)
    # No poll: an answer from before the end would name the program again, and the repeated end would count.
    async with running(fake), world([fake], tenants=KEYS, admin_key="root", poll_s=3600) as it:
        for name in ("ended", "crashed", "killed"):
            assert (await it.chat(name, "key-a")).status == 200
        end = {"type": "program_end", "program_id": "ended", "seq": 1}
        crash = {"type": "program_end", "program_id": "crashed", "seq": 2, "status": "error"}
        for _ in range(2):  # as a client that does not know whether its batch arrived
            await it.events(end, crash, key="key-a")
        fake.virtual.wait(61.0)
        for name, outcome in (("ended", "ok"), ("crashed", "error"), ("killed", "lost")):
            found = await it.get(f"/sojourn/v1/programs/{name}", "key-a")
            assert (found["program_id"], found["engine"]["program_id"]) == (name, name)
            assert found["engine"]["outcome"] == outcome
        assert "error" in await it.get("/sojourn/v1/programs/ended", "key-b")
        async with it.http.get(f"{it.url}/metrics") as answer:
            page = await answer.text()
        for outcome, number in (("ok", 1.0), ("error", 1.0), ("cancelled", 0.0), ("final", 0.0)):
            assert f'sojourn_gateway_programs_finished_total{{outcome="{outcome}"}} {number}' in page
        fake.hold = asyncio.Event()
        left = asyncio.ensure_future(it.chat("killed", "key-a"))
        await until(lambda: len(fake.requests) == 4)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        await until(lambda: it.gateway.metrics.registry.get_sample_value(DISCONNECTS) == 1)
