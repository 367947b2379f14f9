"""The routes over engines that answer from a script, hostile clients, and engines that do not answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from api_test_engines import (
    BATCH,
    CANARY,
    KEY,
    PERSISTED,
    ScriptedEngine,
    check_error,
    client_of,
    engine_answers,
    outcomes,
)
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sojourn.wire_codec import MAX_BATCH_BYTES, MAX_BATCH_EVENTS
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError, StockEngineError
from sojourn_server.api.openapi import PREFIX
from sojourn_server.api.routes import build_router
from virtual_engine import VirtualEngine


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(engine_answers())


@pytest.fixture
def client(engine: ScriptedEngine) -> TestClient:
    return client_of(engine)


# --- what goes in and out ---------------------------------------------------


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
def test_a_program_is_asked_for_and_written_to_disk_by_any_id(
    engine: ScriptedEngine, path: str, program_id: str
) -> None:
    client = client_of(engine)
    answer = client.post("/sojourn/v1/programs/p/persist")
    assert (answer.status_code, answer.json()) == (200, PERSISTED)
    assert engine.calls == [("persist", '{"program_id":"p"}')]
    for answer in (
        client.get(f"/sojourn/v1/programs/{path}"),
        client.post(f"/sojourn/v1/programs/{path}/persist"),
    ):
        assert "/sojourn/v1/programs" in check_error(answer, 404)["next"]
        assert json.loads(engine.calls[-1][1]) == {"program_id": program_id}
    asked = len(engine.calls)
    check_error(client.post("/sojourn/v1/programs/" + "x" * 300 + "/persist"), 404)
    check_error(client.post("/sojourn/v1/programs//persist"), 404)
    assert len(engine.calls) == asked


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
    three = {**BATCH, "events": [*BATCH["events"], {"type": "program_end", "program_id": "p", "seq": 2}]}
    response = client_of(engine).post("/sojourn/v1/events", json=three)
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
            load={"requests": 2, "programs": []},
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
    assert "tiers" not in client.get("/sojourn/v1/capabilities").json()
    assert [one["requests"] for one in client.get("/sojourn/v1/load").json()["engines"]] == [1, 2]
    assert client.get("/sojourn/v1/decisions?engine=1").json()["next"] == 1
    assert client.get("/sojourn/v1/decisions").json()["engines"] == ["0", "1"]
    check_error(client.get("/sojourn/v1/decisions?engine=2"), 404)


def test_of_several_engines_each_shows_its_newest_programs() -> None:
    def listed(*names: str) -> dict[str, Any]:
        return {"programs": [{"program_id": name, "turns": 1} for name in names], "total": 2, "shown": 2}

    ranks = [engine_answers(programs=listed(*names)) for names in ("ab", "cd")]
    answer = client_of(ScriptedEngine(*ranks)).get("/sojourn/v1/programs?limit=3").json()
    assert [one["program_id"] for one in answer["programs"]] == ["a", "c", "b"]
    assert (answer["total"], answer["shown"]) == (4, 3)


# --- keys -------------------------------------------------------------------


def routes(engine: ScriptedEngine) -> list[tuple[str, str]]:
    """Return method and URL of every route, with the parameters that it needs."""
    needed = {f"{PREFIX}/policy": "?on=false", f"{PREFIX}/stream": "?once=1"}
    found = [
        (method, route.path.replace("{program_id:path}", "p") + needed.get(route.path, ""))
        for route in build_router(engine, ApiKeys()).routes
        if isinstance(route, APIRoute)
        for method in route.methods
    ]
    assert len(found) == 12
    return found


@pytest.mark.parametrize("headers", [{}, {"authorization": f"Bearer {KEY}x"}, {"x-api-key": KEY}])
def test_every_route_refuses_a_missing_or_wrong_key_before_anything_else(
    engine: ScriptedEngine, headers: dict[str, Any]
) -> None:
    """``tests/vllm`` compares more headers with vLLM's own check."""
    client = client_of(engine, [KEY, "second"])
    for method, url in [*routes(engine), ("GET", f"{PREFIX}/programs?limit={CANARY}")]:
        body = b"x" * (MAX_BATCH_BYTES + 1) if url.endswith("/events") else b""
        refused = client.request(method, url, content=body, headers=headers)
        check_error(refused, 401)
        assert refused.headers["www-authenticate"] == "Bearer"
    assert engine.calls == []


# --- hostile input ----------------------------------------------------------


@pytest.mark.parametrize(
    "batch", [{**BATCH, "emitter": CANARY * 40}, {**BATCH, "events": BATCH["events"] * MAX_BATCH_EVENTS}]
)
def test_a_malformed_batch_is_refused_and_never_reaches_the_engine(
    client: TestClient, engine: ScriptedEngine, batch: dict[str, Any]
) -> None:
    """tests/fuzz has any other bytes, which end in the same error of the decoder."""
    assert "capabilities" in check_error(client.post("/sojourn/v1/events", json=batch), 400)["next"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("bad", "sent", "told"),
    [
        (b'"type":"heartbeat","program_id":"p\xff"', {}, ("rejected", None, None)),
        (b'"type":"heartbeat","program_id":"p\\n"', {"type": "heartbeat"}, ("rejected", "p\n", 2)),
        (b'"type":"heartbeat","x":' + b"[" * 900 + b"]" * 900, {"type": "heartbeat"}, ("rejected", None, 2)),
        (b'"type":"tool_start","program_id":"p","call_id":7', {"type": "tool_start"}, ("rejected", "p", 2)),
        (b'"type":"checkpoint","program_id":"p"', {"type": "unknown"}, ("unsupported", "p", 2)),
        (b'"type":7,"program_id":"p"', {}, ("rejected", "p", 2)),
    ],
)
def test_a_bad_event_is_refused_and_counted_and_the_others_reach_the_engine(
    bad: bytes, sent: dict[str, str], told: tuple[str, str | None, int | None]
) -> None:
    virtual = VirtualEngine()
    engine = ScriptedEngine({"events": lambda batch: msgspec.to_builtins({"outcomes": virtual.post(batch)})})
    good = b'{"type":"heartbeat","program_id":"q","seq":1,"later":[7]}'
    body = b'{"v":1,"emitter":"e","events":[{"seq":2,%s},%s]}' % (bad, good)
    answer = client_of(engine).post("/sojourn/v1/events", content=body)
    assert answer.status_code == 200, answer.text
    refused, _ = answer.json()["outcomes"]
    assert (refused["outcome"], refused.get("program_id"), refused.get("seq")) == told
    assert refused["reason"].startswith("unknown event type") == (told[0] == "unsupported")
    [(_, payload)] = engine.calls
    [batch] = json.loads(payload)
    assert batch["events"] == [sent, {"type": "heartbeat", "program_id": "q", "seq": 1}]
    assert virtual.counter("sojourn_events_total", type=sent.get("type", "unknown"), outcome=told[0]) == 1


def test_a_batch_may_be_as_large_as_the_limit_and_no_larger(
    client: TestClient, engine: ScriptedEngine
) -> None:
    text = json.dumps(BATCH)
    full = text + " " * (MAX_BATCH_BYTES - len(text))
    assert client.post("/sojourn/v1/events", content=full).status_code == 200
    check_error(client.post("/sojourn/v1/events", content=full + " "), 413)
    check_error(client.post("/sojourn/v1/events", content=iter([full.encode(), b" "])), 413)
    assert len(engine.calls) == 1


def test_a_bad_query_is_refused_in_our_words(client: TestClient, engine: ScriptedEngine) -> None:
    bad = (f"programs?limit={CANARY}", "programs?limit=1001", "programs?limit=" + "9" * 5000)
    for query in (*bad, f"programs?status={CANARY}", "decisions?since=-1", f"decisions?format={CANARY}"):
        check_error(client.get(f"/sojourn/v1/{query}"), 400)
    assert engine.calls == []


# --- engines that do not answer ---------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (EngineUnavailableError("dead " + CANARY), 503),
        (StockEngineError("stock " + CANARY), 501),
        (EngineError(CANARY), 500),
    ],
)
def test_each_failure_of_the_engine_has_its_status(error: Exception, status: int) -> None:
    engine = ScriptedEngine(dict.fromkeys([*engine_answers(), "policy"], error))
    for method, url in routes(engine):
        if not url.endswith("/openapi.json"):
            response = client_of(engine).request(method, url, json=BATCH)
            check_error(response, status)
            assert ("retry-after" in response.headers) == (status == 503)
