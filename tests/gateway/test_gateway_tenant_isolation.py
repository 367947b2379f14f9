"""No tenant speaks as another's program, sees its names, or is taken for it; and no key goes where it need
not."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from fake_engine import FakeEngine, engines
from gateway_harness import World, world
from sojourn.ids import MAX_ID_BYTES
from sojourn.wire_codec import decode_context
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.generation_request import parse_generation_request
from sojourn_server.gateway.http.prefill_decode_bodies import prefill_body
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

TENANTS = {"ka": "alice", "kb": "bob"}
LONGEST = "x" * MAX_ID_BYTES


def hint(**members: Any) -> str:
    return json.dumps({"program_id": "p", **members}, separators=(",", ":"))


def named(tenant: str, body: dict[str, Any], session: str | None = None) -> dict[str, Any]:
    """A body as an engine gets it."""
    raw = json.dumps(body).encode()
    names = ProgramIdMapper(TENANTS.values())
    read: dict[str, Any] = json.loads(
        names.request(tenant, raw, parse_generation_request(ClientApi.CHAT, raw, session))
    )
    return read


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
        assert fake.headers[-1].get("x-session-id") == (f"bob/{header}" if header else None)
        # The engine reads the body's, then the header's, then that of vllm_xargs.
        known = "alice/p" if of_body or header is None else header
        shown = (await it.get("/sojourn/v1/programs", "kb"))["programs"]
        assert [one["program_id"] for one in shown] == [known]


async def test_of_one_tenant_the_gateway_means_the_program_that_its_engine_means() -> None:
    async with engines(1) as (fake,), world([fake]) as it:
        await it.chat("header", session_id="own")
        assert fake.requests[-1]["session_id"] == "own"
        assert await it.home("own") == fake.name
        assert await it.home("header") is None


def test_beside_a_hint_the_session_is_named_too() -> None:
    for text in (hint(), "{"):
        sent = named("bob", {"session_id": "s", "vllm_xargs": {"agentic_context": text, "session_id": "t"}})
        assert sent["session_id"] == "bob/s"
        assert sent["vllm_xargs"].pop("session_id") == "bob/t"
        told = sent["vllm_xargs"].pop("agentic_context", None)
        assert (
            told is None
            if text == "{"
            else json.loads(told)
            == {
                "program_id": "bob/p",
                "sojourn": {"v": 1, "tenant": "bob"},
            }
        )


def test_a_prefill_engine_gets_no_program() -> None:
    body = {"session_id": "s", "vllm_xargs": {"session_id": "t", "agentic_context": hint(), "x": 1}}
    raw = json.dumps(body).encode()
    sent = json.loads(prefill_body(ClientApi.CHAT, raw, "t1", "tcp:d:1", 0.25))
    assert "session_id" not in sent
    assert sent["vllm_xargs"] == {"x": 1}


# -- what is told of programs -----------------------------------------------------


async def test_evictions_do_not_name_another_tenants_program() -> None:
    turns = [
        {"program_id": "bob/p", "evictor": "alice/merger", "seconds": {"wall": 1.0}},
        {"program_id": "bob/p", "evictor": "bob/q"},
        {"program_id": "bob/p", "evictor": None},
        {"program_id": "bob/p", "evictor": "strangers"},
    ]
    fake = Told({"program_id": "bob/p", "parent_program_id": "bob/q", "ledger": turns, "status": "acting"})
    await fake.start()
    async with world([fake], tenants=TENANTS, admin_key="root") as it:
        await it.chat("p", key="kb")
        engine = (await it.get("/sojourn/v1/programs/p", "kb"))["engine"]
        assert (engine["program_id"], engine["parent_program_id"], engine["status"]) == ("p", "q", "acting")
        assert {turn["program_id"] for turn in engine["ledger"]} == {"p"}
        assert [turn["evictor"] for turn in engine["ledger"]] == ["another", "q", None, "another"]
        assert engine["ledger"][0]["seconds"] == {"wall": 1.0}
        all_of_it = (await it.get("/sojourn/v1/programs/p", "root"))["engine"]["ledger"]
        assert [turn["evictor"] for turn in all_of_it] == ["alice/merger", "q", None, "strangers"]
    await fake.kill()


def test_of_one_tenant_answers_stay_what_they_are() -> None:
    told = {"program_id": "p", "ledger": [{"evictor": "q"}]}
    assert ProgramIdMapper(["only"]).answer("only", told) == told


@pytest.mark.parametrize("bad", [{"events": 5}, {"events": {"a": 1}}, {"events": None}, {"node": 5}])
def test_a_bad_field_of_a_hint_is_left_out_alone(bad: dict[str, Any]) -> None:
    text = hint(parent_program_id="", root_program_id="x" * 300, step_id=12, sojourn={"v": 1, **bad})
    sent = named("bob", {"vllm_xargs": {"agentic_context": text}})["vllm_xargs"]["agentic_context"]
    read = decode_context(sent)
    assert (read.program_id, read.parent_program_id, read.root_program_id) == ("bob/p", None, None)
    assert read.step_id == "12"
    assert read.sojourn is not None
    assert (read.sojourn.events, read.sojourn.node) == ([], None)


# -- what cannot be read ----------------------------------------------------------

HINTED = json.dumps({"vllm_xargs": {"agentic_context": hint()}}).encode()[1:]
BAD_NAMES = [
    b'{"model":"tiny","messages":[],"\xff":1,"session_id":"s"}',
    b'{"model":"tiny","messages":[],"\xff":1,' + HINTED,
]


@pytest.mark.parametrize("body", BAD_NAMES)
async def test_names_that_are_not_text_are_rejected(body: bytes, caplog: Any) -> None:
    async with engines(1) as (fake,), world([fake], tenants=TENANTS) as it:
        shown = {"Authorization": "Bearer kb"}
        async with it.http.post(f"{it.url}{ClientApi.CHAT.value}", data=body, headers=shown) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["code"] == "bad_request"
        assert fake.bodies == []
        assert "Traceback" not in caplog.text


# -- keys and conversations -------------------------------------------------------


async def test_the_operators_key_reaches_no_engine() -> None:
    fake = Told()
    await fake.start()
    async with world([fake], tenants=TENANTS, admin_key="root") as it:
        await it.chat("p", key="kb")
        fake.keys.clear()
        for path in ("/sojourn/v1/stats", "/v1/models", "/sojourn/v1/programs/p", "/sojourn/v1/graphs"):
            await it.get(path, "root")
        shown = {"Authorization": "Bearer root", "X-API-Key": "root"}
        async with it.http.post(f"{it.url}/tokenize", json={"prompt": "x"}, headers=shown) as answer:
            assert answer.status == 200
        assert len(fake.keys) >= 5
        assert set(fake.keys) == {None}
        await it.get("/v1/models", "kb")
        assert fake.keys[-1] == "Bearer kb"
    await fake.kill()


async def test_a_conversation_is_its_tenants_whatever_they_are_called() -> None:
    async with engines(1) as (fake,), world([fake], tenants={"k1": "a", "k2": "a/b"}) as it:
        await responded(it, "k2", "X-Session-ID", input="x")
        await responded(it, "k1", input="x", previous_response_id="b/resp_abc")
        [own] = (await it.get("/sojourn/v1/programs", "k1"))["programs"]
        assert own["program_id"].startswith("conversation-")


async def responded(it: World, key: str, *session: str, **body: Any) -> None:
    headers = {"Authorization": f"Bearer {key}", **dict.fromkeys(session, "secret-merger")}
    sent = {"model": "tiny", **body}
    async with it.http.post(f"{it.url}{ClientApi.RESPONSES.value}", json=sent, headers=headers) as answer:
        assert answer.status == 200
        msgspec.json.decode(await answer.read())
