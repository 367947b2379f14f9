"""What a gateway tells of itself: who waits, whose word an answer is, who was refused and why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_engine import engines
from gateway_harness import World, until, world
from sojourn.errors import InputError
from sojourn_server.gateway.http.gateway_app import GatewayOptions, build_gateway
from sojourn_server.gateway.http.tenant_keys import DEFAULT_TENANT, TenantKeys
from sojourn_server.policies.cluster_preset import parse_cluster_preset
from sojourn_server.routing.routing_events import ProgramEnded, RequestFinished, RequestReceived

KEYS = {"key-a": "a", "key-b": "b"}


async def metric(it: World, series: str) -> float:
    async with it.http.get(f"{it.url}/metrics") as answer:
        page = await answer.text()
    return next(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(series))


async def test_requests_that_wait_for_any_replica_are_counted(caplog: Any) -> None:
    async with engines(1) as fakes, world(fakes, admin_key="root") as it:
        await it.drain(fakes[0].name)
        asking = asyncio.ensure_future(it.chat("p"))
        await until(lambda: it.gateway.routing_backend.core.waiting)
        assert await metric(it, "sojourn_gateway_waiting") == 1
        assert (await it.get("/health"))["waiting"] == 1
        await it.drain(fakes[0].name, "stay")
        assert (await asking).status == 200
        assert await metric(it, "sojourn_gateway_waiting") == 0
        await fakes[0].kill()
        await until(lambda: "engines left: 0" in caplog.text)
        asking = asyncio.ensure_future(it.chat("p"))
        await until(lambda: it.gateway.routing_backend.core.waiting)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: not it.gateway.routing_backend.core.waiting)


async def test_decisions_are_of_one_replica_and_name_it() -> None:
    async with engines(2) as fakes, world(fakes) as it:
        error = (await it.get("/sojourn/v1/decisions"))["error"]
        assert all(fake.name in error["next"] for fake in fakes)
        url = f"{it.url}/sojourn/v1/decisions?replica={fakes[1].name}"
        async with it.http.get(url) as answer:
            assert answer.headers["X-Sojourn-Replica"] == fakes[1].name
            assert answer.content_type == "application/json"
        lines = "application/x-ndjson"
        async with it.http.get(f"{url}&format=ndjson") as answer:
            assert answer.content_type == lines
        async with it.http.get(url, headers={"Accept": lines}) as answer:
            assert answer.content_type == lines
    async with (
        engines(1) as fakes,
        world(fakes) as it,
        it.http.get(f"{it.url}/sojourn/v1/decisions") as answer,
    ):
        assert answer.headers["X-Sojourn-Replica"] == fakes[0].name


async def test_a_key_that_is_not_known_has_one_code_and_counts() -> None:
    async with world([], tenants=KEYS) as it:
        series = 'sojourn_gateway_refused_total{code="invalid_api_key"}'
        assert await metric(it, series) == 0
        assert (await (await it.chat("p")).json())["error"]["code"] == "invalid_api_key"
        assert (await it.get("/v1/models", "wrong"))["error"]["code"] == "invalid_api_key"
        await it.get("/sojourn/v1/programs")
        assert await metric(it, series) == 3
        headers = {"Authorization": "Bearer key-a", "Content-Type": "application/json"}
        async with it.http.post(f"{it.url}/v1/chat/completions", data=b"[]", headers=headers) as answer:
            assert answer.status == 400
        assert await metric(it, 'sojourn_gateway_refused_total{code="bad_request"}') >= 1


def test_the_admin_key_is_no_tenants() -> None:
    preset = parse_cluster_preset('routing = "random"', source="test")
    options = GatewayOptions(admin_key="key-b")
    with pytest.raises(InputError, match="the admin key is also b's key"):
        build_gateway([], preset, TenantKeys(KEYS), options)


# -- The gateway's list of programs and its status of one of them, where there are many programs.


TENANTS = {"ka": "alice", "kb": "bob"}
PROGRAMS = "/sojourn/v1/programs"


def add_programs(it: World, tenant: str, *names: str) -> None:
    for name in names:
        it.gateway.routing_backend.tell(RequestReceived(f"{tenant}-{name}", tenant, 10, name))


async def test_a_list_says_that_ended_programs_are_not_in_it() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        it.gateway.routing_backend.tell(RequestReceived("r", DEFAULT_TENANT, 10, "p"))
        assert (await it.get(PROGRAMS))["total"] == 1
        it.gateway.routing_backend.tell(RequestFinished("r"))
        it.gateway.routing_backend.tell(ProgramEnded("p", DEFAULT_TENANT))
        told = await it.get(PROGRAMS)
        assert (told["programs"], told["shown"], told["total"]) == ([], 0, 0)
        assert told["note"].startswith("ended programs are not listed")


async def test_each_tenant_sees_its_own_programs_and_the_newest_first() -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS, admin_key="root") as it:
        add_programs(it, "alice", "p0", "p1", "shared")
        add_programs(it, "bob", "p0", "shared", "a/b")
        for key, total, shown in (
            ("ka", 3, ["shared", "p1"]),
            ("kb", 3, ["a/b", "shared"]),
            ("root", 6, ["a/b", "shared"]),
        ):
            told = await it.get(f"{PROGRAMS}?limit=2", key)
            assert (told["shown"], told["total"]) == (2, total)
            assert [one["program_id"] for one in told["programs"]] == shown
        for key, tenant in (("ka", "alice"), ("kb", "bob"), ("root", "bob")):
            assert (await it.get(f"{PROGRAMS}/shared", key))["tenant"] == tenant
        assert (await it.get(f"{PROGRAMS}/a%2Fb", "kb"))["program_id"] == "a/b"
        assert (await it.get(f"{PROGRAMS}/a%2Fb", "ka")).get("tenant") != "bob"
