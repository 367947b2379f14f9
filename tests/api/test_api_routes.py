"""The routes over engines that answer from a script."""

from __future__ import annotations

import json
from typing import Any

import pytest
from api_test_engines import (
    BATCH,
    CANARY,
    GETS,
    KEY,
    PERSISTED,
    ScriptedEngine,
    check_error,
    client_of,
    engine_answers,
    outcomes,
)
from fastapi import FastAPI
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient
from sojourn.wire_codec import MAX_BATCH_BYTES
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.routes import build_router

# --- what goes in and out ---------------------------------------------------


def test_events_reach_the_engine_as_sent_and_its_outcomes_come_back(
    client: TestClient, engine: ScriptedEngine
) -> None:
    text = json.dumps(BATCH, indent=1)
    response = client.post("/sojourn/v1/events", content=text)
    assert response.status_code == 200
    assert response.json()["outcomes"] == outcomes("applied", "applied")["outcomes"]
    ((operation, payload),) = engine.calls
    assert (operation, json.loads(payload)) == ("event_batches", [BATCH])


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
    check_error(client.post("/sojourn/v1/programs/p/persist", headers=headers), 401)
    check_error(client.post("/sojourn/v1/policy?on=false", headers=headers), 401)
    check_error(client.get(f"/sojourn/v1/programs?limit={CANARY}", headers=headers), 401)
    assert refused.headers["www-authenticate"] == "Bearer"
    assert engine.calls == []


def test_the_tests_above_know_every_route() -> None:
    router = build_router(ScriptedEngine(engine_answers()), ApiKeys())
    found = {
        (method, route.path)
        for route in router.routes
        if isinstance(route, APIRoute)
        for method in route.methods
    }
    paths = {path.partition("?")[0] for path in GETS} - {"programs/p"}
    expected = {("GET", f"/sojourn/v1/{path}") for path in paths}
    assert found == expected | {
        ("GET", "/sojourn/v1/openapi.json"),
        ("POST", "/sojourn/v1/events"),
        ("POST", "/sojourn/v1/policy"),
        ("GET", "/sojourn/v1/programs/{program_id:path}"),
        ("GET", "/sojourn/v1/programs/{program_id:path}/explain"),
        ("POST", "/sojourn/v1/programs/{program_id:path}/persist"),
    }


def test_nobody_gets_in_before_the_keys_are_known() -> None:
    keys = ApiKeys()
    app = FastAPI()
    app.include_router(build_router(ScriptedEngine(engine_answers()), keys))
    client = TestClient(app)
    check_error(client.get("/sojourn/v1/stats"), 401)
    keys.configure([])
    assert client.get("/sojourn/v1/stats").status_code == 200
