"""Engines that answer from a script, and a check of error answers."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sojourn_server.api.api_keys import ApiKeys
from sojourn_server.api.event_intake import EVENT_BATCHES_OPERATION
from sojourn_server.api.routes import build_router
from waiting import wait_until

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
PERSISTED = {"program_id": "p", "turns": 2, "state": "writing", "context_tokens": 70, "stored_tokens": 32}


class ScriptedEngine:
    """Answers each operation from ``answers``: data, an exception to raise, or a function of the payload.

    The answer ``events`` is given to each batch of a call."""

    wait_s = 0.0
    """Seconds of ``wait_s`` in the answer to each call with events."""

    def __init__(self, *per_engine: dict[str, Any]) -> None:
        self.per_engine = per_engine
        self.calls: list[tuple[str, str]] = []

    def engine_ids(self) -> Sequence[str]:
        return [str(index) for index in range(len(self.per_engine))]

    async def call(self, op: str, payload: str) -> list[str]:
        self.calls.append((op, payload))
        asked = json.loads(payload)
        if op == EVENT_BATCHES_OPERATION:
            batches = [
                [self._answer(answers, "events", batch) for batch in asked] for answers in self.per_engine
            ]
            return [json.dumps({"wait_s": self.wait_s, "batches": found}) for found in batches]
        return [json.dumps(self._answer(answers, op, asked)) for answers in self.per_engine]

    def _answer(self, answers: dict[str, Any], op: str, asked: Any) -> Any:
        answer = answers[op]
        if isinstance(answer, Exception):
            raise answer
        return answer(asked) if callable(answer) else answer


class HungEngine(ScriptedEngine):
    """Answers once ``released`` is set. ``calls`` has the calls that have reached it."""

    def __init__(self, **changed: Any) -> None:
        super().__init__(engine_answers(**changed))
        self.released = asyncio.Event()

    async def call(self, op: str, payload: str) -> list[str]:
        answer = await super().call(op, payload)
        await self.released.wait()
        return answer


def outcomes(*names: str) -> dict[str, Any]:
    return {"v": 1, "outcomes": [{"outcome": name} for name in names]}


def engine_answers(**changed: Any) -> dict[str, Any]:
    return {
        "events": outcomes("applied", "applied"),
        "capabilities": {"name": "sojourn", "wire": [1], "policy": "continuum"},
        "programs": {"programs": [{"program_id": "p", "turns": 2}], "total": 1, "shown": 1},
        "program": lambda payload: {"program_id": "p", "turns": 2} if payload["program_id"] == "p" else None,
        "persist": lambda payload: PERSISTED if payload["program_id"] == "p" else None,
        "snapshot": {"engine": {"engine": "0", "now_s": 1.0}, "programs": [], "total": 0, "full": True},
        "stats": {"programs": {"acting": 1}, "policy": "continuum", "lost_tokens": 10},
        "load": {"requests": 1, "programs": [{"program_id": "p", "tokens": 8, "context_tokens": 9}]},
        "decisions": {"decisions": [{"seq": 4, "kind": "keep"}, {"seq": 5, "kind": "drop"}], "next": 6},
        **changed,
    }


def app_of(engine: Any, keys: Sequence[str] = ()) -> FastAPI:
    api_keys = ApiKeys()
    api_keys.configure(keys)
    app = FastAPI()
    app.include_router(build_router(engine, api_keys))
    return app


def client_of(engine: Any, keys: Sequence[str] = ()) -> TestClient:
    return TestClient(app_of(engine, keys), raise_server_exceptions=False)


@contextmanager
def served(app: Any, *, ws: Any = "none") -> Iterator[str]:
    """Serve an application in a thread; yields its address."""
    config = uvicorn.Config(app, port=0, ws=ws, lifespan="off", log_config=None, timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    app.state.server = server  # as vLLM does; live streams end with it
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def check_error(response: Any, status: int) -> dict[str, str]:
    """Check that an error answer has the one shape, says what to do, and does not repeat the request's
    canary."""
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error: dict[str, str] = response.json()["error"]
    assert set(error) == {"message", "next"}
    assert error["message"]
    assert error["next"]
    assert CANARY not in response.text
    return error
