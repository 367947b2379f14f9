"""What a gateway says of all its engines at once, where one of them is silent or talks nonsense."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from fake_engine import FakeEngine, engines, running
from fake_pair_engine import pairs
from gateway_harness import KEYS, World, until, world
from sojourn.wire_events import ProgramEnd, ProgramStart
from sojourn_server.cli import doctor
from sojourn_server.gateway.http import multi_engine_queries
from sojourn_server.gateway.http.program_id_mapper import FOREIGN_PROGRAM_ID
from sojourn_server.metrics.live_frame import LiveFrame
from starlette.requests import Request
from starlette.responses import Response
from virtual_engine import prompt
from virtual_fake_engine import VirtualFakeEngine

PATH = "/sojourn/v1/capabilities"


class Odd(FakeEngine):
    """Told to, it answers in its own way when asked what it speaks, or not at all."""

    says: bytes | None = None
    mute = False

    async def _capabilities(self, request: Request) -> Response:
        if self.mute:
            await asyncio.sleep(3600)
        if self.says is not None:
            return Response(self.says, media_type="application/json")
        return await super()._capabilities(request)


@asynccontextmanager
async def beside_odd() -> AsyncIterator[tuple[Odd, Any]]:
    """A gateway in front of an odd engine and another."""
    async with engines(1) as fakes, running(Odd()) as [odd], world([odd, *fakes]) as it:
        yield odd, it


async def test_an_engine_that_does_not_answer_holds_up_no_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multi_engine_queries, "STRAGGLER_WAIT_S", 0.05)
    monkeypatch.setattr(multi_engine_queries, "QUERY_TIMEOUT_S", 3600.0)
    async with beside_odd() as (odd, it):
        odd.mute = True
        told = await it.get(PATH)
        assert (told["name"], told["engines"], told["gateway"]) == ("sojourn", 1, True)
        assert told["silent"] == [odd.url]
        assert (await it.get("/sojourn/v1/stats"))["silent"] == [], "of numbers each engine's are wanted"


@pytest.mark.parametrize(
    "says",
    [b'"\xff"', b'{"a":' * 5000, b"[]", b'{"name": "other", "engines": 4}'],
)
async def test_an_engine_that_answers_nonsense_is_left_out(says: bytes) -> None:
    async with beside_odd() as (odd, it):
        odd.says = says
        told = await it.get(PATH)
        assert (told["name"], told["engines"], told["silent"]) == ("sojourn", 1, [odd.url])


@pytest.mark.parametrize("key", [None, "wrong"])
async def test_a_client_whose_key_the_engines_refuse_hears_that(key: str | None) -> None:
    """It was told that no engine answers, and to try again."""
    async with engines(2, key="right") as fakes, world(fakes) as it:
        for path in ("/v1/models", PATH):
            answer = await it.send(path, key, method="GET")
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
            assert "Retry-After" not in answer.headers
            assert (await it.send(path, "right", method="GET")).status == 200


# -- sojourn doctor ---------------------------------------------------------------


async def examined(url: str, key: str | None = None) -> dict[str, doctor.Check]:
    """What the doctor reports of a gateway, by name."""

    def ask() -> dict[str, doctor.Check]:
        headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
        with httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False) as client:
            return {check.name: check for check in doctor.server_checks(client)}

    return await asyncio.to_thread(ask)


async def test_the_doctor_knows_a_gateway() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        checks = await examined(it.url)
        assert list(checks)[:2] == ["server", "gateway"]
        assert checks["gateway"].ok is True
        assert checks["gateway"].detail == (
            "policy test, 2 of 2 replicas up; its replicas answer the following checks"
        )
        assert checks["plugin"].ok is checks["events"].ok is checks["models"].ok is True
        await fakes[0].kill()
        await until(lambda: it.gateway.replicas.get(fakes[0].name) is None)
        check = (await examined(it.url))["gateway"]
        assert check.ok is False
        assert f"1 of 2 replicas up; no answer from: {fakes[0].url}; " in check.detail
        assert "logs" in check.next_step
        await fakes[1].kill()
        await until(lambda: it.gateway.replicas.get(fakes[1].name) is None)
        checks = await examined(it.url)
        assert list(checks) == ["server", "gateway"]
        assert "policy test, 0 of 2 replicas up" in checks["gateway"].detail


async def test_the_doctor_knows_a_gateway_for_pairs_and_says_which_role_is_missing_and_why() -> None:
    async with pairs(1, 1, read_side="prefill") as (it, [prefill], [decode]):
        checks = await examined(it.url)
        assert not [name for name, check in checks.items() if check.ok is False and name != "cached tokens"]
        assert checks["gateway"].detail.startswith("policy dualpath, 2 of 2 replicas up")
        nodes = ", ".join(sorted((prefill.at_node, decode.at_node)))
        assert checks["pairs"].detail == f"1 prefill, 1 decode; nodes {nodes}; read side prefill"
        decode.paths = {"block_bytes": 8192}
        await until(lambda: decode.name not in it.core.fleet)
        checks = await examined(it.url)
        assert [*checks][:3] == ["server", "gateway", "pairs"]
        assert checks["server"].ok is True
        assert "1 of 2 replicas up" in checks["gateway"].detail
        pairs_check = checks["pairs"]
        assert pairs_check.ok is False
        assert pairs_check.detail.startswith("1 prefill, 0 decode; ")
        assert f"{decode.url} is rejected: its Full Block in bytes is 8192" in pairs_check.detail
        assert "--prefill" in pairs_check.next_step


# -- Live frames and explanations of several engines behind a gateway: whose they are, and what is missing.


@asynccontextmanager
async def gateway(*fakes: FakeEngine) -> AsyncIterator[World]:
    """A gateway of two tenants and an operator before these engines."""
    async with running(*fakes), world(list(fakes), tenants=KEYS, admin_key="root") as it:
        yield it


async def frame(it: World, key: str, more: str = "") -> LiveFrame:
    return msgspec.convert(await it.get(f"/sojourn/v1/stream?once=1{more}", key), LiveFrame)


async def explained(it: World, key: str, status: int = 200, program: str = "p", more: str = "") -> Any:
    answer = await it.send(f"/sojourn/v1/programs/{program}/explain{more}", key, method="GET")
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


async def test_a_live_frame_says_which_engines_get_no_requests_or_are_not_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake, odd = VirtualFakeEngine(), VirtualFakeEngine()
    async with gateway(fake, odd) as it:
        await until(lambda: len(it.gateway.replicas) == 2)
        refused = {"http://10.0.0.9:8000": "no role", odd.url: "too late"}
        monkeypatch.setattr(it.gateway.monitor, "refused", lambda: refused)
        rows = {row.engine: row.error for row in (await frame(it, "root")).engines}
        assert rows == {fake.name: None, odd.name: None, "10.0.0.9:8000": "gets no requests: no role"}
        monkeypatch.undo()
        it.gateway.monitor.watch(dict.fromkeys((fake.url, odd.url)), ["Prefill", "Decode", "Decode"])
        rows = {row.engine: row.error for row in (await frame(it, "root", "&changed_within_s=9")).engines}
        assert (rows["Prefill"], rows["Decode"]) == ("does not answer", "2 do not answer")


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
        page = await it.metrics()
        for outcome, number in (("ok", 1.0), ("error", 1.0), ("cancelled", 0.0), ("final", 0.0)):
            assert f'sojourn_gateway_programs_finished_total{{outcome="{outcome}"}} {number}' in page
