"""The gateway's list of programs and its status of one of them, where there are many programs."""

from __future__ import annotations

from fake_engine import engines
from gateway_harness import World, world
from sojourn_server.gateway.http.tenant_keys import DEFAULT_TENANT
from sojourn_server.routing.routing_events import ProgramEnded, RequestFinished, RequestReceived

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
