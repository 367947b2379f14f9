"""What a gateway tells of itself: who waits, whose word an answer is, who was refused and why."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from api_contract import Contract
from fake_engine import engines, running
from gateway_harness import KEYS, World, until, world
from openapi_spec_validator import validate
from sojourn.aeg import END, START, Aeg
from sojourn.wire_events import AegReport, ToolStart
from sojourn_server.api.openapi import PREFIX
from sojourn_server.gateway.http.gateway_metrics import GatewayMetrics
from sojourn_server.policies.cluster_preset import cluster_preset_names, load_cluster_preset
from sojourn_server.routing import routing_events
from sojourn_server.routing.routing_events import ProgramEnded, RequestFinished, RequestReceived
from sojourn_server.routing.routing_from_preset import routing_reasons
from sojourn_server.routing.routing_records import PairEngineStatus, ReplicaStatus
from virtual_engine import prompt
from virtual_fake_engine import VirtualFakeEngine


async def metric(it: World, series: str) -> float:
    page = await it.metrics()
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))


async def test_requests_that_wait_for_any_replica_are_counted(caplog: Any) -> None:
    async with engines(1) as fakes, world(fakes, admin_key="root") as it:
        await it.drain(fakes[0].name)
        asking = asyncio.ensure_future(it.chat("p"))
        await until(lambda: it.core.waiting)
        assert await metric(it, "sojourn_gateway_waiting") == 1
        assert (await it.get("/health"))["waiting"] == 1
        await it.drain(fakes[0].name, "stay")
        assert (await asking).status == 200
        assert await metric(it, "sojourn_gateway_waiting") == 0
        await fakes[0].kill()
        await until(lambda: "; engines: 0" in caplog.text)
        asking = asyncio.ensure_future(it.chat("p"))
        await until(lambda: it.core.waiting)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not it.core.waiting)


async def test_decisions_are_of_one_replica_and_name_it() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        error = (await it.get("/sojourn/v1/decisions"))["error"]
        assert all(fake.name in error["next"] for fake in fakes)
        path = f"/sojourn/v1/decisions?replica={fakes[1].name}"
        answer = await it.send(path, method="GET")
        assert answer.headers["X-Sojourn-Replica"] == fakes[1].name
        assert answer.content_type == "application/json"
        lines = "application/x-ndjson"
        for more, headers in (("&format=ndjson", {}), ("", {"Accept": lines})):
            assert (await it.send(path + more, method="GET", headers=headers)).content_type == lines
    async with engines(1) as fakes, world(fakes) as it:
        answer = await it.send("/sojourn/v1/decisions", method="GET")
        assert answer.headers["X-Sojourn-Replica"] == fakes[0].name


async def test_keys_are_checked_and_one_that_is_not_known_has_one_code_and_counts() -> None:
    async with engines(1) as [fake], world([fake], tenants=KEYS, admin_key="root") as it:
        series = 'sojourn_gateway_refused_total{code="invalid_api_key"}'
        assert await metric(it, series) == 0
        assert (await (await it.chat("p")).json())["error"]["code"] == "invalid_api_key"
        assert (await it.get("/v1/models", "wrong"))["error"]["code"] == "invalid_api_key"
        await it.get("/sojourn/v1/programs")
        assert await metric(it, series) == 3
        assert (await it.send("/v1/chat/completions", "key-a", json=[])).status == 400
        assert await metric(it, 'sojourn_gateway_refused_total{code="bad_request"}') >= 1
        assert (await it.chat("p", key="wrong")).status == 401
        assert not fake.requests
        assert (await it.send("/v1/messages", json={}, headers={"X-Api-Key": "key-b"})).status == 200
        assert (await it.get("/sojourn/v1/stats", "key-a"))["error"]["message"].startswith("this shows every")
        assert "engines" in await it.get("/sojourn/v1/stats", "root")


# -- The gateway's list of programs and its status of one of them, where there are many programs.


PROGRAMS = "/sojourn/v1/programs"


def add_programs(it: World, tenant: str, *names: str) -> None:
    for name in names:
        it.gateway.routing_backend.tell(RequestReceived(f"{tenant}-{name}", tenant, 10, name))


async def test_each_tenant_sees_its_own_programs_and_the_newest_first() -> None:
    async with engines(1) as fakes, world(fakes, tenants=KEYS, admin_key="root") as it:
        add_programs(it, "a", "p0", "p1", "shared")
        add_programs(it, "b", "p0", "shared", "a/b")
        for key, total, shown in (
            ("key-a", 3, ["shared", "p1"]),
            ("key-b", 3, ["a/b", "shared"]),
            ("root", 6, ["a/b", "shared"]),
        ):
            told = await it.get(f"{PROGRAMS}?limit=2", key)
            assert (told["shown"], told["total"]) == (2, total)
            assert [one["program_id"] for one in told["programs"]] == shown
        for key, tenant in (("key-a", "a"), ("key-b", "b"), ("root", "b")):
            assert (await it.get(f"{PROGRAMS}/shared", key))["tenant"] == tenant
        assert (await it.get(f"{PROGRAMS}/a%2Fb", "key-b"))["program_id"] == "a/b"
        assert (await it.get(f"{PROGRAMS}/a%2Fb", "key-a")).get("tenant") != "b"
        it.gateway.routing_backend.tell(RequestFinished("a-p0"))
        it.gateway.routing_backend.tell(ProgramEnded("p0", "a"))
        told = await it.get(PROGRAMS, "key-a")
        assert told["total"] == 2
        assert told["note"].startswith("ended programs are not listed")


# -- The documents name metrics that there are, and all of them; counters begin at 0


@pytest.mark.parametrize("name", cluster_preset_names())
def test_a_first_increment_can_be_seen(name: str) -> None:
    """``rate()`` sees none of a series that appears with it."""
    preset = load_cluster_preset(name)
    shown = GatewayMetrics(routing_reasons(preset)).exposition((), {}).decode()
    reasons = routing_reasons(preset)
    assert reasons
    for reason in reasons:
        assert f'sojourn_gateway_requests_total{{reason="{reason}"}} 0.0' in shown
        assert f'sojourn_gateway_moves_total{{reason="{reason}"}} 0.0' in shown
    assert "stolen_idle" in reasons or not preset.stealing.is_used
    assert ("made_way" in reasons) is preset.tenant_preemption.is_used
    for code in routing_events.REJECTION_CODES:
        assert f'sojourn_gateway_refused_total{{code="{code}"}} 0.0' in shown
    for bare in ("recalls", "cut_streams"):
        assert f"sojourn_gateway_{bare}_total 0.0" in shown


def _pair_engine(name: str, role: str, load: float) -> PairEngineStatus:
    return PairEngineStatus(
        name, "i", "up", load, 1, 0, 0, 100, 0, 50, role=role, node="n", epoch="", links={}
    )


def _replica(name: str, health: str, load: float) -> ReplicaStatus:
    return ReplicaStatus(name, "i", health, load, 0, 0, 0, 100, 0, 50)


def test_the_spread_of_loads_is_that_of_replicas_that_share_the_work() -> None:
    def spread(*states: ReplicaStatus) -> float | None:
        metrics = GatewayMetrics()
        metrics.exposition(states, {})
        return metrics.registry.get_sample_value("sojourn_gateway_load_spread")

    assert spread() == 0.0
    assert spread(_replica("a", "up", 0.8), _replica("b", "draining", 0.0)) == 0.0
    assert spread(_replica("a", "up", 0.8), _replica("b", "up", 0.25)) == pytest.approx(0.55)
    prefill, decode = _pair_engine("p", "prefill", 0.1), _pair_engine("d", "decode", 0.8)
    assert spread(prefill, decode) == 0.0
    assert spread(prefill, decode, _pair_engine("e", "decode", 0.3)) == pytest.approx(0.5)


# -- The OpenAPI document of a gateway: it has every route, and every answer is as it says


async def checked(contract: Contract, it: World, url: str, status: int = 200, **more: Any) -> Any:
    method = "POST" if "json" in more or "/policy" in url else "GET"
    answer = await it.send(PREFIX + url, "root", method=method, **more)
    body = await answer.read()
    assert answer.status == status, body
    return contract.check(method, PREFIX + url, status, answer.headers["content-type"], body)


async def test_every_answer_of_a_gateway_is_as_its_document_says() -> None:
    fake = VirtualFakeEngine()
    virtual = fake.virtual
    virtual.turn("a", prompt(40))
    aeg = Aeg({"act": ("bash",)}, [(START, "act"), ("act", END)])
    virtual.send(AegReport(program_id="a", seq=-1, graph_hash=aeg.hash, graph=aeg.wire()))
    virtual.send(ToolStart(program_id="a", seq=-1, call_id="c1", tool="bash"))
    async with running(fake), world([fake], admin_key="root") as it:
        contract = Contract(await it.get(f"{PREFIX}/openapi.json"))
        await asyncio.to_thread(validate, contract.document)  # the gateway serves in this thread
        assert contract.document["info"]["title"] == "sojourn gateway"
        assert (await it.chat("a")).status == 200
        batch = {"v": 1, "emitter": "e", "events": [{"type": "heartbeat", "program_id": "a", "seq": 1}]}
        await checked(contract, it, "/events", json=batch)
        await checked(contract, it, "/events", 400, json=[])
        assert (await checked(contract, it, "/programs?limit=5"))["shown"] == 1
        await checked(contract, it, "/programs?limit=0", 400)
        assert (await checked(contract, it, "/programs/a"))["engine"]["turns"] == 1
        assert (await checked(contract, it, "/programs/a/explain?turn=1"))["replica"] == fake.name
        await checked(contract, it, "/programs/a/explain?turn=9", 404)
        await checked(contract, it, "/programs/nobody", 404)
        for url in (
            "/capabilities",
            "/stats",
            "/stream?once=1",
            "/decisions?limit=2",
            "/moves",
            "/replicas",
        ):
            await checked(contract, it, url)
        switched = await checked(contract, it, "/policy?on=false")
        off = {"policy": "off", "started_with": "fixed-ttl"}
        assert switched == {"engines": {fake.url: off}, "stock": [], "silent": []}
        assert virtual.program_scheduler.preset.name == "off"
        await checked(contract, it, "/policy?on=maybe", 400)
        lines = await checked(contract, it, "/decisions?format=ndjson")
        assert json.loads(lines.splitlines()[0])["seq"] == 0
        await checked(contract, it, f"/replicas/{fake.name}/drain", json={})
        await checked(contract, it, f"/replicas/{fake.name}/stay", json={})
        await checked(contract, it, "/openapi.json")
        assert contract.seen == contract.operations
        await fake.kill()
        for url in ("/stats", "/stream?once=1", "/programs/a"):
            await checked(contract, it, url)
        for url in ("/capabilities", "/programs/a/explain"):
            await checked(contract, it, url, 503)
