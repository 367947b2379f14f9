"""Clients that name their program in a way of their own: what vLLM and the engine are told."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
from contextlib import closing
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_contract import VirtualRpc
from api_test_engines import HungEngine, check_error, served
from sojourn_server.api import identity_middleware
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.client_identity import HEADER_ROWS
from sojourn_server.api.event_intake import EventIntake
from sojourn_server.api.identity_middleware import IdentityMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from virtual_engine import VirtualEngine
from waiting import wait_until_async

LONG = "x" * 257
HASHED = "sha256-" + hashlib.sha256(LONG.encode()).hexdigest()
UUID = "01a229fa-991a-7673-88c3-92227f9b618c"
HINT = {"agentic_context": json.dumps({"program_id": "hinted"})}
CLAUDE = {"X-Claude-Code-Session-Id": "c-1"}
CLAUDE_AGENT = {**CLAUDE, "x-claude-code-agent-id": "a7"}
CODEX_AGENT = {
    "session-id": "root",
    "thread-id": "t-2",
    "x-codex-parent-thread-id": "t-1",
    "x-openai-subagent": "collab_spawn",
}


async def echo(request: Request) -> Response:
    """Answer what vLLM would see of a request."""
    body = await request.body()
    return JSONResponse(
        {
            "path": request.url.path,
            "session": request.headers.get("x-session-id"),
            "sent": request.headers.getlist("x-session-id"),
            "body": body.decode("utf-8", "replace"),
        }
    )


def app_of(engine: Any, keys: tuple[str, ...] = (), session_header: str | None = None) -> Starlette:
    api_keys = ApiKeys()
    api_keys.configure(keys)
    app = Starlette(routes=[Route("/v1/{rest:path}", echo, methods=["GET", "POST"])])
    app.add_middleware(
        IdentityMiddleware, keys=api_keys, events=EventIntake(engine), session_header=session_header
    )
    return app


def http_of(engine: Any, **options: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app=app_of(engine, **options)), base_url="http://server"
    )


def user(session: str) -> dict[str, Any]:
    return {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": session})}}


@pytest.mark.parametrize(
    ("headers", "body", "session"),
    [
        pytest.param(CLAUDE, {}, "c-1", id="Claude Code"),
        pytest.param(CLAUDE_AGENT, {}, "c-1/a7", id="Claude Code, sub-agent"),
        pytest.param(CODEX_AGENT, {"store": False}, "t-2", id="Codex, sub-agent"),
        pytest.param({"x-session-id": "o", "x-session-affinity": "p"}, {}, "o", id="OpenCode"),
        pytest.param({"x-run": "mine", **CLAUDE}, {}, "mine", id="the operator's header"),
        pytest.param({}, user("u-1"), "u-1", id="user_id"),
        pytest.param({}, {"metadata": {"user_id": "user_ab_session_u-2"}}, "u-2", id="old user_id"),
        pytest.param({}, {"prompt_cache_key": UUID}, UUID, id="prompt_cache_key"),
        pytest.param({}, {"prompt_cache_key": "task_1732932000000"}, "task_1732932000000", id="milliseconds"),
        pytest.param(
            {}, {"prompt_cache_key": "01JDVQ0E5XK8T1Y2ZB3C4D5F6G"}, "01JDVQ0E5XK8T1Y2ZB3C4D5F6G", id="ULID"
        ),
        pytest.param({}, {"prompt_cache_key": "support-bot-v2"}, None, id="an application's key"),
        pytest.param({}, {"prompt_cache_key": "sha256:" + "5" * 12 + "a" * 52}, None, id="a prefix's digest"),
        pytest.param({"x-correlation-id": "r-1"}, {}, None, id="an id of each request"),
        pytest.param(
            {"x-run": "mine", "x-session-id": "o"}, {}, "o", id="X-Session-ID, which a gateway sends"
        ),
        pytest.param({"x-session-id": LONG}, {}, HASHED, id="a long id"),
        pytest.param({}, user(LONG), HASHED, id="a long session"),
        pytest.param({}, user("日 1"), "%E6%97%A5%201", id="no header can hold it"),
        pytest.param({}, {"vllm_xargs": {"session_id": "own"}, **user("u")}, "own", id="vllm_xargs"),
        # What the request says itself stays, and an id is never made up.
        pytest.param({}, {"vllm_xargs": HINT, "prompt_cache_key": UUID}, None, id="a hint"),
        pytest.param({}, {"vllm_xargs": HINT, "use_beam_search": True}, "hinted", id="a hint for beams"),
        pytest.param({}, {"store": False}, None, id="a response that is not stored"),
        pytest.param({}, {"prompt_cache_key": UUID + "\n"}, None, id="a control character"),
        pytest.param({}, {"prompt_cache_key": ["k"], "metadata": "me"}, None, id="other types"),
        pytest.param({}, {"metadata": {"user_id": "user-17"}}, None, id="a person"),
    ],
)
async def test_a_clients_program_is_the_session_of_its_request(
    headers: dict[str, str], body: dict[str, Any], session: str | None
) -> None:
    async with http_of(VirtualRpc(VirtualEngine()), session_header="X-Run") as http:
        for path in identity_middleware.GENERATION_PATHS:
            seen = (await http.post(path, headers=headers, json=body)).json()
            assert seen["session"] == session
            assert len(seen["sent"]) <= 1
            assert json.loads(seen["body"]) == body
        counted = (await http.post("/v1/messages/count_tokens", headers=headers, json=body)).json()
        assert counted["session"] == headers.get("x-session-id"), "a count is no turn"


async def test_a_body_is_read_in_the_encodings_of_vllm_and_one_that_is_no_object_is_left_to_it() -> None:
    async with http_of(VirtualRpc(VirtualEngine())) as http:
        named = [json.dumps(user("u")).encode(encoding) for encoding in ("utf-8-sig", "utf-16", "utf-32-le")]
        for body in (*named, b"", b"[", b"[1]", b"\xff", b"\xff\xfe\x00\xd8", b"[" * 50_000):
            seen = (await http.post("/v1/messages", content=body)).json()
            session = "u" if body in named else None
            assert (seen["session"], seen["body"]) == (session, body.decode("utf-8", "replace"))


def test_the_documented_table_is_the_one_that_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text(encoding="utf-8")
    table = page.partition("<!-- identity-headers -->\n")[2].partition("\n<!-- /identity-headers -->")[0]
    shown = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert shown == [
        [row.clients, row.program, row.agent, row.parent, row.root, row.agent_type] for row in HEADER_ROWS
    ]


# --- relations --------------------------------------------------------------------------


async def test_parent_and_agent_type_are_reported_once() -> None:
    engine = VirtualEngine()
    async with http_of(VirtualRpc(engine)) as http:
        for headers in (CLAUDE_AGENT, CODEX_AGENT):
            for _ in range(3):
                await http.post("/v1/responses", headers=headers, json={})
        await wait_until_known(engine, "c-1/a7", "t-2")
    found = [engine.program(name) for name in ("c-1/a7", "t-2")]
    assert [(one.parent_id, one.agent_type) for one in found] == [("c-1", None), ("t-1", "collab_spawn")]
    assert engine.counter("sojourn_events_total", type="program_start", outcome="applied") == 2


async def wait_until_known(engine: VirtualEngine, *names: str) -> None:
    await wait_until_async(lambda: all(name in engine.program_scheduler.state.programs for name in names))


async def test_a_hint_names_its_own_parent() -> None:
    engine = VirtualEngine()
    async with http_of(VirtualRpc(engine)) as http:
        for own in ({"vllm_xargs": HINT}, {"session_id": "another"}):
            await http.post("/v1/responses", headers=CODEX_AGENT, json=own)
        assert "t-2" not in engine.program_scheduler.state.programs
        await http.post("/v1/responses", headers=CODEX_AGENT, json={"session_id": "t-2"})
        await wait_until_known(engine, "t-2")


async def test_a_hung_engine_delays_no_request_and_reports_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(identity_middleware, "MAX_REPORTS", 3)
    monkeypatch.setattr(identity_middleware, "MAX_REPORTED", 2)
    engine = HungEngine()
    app = app_of(engine)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://server") as http:
        for number in range(6):
            headers = {**CLAUDE, "x-claude-code-agent-id": str(number)}
            answer = await http.post("/v1/messages", headers=headers, json={})
            assert answer.json()["session"] == f"c-1/{number}"
        middleware: Any = app.middleware_stack
        while not isinstance(middleware, IdentityMiddleware):
            middleware = middleware.app
        assert len(middleware._reports) == 3
        assert len(middleware._reported) == 2
        engine.released.set()
        await asyncio.gather(*middleware._reports)


# --- a session in the base URL ----------------------------------------------------------


async def test_a_base_url_names_the_program() -> None:
    async with http_of(VirtualRpc(VirtualEngine())) as http:
        for path, session, served in (
            ("/sojourn/session/run-1/v1/chat/completions", "run-1", "/v1/chat/completions"),
            ("/sojourn/session/a%2Fb%C3%A9/v1/models", "a/bé", "/v1/models"),
            (f"/sojourn/session/{LONG}/v1/responses", HASHED, "/v1/responses"),
        ):
            for headers in ({}, CLAUDE, {"X-Session-ID": "other"}):
                seen = (await http.request("POST", path, headers=headers, json=user("u"))).json()
                assert (seen["path"], seen["session"], len(seen["sent"])) == (served, session, 1)
        for session in ("", "a/b", "%00"):
            assert (await http.get(f"/sojourn/session/{session}/v1/models")).status_code == 404


async def test_a_base_url_with_a_session_needs_the_servers_key() -> None:
    """vLLM checks the key of paths that begin with /v1, and sees this path before it is rewritten."""
    path = "/sojourn/session/run-1/v1/models"
    async with http_of(VirtualRpc(VirtualEngine()), keys=("k",)) as http:
        for headers in ({}, {"authorization": "Bearer x"}):
            check_error(await http.get(path, headers=headers), 401)
        assert (await http.get(path, headers={"authorization": "Bearer k"})).status_code == 200


# --- WebSocket --------------------------------------------------------------------------

OFFER = {
    "Connection": "Upgrade",
    "Upgrade": "websocket",
    "Sec-WebSocket-Version": "13",
    "Sec-WebSocket-Key": "dGhlIHNhbXBsZSBub25jZQ==",
}


@pytest.mark.parametrize("ws", ["auto", "none"])
def test_a_websocket_offer_gets_426_so_that_codex_falls_back_at_once(
    ws: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whether the server has a WebSocket package or not. At 403 Codex offers it seven times."""
    with served(app_of(VirtualRpc(VirtualEngine())), ws=ws) as address:
        for path in ("/v1/responses", "/sojourn/session/run-1/v1/responses"):
            with closing(HTTPConnection(address, timeout=10)) as connection:
                connection.request("GET", path, headers=OFFER)
                answer = connection.getresponse()
                assert answer.status == 426
                assert json.load(answer)["error"]["code"] == "websocket_not_supported"
    assert not [record for record in caplog.records if record.levelname == "ERROR"]
    logging.getLogger("uvicorn.error").error("ASGI callable returned without completing handshake.")
    assert caplog.records, "of another route it is a fault"
