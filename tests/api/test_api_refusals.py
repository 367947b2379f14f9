"""Who was refused reads why, in the shape of the route; nobody else's answer is held up or changed."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx
import pytest
from api_test_engines import ScriptedEngine
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from sojourn_server.api.engine_rpc import EngineError, EngineUnavailableError, StockEngineError
from sojourn_server.api.refusal_middleware import (
    RefusalMiddleware,
    refusal_message,
    responses_error_event,
    retry_after_s,
    rewrite_error,
    rewrite_error_event,
)

TOLD = refusal_message(600.0)
OPENAI = {
    "error": {
        "message": "Internal server error",
        "type": "InternalServerError",
        "param": None,
        "code": 500,
    }
}
OPENAI_TOLD = {"error": {"message": TOLD, "type": "ServiceUnavailableError", "param": None, "code": 503}}
ANTHROPIC = {
    "type": "error",
    "error": {"type": "InternalServerError", "message": "Internal server error"},
    "request_id": None,
}
ANTHROPIC_TOLD = {**ANTHROPIC, "error": {"type": "ServiceUnavailableError", "message": TOLD}}


class RefusingEngine(ScriptedEngine):
    """Knows the request ``gone`` as one that it refused."""

    def __init__(self) -> None:
        super().__init__(
            {"refusal": lambda asked: {"waited_s": 600} if asked["request_id"] == "gone" else None}
        )


def http_of(engine: Any, answer: Callable[[], Any], request_id: str | None = "gone") -> httpx.AsyncClient:
    app = FastAPI()
    app.add_middleware(RefusalMiddleware, engine=engine, request_id=lambda scope: scope["state"].get("id"))

    @app.post("/")
    async def route(request: Request) -> Response:
        if request_id is not None:
            request.state.id = request_id
        made: Response = answer()
        return made

    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://server")


def failure(document: Any = OPENAI, status: int = 500) -> Callable[[], Response]:
    return lambda: JSONResponse(document, status_code=status, headers={"x-kept": "yes", "retry-after": "1"})


def stream(*chunks: Any, media_type: str = "text/event-stream") -> Callable[[], Response]:
    async def parts() -> AsyncIterator[Any]:
        for chunk in chunks:
            if isinstance(chunk, Exception):
                raise chunk
            yield chunk

    return lambda: StreamingResponse(parts(), media_type=media_type)


def data(document: Any) -> str:
    return f"data: {json.dumps(document)}\n\n"


# --- the words ------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff", b"[]", b"{}", b'{"error":"x"}', b'{"error":{}}', b"[" * 50_000]
)
def test_what_is_no_error_is_left_alone(text: bytes) -> None:
    assert rewrite_error(text, TOLD) is None
    assert rewrite_error_event(b"data: " + text + b"\n\n", TOLD) is None


# --- answers --------------------------------------------------------------------


@pytest.mark.parametrize(("document", "told"), [(OPENAI, OPENAI_TOLD), (ANTHROPIC, ANTHROPIC_TOLD)])
async def test_a_refusal_is_a_503_with_the_reason(document: Any, told: Any) -> None:
    engine = RefusingEngine()
    async with http_of(engine, failure(document)) as http:
        answer = await http.post("/")
    assert answer.status_code == 503
    assert answer.json() == told
    assert answer.headers["content-length"] == str(len(answer.content))
    assert answer.headers.get_list("retry-after") == [str(retry_after_s("gone"))]
    assert answer.headers["x-kept"] == "yes"
    assert engine.calls == [("refusal", '{"request_id":"gone"}')]


@pytest.mark.parametrize(
    "why_not",
    [
        EngineError("x"),
        EngineUnavailableError("x"),
        StockEngineError("x"),
        ValueError("ours"),
        None,
        [],
        {"waited_s": "x"},
        {"old": 1},
    ],
)
async def test_another_failure_goes_out_as_it_is(why_not: Any) -> None:
    async with http_of(ScriptedEngine({"refusal": why_not}), failure()) as http:
        answer = await http.post("/")
    assert (answer.status_code, answer.json()) == (500, OPENAI)
    assert answer.headers["retry-after"] == "1"


@pytest.mark.parametrize(
    ("answer", "request_id"),
    [
        (failure(), None),
        (failure(status=400), "gone"),
        (failure(status=503), "gone"),
        (lambda: JSONResponse({"choices": [OPENAI]}), "gone"),
        (lambda: PlainTextResponse("error", status_code=500), "gone"),
        (lambda: Response(status_code=500), "gone"),
        (stream(data(OPENAI), media_type="text/plain"), "gone"),
        (stream(data({"id": "c", "error": OPENAI["error"]}), "data: [DONE]\n\n"), "gone"),
    ],
)
async def test_nobody_else_is_asked_about(answer: Any, request_id: str | None) -> None:
    engine = RefusingEngine()
    expected = answer()
    async with http_of(engine, answer, request_id) as http:
        got = await http.post("/")
    assert got.status_code == expected.status_code
    if not isinstance(expected, StreamingResponse):
        assert got.content == expected.body
    assert engine.calls == []


# --- streams --------------------------------------------------------------------

CHUNK = data({"id": "c", "choices": []})
DONE = "data: [DONE]\n\n"


@pytest.mark.parametrize(
    ("start", "document", "told"), [("", OPENAI, OPENAI_TOLD), ("event: error\n", ANTHROPIC, ANTHROPIC_TOLD)]
)
async def test_a_stream_has_the_reason_in_its_error_event(start: str, document: Any, told: Any) -> None:
    engine = RefusingEngine()
    async with http_of(engine, stream(CHUNK, start + data(document), DONE)) as http:
        got = await http.post("/")
    assert got.status_code == 200
    first, event, last = got.text.split("\n\n", 2)
    assert (first + "\n\n", last) == (CHUNK, DONE)
    assert json.loads(event.removeprefix(f"{start}data: ")) == told
    assert len(engine.calls) == 1


CREATED = 'event: response.created\ndata: {"sequence_number":0}\n\n'
GOES_ON = 'event: response.in_progress\ndata: {"sequence_number":1}\n\n'


async def test_a_stream_of_responses_that_breaks_off_ends_with_the_reason() -> None:
    async with http_of(RefusingEngine(), stream(CREATED, GOES_ON, ValueError("no event"))) as http:
        got = await http.post("/")
    assert got.text == CREATED + GOES_ON + responses_error_event(TOLD, 2).decode()
    event = json.loads(got.text.rsplit("data: ", 1)[1])
    assert event == {
        "type": "error",
        "code": "ServiceUnavailableError",
        "message": TOLD,
        "param": None,
        "sequence_number": 2,
    }
