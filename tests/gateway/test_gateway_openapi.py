"""The OpenAPI document of a gateway: it has every route, and every answer is as it says."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from api_contract import Contract
from fake_engine import running
from fake_pair_engine import pairs
from gateway_harness import World, world
from openapi_spec_validator import validate
from sojourn.aeg import END, START, Aeg
from sojourn.wire_events import AegReport, ToolStart
from sojourn_server.api.openapi import PREFIX
from virtual_engine import prompt
from virtual_fake_engine import VirtualFakeEngine

ROOT = {"Authorization": "Bearer root"}


async def ask(contract: Contract, it: World, url: str, status: int = 200, **more: Any) -> Any:
    method = "POST" if "json" in more or "/policy" in url else "GET"
    async with it.http.request(method, it.url + PREFIX + url, headers=ROOT, **more) as answer:
        body = await answer.read()
        assert answer.status == status, body
        return contract.check(method, PREFIX + url, status, answer.headers["content-type"], body)


async def document_of(it: World) -> dict[str, Any]:
    async with it.http.get(f"{it.url}{PREFIX}/openapi.json") as answer:
        found: dict[str, Any] = await answer.json()
        return found


async def test_every_answer_of_a_gateway_is_as_its_document_says() -> None:
    fake = VirtualFakeEngine()
    virtual = fake.virtual
    virtual.turn("a", prompt(40))
    aeg = Aeg({"act": ("bash",)}, [(START, "act"), ("act", END)])
    virtual.send(AegReport(program_id="a", seq=-1, graph_hash=aeg.hash, graph=aeg.wire()))
    virtual.send(ToolStart(program_id="a", seq=-1, call_id="c1", tool="bash"))
    async with running(fake), world([fake], admin_key="root") as it:
        contract = Contract(await document_of(it))
        await asyncio.to_thread(validate, contract.document)  # the gateway serves in this thread
        assert contract.document["info"]["title"] == "sojourn gateway"
        assert (await it.chat("a")).status == 200
        batch = {"v": 1, "emitter": "e", "events": [{"type": "heartbeat", "program_id": "a", "seq": 1}]}
        await ask(contract, it, "/events", json=batch)
        await ask(contract, it, "/events", 400, json=[])
        assert (await ask(contract, it, "/programs?limit=5"))["shown"] == 1
        await ask(contract, it, "/programs?limit=0", 400)
        assert (await ask(contract, it, "/programs/a"))["engine"]["turns"] == 1
        assert (await ask(contract, it, "/programs/a/explain?turn=1"))["replica"] == fake.name
        await ask(contract, it, "/programs/a/explain?turn=9", 404)
        await ask(contract, it, "/programs/nobody", 404)
        for url in (
            "/capabilities",
            "/stats",
            "/stream?once=1",
            "/decisions?limit=2",
            "/moves",
            "/replicas",
        ):
            await ask(contract, it, url)
        switched = await ask(contract, it, "/policy?on=false")
        off = {"policy": "off", "started_with": "fixed-ttl"}
        assert switched == {"engines": {fake.url: off}, "stock": [], "silent": []}
        assert virtual.program_scheduler.preset.name == "off"
        await ask(contract, it, "/policy?on=maybe", 400)
        lines = await ask(contract, it, "/decisions?format=ndjson")
        assert json.loads(lines.splitlines()[0])["seq"] == 0
        await ask(contract, it, f"/replicas/{fake.name}/drain", json={})
        await ask(contract, it, f"/replicas/{fake.name}/stay", json={})
        await ask(contract, it, "/openapi.json")
        assert contract.seen == contract.operations
        await fake.kill()
        for url in ("/stats", "/stream?once=1", "/programs/a"):
            await ask(contract, it, url)
        for url in ("/capabilities", "/programs/a/explain"):
            await ask(contract, it, url, 503)


async def test_replicas_of_pairs_are_as_the_document_says_too() -> None:
    async with pairs(1, 1, admin_key="root") as (it, [prefill], _):
        contract = Contract(await document_of(it))
        told = await ask(contract, it, "/replicas")
        assert told["pairs"] == {"prefill": 1, "decode": 1}
        assert {one["role"] for one in told["replicas"]} == {"prefill", "decode"}
        await ask(contract, it, f"/replicas/{prefill.name}/drain", json={})
