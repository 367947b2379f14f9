"""Requests as coding agents send them, in their headers and structure, through a gateway to engines."""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from fake_engine import engines
from gateway_harness import World, world
from sojourn_server.api.client_identity import identify

RECORDED = json.loads((Path(__file__).parents[1] / "clients" / "recorded_requests.json").read_text())


class Shape(NamedTuple):
    """What one client sends: path, headers and body of a request, with its program and parent."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    program: str
    parent: str | None = None


def recorded(client: str, role: str) -> Shape:
    """A recorded request; ``tests/clients/test_clients_recorded.py`` says whose it is."""
    one = next(each for each in RECORDED if (each["client"], each["role"]) == (client, role))
    headers, body = one["headers"], one["body"]
    user_id = body.get("metadata", {}).get("user_id")
    identity = identify(headers, None, user_id, body.get("prompt_cache_key"))
    assert identity is not None
    return Shape(one["path"], headers, body, identity.program_id, identity.parent_id)


async def send(it: World, shape: Shape, key: str | None = None, base: str = "") -> str:
    """Send a request, and return the replica that answered it."""
    answer = await it.send(base + shape.path, key, json=shape.body, headers=shape.headers)
    assert answer.status == 200, await answer.text()
    return answer.headers["X-Sojourn-Replica"]


@pytest.mark.parametrize("client", ["Claude Code", "Codex", "OpenCode"])
async def test_each_session_is_its_tenants_program_and_its_sub_agents_are_children(client: str) -> None:
    tenants = {"ka": "alice", "kb": "bob"}
    async with engines(3) as fakes, world(fakes, preset='extends = "sojourn"', tenants=tenants) as it:
        turn, sub_agent = recorded(client, "turn"), recorded(client, "sub-agent")
        shapes = [turn, turn, sub_agent, sub_agent, turn]  # the second turn starts the sub-agent
        at = [await send(it, shape, "ka") for shape in shapes]
        programs = it.core.programs
        root, agent = turn.program, sub_agent.program
        assert {key: one.parent for key, one in programs.items()} == {
            ("alice", root): None,
            ("alice", agent): ("alice", root),
        }
        assert len({at[0], at[1], at[4]}) == 1, "each turn where the session's KV is"
        assert at[2] == at[3]
        await send(it, turn, "kb")
        sent = [headers for fake in fakes for headers in fake.headers]
        of_agent = [headers for headers in sent if headers["x-session-id"] == f"alice/{agent}"]
        assert [one["x-parent-session-id"] for one in of_agent] == [f"alice/{sub_agent.parent}"] * 2
        if client != "OpenCode":
            assert [one["x-root-session-id"] for one in of_agent] == [f"alice/{root}"] * 2
        if client == "Codex":
            assert of_agent[0]["x-sojourn-agent-type"] == "collab_spawn"
        names = {headers["x-session-id"] for headers in sent}
        assert names == {f"alice/{root}", f"alice/{agent}", f"bob/{root}"}
        others = {name for headers in sent for name, value in headers.items() if value in (root, agent)}
        assert others <= {"x-client-request-id"}, "only what names no program"


async def test_without_tenants_an_engine_gets_the_clients_own_names() -> None:
    agent = recorded("Codex", "sub-agent")
    async with engines(1) as (fake,), world([fake]) as it:
        await send(it, agent)
        names = ("x-session-id", "x-parent-session-id", "x-sojourn-agent-type")
        assert [fake.headers[0][name] for name in names] == [agent.program, agent.parent, "collab_spawn"]


async def test_the_base_url_or_the_operators_header_may_name_the_program() -> None:
    async with engines(1) as (fake,), world([fake], session_header="X-Job", tenants={"ka": "alice"}) as it:
        anonymous = Shape("/v1/chat/completions", {}, {"model": "tiny", "messages": []}, "")
        await send(it, anonymous, "ka", "/sojourn/session/my%20job%2F1")
        await send(it, anonymous._replace(headers={"x-job": "job-2"}), "ka", "/sojourn/session/job-1")
        await send(it, anonymous._replace(headers={"x-job": "job-2", "thread-id": "other"}), "ka")
        assert [headers["x-session-id"] for headers in fake.headers] == ["my job/1", "job-1", "job-2"]
        assert "x-job" not in fake.headers[-1]
        await send(it, anonymous, "ka", "/sojourn/session/caf%C3%A9")
        named = f"{uuid.UUID(int=1)}日"
        await send(it, anonymous._replace(body={**anonymous.body, "prompt_cache_key": named}), "ka")
        ids = {key[1] for key in it.core.programs}
        assert ids == {headers["x-session-id"] for headers in fake.headers}
        assert "caf%C3%A9" in ids
        for version, status in (("v1", 200), ("v2", 404)):
            answer = await it.send(f"/sojourn/session/a/{version}/models", "ka", method="GET")
            assert answer.status == status
        answer = await it.send("/sojourn/session/a/v1/messages", json={})
        assert (answer.status, (await answer.json())["type"]) == (401, "error")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/messages", 405),
        ("POST", "/v1/messages/batches", 404),
        ("POST", "/v1/messages/count_tokens", 413),
        ("DELETE", "/v1/responses/resp_1", 405),
        ("GET", "/v1/responses/resp_1", 404),
        ("GET", "/v1/models/huge", 404),
    ],
)
async def test_an_error_has_the_format_of_the_api_that_was_asked(method: str, path: str, status: int) -> None:
    async with engines(1) as fakes, world(fakes, max_body_bytes=100) as it:
        answer = await it.send(path, method=method, data=b"x" * 200 if status == 413 else None)
        assert answer.status == status
        assert answer.headers["X-Sojourn-Gateway"] == "1"
        error = await answer.json()
        assert error["error"]["message"]
        assert ("type" in error, "code" in error["error"]) == (
            (True, False) if "messages" in path else (False, True)
        )
        assert (await it.get("/v1/models/tiny"))["id"] == "tiny"


async def test_a_websocket_offer_is_answered_so_that_codex_falls_back_at_once() -> None:
    async with engines(1) as fakes, world(fakes) as it:
        offer = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Key": "eA=="}
        for path in ("/v1/responses", "/sojourn/session/s/v1/responses", "/v1/realtime"):
            answer = await it.send(path, method="GET", headers=offer)
            assert (answer.status, bool((await answer.json())["error"]["message"])) == (426, True)
