"""Decoders of what clients, engines and peers send."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import msgspec
from decoder import MAX_MESSAGE_CHARS, Decoder, of_text
from hostile_input import json_bytes, msgpack_bytes
from socketless_connection import SocketlessConnection
from sojourn import dialect_probe, token_usage
from sojourn.aeg import END, START, Aeg
from sojourn.hints import AgenticContext, SojournContext
from sojourn.http_transport import HttpResponse
from sojourn.shell_command import command_class, commands_of, main_head
from sojourn.wire_codec import (
    EventBatch,
    EventOutcome,
    Outcome,
    OutcomeBatch,
    WireError,
    decode_batch,
    decode_context,
    decode_event,
    decode_outcomes,
    encode,
)
from sojourn.wire_events import AegReport, Heartbeat, ProgramEnd, ProgramStart, ToolStart, ToolStop
from sojourn_integrations.openai_agents.run_hooks import _command_head
from sojourn_server.api import refusal_middleware
from sojourn_server.cli import agent_process
from sojourn_server.core.engine_service import UnknownOperation
from sojourn_server.core.request_hints import read_identity
from sojourn_server.gateway.http import (
    dropped_kv_poller,
    engine_client,
    engine_connection,
    engine_descriptions,
    multi_engine_queries,
)
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.client_json import InvalidGenerationRequest
from sojourn_server.gateway.http.generation_request import (
    PromptSizeEstimator,
    parse_generation_request,
    without_identity,
)
from sojourn_server.gateway.http.piggybacked_events import with_events
from sojourn_server.gateway.http.prefill_decode_bodies import (
    decode_body,
    decode_only_body,
    prefill_body,
)
from sojourn_server.gateway.http.prefill_decode_bodies import (
    parse_transfer_params as parse_relayed_params,
)
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper
from sojourn_server.gateway.http.program_migrator import read_stored_kv
from sojourn_server.gateway.http.proxy_headers import engine_request_headers, first_value
from sojourn_server.gateway.http.response_meter import ResponseMeter, SseEventBuffer, parse_prompt_tokens
from sojourn_server.kv_transfer.peer_transport import UnknownTransport, check_address
from sojourn_server.kv_transfer.transfer_request import parse_transfer_params
from sojourn_server.kv_transfer.transfer_stats import StatsUnavailable, read_stats
from sojourn_server.kv_transfer.transfer_wire import HEAD_BYTES, PeerWireError, decode, decode_head
from sojourn_server.kv_transfer.transfer_wire import encode as encode_message
from sojourn_server.metrics.vllm_metrics_page import cache_pool, cache_pools, process_start_time
from sojourn_server.programs.declared_graphs import GraphError, GraphStore
from sojourn_server.programs.tool_call_parsers import MAX_CALLS, parse_tool_calls
from sojourn_server.replay.completions_client import CompletionsClient, RequestError, ServerError
from sojourn_server.routing.routing_events import YieldPrograms
from virtual_engine import VirtualEngine

GOLDEN = Path(__file__).parents[1] / "golden"
TENANTS = ("alice", "bob")
HTTP_RESPONSES = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}",
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"9;a=b\r\ndata: 1\n\n\r\n0\r\nTrailer: 1\r\n\r\n",
    b"HTTP/1.0 200 OK\r\n\r\nuntil it closes",
)
OTHERS = "bob/"
"""Prefix with which the engine names another tenant's programs."""

GRAPH = Aeg(
    {"plan": (), "act": ("bash", "edit")},
    [(START, "plan"), ("plan", "act"), ("act", "plan", 0.9), ("act", END, 0.1)],
)
EVENTS = (
    ProgramStart(
        program_id="p",
        seq=0,
        name="fixer",
        agent_type="coder",
        parent_program_id="q",
        root_program_id="q",
        call_id="c",
        heartbeat=True,
        tenant="t",
    ),
    ToolStart(
        program_id="p",
        seq=1,
        age_s=0.5,
        call_id="c1",
        tool="bash",
        tool_class="pytest",
        expected_s=2.0,
        expected_p95_s=9.5,
    ),
    ToolStop(program_id="p", seq=2, call_id="c1", duration_s=1.25, status="nonzero"),
    Heartbeat(program_id="p", seq=3, age_s=0.25),
    AegReport(program_id="p", seq=4, graph_hash=GRAPH.hash, agent_type="coder", graph=GRAPH.wire()),
    ProgramEnd(program_id="p", seq=5, status="error"),
)
CONTEXT = AgenticContext(
    program_id="p",
    parent_program_id="q",
    root_program_id="q",
    blocks_parent=True,
    expected_resume=False,
    request_id="r1",
    step_id="s",
    priority=3,
    deadline_seconds=9.5,
    expected_output_length=80,
    kv_retention_ttl_seconds=30.0,
    sojourn=SojournContext(
        emitter="e",
        agent_type="coder",
        node="plan",
        heartbeat=True,
        final=True,
        tenant="t",
        expected_steps_left=2.5,
        events=[msgspec.Raw(encode(event)) for event in EVENTS[:4]],
    ),
)
BATCH = EventBatch(v=1, emitter="e", events=[msgspec.Raw(encode(event)) for event in EVENTS], dropped=2)
HINT = encode(CONTEXT).decode()
XARGS = {"session_id": "beside", "agentic_context": HINT}
BODIES: tuple[dict[str, Any], ...] = (
    {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 7,
        "stream": True,
        "vllm_xargs": XARGS,
    },
    {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "session_id": "own",
        "n": 1,
        "kv_transfer_params": {"transfer": "x"},
    },
    {"model": "tiny", "prompt": ["a", "b"], "echo": False, "vllm_xargs": {"agentic_context": HINT}},
    {
        "model": "tiny",
        "input": "hi",
        "previous_response_id": "resp_1",
        "max_output_tokens": 9,
        "vllm_xargs": XARGS,
    },
)


def decode_whole_batch(data: bytes, folder: Path) -> Any:
    batch = decode_batch(data)
    found: list[Any] = []
    reasons: list[str] = []
    for raw in batch.events:
        try:
            found.append(decode_event(raw))
        except WireError as error:
            reasons.append(str(error))
    assert all(len(reason) <= MAX_MESSAGE_CHARS for reason in reasons)
    return batch.emitter, batch.dropped, found


def encode_whole_batch(value: Any) -> bytes:
    emitter, dropped, events = value
    return encode(
        EventBatch(v=1, emitter=emitter, dropped=dropped, events=[msgspec.Raw(encode(one)) for one in events])
    )


OPERATIONS = (
    "events",
    "event_batches",
    "capabilities",
    "programs",
    "program",
    "persist",
    "graphs",
    "graph",
    "stats",
    "decisions",
    "refusal",
    "drain_metrics",
)
_engine = VirtualEngine()


def call_engine(data: bytes, folder: Path) -> Any:
    """Call an engine operation, which the first line names. The answer must be JSON."""
    operation, _, payload = data.decode("utf-8", "surrogateescape").partition("\n")
    return json.loads(_engine.service.call(operation, payload, _engine.now))


def identify(data: bytes, folder: Path) -> Any:
    """Identify a request by its session header and extra arguments, as the engine does."""
    try:
        given = json.loads(data)
    except (ValueError, RecursionError):
        given = {}
    given = given if isinstance(given, dict) else {}
    xargs = given.get("vllm_xargs")
    found = read_identity(given.get("session_id"), xargs if isinstance(xargs, dict) else None)
    assert len(found.reason) < 1000
    return found


def follow_graph(data: bytes, folder: Path) -> Any:
    event = decode_event(data)
    if not isinstance(event, AegReport):
        return None
    graphs = GraphStore()
    if not graphs.follow(event.graph_hash, event.graph, event.agent_type):
        return None
    (known,) = graphs
    for node in (START, END, *known.aeg.nodes):
        known.following(node)
    return event


_names = ProgramIdMapper(TENANTS)


def route_request(data: bytes, folder: Path) -> Any:
    """Route a client's body through a gateway to an engine, or to a pair of engines.

    The first line is the header ``X-Session-ID``."""
    header, _, body = data.partition(b"\n")
    session = first_value([(b"x-session-id", header)], b"x-session-id")
    for api in ClientApi:
        question = parse_generation_request(api, body, session)
        PromptSizeEstimator().tokens(question)
        question.prefix()
        sent, fits = _names.request("alice", body, question)
        check_names(sent, question)
        if fits and question.context is not None and question.context.sojourn is not None:
            with_events(sent, [])
        whole = decode_only_body(api, sent)
        if whole is None:
            prefill_body(api, sent, "t1", "tcp:d:1", 0.25, "epoch")
            decode_body(sent, {"do_remote_prefill": True})
        without_identity(sent)
        name = (
            _names.engine_name("alice", question.program_id)
            if session is not None and question.program_id
            else None
        )
        engine_request_headers(
            [(b"x-session-id", header)],
            key=None,
            rank=None,
            session=name and name.encode("utf-8", "replace").decode("latin-1"),
        )
    return None


def check_names(body: bytes, question: Any) -> None:
    """Check that an engine reads no program of another tenant in a body from ``alice``."""
    # Messages may hold any bytes and numbers.
    document = json.loads(body.decode("utf-8", "surrogateescape"), parse_int=str)
    xargs = document.get("vllm_xargs") or {}
    for session in (document.get("session_id"), xargs.get("session_id")):
        if isinstance(session, str):
            assert not session.startswith(OTHERS)
    identity = read_identity(None, xargs)
    if identity.context is not None:
        ids = (
            identity.context.program_id,
            identity.context.parent_program_id,
            identity.context.root_program_id,
        )
        assert not any(name is not None and name.startswith(OTHERS) for name in ids)
        own = identity.context.sojourn
        assert own is None or own.tenant == "alice"
        for raw in own.events if own is not None else ():
            event = decode_event(raw)
            assert event.program_id.startswith("alice/")


def rename_event(data: bytes, folder: Path) -> Any:
    named = _names.event("alice", msgspec.Raw(data))
    if named is None:
        return None
    event = decode_event(named)
    assert event.program_id.startswith("alice/")
    return event


_YIELD_ORDER = YieldPrograms("a:1", "alice", "p", (("alice", "q"), ("alice", "r")))


def read_engine(data: bytes, folder: Path) -> Any:
    """Decode an engine's answers to a gateway's queries and orders."""
    text = data.decode("utf-8", "replace")
    reply = engine_client.EngineReply(200, data, "application/json")
    yielding = multi_engine_queries._yield_answer(_YIELD_ORDER, reply).programs
    assert set(yielding) <= set(_YIELD_ORDER.programs)
    answer = reply.document or {}
    for document in (answer, engine_client.parse_json_object(text) or {}):
        described = engine_descriptions.describe_pair(document, text, document, 1)
        assert len(described.unfit) < 1000
        engine_descriptions.parse_link_stats(document)
        for programs in dropped_kv_poller._dropped(document).engines:
            for program in programs:
                _names.key(program)
        _names.answer("alice", document)
    return None


def engine_response(data: bytes, folder: Path) -> Any:
    """Decode an engine's response, received at once and in two parts. Then the engine closes the
    connection."""
    found: list[tuple[int, Any, bytes] | None] = []
    for parts in ((data,), (data[: len(data) // 3], data[len(data) // 3 :])):
        wire = SocketlessConnection()
        for part in parts:
            wire.receive(part)
        if not wire.is_aborted:
            wire.connection.connection_lost(None)
        response = wire.response
        assert response.is_complete is (response._error is None)
        body = b"".join(response._parts)
        found.append((response.status, response.raw_headers, body) if response.is_complete else None)
    # Only a size limit may act differently on the two ways to receive the bytes.
    assert found[0] == found[1] or len(data) > engine_connection.MAX_HEAD_BYTES
    if response._error is not None:
        raise response._error()


def meter(data: bytes, folder: Path) -> Any:
    """Meter an engine's answer, received in two chunks."""
    for stream in (False, True):
        found, events = ResponseMeter(stream=stream), SseEventBuffer()
        passed = b""
        for chunk in (data[: len(data) // 3], data[len(data) // 3 :]):
            found.add_chunk(chunk)
            passed += events.push(chunk)
        assert passed + events.rest() == data
        assert isinstance(found.prompt_tokens, int | None)
        assert isinstance(found.output_tokens, int)
        assert isinstance(found.response_id, str | None)
        parse_prompt_tokens(data)
        for status in (200, 500):
            answer: Any = SimpleNamespace(
                response=SimpleNamespace(status=status), first=data, is_stream=stream
            )
            engine_client.is_engine_failure(answer)
        engine_client._is_engine_dead_error(data)
    token_usage.of_tail(data)
    parse_relayed_params(data)
    refusal_middleware.rewrite_error(data, "refused")
    refusal_middleware.rewrite_error_event(data, "refused")


def probe(data: bytes, folder: Path) -> Any:
    class Transport:
        def __init__(self, first: int) -> None:
            self.first = first

        def get(self, path: str, timeout_s: float) -> HttpResponse:
            return HttpResponse(self.first if path.endswith("capabilities") else 200, data)

    for first in (200, 404):
        dialect_probe.probe_dialect(Transport(first), timeout_s=1.0)  # type: ignore[arg-type]


def ask_server(data: bytes, folder: Path) -> Any:
    """Decode a server's stream of completions, and its answer to a discovery query."""
    import asyncio

    import httpx

    async def ask() -> Any:
        async with CompletionsClient("http://server") as client:
            await client._http.aclose()
            client._http = httpx.AsyncClient(
                transport=httpx.MockTransport(lambda request: httpx.Response(200, content=data))
            )
            with suppress(ServerError):
                await client.discover(None)
            return await client.complete("m", [1, 2], 3)

    return asyncio.run(ask()) and None


def read_status(data: bytes, folder: Path) -> None:
    read_stored_kv(data)
    read_stats(data, "unix:/run/a")


def find_server(data: bytes, folder: Path) -> Any:
    notes: list[str] = []
    with patch.object(agent_process, "get_capabilities", lambda root: (200, data)):
        agent_process.openai_base_url_root({"OPENAI_BASE_URL": "http://h:1/v1"}, notes.append)


def read_calls(text: str) -> Any:
    calls = parse_tool_calls(text)
    assert len(calls) <= MAX_CALLS
    for call in calls:
        assert len(call.key) <= 300
    commands_of(text)
    head = main_head(text)
    assert head is None or len(head) <= 64
    command_class(text)
    return calls


def read_metrics(text: str) -> None:
    cache_pools(text)
    cache_pool(text)
    started = process_start_time(text)
    assert started is None or len(started) <= len(text)


def documents_of(*texts: bytes) -> tuple[Any, ...]:
    return tuple(json.loads(text) for text in texts)


FRAMES = tuple(path.read_bytes() for path in sorted((GOLDEN / "paths").glob("*.bin")))
MESSAGES = tuple(
    frame[HEAD_BYTES : HEAD_BYTES + decode_head(frame[:HEAD_BYTES]).message_bytes] for frame in FRAMES
)
PARAMS = (
    {"do_remote_decode": True, "transfer": "t", "peer": "tcp:h:1", "decode_share": 0.5, "epoch": "e"},
    {"do_remote_prefill": True, "transfer": "t", "context": "t.0", "epoch": "e", "stored": 12},
)
REPORTED = {
    "name": "sojourn",
    "engines": 1,
    "engine": {"block_size": 16, "num_blocks": 100, "max_num_seqs": 8},
    "tiers": {"on": True, "host": {"blocks": 10}, "disk": {"shared": True}},
    "data": [{"id": "m", "max_model_len": 4096}],
    "paths": {
        "role": "prefill",
        "peer": "tcp:h:1",
        "node": "n",
        "epoch": "e",
        "block_s": 0.01,
        "block_bytes": 64,
        "block_tokens": 16,
        "kv": "d",
        "links": {"storage read": {"queued_s": 0.5, "queued_bytes": 3, "moved_bytes": 4}},
    },
    "programs": [{"program_id": "bob/p", "placed": "waiting", "turns": 3}],
}
PAGE = (
    'vllm:cache_config_info{block_size="16",engine="0",num_gpu_blocks="256"} 1.0\n'
    "process_start_time_seconds 1.7e+09\n"
)
ANSWER = {
    "id": "resp_1",
    "choices": [{"text": "x"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}},
    "error": {"message": engine_client.ENGINE_DEAD_MESSAGE, "code": 500},
    "kv_transfer_params": PARAMS[1],
}
SSE = (
    b'data: {"error": {"message": "x", "code": 400}}\n\ndata: ' + json_bytes(ANSWER) + b"\n\ndata: [DONE]\n\n"
)
CAPABILITIES = (
    {"name": "sojourn", "wire": [1]},
    {"data": [{"owned_by": "sglang"}]},
    {
        "router_mode": "tr",
        "scheduling_enabled": True,
        "programs_count": 0,
        "resume_order": [],
        "retained_requests": 1,
        "enabled": True,
    },
)
OUTPUTS = (
    b'{"type": "function_call", "name": "bash", "arguments": "{\\"command\\": \\"cd x && pytest | tail\\"}"}',
    b'<tool_call>\n{"name": "bash", "arguments": {"command": ["bash", "-lc", "ls"]}}\n</tool_call>',
    b"<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value></tool_call>",
    b"<function=bash><parameter=command>\nls -l\n</parameter></function>",
    b'<invoke name="search"><parameter name="q">x</parameter></invoke>',
    b"thought</think>[search(q='a', n=1), bash(command=\"ls\")]",
    b'{"commands": [{"keystrokes": "ls\\n"}]}',
    b"Let us see.\n```bash\ntimeout 60 pytest -q <<'EOF' | tail\nx\nEOF\n```\n<|im_end|>",
)

WIRE_DECODERS: dict[str, Decoder] = {
    "event batch": Decoder(
        modules=("sojourn/wire_codec.py", "sojourn_server/api/event_intake.py"),
        decode=decode_whole_batch,
        encode=encode_whole_batch,
        examples=(encode(BATCH),),
        documents=documents_of(encode(BATCH)),
        pack=json_bytes,
        errors=(WireError,),
    ),
    "event": Decoder(
        modules=("sojourn/wire_codec.py",),
        decode=lambda data, folder: decode_event(data),
        encode=encode,
        examples=tuple(map(encode, EVENTS)),
        documents=documents_of(*map(encode, EVENTS)),
        pack=json_bytes,
        errors=(WireError,),
    ),
    "hint": Decoder(
        modules=("sojourn/wire_codec.py",),
        decode=lambda data, folder: decode_context(data),
        encode=encode,
        examples=(encode(CONTEXT), b'{"program_id":"p"}'),
        documents=documents_of(encode(CONTEXT)),
        pack=json_bytes,
        errors=(WireError,),
    ),
    "outcomes": Decoder(
        modules=("sojourn/wire_codec.py",),
        decode=lambda data, folder: decode_outcomes(data),
        encode=encode,
        examples=(
            encode(
                OutcomeBatch(
                    outcomes=[EventOutcome(outcome=Outcome.CLIPPED, reason="x", program_id="p", seq=3)]
                )
            ),
        ),
        errors=(WireError,),
    ),
    "engine call": Decoder(
        modules=("sojourn_server/core/engine_service.py", "sojourn_server/core/client_event_decoder.py"),
        decode=call_engine,
        examples=(
            b"events\n" + encode(BATCH),
            b"event_batches\n[" + encode(BATCH) + b"]",
            *(
                name.encode()
                + b'\n{"limit": 3, "since": 0, "program_id": "p", "graph_hash": "h", "request_id": "r"}'
                for name in OPERATIONS[2:]
            ),
        ),
        errors=(WireError, UnknownOperation),
    ),
    "request identity": Decoder(
        modules=("sojourn_server/core/request_hints.py",),
        decode=identify,
        examples=(json_bytes({"session_id": "s", "vllm_xargs": XARGS}),),
        documents=({"session_id": "s", "vllm_xargs": XARGS},),
        pack=json_bytes,
    ),
    "execution graph": Decoder(
        modules=("sojourn_server/programs/declared_graphs.py", "sojourn/aeg.py"),
        decode=follow_graph,
        encode=lambda event: encode(event if event is not None else EVENTS[0]),
        examples=(encode(EVENTS[4]),),
        documents=documents_of(encode(EVENTS[4])),
        pack=json_bytes,
        errors=(WireError, GraphError),
    ),
    "generation request": Decoder(
        modules=(
            "sojourn_server/gateway/http/client_json.py",
            "sojourn_server/gateway/http/generation_request.py",
            "sojourn_server/gateway/http/prefill_decode_bodies.py",
            "sojourn_server/gateway/http/program_id_mapper.py",
            "sojourn_server/gateway/http/piggybacked_events.py",
            "sojourn_server/gateway/http/proxy_headers.py",
        ),
        decode=route_request,
        examples=tuple(b"header\n" + json_bytes(body) for body in BODIES),
        documents=BODIES,
        pack=lambda document: b"header\n" + json_bytes(document),
        errors=(InvalidGenerationRequest,),
    ),
    "renamed event": Decoder(
        modules=("sojourn_server/gateway/http/program_id_mapper.py",),
        decode=rename_event,
        examples=tuple(map(encode, EVENTS)),
        documents=documents_of(*map(encode, EVENTS)),
        pack=json_bytes,
    ),
    "engine report": Decoder(
        modules=(
            "sojourn_server/gateway/http/engine_descriptions.py",
            "sojourn_server/gateway/http/engine_client.py",
            "sojourn_server/gateway/http/dropped_kv_poller.py",
            "sojourn_server/gateway/http/multi_engine_queries.py",
            "sojourn_server/gateway/http/engine_probe.py",
        ),
        decode=read_engine,
        examples=(json_bytes(REPORTED), PAGE.encode()),
        documents=(REPORTED,),
        pack=json_bytes,
    ),
    "engine metrics page": Decoder(
        modules=("sojourn_server/metrics/vllm_metrics_page.py",),
        decode=of_text(read_metrics),
        examples=(PAGE.encode(),),
    ),
    "engine response": Decoder(
        modules=("sojourn_server/gateway/http/engine_connection.py",),
        decode=engine_response,
        examples=HTTP_RESPONSES,
        errors=(engine_connection.EngineConnectionError,),
    ),
    "engine answer": Decoder(
        modules=(
            "sojourn_server/gateway/http/response_meter.py",
            "sojourn_server/gateway/http/engine_client.py",
            "sojourn_server/gateway/http/prefill_decode_bodies.py",
            "sojourn_server/api/refusal_middleware.py",
            "sojourn/token_usage.py",
        ),
        decode=meter,
        examples=(json_bytes(ANSWER), SSE),
        documents=(ANSWER,),
        pack=json_bytes,
    ),
    "server probe": Decoder(
        modules=("sojourn/dialect_probe.py",),
        decode=probe,
        examples=tuple(map(json_bytes, CAPABILITIES)),
        documents=CAPABILITIES,
        pack=json_bytes,
    ),
    "peer frame head": Decoder(
        modules=("sojourn_server/kv_transfer/transfer_wire.py",),
        decode=lambda data, folder: decode_head(data),
        examples=tuple(frame[:HEAD_BYTES] for frame in FRAMES),
        errors=(PeerWireError,),
    ),
    "peer message": Decoder(
        modules=("sojourn_server/kv_transfer/transfer_wire.py",),
        decode=lambda data, folder: decode(data),
        encode=lambda message: encode_message(message)[HEAD_BYTES:],
        examples=MESSAGES,
        documents=tuple(msgspec.msgpack.decode(message) for message in MESSAGES),
        pack=msgpack_bytes,
        errors=(PeerWireError,),
    ),
    "peer address": Decoder(
        modules=("sojourn_server/kv_transfer/peer_transport.py",),
        decode=of_text(check_address),
        examples=(b"tcp:10.0.0.7:8500", b"tcp:[::1]:1", b"unix:/run/a"),
        refused=(b"nixl:x",),
        errors=(ValueError, UnknownTransport),
    ),
    "KV transfer parameters": Decoder(
        modules=("sojourn_server/kv_transfer/transfer_request.py",),
        decode=lambda data, folder: parse_transfer_params(_mapping(data)),
        examples=tuple(map(json_bytes, PARAMS)),
        documents=PARAMS,
        pack=json_bytes,
        errors=(ValueError,),
    ),
    "KV transfer status": Decoder(
        modules=(
            "sojourn_server/kv_transfer/transfer_stats.py",
            "sojourn_server/gateway/http/program_migrator.py",
        ),
        decode=read_status,
        examples=(
            json_bytes(REPORTED),
            b"null",
            b'{"context_tokens": 3, "stored_tokens": 2, "pending_tokens": 1}',
        ),
        documents=(REPORTED,),
        pack=json_bytes,
        errors=(StatsUnavailable,),
    ),
    "stream of completions": Decoder(
        modules=("sojourn_server/replay/completions_client.py",),
        large_bytes=16 * 1024,
        decode=ask_server,
        examples=(
            b'data: {"choices": [{"text": "x", "token_ids": [1]}]}\n\ndata: '
            + json_bytes({"choices": [], "usage": ANSWER["usage"]})
            + b"\n\ndata: [DONE]\n\n",
        ),
        errors=(RequestError,),
    ),
    "server of OPENAI_BASE_URL": Decoder(
        modules=("sojourn_server/cli/agent_process.py",),
        decode=find_server,
        examples=tuple(map(json_bytes, CAPABILITIES)),
    ),
    "tool arguments": Decoder(
        modules=("sojourn_integrations/openai_agents/run_hooks.py",),
        decode=of_text(lambda text: _command_head(text)),
        examples=(b'{"command": "cd x && pytest -q"}', b'{"cmd": "ls"}'),
    ),
    "model output": Decoder(
        modules=("sojourn_server/programs/tool_call_parsers.py", "sojourn/shell_command.py"),
        decode=of_text(read_calls),
        examples=OUTPUTS,
    ),
}


def _mapping(data: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
