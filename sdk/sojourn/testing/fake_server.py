"""A fake server for tests of agents and integrations: it records the events and requests it receives.

    with FakeServer() as server:
        sojourn.init(server.url)
        ...
        assert [type(e).__name__ for e in server.events()] == ["ProgramStart", "ProgramEnd"]

It listens on 127.0.0.1, takes event batches, answers the capabilities probe, and serves the parts of the
OpenAI API (chat, completions, responses) and of Anthropic's (messages) that clients need, streamed or not,
tool calls included. ``script`` sets its answers, ``mode`` its failures. It imports the wire format and the
standard library.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, NamedTuple
from urllib.parse import unquote

import msgspec

from sojourn.hints import AgenticContext
from sojourn.wire_codec import (
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
from sojourn.wire_events import AnyEvent

from .scripted_answers import Answer, ToolUse, answer_body, answer_stream

_PROGRAMS = "/sojourn/v1/programs/"
MODES = ("ok", "500", "404", "hang")
"""Behaviours of the events endpoint: accept events, answer 500, answer 404, or send no answer. For a refused
connection use ``refusing_url()``."""


class LlmRequest(NamedTuple):
    """One HTTP attempt of an LLM request as it arrived."""

    path: str
    headers: dict[str, str]
    """Headers with lower-case names."""
    body: dict[str, Any]
    batches_before: int = 0
    """Number of event batches that had arrived before this request."""

    @property
    def context(self) -> AgenticContext | None:
        """The decoded ``agentic_context``; ``None`` if the request has none. Raises ``WireError``."""
        xargs = self.body.get("vllm_xargs")
        text = xargs.get("agentic_context") if isinstance(xargs, dict) else None
        return None if text is None else decode_context(text)

    @property
    def emitter(self) -> str:
        """Id of the emitter that numbered the carried events; empty if there are none."""
        context = self.context
        ours = context.sojourn if context is not None else None
        return (ours.emitter or "") if ours is not None else ""

    @property
    def events(self) -> list[AnyEvent]:
        """The events that the request carried. Raises ``WireError``."""
        context = self.context
        if context is None or context.sojourn is None:
            return []
        return [decode_event(raw) for raw in context.sojourn.events]


Reply = str | ToolUse | Sequence[ToolUse] | Answer
"""One entry of a script: a text, one or more tool calls, or an ``Answer`` with text and tool calls."""
Script = Iterable[Reply] | Callable[[LlmRequest], Reply]


class FakeServer:
    """Records batches and LLM requests. Attributes may be set while it runs, from any thread."""

    def __init__(
        self,
        script: Script = (),
        *,
        mode: str = "ok",
        sojourn: bool = True,
        api_key: str | None = None,
    ) -> None:
        self.script = script
        """The answers to LLM requests. A list is used in order; after its end every answer is ``reply``. A
        function gets the ``LlmRequest`` and returns the answer; several threads may call it at once."""
        self.mode = mode
        """Behaviour of the events endpoint: one of ``MODES``."""
        self.sojourn = sojourn
        """Whether the server has the capabilities page and the events endpoint. If not, it behaves like a
        stock server."""
        self.api_key = api_key
        """If set, probes and events without this API key get the answer 401."""
        self.fail_next = 0
        """Number of further LLM requests that get the answer 500."""
        self.reply = "hello from the fake"
        """Text of the answers for which the script has no entry. A stream sends it word by word."""
        self.verdict: Callable[[AnyEvent], Outcome] = lambda event: Outcome.APPLIED
        """Function that returns the server's outcome for one event of a batch."""
        self.chunk_delay_s = 0.0
        self.reply_delay_s = 0.0
        self.probe_delay_s = 0.0
        self.batches: list[EventBatch] = []
        self.requests: list[LlmRequest] = []
        self.authorizations: list[str | None] = []
        """The ``Authorization`` header of every request to the events endpoint."""
        self.probes = 0
        """Number of GET requests, except those for programs."""
        self.programs: dict[str, Any] = {}
        """Program id → the JSON answer of ``GET /sojourn/v1/programs/{id}``. Other ids get 404."""
        self.program_lookups: list[str] = []
        """Program ids for which ``GET /sojourn/v1/programs/{id}`` was called."""
        self._script_lock = threading.Lock()
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
        """URL for ``sojourn.init``."""
        return f"http://{self.host}"

    @property
    def base_url(self) -> str:
        """URL for an OpenAI client."""
        return f"{self.url}/v1"

    def events(self, *, piggybacked: bool = False) -> list[AnyEvent]:
        """Return the events that arrived in batches, in order of arrival; with ``piggybacked``, the events
        that LLM requests carried instead."""
        if piggybacked:
            return [event for request in list(self.requests) for event in request.events]
        return [decode_event(raw) for batch in list(self.batches) for raw in batch.events]

    def wait_for_events(self, count: int, timeout_s: float = 5.0) -> list[AnyEvent]:
        """Wait until ``count`` events have arrived in batches, and return all events so far. Raises
        ``TimeoutError``."""
        end_s = time.monotonic() + timeout_s
        while len(events := self.events()) < count:
            if time.monotonic() > end_s:
                raise TimeoutError(f"{len(events)} of {count} events arrived within {timeout_s} s")
            time.sleep(0.002)
        return events

    def program_events(self) -> list[AnyEvent]:
        """Return all events, from batches and requests, each once. They are sorted by emitter, then in the
        order in which the emitter numbered them."""
        seen: dict[tuple[str, str, int], AnyEvent] = {}
        for batch in list(self.batches):
            for raw in batch.events:
                event = decode_event(raw)
                seen.setdefault((batch.emitter, event.program_id, event.seq), event)
        for request in list(self.requests):
            emitter = request.emitter
            for event in request.events:
                seen.setdefault((emitter, event.program_id, event.seq), event)
        return [seen[key] for key in sorted(seen, key=lambda key: (key[0], key[2]))]

    def next_answer(self, request: LlmRequest) -> Answer:
        """Return the script's answer to this request."""
        if callable(self.script):
            return Answer.of(self.script(request))
        with self._script_lock:
            if not isinstance(self.script, Iterator):
                self.script = iter(self.script)
            return Answer.of(next(self.script, self.reply))

    def forget(self) -> None:
        """Clear the recorded ``batches``, ``requests`` and ``authorizations``."""
        self.batches.clear()
        self.requests.clear()
        self.authorizations.clear()

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._released.set()  # last, so that a client that retries a dropped request is refused
        self._thread.join(2)


def refusing_url() -> str:
    """Return a URL on this machine where no server listens, so that connections are refused."""
    with FakeServer() as server:
        return server.url


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    fake: FakeServer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore errors of a connection, since in many tests clients disconnect during an answer."""


def _outcome(verdict: Callable[[AnyEvent], Outcome], raw: msgspec.Raw) -> EventOutcome:
    try:
        event = decode_event(raw)
    except WireError as error:
        return EventOutcome(outcome=Outcome.REJECTED, reason=str(error))
    return EventOutcome(outcome=verdict(event), program_id=event.program_id, seq=event.seq)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def do_GET(self) -> None:
        fake = self.server.fake
        if self.path.startswith(_PROGRAMS):
            self._program(unquote(self.path.removeprefix(_PROGRAMS)))
            return
        fake.probes += 1
        if fake.probe_delay_s:
            fake._released.wait(fake.probe_delay_s)
        if fake.sojourn and not self._allowed():
            self._json(401, {"detail": "Unauthorized"})
        elif self.path == CAPABILITIES_PATH and fake.sojourn:
            self._json(200, {"name": "sojourn", "wire": [WIRE_VERSION]})
        else:
            self._json(404, {"detail": "Not Found"})

    def _program(self, program_id: str) -> None:
        fake = self.server.fake
        fake.program_lookups.append(program_id)
        document = fake.programs.get(program_id)
        if fake.mode == "500":
            self._json(500, {"detail": "broken"})
        elif fake.mode == "hang":
            self._hang()
        elif not self._allowed():
            self._json(401, {"detail": "Unauthorized"})
        elif document is None:
            self._json(404, {"detail": "Not Found"})
        else:
            self._json(200, document)

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
            self._hang()
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
            outcomes = [_outcome(fake.verdict, raw) for raw in batch.events]
            self._bytes(200, encode(OutcomeBatch(outcomes=outcomes)))

    def _hang(self) -> None:
        """Answer nothing for a minute, or until the server stops; then close the connection."""
        self.server.fake._released.wait(60)
        self.close_connection = True

    def _allowed(self) -> bool:
        key = self.server.fake.api_key
        return key is None or self.headers.get("authorization") == f"Bearer {key}"

    def _llm(self, data: bytes) -> None:
        fake = self.server.fake
        body = json.loads(data or b"{}")
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = LlmRequest(self.path, headers, body, len(fake.batches))
        fake.requests.append(request)
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
            self._stream(answer_stream(kind, body, fake.next_answer(request)))
        else:
            self._json(200, answer_body(kind, body, fake.next_answer(request)))

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
