"""Decoders of what clients and engines give a gateway."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from decoder import Decoder, json_bytes
from engine_decoders import PARAMS, XARGS
from sojourn.wire_codec import decode_event
from sojourn_server.core.request_hints import read_identity
from sojourn_server.gateway.http.client_apis import ClientApi
from sojourn_server.gateway.http.engine_client import ResponseMeter
from sojourn_server.gateway.http.generation_request import (
    InvalidGenerationRequest,
    decode_body,
    decode_only_body,
    parse_generation_request,
    prefill_body,
    without_events,
)
from sojourn_server.gateway.http.program_id_mapper import ProgramIdMapper

OTHERS = "bob/"
"""Prefix with which the engine names another tenant's programs."""
BODIES: tuple[dict[str, Any], ...] = (
    {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "stream": True, "vllm_xargs": XARGS},
    {"model": "tiny", "prompt": [1, 2, 3], "session_id": "own", "kv_transfer_params": {"transfer": "x"}},
    {"model": "tiny", "input": "hi", "previous_response_id": "resp_1", "vllm_xargs": XARGS},
)
ANSWER = {
    "id": "resp_1",
    "choices": [{"text": "x"}],
    "usage": {"prompt_tokens": 12, "completion_tokens": 5},
    "kv_transfer_params": PARAMS[1],
}
_names = ProgramIdMapper(("alice", "bob"))


def route_request(data: bytes, folder: Path) -> Any:
    """Route a client's body through a gateway to an engine, or to a pair of engines. No engine reads a
    program of another tenant in it."""
    for api in ClientApi:
        question = parse_generation_request(api, data, {"x-session-id": "header"})
        sent = _names.request("alice", data, question)
        check_names(sent)
        if decode_only_body(api, sent) is None:
            prefill_body(api, sent, "t1", "tcp:d:1", True)
            decode_body(sent, {"do_remote_prefill": True})
        if question.context is not None and question.context.sojourn is not None:
            without_events(sent)


def check_names(body: bytes) -> None:
    document = json.loads(body.decode("utf-8", "surrogateescape"), parse_int=str)
    xargs = document.get("vllm_xargs") or {}
    for session in (document.get("session_id"), xargs.get("session_id")):
        assert not isinstance(session, str) or not session.startswith(OTHERS)
    context = read_identity(None, xargs).context
    if context is not None:
        ids = (context.program_id, context.parent_program_id, context.root_program_id)
        assert not any(name is not None and name.startswith(OTHERS) for name in ids)
        for raw in context.sojourn.events if context.sojourn is not None else ():
            assert decode_event(raw).program_id.startswith("alice/")


def meter(data: bytes, folder: Path) -> Any:
    """Meter an engine's answer, received in two chunks, which pass as they came."""
    for stream in (False, True):
        found = ResponseMeter(is_stream=stream)
        passed = b""
        for chunk in (data[: len(data) // 3], data[len(data) // 3 :]):
            passed += found.push(chunk)
        assert passed + found.rest() == data
        found.counts()


GATEWAY_DECODERS: dict[str, Decoder] = {
    "generation request": Decoder(
        decode=route_request,
        examples=tuple(map(json_bytes, BODIES)),
        errors=(InvalidGenerationRequest,),
    ),
    "engine answer": Decoder(
        decode=meter,
        examples=(json_bytes(ANSWER), b"data: " + json_bytes(ANSWER) + b"\n\ndata: [DONE]\n\n"),
    ),
}
