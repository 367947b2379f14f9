"""The APIs that agents speak, and how each says that something went wrong: before an answer or in one."""

from __future__ import annotations

import json
from enum import Enum


class Api(Enum):
    """By the path under which engines serve it."""

    CHAT = "/v1/chat/completions"
    COMPLETIONS = "/v1/completions"
    RESPONSES = "/v1/responses"
    MESSAGES = "/v1/messages"


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def error_body(api: Api | None, status: int, code: str, message: str) -> bytes:
    """The JSON that clients of an API read of an error. ``api`` ``None``: as OpenAI's have it."""
    kind = _TYPES.get(status, "api_error")
    if api is Api.MESSAGES:
        return _json({"type": "error", "error": {"type": kind, "message": message}})
    return _json({"error": {"message": message, "type": kind, "param": None, "code": code}})


def error_event(api: Api, code: str, message: str) -> bytes:
    """What ends a stream that cannot be gone on with: whole events, after the end of one."""
    if api is Api.RESPONSES:
        told = {"type": "error", "code": code, "message": message, "param": None, "sequence_number": 0}
        return b"event: error\ndata: " + _json(told) + b"\n\n"
    if api is Api.MESSAGES:
        failed = {"type": "error", "error": {"type": "api_error", "message": message}}
        return b"event: error\ndata: " + _json(failed) + b"\n\n"
    event = {"error": {"message": message, "type": code, "param": None, "code": 502}}
    return b"data: " + _json(event) + b"\n\ndata: [DONE]\n\n"


def _json(document: object) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode()
