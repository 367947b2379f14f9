"""The routes over engines that answer from a script."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sojourn.wire import MAX_BATCH_BYTES, MAX_BATCH_EVENTS, MAX_EVENT_NAME_BYTES
from sojourn_server.web import routes
from sojourn_server.web.body import read_body
from sojourn_server.web.calls import EngineError, EngineStock, EngineUnavailable
from sojourn_server.web.failure import Failure
from sojourn_server.web.keys import ApiKeys
from sojourn_server.web.routes import build_router
from starlette.requests import Request

KEY = "correct-horse"
CANARY = "canary-7f3a"
BATCH = {
    "v": 1,
    "emitter": "e1",
    "events": [
        {"type": "program_start", "program_id": "p", "seq": 0},
        {"type": "tool_start", "program_id": "p", "seq": 1, "call_id": "c", "tool": "bash"},
    ],
}
GETS = ("capabilities", "programs", "programs/p", "stats", "decisions")


class ScriptedEngine:
    """Answers each operation from ``answers``: data, an exception to raise, or a function of the payload."""

    def __init__(self, *per_engine: dict[str, Any]) -> None:
        self.per_engine = per_engine
        self.calls: list[tuple[str, str]] = []

    def engine_ids(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.per_engine))]

    async def call(self, op: str, payload: str) -> list[str]:
        self.calls.append((op, payload))
        found = []
        for answers in self.per_engine:
            answer = answers[op]
            if isinstance(answer, Exception):
                raise answer
            if callable(answer):
                answer = answer(json.loads(payload))
            found.append(json.dumps(answer))
        return found


def outcomes(*names: str) -> dict[str, Any]:
    return {"v": 1, "outcomes": [{"outcome": name} for name in names]}


def engine_answers(**changed: Any) -> dict[str, Any]:
    return {
        "events": outcomes("applied", "applied"),
        "capabilities": {"name": "sojourn", "wire": [1], "policy": "continuum"},
        "programs": {"programs": [{"program_id": "p", "turns": 2}], "total": 1, "shown": 1},
        "program": lambda payload: {"program_id": "p", "turns": 2} if payload["program_id"] == "p" else None,
        "stats": {"programs": {"acting": 1}, "policy": "continuum", "lost_tokens": 10},
        "decisions": {"decisions": [{"seq": 4, "kind": "keep"}, {"seq": 5, "kind": "drop"}], "next": 6},
        **changed,
    }


def client_of(engine: Any, keys: Sequence[str] = ()) -> TestClient:
    api_keys = ApiKeys()
    api_keys.configure(keys)
    app = FastAPI()
    app.include_router(build_router(engine, api_keys))
    return TestClient(app, raise_server_exceptions=False)


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(engine_answers())


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


def check_error(response: Any, status: int) -> dict[str, str]:
    """An error answer has one shape, says what to do, and repeats nothing that was sent."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, str] = response.json()["error"]
    assert set(error) == {"message", "next"}
    assert error["message"]
    assert error["next"]
    assert CANARY not in response.text
    return error


# --- what goes in and out ---------------------------------------------------


def test_events_reach_the_engine_as_sent_and_its_outcomes_come_back(
    client: TestClient, engine: ScriptedEngine
) -> None:
    text = json.dumps(BATCH, indent=1)
    response = client.post("/sojourn/v1/events", content=text)
    assert response.status_code == 200
    assert response.json() == outcomes("applied", "applied")
    assert engine.calls == [("events", text)]


def test_reads_answer_what_the_engine_says(client: TestClient, engine: ScriptedEngine) -> None:
    assert client.get("/sojourn/v1/capabilities").json()["policy"] == "continuum"
    assert client.get("/sojourn/v1/capabilities").json()["engines"] == 1
    assert client.get("/sojourn/v1/programs?limit=7&status=acting").json()["shown"] == 1
    assert engine.calls[-1] == ("programs", '{"limit":7,"status":"acting"}')
    assert client.get("/sojourn/v1/programs/p").json() == {"program_id": "p", "turns": 2}
    assert client.get("/sojourn/v1/stats").json()["lost_tokens"] == 10


@pytest.mark.parametrize(
    ("path", "program_id"),
    [
        ("a/b/c", "a/b/c"),
        ("a%2Fb", "a/b"),
        ("%C3%A4%20%22", 'ä "'),
        ("%3Cscript%3E", "<script>"),
        ("..%2Fp", "../p"),
    ],
)
def test_any_program_id_can_be_asked_for(engine: ScriptedEngine, path: str, program_id: str) -> None:
    error = check_error(client_of(engine).get(f"/sojourn/v1/programs/{path}"), 404)
    assert "/sojourn/v1/programs" in error["next"]
    assert json.loads(engine.calls[-1][1]) == {"program_id": program_id}


def test_an_id_no_program_can_have_never_reaches_the_engine(
    client: TestClient, engine: ScriptedEngine
) -> None:
    check_error(client.get("/sojourn/v1/programs/" + "x" * 300), 404)
    check_error(client.get("/sojourn/v1/programs/"), 404)
    assert engine.calls == []


def test_decisions_as_json_and_as_lines(client: TestClient, engine: ScriptedEngine) -> None:
    document = client.get("/sojourn/v1/decisions?since=4&limit=2").json()
    assert document["next"] == 6
    assert document["engine"] == "0"
    assert engine.calls[-1] == ("decisions", '{"since":4,"limit":2}')
    for kwargs in ({"params": {"format": "ndjson"}}, {"headers": {"accept": "application/x-ndjson"}}):
        response = client.get("/sojourn/v1/decisions", **kwargs)
        assert response.headers["content-type"] == "application/x-ndjson"
        assert response.headers["x-sojourn-next"] == "6"
        assert [json.loads(line)["seq"] for line in response.text.splitlines()] == [4, 5]


# --- several engines --------------------------------------------------------


def test_an_event_belongs_to_the_engine_that_knows_its_program() -> None:
    engine = ScriptedEngine(
        engine_answers(events=outcomes("missing", "applied", "missing")),
        engine_answers(events=outcomes("duplicate", "missing", "missing")),
    )
    response = client_of(engine).post("/sojourn/v1/events", json=BATCH)
    assert [outcome["outcome"] for outcome in response.json()["outcomes"]] == [
        "duplicate",
        "applied",
        "missing",
    ]


def test_several_engines_answer_as_one() -> None:
    engine = ScriptedEngine(
        engine_answers(program=None),
        engine_answers(
            programs={
                "programs": [{"program_id": "p", "turns": 9}, {"program_id": "q", "turns": 1}],
                "total": 2,
                "shown": 2,
            },
            program={"program_id": "p", "turns": 9},
            stats={"programs": {"acting": 2, "ended": 1}, "policy": "continuum", "lost_tokens": 5},
            decisions={"decisions": [{"seq": 0}], "next": 1},
        ),
    )
    client = client_of(engine)
    programs = client.get("/sojourn/v1/programs").json()
    assert {p["program_id"]: p["turns"] for p in programs["programs"]} == {"p": 9, "q": 1}
    assert (programs["total"], programs["shown"]) == (2, 2)
    assert client.get("/sojourn/v1/programs/p").json()["turns"] == 9
    stats = client.get("/sojourn/v1/stats").json()
    assert [stats["engines"][index]["lost_tokens"] for index in ("0", "1")] == [10, 5]
    assert client.get("/sojourn/v1/capabilities").json()["engines"] == 2
    assert client.get("/sojourn/v1/decisions?engine=1").json()["next"] == 1
    assert client.get("/sojourn/v1/decisions").json()["engines"] == ["0", "1"]
    check_error(client.get("/sojourn/v1/decisions?engine=2"), 404)


# --- keys -------------------------------------------------------------------

REFUSED = [
    {},
    {"authorization": ""},
    {"authorization": "Bearer"},
    {"authorization": "Bearer "},
    {"authorization": KEY},
    {"authorization": f"Basic {KEY}"},
    {"authorization": f"Bearer {KEY}x"},
    {"authorization": f"Bearer {KEY[:-1]}"},
    {"authorization": f"Bearer  {KEY}"},
    {"authorization": b"Bearer \xff\xfe"},
    {"x-api-key": KEY},
]


@pytest.mark.parametrize("headers", REFUSED)
def test_every_route_refuses_a_missing_or_wrong_key_before_anything_else(headers: dict[str, Any]) -> None:
    engine = ScriptedEngine(engine_answers())
    client = client_of(engine, [KEY, "second"])
    for path in GETS:
        check_error(client.get(f"/sojourn/v1/{path}", headers=headers), 401)
    refused = client.post("/sojourn/v1/events", content=b"x" * (MAX_BATCH_BYTES + 1), headers=headers)
    check_error(refused, 401)
    check_error(client.get(f"/sojourn/v1/programs?limit={CANARY}", headers=headers), 401)
    assert refused.headers["www-authenticate"] == "Bearer"
    assert engine.calls == []


@pytest.mark.parametrize("header", [f"Bearer {KEY}", f"bearer {KEY}", "Bearer second"])
def test_any_configured_key_opens_every_route(header: str) -> None:
    client = client_of(ScriptedEngine(engine_answers()), [KEY, "second"])
    for path in GETS:
        assert client.get(f"/sojourn/v1/{path}", headers={"authorization": header}).status_code == 200
    posted = client.post("/sojourn/v1/events", json=BATCH, headers={"authorization": header})
    assert posted.status_code == 200


def test_the_tests_above_know_every_route() -> None:
    router = build_router(ScriptedEngine(engine_answers()), ApiKeys())
    found = {
        (method, route.path)
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    expected = {("GET", f"/sojourn/v1/{path}") for path in GETS if path != "programs/p"}
    assert found == expected | {
        ("POST", "/sojourn/v1/events"),
        ("GET", "/sojourn/v1/programs/{program_id:path}"),
    }


def test_nobody_gets_in_before_the_keys_are_known() -> None:
    keys = ApiKeys()
    app = FastAPI()
    app.include_router(build_router(ScriptedEngine(engine_answers()), keys))
    client = TestClient(app)
    check_error(client.get("/sojourn/v1/stats"), 401)
    keys.configure([])
    assert client.get("/sojourn/v1/stats").status_code == 200


def test_an_empty_key_is_no_key() -> None:
    keys = ApiKeys()
    keys.configure(["", KEY])
    assert not keys.allow("Bearer ")
    assert keys.allow(f"Bearer {KEY}")


def test_the_routes_describe_themselves(client: TestClient) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        f"/sojourn/v1/{path}" for path in (*GETS[:2], *GETS[3:], "events", "programs/{program_id}")
    }
    limits = {p["name"]: p["schema"] for p in paths["/sojourn/v1/programs"]["get"]["parameters"]}
    assert limits["limit"]["maximum"] == 1000


# --- hostile input ----------------------------------------------------------


def events_of(count: int) -> dict[str, Any]:
    return {**BATCH, "events": [{"type": "heartbeat", "program_id": "p", "seq": i} for i in range(count)]}


MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "not json": CANARY.encode(),
    "truncated": json.dumps(BATCH).encode()[:-1],
    "trailing": json.dumps(BATCH).encode() + b"{}",
    "array": b"[]",
    "null": b"null",
    "no version": b'{"emitter":"e","events":[]}',
    "other version": b'{"v":2,"emitter":"e","events":[]}',
    "version as text": b'{"v":"1","emitter":"e","events":[]}',
    "huge version": b'{"v":1e400,"emitter":"e","events":[]}',
    "empty emitter": b'{"v":1,"emitter":"","events":[]}',
    "long emitter": json.dumps({**BATCH, "emitter": CANARY * 40}).encode(),
    "events is an object": b'{"v":1,"emitter":"e","events":{}}',
    "too many events": json.dumps(events_of(MAX_BATCH_EVENTS + 1)).encode(),
    "not utf-8": b'{"v":1,"emitter":"\xff","events":[]}',
    "not utf-8 inside an event": b'{"v":1,"emitter":"e","events":[{"type":"heartbeat","program_id":"\xff"}]}',
    "utf-16": json.dumps(BATCH).encode("utf-16"),
    "deep": b'{"v":1,"emitter":"e","events":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "gzip": b"\x1f\x8b\x08\x00" + b"\x00" * 20,
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_is_refused_and_never_reaches_the_engine(
    client: TestClient, engine: ScriptedEngine, name: str
) -> None:
    response = client.post("/sojourn/v1/events", content=MALFORMED[name])
    error = check_error(response, 400)
    assert "capabilities" in error["next"]
    assert engine.calls == []


def test_one_bad_event_is_the_engines_to_judge(client: TestClient, engine: ScriptedEngine) -> None:
    batch = {**BATCH, "events": [{"type": "nonsense"}, {"tool": "x" * (MAX_EVENT_NAME_BYTES + 1)}]}
    assert client.post("/sojourn/v1/events", json=batch).status_code == 200
    assert len(engine.calls) == 1


@pytest.mark.parametrize("length", [MAX_BATCH_BYTES + 1, int("9" * 50)])
async def test_a_body_declared_too_large_is_refused_unread(length: int) -> None:
    async def receive() -> dict[str, Any]:
        raise AssertionError("the body was read")

    with pytest.raises(Failure) as failure:
        await read_body(request_from(receive, [(b"content-length", str(length).encode())]), MAX_BATCH_BYTES)
    assert failure.value.status == 413


def test_a_batch_may_be_as_large_as_the_limit_and_no_larger(
    client: TestClient, engine: ScriptedEngine
) -> None:
    text = json.dumps(BATCH)
    full = text + " " * (MAX_BATCH_BYTES - len(text))
    assert client.post("/sojourn/v1/events", content=full).status_code == 200
    check_error(client.post("/sojourn/v1/events", content=full + " "), 413)
    check_error(client.post("/sojourn/v1/events", content=iter([full.encode(), b" "])), 413)
    assert len(engine.calls) == 1


async def test_a_body_of_unknown_length_is_cut_off_at_the_limit() -> None:
    request, consumed = endless_request(b"x" * 65536)
    with pytest.raises(Failure) as failure:
        await read_body(request, MAX_BATCH_BYTES)
    assert failure.value.status == 413
    assert consumed() <= MAX_BATCH_BYTES // 65536 + 1


async def test_a_slow_body_is_given_up() -> None:
    request, _ = endless_request(b"", pause_s=0.01)
    with pytest.raises(Failure) as failure:
        await read_body(request, MAX_BATCH_BYTES, timeout_s=0.05)
    assert failure.value.status == 408


async def test_a_client_that_goes_away_is_no_error_of_ours() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    with pytest.raises(Failure) as failure:
        await read_body(request_from(receive), MAX_BATCH_BYTES)
    assert failure.value.status == 400


def endless_request(chunk: bytes, pause_s: float = 0.0) -> tuple[Request, Callable[[], int]]:
    received = 0

    async def receive() -> dict[str, Any]:
        nonlocal received
        received += 1
        await asyncio.sleep(pause_s)
        return {"type": "http.request", "body": chunk, "more_body": True}

    return request_from(receive), lambda: received


def request_from(
    receive: Callable[[], Awaitable[dict[str, Any]]], headers: Sequence[tuple[bytes, bytes]] = ()
) -> Request:
    return Request({"type": "http", "method": "POST", "path": "/", "headers": list(headers)}, receive)


@pytest.mark.parametrize(
    "query",
    [
        f"programs?limit={CANARY}",
        "programs?limit=0",
        "programs?limit=-1",
        "programs?limit=1001",
        "programs?limit=1.5",
        "programs?limit=" + "9" * 5000,
        f"programs?status={CANARY}",
        "decisions?since=-1",
        "decisions?since=" + "9" * 30,
        "decisions?limit=5001",
        f"decisions?format={CANARY}",
    ],
)
def test_a_bad_query_is_refused_in_our_words(client: TestClient, engine: ScriptedEngine, query: str) -> None:
    check_error(client.get(f"/sojourn/v1/{query}"), 400)
    assert engine.calls == []


# --- engines that do not answer ---------------------------------------------


@pytest.mark.parametrize("path", GETS)
@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnavailable("dead " + CANARY), 503),
        (EngineStock("stock " + CANARY), 501),
        (EngineError(CANARY), 500),
    ],
)
def test_each_failure_of_the_engine_has_its_status(path: str, error: Exception, status: int) -> None:
    broken = dict.fromkeys(engine_answers(), error)
    client = client_of(ScriptedEngine(broken))
    for response in (client.get(f"/sojourn/v1/{path}"), client.post("/sojourn/v1/events", json=BATCH)):
        check_error(response, status)
        assert ("retry-after" in response.headers) == (status == 503)


def test_an_answer_that_is_not_json_is_our_error_and_says_nothing() -> None:
    class Garbled(ScriptedEngine):
        async def call(self, op: str, payload: str) -> list[str]:
            return [f"{{{CANARY}"]

    check_error(client_of(Garbled({})).get("/sojourn/v1/stats"), 500)


class HungEngine(ScriptedEngine):
    """Answers once ``released`` is set."""

    def __init__(self) -> None:
        super().__init__(engine_answers())
        self.released = asyncio.Event()

    async def call(self, op: str, payload: str) -> list[str]:
        await self.released.wait()
        return await super().call(op, payload)


async def test_a_hung_engine_costs_a_bounded_number_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MAX_CALLS_IN_FLIGHT", 3)
    engine = HungEngine()
    ask = routes._Asker(engine)
    started = time.monotonic()
    for _ in range(3):
        with pytest.raises(EngineUnavailable, match="no answer within"):
            await ask("stats", "{}", 0.02)
    with pytest.raises(EngineUnavailable, match="3 calls are waiting"):
        await ask("stats", "{}", 60)
    assert time.monotonic() - started < 5

    engine.released.set()
    await asyncio.sleep(0.01)
    assert len(engine.calls) == 3  # late, but delivered: an event is not lost for having been slow
    assert len(await ask("stats", "{}", 1)) == 1


def test_a_slow_engine_is_answered_for_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EVENTS_TIMEOUT_S", 0.05)

    class Slow(ScriptedEngine):
        async def call(self, op: str, payload: str) -> list[str]:
            await asyncio.sleep(60)
            return []

    response = client_of(Slow(engine_answers())).post("/sojourn/v1/events", json=BATCH)
    check_error(response, 503)
    assert int(response.headers["retry-after"]) > 0
