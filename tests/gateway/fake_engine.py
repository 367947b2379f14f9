"""An engine for tests of the gateway: real HTTP on a real port, vLLM's answers, and faults on demand."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import uvicorn
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

Engine = TypeVar("Engine", bound="FakeEngine")


class FakeEngine:
    """Answers like one ``vllm serve`` with the sojourn plugin."""

    def __init__(self, *, key: str | None = None, shared_disk: bool = False) -> None:
        self.blocks, self.block_size, self.key = 1001, 16, key
        self.started_s = 1.0
        """Reported start time. A new number means that the engine was restarted."""
        self.healthy = True
        self.silent = False
        """Whether it accepts connections, but does not answer health checks."""
        self.deaf = False
        """Whether it answers events with an error."""
        self.dead_core = False
        self.cut_after: int | None = None
        """Number of events after which a stream breaks off."""
        self.stream_events = 5
        self.event_bytes = 0
        """Size of a text in each event of a stream."""
        self.hang_after: int | None = None
        """Number of events after which a stream stays silent."""
        self.break_before_first_byte = 0
        """Number of next requests whose connection closes before any answer."""
        self.hold: asyncio.Event | None = None
        """Event for which answers wait before their first byte."""
        self.max_num_seqs = 64
        self.shared_disk = shared_disk
        self.requests: list[dict[str, Any]] = []
        """Bodies of the requests that generate."""
        self.bodies: list[bytes] = []
        """Raw bodies of these requests, including those that cannot be parsed."""
        self.headers: list[dict[str, str]] = []
        self.raw_headers: list[list[tuple[bytes, bytes]]] = []
        self.events: list[dict[str, Any]] = []
        self.streaming = 0
        """Number of streams that have not ended."""
        self.gave_up = 0
        """Number of answers whose client disconnected."""
        self.persisted: list[str] = []
        self.persist_looks = 0
        """Number of persist requests after which a program's KV counts as written to disk."""
        self.no_metrics = False
        self.looked_at = 0
        self.first_event: str | None = None
        """First event of streams; ``None`` for the usual one."""
        self.served: set[str] = set()
        """Programs that this process has answered."""
        self.stored: dict[str, dict[str, Any]] = {}
        """Answers of the responses API by id, as with ``VLLM_ENABLE_RESPONSES_API_STORE=1``."""
        self.cancelled: list[str] = []
        self.lost: list[str] = []
        """Programs whose KV it has lost."""
        self.port = 0
        self.about: dict[str, Any] = {}
        """Fields of its answer about a program."""
        self.asked: list[tuple[str, str | None, str | None]] = []
        """Path, ``Authorization`` and ``X-API-Key`` of each request."""
        self._server: uvicorn.Server | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def hint(self) -> dict[str, Any]:
        """The hint of the last request that generates."""
        hint: dict[str, Any] = json.loads(self.requests[-1]["vllm_xargs"]["agentic_context"])
        return hint

    @property
    def attached(self) -> list[tuple[str, str]]:
        """Types and programs of the events in that hint."""
        return [(event["type"], event["program_id"]) for event in self.hint["sojourn"].get("events", [])]

    async def start(self) -> None:
        bound = socket.socket(proto=socket.IPPROTO_TCP)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(("127.0.0.1", self.port))
        self.port = bound.getsockname()[1]
        app = self._app()

        async def record(scope: Any, receive: Any, send: Any) -> None:
            names = Headers(scope=scope)
            shown = names.get("authorization")
            self.asked.append((scope["path"], shown, names.get("x-api-key")))
            is_open = self.key is None or scope["path"] in ("/health", "/metrics")
            is_allowed = is_open or shown == f"Bearer {self.key}"
            answer = app if is_allowed else JSONResponse({"error": "Unauthorized"}, 401)
            await answer(scope, receive, send)

        config = uvicorn.Config(record, log_level="error", ws="none", lifespan="off", loop="asyncio")
        self._server = uvicorn.Server(config)
        self._task = asyncio.ensure_future(self._server._serve(sockets=[bound]))
        while not self._server.started:
            await asyncio.sleep(0.005)

    async def kill(self) -> None:
        """End the engine as SIGKILL does. Connections are reset, and the port is closed."""
        assert self._server is not None
        assert self._task is not None
        for server in self._server.servers:
            server.close()
        for connection in list(self._server.server_state.connections):
            transport = getattr(connection, "transport", None)
            if transport is not None:
                transport.abort()
        self._server.force_exit = self._server.should_exit = True
        if self.hold is not None:
            self.hold.set()
        await self._task

    async def restart(self) -> None:
        """Start a new process of the engine at the same port."""
        self.started_s += 1.0
        self.served.clear()
        await self.start()

    def of(self, program_id: str) -> list[str]:
        """Types of the received events of a program."""
        return [event["type"] for event in self.events if event["program_id"] == program_id]

    def _app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/health", self._health),
                Route("/metrics", self._metrics),
                Route("/v1/models", self._models),
                Route("/v1/chat/completions", self._generate, methods=["POST"]),
                Route("/v1/completions", self._generate, methods=["POST"]),
                Route("/v1/responses", self._generate, methods=["POST"]),
                Route("/v1/messages", self._generate, methods=["POST"]),
                Route("/v1/responses/{name}", self._response),
                Route("/v1/responses/{name}/cancel", self._response, methods=["POST"]),
                Route("/v1/messages/count_tokens", self._count_tokens, methods=["POST"]),
                Route("/tokenize", self._tokenize, methods=["POST"]),
                Route("/sojourn/v1/capabilities", self._capabilities),
                Route("/sojourn/v1/events", self._take_events, methods=["POST"]),
                Route("/sojourn/v1/stats", self._stats),
                Route("/sojourn/v1/decisions", self._decisions),
                Route("/sojourn/v1/load", self._load),
                Route("/sojourn/v1/programs/{name:path}/persist", self._persist, methods=["POST"]),
                Route("/sojourn/v1/programs/{name:path}", self._program),
            ]
        )

    async def _health(self, request: Request) -> Response:
        if self.silent:
            await asyncio.sleep(3600)
        return Response(status_code=200 if self.healthy else 503)

    async def _metrics(self, request: Request) -> Response:
        self.looked_at += 1
        if self.no_metrics:
            return Response(status_code=500)
        return PlainTextResponse(
            f"process_start_time_seconds {self.started_s}\n"
            f'vllm:cache_config_info{{block_size="{self.block_size}",engine="0",'
            f'num_gpu_blocks="{self.blocks}"}} 1.0\n'
        )

    async def _models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [{"id": "tiny", "max_model_len": 4096}]})

    async def _capabilities(self, request: Request) -> Response:
        disk = {"blocks": 1000, "bytes": 1 << 20, "shared": True} if self.shared_disk else None
        tiers = {"connector": "x", "on": True, "host": {"blocks": 10, "bytes": 1}, "disk": disk}
        engine = {"block_size": self.block_size, "num_blocks": self.blocks, "max_num_seqs": self.max_num_seqs}
        return JSONResponse(
            {
                "name": "sojourn",
                "wire": [1],
                "policy": "x",
                "engine": engine,
                "engines": 1,
                "tiers": tiers,
                "unused_hints": ["deadline_seconds", "priority"],
            }
        )

    async def _decisions(self, request: Request) -> Response:
        lines = "application/x-ndjson"
        if request.query_params.get("format") == "ndjson" or lines in request.headers.get("accept", ""):
            return Response(b"{}\n", media_type=lines)
        return JSONResponse({"decisions": [{}]})

    async def _take_events(self, request: Request) -> Response:
        if self.deaf:
            return Response(status_code=500)
        batch = await request.json()
        self.events += batch["events"]
        self.served -= {one["program_id"] for one in batch["events"] if one["type"] == "program_end"}
        outcomes = [
            {"outcome": "applied", "program_id": e["program_id"], "seq": e["seq"]} for e in batch["events"]
        ]
        return JSONResponse({"v": 1, "outcomes": outcomes})

    async def _persist(self, request: Request) -> Response:
        self.persisted.append(request.path_params["name"])
        left = 0 if len(self.persisted) > self.persist_looks else 160
        told = {"program_id": self.persisted[-1], "state": "writing", "reason": None, "turns": 1}
        tokens = {"context_tokens": 1600, "stored_tokens": 1600 - left, "pending_tokens": left}
        return JSONResponse({**told, **tokens, "compute_s": None})

    async def _stats(self, request: Request) -> Response:
        return JSONResponse({"programs": len(self.events)})

    async def _load(self, request: Request) -> Response:
        there = [
            {"program_id": name, "tokens": 100, "context_tokens": 105}
            for name in sorted(self.served.difference(self.lost))
        ]
        return JSONResponse({"engines": [{"programs": there, **self.pair_load()}]})

    def pair_load(self) -> dict[str, Any]:
        """Fields of its load that only an engine of a pair has."""
        return {}

    async def _program(self, request: Request) -> Response:
        return JSONResponse({"program_id": request.path_params["name"], "status": "acting", **self.about})

    async def _response(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in self.stored:
            message = f"Response with id '{name}' not found."
            error = {"message": message, "type": "invalid_request_error", "param": "response_id", "code": 404}
            return JSONResponse({"error": error}, 404)
        if request.method == "POST":
            self.cancelled.append(name)
        if request.query_params.get("stream") == "true":
            return StreamingResponse(self._stream(request), media_type="text/event-stream")
        return JSONResponse(self.stored[name])

    async def _count_tokens(self, request: Request) -> Response:
        self.headers.append(dict(request.headers))
        return JSONResponse({"input_tokens": len((await request.json())["messages"])})

    async def _tokenize(self, request: Request) -> Response:
        return JSONResponse({"tokens": [1, 2, 3]})

    async def _generate(self, request: Request) -> Response:
        self.bodies.append(await request.body())
        try:
            body = await request.json()
        except ValueError:
            return JSONResponse({"error": {"message": "no JSON that can be read", "code": 400}}, 400)
        self.requests.append(body)
        self.headers.append(dict(request.headers))
        self.raw_headers.append(list(request.scope["headers"]))
        if self.dead_core:
            message = "EngineCore encountered an issue. See stack trace (above) for the root cause."
            return JSONResponse({"error": {"message": message, "code": 500}}, 500)
        if self.break_before_first_byte:
            self.break_before_first_byte -= 1
            self._abort(request)
            await asyncio.sleep(3600)
        if self.hold is not None:
            waiting = asyncio.ensure_future(self.hold.wait())
            gone = asyncio.ensure_future(_disconnected(request))
            await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            gone.cancel()
            if gone.done() and not gone.cancelled():
                self.gave_up += 1
                return Response(status_code=499)
        if name := request.headers.get("x-session-id"):
            self.served.add(name)
        if request.url.path == "/v1/responses" and body.get("store") is not False:
            if body.get("previous_response_id", "resp_abc") not in {*self.stored, "resp_abc"}:
                return JSONResponse({"error": {"message": "not found", "code": 404}}, 404)
            name = body.get("request_id", "resp_abc")
            self.stored[name] = {"id": name, "status": "completed", "at": self.name}
        if not body.get("stream"):
            usage = {"prompt_tokens": 100, "completion_tokens": 5, "total_tokens": 105}
            name = body.get("request_id", "resp_abc")
            return JSONResponse({"id": name, "model": "tiny", "text": self.name, "usage": usage})
        return StreamingResponse(self._counted(self._stream(request)), media_type="text/event-stream")

    def _abort(self, request: Request) -> None:
        """Break the connection of a request."""
        for connection in list(self._server.server_state.connections):  # type: ignore[union-attr]
            if getattr(connection, "scope", None) is request.scope:
                connection.transport.abort()

    async def _counted(self, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        self.streaming += 1
        try:
            async for part in parts:
                yield part
        finally:
            self.streaming -= 1

    async def _stream(self, request: Request) -> AsyncIterator[bytes]:
        if self.first_event is not None:
            yield self.first_event.encode()
            yield b"data: [DONE]\n\n"
            return
        for number in range(self.stream_events):
            if number == self.hang_after:
                await asyncio.sleep(3600)
            if self.cut_after is not None and number == self.cut_after:
                # Half an event, and then nothing.
                yield b'data: {"half'
                await asyncio.sleep(0.05)
                self._abort(request)
                return
            event = {
                "number": number,
                "at": self.name,
                **({"text": "x" * self.event_bytes} if self.event_bytes else {}),
            }
            yield b"data: " + json.dumps(event).encode() + b"\n\n"
            await asyncio.sleep(0)
        yield b"data: [DONE]\n\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


@asynccontextmanager
async def running(*engines: Engine) -> AsyncIterator[list[Engine]]:
    """Run the engines until the end of the ``with`` block, or until they are killed."""
    for engine in engines:
        await engine.start()
    try:
        yield list(engines)
    finally:
        for engine in engines:
            if engine._task is not None and not engine._task.done():
                await engine.kill()


@asynccontextmanager
async def engines(count: int, **options: Any) -> AsyncIterator[list[FakeEngine]]:
    """Run ``count`` engines."""
    async with running(*(FakeEngine(**options) for _ in range(count))) as found:
        yield found
