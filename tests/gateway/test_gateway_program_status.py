"""The gateway's list of programs and its status of one of them, where there are many programs."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import engines
from gateway_harness import World, world
from sojourn_server.gateway.http.tenant_keys import DEFAULT_TENANT
from sojourn_server.routing.routed_programs import RoutedProgram
from sojourn_server.routing.routing_events import ProgramEnded, RequestFinished, RequestReceived

TENANTS = {"ka": "alice", "kb": "bob"}
PROGRAMS = "/sojourn/v1/programs"


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the programs whose statuses are built."""
    found: list[str] = []
    status = RoutedProgram.status

    def noted(program: RoutedProgram) -> Any:
        found.append(program.key[1])
        return status(program)

    monkeypatch.setattr(RoutedProgram, "status", noted)
    return found


def add_programs(it: World, tenant: str, *names: str) -> None:
    for name in names:
        it.gateway.routing_backend.tell(RequestReceived(f"{tenant}-{name}", tenant, 10, name))


async def test_the_status_of_one_program_costs_that_of_no_other(built: list[str]) -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS, admin_key="root") as it:
        add_programs(it, "alice", *(f"p{number}" for number in range(500)), "shared")
        add_programs(it, "bob", *(f"p{number}" for number in range(500)), "shared", "a/b")
        for key, tenant in (("ka", "alice"), ("kb", "bob"), ("root", "bob")):
            built.clear()
            assert (await it.get(f"{PROGRAMS}/shared", key))["tenant"] == tenant
            assert built == ["shared"]
            await it.get(f"{PROGRAMS}/shared/explain", key)
            assert built == ["shared"] * 2
        assert (await it.get(f"{PROGRAMS}/a%2Fb", "kb"))["program_id"] == "a/b"
        built.clear()
        async with it.http.get(
            it.url + f"{PROGRAMS}/a%2Fb", headers={"Authorization": "Bearer ka"}
        ) as answer:
            assert (await answer.json()).get("tenant") != "bob"
        assert built == []


async def test_a_list_says_that_ended_programs_are_not_in_it() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        it.gateway.routing_backend.tell(RequestReceived("r", DEFAULT_TENANT, 10, "p"))
        assert (await it.get(PROGRAMS))["total"] == 1
        it.gateway.routing_backend.tell(RequestFinished("r"))
        it.gateway.routing_backend.tell(ProgramEnded("p", DEFAULT_TENANT))
        told = await it.get(PROGRAMS)
        assert (told["programs"], told["shown"], told["total"]) == ([], 0, 0)
        assert told["note"].startswith("ended programs are not listed")


async def test_a_list_costs_the_programs_that_it_shows(built: list[str]) -> None:
    async with engines(1) as fakes, world(fakes, tenants=TENANTS, admin_key="root") as it:
        add_programs(it, "alice", *(f"a{number}" for number in range(300)))
        add_programs(it, "bob", *(f"b{number}" for number in range(500)))
        for key, total, shown in (
            ("ka", 300, ["a299", "a298"]),
            ("kb", 500, ["b499", "b498"]),
            ("root", 800, ["b499", "b498"]),
        ):
            built.clear()
            told = await it.get(f"{PROGRAMS}?limit=2", key)
            assert (told["shown"], told["total"]) == (2, total)
            assert [one["program_id"] for one in told["programs"]] == shown
            assert built == shown
