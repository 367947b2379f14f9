"""Hostile clients and engines that do not answer."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from api_test_engines import BATCH, CANARY, GETS, ScriptedEngine, check_error, client_of, engine_answers
from fastapi.testclient import TestClient
from sojourn.wire_codec import MAX_BATCH_BYTES, MAX_BATCH_EVENTS
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError, StockEngineError
from virtual_engine import VirtualEngine

# --- hostile input ----------------------------------------------------------


def events_of(count: int) -> dict[str, Any]:
    return {**BATCH, "events": [{"type": "heartbeat", "program_id": "p", "seq": i} for i in range(count)]}


# tests/fuzz has any other bytes: all end in the same error of the decoder.
MALFORMED: dict[str, bytes] = {
    "empty": b"",
    "long emitter": json.dumps({**BATCH, "emitter": CANARY * 40}).encode(),
    "too many events": json.dumps(events_of(MAX_BATCH_EVENTS + 1)).encode(),
    "deep": b'{"v":1,"emitter":"e","events":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_batch_is_refused_and_never_reaches_the_engine(
    client: TestClient, engine: ScriptedEngine, name: str
) -> None:
    response = client.post("/sojourn/v1/events", content=MALFORMED[name])
    error = check_error(response, 400)
    assert "capabilities" in error["next"]
    assert engine.calls == []


@pytest.mark.parametrize(
    ("bad", "sent", "told"),
    [
        (b'"type":"heartbeat","program_id":"p\xff"', {}, ("rejected", None, None)),
        (b'"type":"heartbeat","program_id":"p\\n","\xff":1', {"type": "heartbeat"}, ("rejected", "p\n", 2)),
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


@pytest.mark.parametrize(
    "query",
    [
        f"programs?limit={CANARY}",
        "programs?limit=0",
        "programs?limit=1001",
        "programs?limit=" + "9" * 5000,
        f"programs?status={CANARY}",
        "decisions?since=-1",
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
        (EngineUnavailableError("dead " + CANARY), 503),
        (StockEngineError("stock " + CANARY), 501),
        (EngineError(CANARY), 500),
    ],
)
def test_each_failure_of_the_engine_has_its_status(path: str, error: Exception, status: int) -> None:
    broken = dict.fromkeys(engine_answers(), error)
    client = client_of(ScriptedEngine(broken))
    for response in (
        client.get(f"/sojourn/v1/{path}"),
        client.post("/sojourn/v1/events", json=BATCH),
        client.post("/sojourn/v1/programs/p/persist"),
    ):
        check_error(response, status)
        assert ("retry-after" in response.headers) == (status == 503)
