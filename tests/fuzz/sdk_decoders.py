"""Decoders of the SDK, of the command line beside it, and of traces."""

from __future__ import annotations

import gzip
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
from decoder import Decoder, in_file, json_bytes
from sojourn import dialect_probe, resume_file, token_usage
from sojourn.errors import ArgumentError
from sojourn.http_transport import HttpResponse
from sojourn_server.cli import agent_process
from sojourn_server.replay.completions_client import CompletionsClient, RequestError, ServerError
from sojourn_server.traces.imports.ledger_import import read_ledgers
from sojourn_server.traces.prompt_builder import plan_turns
from sojourn_server.traces.trace_file import read_trace
from sojourn_server.traces.trace_schema import TraceError, TraceProgram, TraceTurn
from virtual_engine import VirtualEngine, prompt

TRACE = (
    TraceProgram(
        program_id="p",
        source="s",
        turns=(
            TraceTurn(
                prompt_tokens=64, output_tokens=20, append_tokens=64, tool="bash", tool_seconds=2.0, t=0.0
            ),
            TraceTurn(prompt_tokens=100, output_tokens=8, append_tokens=16, cached_tokens=64, t=4.0),
        ),
    ),
    TraceProgram(
        program_id="q",
        parent="p",
        parent_turn=0,
        start_offset_s=1.0,
        block_size=16,
        hash_scope="global",
        turns=(TraceTurn(prompt_tokens=40, output_tokens=3, hash_lcp=0, hash_runs=((5, 2),)),),
    ),
)
TRACE_TEXT = b"".join(msgspec.json.encode(program) + b"\n" for program in TRACE)
USAGE = {"prompt_tokens": 12, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}}
CAPABILITIES = ({"name": "sojourn", "wire": [1]}, {"data": [{"owned_by": "sglang"}]})


def ledger() -> bytes:
    engine = VirtualEngine()
    engine.turn("p", prompt(40))
    return json_bytes(engine.ask("program", program_id="p"))


def use_trace(path: Path) -> Any:
    programs = list(read_trace(path))
    for program in programs:
        assert program.max_context_tokens > 0
        plan_turns(program)
    return programs


def probe(data: bytes, folder: Path) -> Any:
    class Transport:
        def __init__(self, first: int) -> None:
            self.first = first

        def get(self, path: str, timeout_s: float) -> HttpResponse:
            return HttpResponse(self.first if path.endswith("capabilities") else 200, data)

    for first in (200, 404):
        dialect_probe.probe_dialect(Transport(first), timeout_s=1.0)  # type: ignore[arg-type]
    token_usage.of_tail(data)


def find_server(data: bytes, folder: Path) -> Any:
    notes: list[str] = []
    with patch.object(agent_process, "get_page", lambda root: (200, data)):
        agent_process.base_url_root({"OPENAI_BASE_URL": "http://h:1/v1"}, notes.append)


def ask_server(data: bytes, folder: Path) -> Any:
    """Decode a server's stream of completions, and its answer to a discovery query."""
    import asyncio

    import httpx

    async def ask() -> None:
        async with CompletionsClient("http://server") as client:
            await client._http.aclose()
            transport = httpx.MockTransport(lambda request: httpx.Response(200, content=data))
            client._http = httpx.AsyncClient(transport=transport)
            with suppress(ServerError):
                await client.discover(None)
            await client.complete("m", [1, 2], 3)

    asyncio.run(ask())


SDK_DECODERS: dict[str, Decoder] = {
    "resume file": Decoder(
        decode=in_file(lambda path: resume_file.check(str(path))),
        examples=(b"run-1\n", "é\r\n".encode()),
        errors=(ArgumentError,),
    ),
    "server probe": Decoder(decode=probe, examples=tuple(map(json_bytes, CAPABILITIES))),
    "server of OPENAI_BASE_URL": Decoder(decode=find_server, examples=tuple(map(json_bytes, CAPABILITIES))),
    "stream of completions": Decoder(
        large_bytes=16 * 1024,
        decode=ask_server,
        examples=(
            b'data: {"choices": [{"text": "x", "token_ids": [1]}]}\n\ndata: '
            + json_bytes({"choices": [], "usage": USAGE})
            + b"\n\ndata: [DONE]\n\n",
        ),
        refused=(
            b"data: " + b"[" * 5000 + b"]" * 5000 + b"\n\n",
            b'data: {"choices":[{}],"usage":{"completion_tokens":1e999}}\n\n',
        ),
        errors=(RequestError,),
    ),
    "trace": Decoder(
        decode=in_file(use_trace),
        encode=lambda programs: b"".join(msgspec.json.encode(program) + b"\n" for program in programs),
        examples=(TRACE_TEXT,),
        refused=(TRACE_TEXT.replace(b'"prompt_tokens":64', b'"prompt_tokens":1' + b"0" * 18),),
        errors=(TraceError,),
    ),
    "gzipped trace": Decoder(
        decode=in_file(use_trace),
        examples=(TRACE_TEXT,),
        wrap=lambda data: gzip.compress(data, compresslevel=1, mtime=0),
        errors=(TraceError,),
    ),
    "ledgers": Decoder(
        decode=in_file(lambda path: read_ledgers([path])),
        examples=(ledger(),),
        refused=(b"9" * 5000, b'"\\ud800"'),
        errors=(TraceError,),
    ),
}
