"""For tests of agents and integrations: a server on 127.0.0.1 that records what it was told.

    with FakeServer() as server:
        sojourn.init(server.url)
        ...
        assert [type(e).__name__ for e in server.events()] == ["ProgramStart", "ProgramEnd"]

It takes event batches, answers the capabilities probe, and plays just enough of the
OpenAI API (chat, completions, responses; streamed or not) for a client to be happy.
Failure is a mode one can set at any time. No engine, no framework, standard library only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple

from .events import AnyEvent
from .hints import AgenticContext
from .wire import (
    CAPABILITIES_PATH,
    EVENTS_PATH,
    WIRE_VERSION,
    EventBatch,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    WireError,
    decode_batch,
    decode_context,
    decode_event,
    encode,
)

MODES = ("ok", "500", "404", "hang")
"""What the events endpoint does; for a refused connection use ``refusing_url()``."""


class LlmRequest(NamedTuple):
    """One HTTP attempt of an LLM request as it arrived."""

    path: str
    headers: dict[str, str]
    """With lower-case names."""
    body: dict[str, Any]

    @property
    def context(self) -> AgenticContext | None:
        """The ``agentic_context``, decoded; ``None`` where there is none. Raises ``WireError``."""
        xargs = self.body.get("vllm_xargs")
        text = xargs.get("agentic_context") if isinstance(xargs, dict) else None
        return None if text is None else decode_context(text)

    @property
    def events(self) -> list[AnyEvent]:
        """Events that rode along. Raises ``WireError``."""
        context = self.context
        if context is None or context.sojourn is None:
            return []
        return [decode_event(raw) for raw in context.sojourn.events]


class FakeServer:
    """Records batches and LLM requests. Attributes may be set while it runs, from any thread."""

    def __init__(self, *, mode: str = "ok", sojourn: bool = True, api_key: str | None = None) -> None:
        self.mode = mode
        """How the events endpoint behaves: one of ``MODES``."""
        self.sojourn = sojourn
        """False: a stock server, which has neither capabilities nor events."""
        self.api_key = api_key
        """Answer 401 to the probe and to events without this bearer key."""
        self.fail_next = 0
        """Answer 500 to that many LLM requests."""
        self.reply = "hello from the fake"
        """Text of every answer, streamed word by word."""
        self.chunk_delay_s = 0.0
        self.reply_delay_s = 0.0
        self.probe_delay_s = 0.0
        self.batches: list[EventBatch] = []
        self.requests: list[LlmRequest] = []
        self.authorizations: list[str | None] = []
        """``Authorization`` of every events request."""
        self.probes = 0
        self._released = threading.Event()
        self._http = _Http(("127.0.0.1", 0), _Handler)
        self._http.fake = self
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)

    @property
    def host(self) -> str:
        """``127.0.0.1:port``."""
        return f"127.0.0.1:{self._http.server_address[1]}"

    @property
    def url(self) -> str:
        """For ``sojourn.init``."""
        return f"http://{self.host}"

    @property
    def base_url(self) -> str:
        """For an OpenAI client."""
        return f"{self.url}/v1"

    def events(self, *, piggybacked: bool = False) -> list[AnyEvent]:
        """Events in the order of arrival, as they came in batches (or, on request, with LLM requests)."""
        if piggybacked:
            return [event for request in list(self.requests) for event in request.events]
        return [decode_event(raw) for batch in list(self.batches) for raw in batch.events]

    def wait_for_events(self, count: int, timeout_s: float = 5.0) -> list[AnyEvent]:
        """All events that came in batches, once there are ``count``. Raises ``TimeoutError``."""
        end_s = time.monotonic() + timeout_s
        while len(events := self.events()) < count:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{len(events)} of {count} events arrived within {timeout_s} s")
            time.sleep(0.002)
        return events

    def forget(self) -> None:
        """Start recording afresh."""
        self.batches.clear()
        self.requests.clear()
        self.authorizations.clear()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._released.set()
        self._http.shutdown()
        self._http.server_close()
        self._thread.join(2)


def refusing_url() -> str:
    """A URL on this machine where nothing listens."""
    with FakeServer() as server:
        return server.url


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in mid-answer is part of many tests."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        fake = self.server.fake
        fake.probes += 1
        if fake.probe_delay_s:
            fake._released.wait(fake.probe_delay_s)
        if fake.sojourn and not self._allowed():
            self._json(401, {"detail": "Unauthorized"})
        elif self.path == CAPABILITIES_PATH and fake.sojourn:
            self._json(200, {"name": "sojourn", "wire": [WIRE_VERSION]})
        else:
            self._json(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        if self.path == EVENTS_PATH:
            self._events(body)
        else:
            self._llm(body)

    def _events(self, body: bytes) -> None:
        fake = self.server.fake
        mode = fake.mode
        if mode == "hang":
            fake._released.wait(60)
            return
        fake.authorizations.append(self.headers.get("authorization"))
        if not self._allowed():
            self._json(401, {"detail": "Unauthorized"})
        elif mode == "500":
            self._json(500, {"detail": "broken"})
        elif mode == "404" or not fake.sojourn:
            self._json(404, {"detail": "Not Found"})
        else:
            try:
                batch = decode_batch(body)
            except WireError as error:
                self._json(400, {"detail": str(error)})
                return
            fake.batches.append(batch)
            outcomes = [EventOutcome(outcome=Outcome.APPLIED) for _ in batch.events]
            self._bytes(200, encode(OutcomeBatch(outcomes=outcomes)))

    def _allowed(self) -> bool:
        key = self.server.fake.api_key
        return key is None or self.headers.get("authorization") == f"Bearer {key}"

    def _llm(self, data: bytes) -> None:
        fake = self.server.fake
        body = json.loads(data or b"{}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        fake.requests.append(LlmRequest(self.path, headers, body))
        if fake.fail_next > 0:
            fake.fail_next -= 1
            self._json(
                500, {"error": {"message": "as told", "type": "server_error"}}, {"retry-after-ms": "1"}
            )
            return
        if fake.reply_delay_s:
            fake._released.wait(fake.reply_delay_s)
        kind = self.path.partition("?")[0].rpartition("/v1")[2]
        if body.get("stream"):
            self._stream(_stream(kind, body, fake.reply))
        else:
            self._json(200, _answer(kind, body, fake.reply))

    def _stream(self, chunks: Iterator[str]) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for chunk in chunks:
            data = chunk.encode()
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()
            if self.server.fake.chunk_delay_s:
                self.server.fake._released.wait(self.server.fake.chunk_delay_s)
        self.wfile.write(b"0\r\n\r\n")

    def _json(self, status: int, document: Any, headers: dict[str, str] | None = None) -> None:
        self._bytes(status, json.dumps(document).encode(), headers)

    def _bytes(self, status: int, data: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)


def _answer(kind: str, body: dict[str, Any], text: str) -> dict[str, Any]:
    model = body.get("model", "fake")
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    if kind == "/responses":
        return _response(model, text)
    if kind == "/completions":
        choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": "stop", "logprobs": None}
        name = "text_completion"
    else:
        choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
        name = "chat.completion"
    return {"id": "fake-1", "object": name, "created": 1, "model": model, "choices": [choice], "usage": usage}


def _response(model: str, text: str) -> dict[str, Any]:
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {
        "type": "message",
        "id": "msg-1",
        "role": "assistant",
        "status": "completed",
        "content": content,
    }
    return {
        "id": "resp-1",
        "object": "response",
        "created_at": 1,
        "model": model,
        "status": "completed",
        "output": [item],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _stream(kind: str, body: dict[str, Any], text: str) -> Iterator[str]:
    model = body.get("model", "fake")
    words = text.split(" ")
    if kind == "/responses":
        response = _response(model, text)
        parts: list[tuple[str, dict[str, Any]]] = [
            ("response.created", {"response": {**response, "output": [], "status": "in_progress"}})
        ]
        where: dict[str, Any] = {"item_id": "msg-1", "output_index": 0, "content_index": 0, "logprobs": []}
        parts += [("response.output_text.delta", {**where, "delta": word + " "}) for word in words]
        parts.append(("response.completed", {"response": response}))
        for number, (name, fields) in enumerate(parts):
            event = {"type": name, "sequence_number": number, **fields}
            yield f"event: {name}\ndata: {json.dumps(event)}\n\n"
        return
    for word in words:
        if kind == "/completions":
            choice: dict[str, Any] = {"index": 0, "text": word + " ", "finish_reason": None, "logprobs": None}
            name = "text_completion"
        else:
            choice = {"index": 0, "delta": {"content": word + " "}, "finish_reason": None}
            name = "chat.completion.chunk"
        chunk = {"id": "fake-1", "object": name, "created": 1, "model": model, "choices": [choice]}
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"
