"""No tenant speaks as another's program, sees its names, or is taken for it; and no key goes where it need
not."""

from __future__ import annotations

from typing import Any

import pytest
from fake_engine import FakeEngine, engines, running
from gateway_harness import World, world
from sojourn_server.gateway.http.client_apis import ClientApi
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

TENANTS = {"ka": "alice", "kb": "bob"}


class Told(FakeEngine):
    """Keeps what keys it is shown, and says of a program what ``about`` is."""

    def __init__(self, about: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.about = about or {}
        self.keys: list[str | None] = []

    async def _stats(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return await super()._stats(request)

    async def _models(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return await super()._models(request)

    async def _tokenize(self, request: Request) -> Response:
        self.keys += [request.headers.get("authorization"), request.headers.get("x-api-key")]
        return await super()._tokenize(request)

    async def _take_events(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return await super()._take_events(request)

    async def _program(self, request: Request) -> Response:
        self.keys.append(request.headers.get("authorization"))
        return JSONResponse(self.about)


# -- whose request it is ----------------------------------------------------------


@pytest.mark.parametrize("of_body", [True, False])
@pytest.mark.parametrize("header", [None, "bobs"])
async def test_a_session_in_the_body_names_no_other_tenants_program(
    of_body: bool, header: str | None
) -> None:
    forged = {"session_id": "alice/p"}
    more = forged if of_body else {"vllm_xargs": forged}
    async with engines(1) as (fake,), world([fake], tenants=TENANTS) as it:
        assert (await it.chat(header, key="kb", **more)).status == 200
        sent = fake.requests[-1] if of_body else fake.requests[-1]["vllm_xargs"]
        assert sent["session_id"] == "bob/alice/p"
        # The engine reads the body's, then the header's, then that of vllm_xargs.
        known = "alice/p" if of_body or header is None else header
        assert fake.headers[-1]["x-session-id"] == f"bob/{known}"
        shown = (await it.get("/sojourn/v1/programs", "kb"))["programs"]
        assert [one["program_id"] for one in shown] == [known]


# -- what is told of programs -----------------------------------------------------


async def test_evictions_do_not_name_another_tenants_program() -> None:
    turns = [
        {"program_id": "bob/p", "evictor": "alice/merger", "seconds": {"wall": 1.0}},
        {"program_id": "bob/p", "evictor": "bob/q"},
        {"program_id": "bob/p", "evictor": None},
        {"program_id": "bob/p", "evictor": "strangers"},
    ]
    about = {"program_id": "bob/p", "parent_program_id": "bob/q", "ledger": turns, "status": "acting"}
    async with running(Told(about)) as [fake], world([fake], tenants=TENANTS, admin_key="root") as it:
        await it.chat("p", key="kb")
        engine = (await it.get("/sojourn/v1/programs/p", "kb"))["engine"]
        assert (engine["program_id"], engine["parent_program_id"], engine["status"]) == ("p", "q", "acting")
        assert {turn["program_id"] for turn in engine["ledger"]} == {"p"}
        assert [turn["evictor"] for turn in engine["ledger"]] == ["another", "q", None, "another"]
        assert engine["ledger"][0]["seconds"] == {"wall": 1.0}
        all_of_it = (await it.get("/sojourn/v1/programs/p", "root"))["engine"]["ledger"]
        assert [turn["evictor"] for turn in all_of_it] == ["alice/merger", "q", None, "strangers"]


# -- keys and conversations -------------------------------------------------------


async def test_the_operators_key_reaches_no_engine() -> None:
    async with running(Told()) as [fake], world([fake], tenants=TENANTS, admin_key="root") as it:
        await it.chat("p", key="kb")
        fake.keys.clear()
        for path in ("/sojourn/v1/stats", "/v1/models", "/sojourn/v1/programs/p"):
            await it.get(path, "root")
        shown = {"Authorization": "Bearer root", "X-API-Key": "root"}
        async with it.http.post(f"{it.url}/tokenize", json={"prompt": "x"}, headers=shown) as answer:
            assert answer.status == 200
        assert len(fake.keys) >= 4
        assert set(fake.keys) == {None}
        await it.get("/v1/models", "kb")
        assert fake.keys[-1] == "Bearer kb"


async def test_a_conversation_is_its_tenants() -> None:
    async with engines(1) as (fake,), world([fake], tenants=TENANTS, admin_key="root") as it:
        first = (await responded(it, "ka", input="x", request_id="job-17"))["id"]
        # The second one as after a restart, or at another gateway; the last two of no tenant here.
        fake.stored[first + "0"] = fake.stored["resp_1"] = fake.stored["job-17"] = {"id": "old"}
        assert first != "job-17", "another tenant could choose the same id"
        for name in (first, first + "0", "resp_1", "job-17"):
            assert "error" in await responded(it, "kb", input="x", previous_response_id=name)
            for path in (f"/v1/responses/{name}", f"/v1/responses/{name}/cancel"):
                method, bobs = "POST" if "cancel" in path else "GET", {"Authorization": "Bearer kb"}
                async with it.http.request(method, it.url + path, headers=bobs) as answer:
                    assert (answer.status, ".;" in await answer.text()) == (404, False)
            assert await it.get(f"/v1/responses/{name}", "root")
        assert len(fake.requests) == 1
        for name in (first, first + "0"):
            assert (await it.get(f"/v1/responses/{name}", "ka"))["id"]
            assert "error" not in await responded(it, "ka", input="x", previous_response_id=name)
            assert fake.headers[-1]["x-session-id"] == f"alice/conversation-{name}"


async def responded(it: World, key: str, **body: Any) -> dict[str, Any]:
    headers, sent = {"Authorization": f"Bearer {key}"}, {"model": "tiny", **body}
    async with it.http.post(f"{it.url}{ClientApi.RESPONSES.value}", json=sent, headers=headers) as answer:
        found: dict[str, Any] = await answer.json()
        return found
